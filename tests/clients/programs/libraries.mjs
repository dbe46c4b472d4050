// What JavaScript's client libraries are used for: `libraries.mjs LIBRARY FEATURE URL KEY` prints its result as JSON.
// The features are those of libraries.py; URL has no path. Libraries are imported when they are needed.

import { z } from "zod";

const [library, feature, url, key] = process.argv.slice(2);
const MODEL = "quire-demo";
const QUESTION = "What is Quire?";
const messages = [{ role: "user", content: QUESTION }];
const weather = [{ role: "user", content: "How is the weather in Oslo?" }];
const Weather = z.object({ city: z.enum(["Rome", "Oslo"]), sunny: z.boolean() });
const schema = {
  type: "object",
  properties: { city: { type: "string", enum: ["Rome", "Oslo"] }, sunny: { type: "boolean" } },
  required: ["city", "sunny"],
  additionalProperties: false,
};
const fn = { name: "get_weather", description: "Get the weather.", parameters: schema };

async function pieces(stream, text) {
  const found = [];
  for await (const part of stream) found.push(text(part) ?? "");
  return found;
}

async function openai() {
  const { default: OpenAI } = await import("openai");
  const { zodResponseFormat } = await import("openai/helpers/zod");
  const { completions } = new OpenAI({ baseURL: `${url}/v1`, apiKey: key, maxRetries: 0 }).chat;
  return {
    errors: [OpenAI.NotFoundError],
    chat: async () => (await completions.create({ model: MODEL, messages, temperature: 0 })).choices[0].message.content,
    stream: async () =>
      pieces(
        await completions.create({ model: MODEL, messages, temperature: 0, stream: true }),
        (part) => part.choices[0]?.delta?.content,
      ),
    structure: async () => {
      const response_format = zodResponseFormat(Weather, "weather");
      return (await completions.parse({ model: MODEL, messages: weather, response_format })).choices[0].message.parsed;
    },
    tool: async () => {
      const tools = [{ type: "function", function: fn }];
      const answer = await completions.create({ model: MODEL, messages: weather, tools, tool_choice: "required" });
      const call = answer.choices[0].message.tool_calls[0].function;
      return [call.name, JSON.parse(call.arguments)];
    },
    error: () => completions.create({ model: "none", messages }),
  };
}

async function anthropic() {
  const { default: Anthropic } = await import("@anthropic-ai/sdk");
  const client = new Anthropic({ baseURL: url, apiKey: key, maxRetries: 0 });
  const options = { model: MODEL, max_tokens: 200 };
  const greedy = { ...options, messages, temperature: 0 };
  return {
    errors: [Anthropic.NotFoundError],
    chat: async () => (await client.messages.create(greedy)).content[0].text,
    stream: async () =>
      pieces(client.messages.stream(greedy), (event) => (event.type === "content_block_delta" ? event.delta.text : "")),
    structure: async () => {
      const output_format = { type: "json_schema", schema };
      const answer = await client.messages.create({ ...options, messages: weather, output_config: { format: output_format } });
      return JSON.parse(answer.content[0].text);
    },
    tool: async () => {
      const tools = [{ name: fn.name, description: fn.description, input_schema: schema }];
      const answer = await client.messages.create({ ...options, messages: weather, tools, tool_choice: { type: "any" } });
      const call = answer.content.find((block) => block.type === "tool_use");
      return [call.name, call.input];
    },
    error: () => client.messages.create({ ...options, model: "none", messages }),
  };
}

async function ollama() {
  const { Ollama } = await import("ollama");
  const client = new Ollama({ host: url, headers: { Authorization: `Bearer ${key}` } });
  const options = { temperature: 0 };
  return {
    errors: [Error],
    chat: async () => (await client.chat({ model: MODEL, messages, options })).message.content,
    stream: async () =>
      pieces(await client.chat({ model: MODEL, messages, options, stream: true }), (part) => part.message.content),
    structure: async () => JSON.parse((await client.chat({ model: MODEL, messages: weather, format: schema })).message.content),
    error: () => client.chat({ model: "none", messages }),
  };
}

async function ai(provider, structured = true) {
  const { APICallError, Output, generateText, streamText, tool } = await import("ai");
  const options = { temperature: 0, maxRetries: 0, maxOutputTokens: 200 };
  return {
    errors: [APICallError],
    chat: async () => (await generateText({ ...options, model: provider(MODEL), prompt: QUESTION })).text,
    stream: async () => pieces(streamText({ ...options, model: provider(MODEL), prompt: QUESTION }).textStream, (text) => text),
    structure: async () => {
      const output = Output.object({ schema: Weather });
      return (await generateText({ ...options, model: provider(MODEL), messages: weather, output })).output;
    },
    tool: async () => {
      const tools = { get_weather: tool({ description: fn.description, inputSchema: Weather }) };
      const answer = await generateText({ ...options, model: provider(MODEL), messages: weather, tools, toolChoice: "required" });
      return [answer.toolCalls[0].toolName, answer.toolCalls[0].input];
    },
    error: () => generateText({ ...options, model: provider("none"), prompt: QUESTION }),
  };
}

async function langchain() {
  const { ChatOpenAI } = await import("@langchain/openai");
  const model = (name) =>
    new ChatOpenAI({ model: name, apiKey: key, temperature: 0, maxRetries: 0, configuration: { baseURL: `${url}/v1` } });
  return {
    errors: [Error],
    chat: async () => (await model(MODEL).invoke(QUESTION)).content,
    stream: async () => pieces(await model(MODEL).stream(QUESTION), (part) => part.content),
    structure: () => model(MODEL).withStructuredOutput(Weather, { method: "jsonSchema" }).invoke("The weather in Oslo?"),
    tool: async () => {
      const bound = model(MODEL).bindTools([{ type: "function", function: fn }], { tool_choice: "required" });
      const [call] = (await bound.invoke("The weather in Oslo?")).tool_calls;
      return [call.name, call.args];
    },
    error: () => model("none").invoke("hi"),
  };
}

const libraries = {
  openai,
  anthropic,
  ollama,
  "ai-openai": async () => {
    const { createOpenAI } = await import("@ai-sdk/openai");
    return ai(createOpenAI({ baseURL: `${url}/v1`, apiKey: key }));
  },
  "ai-compatible": async () => {
    const { createOpenAICompatible } = await import("@ai-sdk/openai-compatible");
    return ai(createOpenAICompatible({ name: "quire", baseURL: `${url}/v1`, apiKey: key, supportsStructuredOutputs: true }));
  },
  "ai-anthropic": async () => {
    const { createAnthropic } = await import("@ai-sdk/anthropic");
    return ai(createAnthropic({ baseURL: `${url}/v1`, apiKey: key }));
  },
  "langchain-openai": langchain,
};

const { errors, ...features } = await libraries[library]();
let result;
try {
  result = await features[feature]();
} catch (error) {
  if (feature !== "error" || !errors.some((kind) => error instanceof kind)) throw error;
  result = error.constructor.name;
}
console.log(JSON.stringify(result));
