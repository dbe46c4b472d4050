"""What Python's client libraries are used for: `libraries.py LIBRARY FEATURE URL KEY` prints its result as JSON.

Features: "chat" and "stream" answer QUESTION, the latter as the pieces it came in; "structure" fills `Weather`; "tool"
calls a function that the request demands; "error" asks for a model that is not there, and prints the name of what was
raised. URL has no path. Each function is as a user of the library would write it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from typing import Any, Literal

from pydantic import BaseModel

QUESTION = "What is Quire?"
SYSTEM = "You are a helpful assistant."
MODEL = "quire-demo"


class Weather(BaseModel):
    """The weather somewhere."""

    city: Literal["Rome", "Oslo"]
    sunny: bool


GREEDY = {"temperature": 0}
SCHEMA: dict[str, Any] = Weather.model_json_schema()
ASK: list[dict[str, str]] = [{"role": "user", "content": QUESTION}]
WEATHER: list[dict[str, str]] = [{"role": "user", "content": "How is the weather in Oslo?"}]
FUNCTION: dict[str, Any] = {"name": "get_weather", "description": "Get the weather.", "parameters": SCHEMA}
TOOL: dict[str, Any] = {"type": "function", "function": FUNCTION}


class OpenAI:
    """The package `openai`: chat completions and responses."""

    errors = ("NotFoundError",)

    def __init__(self, url: str, key: str) -> None:
        import openai

        self.client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)

    def chat(self) -> str:
        answer = self.client.chat.completions.create(model=MODEL, messages=ASK, temperature=0)
        return answer.choices[0].message.content

    def stream(self) -> list[str]:
        chunks = self.client.chat.completions.create(model=MODEL, messages=ASK, temperature=0, stream=True)
        return [chunk.choices[0].delta.content or "" for chunk in chunks]

    def structure(self) -> Any:
        answer = self.client.chat.completions.parse(model=MODEL, messages=WEATHER, response_format=Weather)
        return answer.choices[0].message.parsed.model_dump()

    def tool(self) -> Any:
        answer = self.client.chat.completions.create(
            model=MODEL, messages=WEATHER, tools=[TOOL], tool_choice="required", max_tokens=200
        )
        call, *_ = answer.choices[0].message.tool_calls
        return call.function.name, json.loads(call.function.arguments)

    def error(self) -> None:
        self.client.chat.completions.create(model="none", messages=ASK)


class OpenAIResponses(OpenAI):
    """The package `openai`: the Responses API."""

    def chat(self) -> str:
        return self.client.responses.create(model=MODEL, input=QUESTION, temperature=0).output_text

    def stream(self) -> list[str]:
        with self.client.responses.stream(model=MODEL, input=QUESTION, temperature=0) as events:
            return [event.delta for event in events if event.type == "response.output_text.delta"]

    def structure(self) -> Any:
        answer = self.client.responses.parse(model=MODEL, input=WEATHER, text_format=Weather)
        return answer.output_parsed.model_dump()

    def tool(self) -> Any:
        answer = self.client.responses.create(
            model=MODEL, input=WEATHER, tools=[{"type": "function", **FUNCTION}], tool_choice="required"
        )
        call, *_ = [item for item in answer.output if item.type == "function_call"]
        return call.name, json.loads(call.arguments)

    def error(self) -> None:
        self.client.responses.create(model="none", input=QUESTION)


class Anthropic:
    """The package `anthropic`."""

    errors = ("NotFoundError",)

    def __init__(self, url: str, key: str) -> None:
        import anthropic

        self.client = anthropic.Anthropic(base_url=url, api_key=key, max_retries=0)

    def chat(self) -> str:
        answer = self.client.messages.create(model=MODEL, messages=ASK, max_tokens=100, extra_body=GREEDY)
        return answer.content[0].text

    def stream(self) -> list[str]:
        with self.client.messages.stream(model=MODEL, messages=ASK, max_tokens=100, extra_body=GREEDY) as stream:
            return list(stream.text_stream)

    def structure(self) -> Any:
        answer = self.client.messages.parse(model=MODEL, messages=WEATHER, max_tokens=100, output_format=Weather)
        return answer.parsed_output.model_dump()

    def tool(self) -> Any:
        tool = {"name": "get_weather", "description": "Get the weather.", "input_schema": SCHEMA}
        answer = self.client.messages.create(
            model=MODEL, messages=WEATHER, max_tokens=200, tools=[tool], tool_choice={"type": "any"}
        )
        call, *_ = [block for block in answer.content if block.type == "tool_use"]
        return call.name, call.input

    def error(self) -> None:
        self.client.messages.create(model="none", messages=ASK, max_tokens=10)


class Ollama:
    """The package `ollama`."""

    errors = ("ResponseError",)

    def __init__(self, url: str, key: str) -> None:
        import ollama

        self.client = ollama.Client(host=url, headers={"Authorization": f"Bearer {key}"})

    def chat(self) -> str:
        return self.client.chat(MODEL, messages=ASK, options={"temperature": 0}).message.content

    def stream(self) -> list[str]:
        return [part.message.content for part in self.client.chat(MODEL, ASK, stream=True, options={"temperature": 0})]

    def structure(self) -> Any:
        answer = self.client.chat(MODEL, messages=WEATHER, format=SCHEMA)
        return Weather.model_validate_json(answer.message.content).model_dump()

    def error(self) -> None:
        self.client.chat("none", messages=ASK)


class LiteLLM:
    """The package `litellm`, with one of its providers."""

    errors = ("NotFoundError", "OpenAIException", "APIConnectionError", "BadRequestError", "APIError")

    def __init__(self, url: str, key: str, provider: str) -> None:
        import litellm

        self.litellm, self.provider = litellm, provider
        bare = provider.startswith(("ollama", "anthropic"))
        self.options = {"api_base": url if bare else f"{url}/v1", "api_key": key, "num_retries": 0}

    def complete(self, messages: Any, model: str = MODEL, **options: Any) -> Any:
        return self.litellm.completion(f"{self.provider}/{model}", messages, **{**self.options, **options})

    def chat(self) -> str:
        return self.complete(ASK, temperature=0, max_tokens=100).choices[0].message.content

    def stream(self) -> list[str]:
        chunks = self.complete(ASK, temperature=0, max_tokens=100, stream=True)
        return [chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices]

    def structure(self) -> Any:
        answer = self.complete(WEATHER, response_format=Weather, max_tokens=200)
        return Weather.model_validate_json(answer.choices[0].message.content).model_dump()

    def tool(self) -> Any:
        answer = self.complete(WEATHER, tools=[TOOL], tool_choice="required", max_tokens=200)
        call, *_ = answer.choices[0].message.tool_calls
        return call.function.name, json.loads(call.function.arguments)

    def error(self) -> None:
        self.complete(ASK, "none")


class LangChain:
    """LangChain with one of its integrations."""

    errors = ("NotFoundError", "ResponseError")

    def __init__(self, url: str, key: str, kind: str) -> None:
        self.url, self.key, self.kind = url, key, kind

    def model(self, name: str = MODEL, temperature: float = 0.0) -> Any:
        if self.kind == "openai":
            from langchain_openai import ChatOpenAI

            return ChatOpenAI(
                model=name, base_url=f"{self.url}/v1", api_key=self.key, temperature=temperature, max_retries=0
            )
        if self.kind == "anthropic":
            from langchain_anthropic import ChatAnthropic

            return ChatAnthropic(
                model=name, base_url=self.url, api_key=self.key, temperature=temperature, max_retries=0, max_tokens=200
            )
        from langchain_ollama import ChatOllama

        headers = {"headers": {"Authorization": f"Bearer {self.key}"}}
        return ChatOllama(model=name, base_url=self.url, temperature=temperature, client_kwargs=headers)

    def chat(self) -> str:
        return self.model().invoke([("human", QUESTION)]).text

    def stream(self) -> list[str]:
        return [chunk.text for chunk in self.model().stream([("human", QUESTION)])]

    def structure(self) -> Any:
        model = self.model().with_structured_output(Weather, method="json_schema")
        return model.invoke("How is the weather in Oslo?").model_dump()

    def tool(self) -> Any:
        model = self.model().bind_tools([TOOL], tool_choice="any")
        call, *_ = model.invoke("How is the weather in Oslo?").tool_calls
        return call["name"], call["args"]

    def error(self) -> None:
        self.model("none").invoke("hi")


class Instructor:
    """The package `instructor`, in one of its modes."""

    errors = ("InstructorRetryException",)

    def __init__(self, url: str, key: str, mode: str) -> None:
        import instructor
        import openai

        client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)
        self.client = instructor.from_openai(client, mode=getattr(instructor.Mode, mode))

    def structure(self, model: str = MODEL) -> Any:
        answer = self.client.chat.completions.create(
            model=model, messages=WEATHER, response_model=Weather, max_retries=1, max_tokens=200
        )
        return answer.model_dump()

    def error(self) -> None:
        self.structure("none")


class PydanticAI:
    """The package `pydantic-ai`."""

    errors = ("ModelHTTPError",)

    def __init__(self, url: str, key: str) -> None:
        self.url, self.key = url, key

    def agent(self, name: str = MODEL, **options: Any) -> Any:
        from pydantic_ai import Agent
        from pydantic_ai.models.openai import OpenAIChatModel
        from pydantic_ai.providers.openai import OpenAIProvider

        provider = OpenAIProvider(base_url=f"{self.url}/v1", api_key=self.key)
        return Agent(OpenAIChatModel(name, provider=provider), model_settings={"temperature": 0.0}, **options)

    def chat(self) -> str:
        return self.agent().run_sync(QUESTION).output

    async def stream(self) -> list[str]:
        async with self.agent().run_stream(QUESTION) as result:
            return [piece async for piece in result.stream_text(delta=True, debounce_by=None)]

    def structure(self) -> Any:
        from pydantic_ai import NativeOutput

        return self.agent(output_type=NativeOutput(Weather)).run_sync("How is the weather?").output.model_dump()

    def tool(self) -> Any:
        output = self.agent(output_type=Weather).run_sync("How is the weather?").output  # by a tool that is required
        return "get_weather", output.model_dump()

    def error(self) -> None:
        self.agent("none").run_sync("hi")


class Agents:
    """The package `openai-agents`, over chat completions or responses."""

    errors = ("NotFoundError",)

    def __init__(self, url: str, key: str, api: str) -> None:
        import agents
        import openai

        agents.set_tracing_disabled(True)
        self.agents, self.api = agents, api
        self.client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)

    def agent(self, name: str = MODEL, **options: Any) -> Any:
        kind = self.agents.OpenAIChatCompletionsModel if self.api == "chat" else self.agents.OpenAIResponsesModel
        settings = self.agents.ModelSettings(temperature=0.0, max_tokens=200)
        model = kind(model=name, openai_client=self.client)
        return self.agents.Agent(name="a", model=model, model_settings=settings, **options)

    def chat(self) -> str:
        return self.agents.Runner.run_sync(self.agent(), QUESTION).final_output

    async def stream(self) -> list[str]:
        result = self.agents.Runner.run_streamed(self.agent(), QUESTION)
        events = [event.data async for event in result.stream_events() if event.type == "raw_response_event"]
        return [event.delta for event in events if event.type == "response.output_text.delta"]

    def structure(self) -> Any:
        return self.agents.Runner.run_sync(self.agent(output_type=Weather), "The weather?").final_output.model_dump()

    def error(self) -> None:
        self.agents.Runner.run_sync(self.agent("none"), "hi")


class LlamaIndex:
    """LlamaIndex's `OpenAILike`."""

    errors = ("NotFoundError",)

    def __init__(self, url: str, key: str) -> None:
        self.url, self.key = url, key

    def llm(self, name: str = MODEL) -> Any:
        from llama_index.llms.openai_like import OpenAILike

        return OpenAILike(
            model=name,
            api_base=f"{self.url}/v1",
            api_key=self.key,
            is_chat_model=True,
            is_function_calling_model=True,
            should_use_structured_outputs=True,
            temperature=0.0,
            max_retries=0,
            context_window=1024,
        )

    def chat(self) -> str:
        from llama_index.core.llms import ChatMessage

        return self.llm().chat([ChatMessage(role="user", content=QUESTION)]).message.content

    def stream(self) -> list[str]:
        from llama_index.core.llms import ChatMessage

        return [part.delta for part in self.llm().stream_chat([ChatMessage(role="user", content=QUESTION)])]

    def structure(self) -> Any:
        return self.llm().as_structured_llm(Weather).complete("How is the weather?").raw.model_dump()

    def error(self) -> None:
        self.llm("none").complete("hi")


class DSPy:
    """The package `dspy`."""

    errors = ("LMUnsupportedModelError",)

    def __init__(self, url: str, key: str) -> None:
        import dspy

        self.dspy, self.url, self.key = dspy, url, key

    def lm(self, name: str = MODEL) -> Any:
        options = {"api_base": f"{self.url}/v1", "api_key": self.key, "num_retries": 0, "cache": False}
        return self.dspy.LM(f"openai/{name}", temperature=0.0, max_tokens=100, **options)

    def chat(self) -> str:
        [answer] = self.lm()(QUESTION)
        return answer if isinstance(answer, str) else answer["text"]

    def error(self) -> None:
        self.lm("none")("hi")


class SmolAgents:
    """The package `smolagents`."""

    errors = ("NotFoundError",)

    def __init__(self, url: str, key: str) -> None:
        self.url, self.key = url, key

    def model(self, name: str = MODEL) -> Any:
        from smolagents import OpenAIServerModel

        return OpenAIServerModel(
            name, api_base=f"{self.url}/v1", api_key=self.key, temperature=0.0, client_kwargs={"max_retries": 0}
        )

    def chat(self) -> str:
        return self.model().generate(ASK).content

    def stream(self) -> list[str]:
        return [part.content or "" for part in self.model().generate_stream(ASK)]

    def error(self) -> None:
        self.model("none").generate(ASK)


class Haystack:
    """The package `haystack-ai`."""

    errors = ("NotFoundError",)

    def __init__(self, url: str, key: str) -> None:
        self.url, self.key = url, key

    def generator(self, name: str = MODEL, **options: Any) -> Any:
        from haystack.components.generators.chat import OpenAIChatGenerator
        from haystack.utils import Secret

        return OpenAIChatGenerator(
            api_key=Secret.from_token(self.key),
            model=name,
            api_base_url=f"{self.url}/v1",
            generation_kwargs={"temperature": 0.0},
            max_retries=0,
            **options,
        )

    def run(self, generator: Any, text: str, **options: Any) -> Any:
        from haystack.dataclasses import ChatMessage

        return generator.run([ChatMessage.from_user(text)], **options)["replies"][0]

    def chat(self) -> str:
        return self.run(self.generator(), QUESTION).text

    def stream(self) -> list[str]:
        pieces: list[str] = []
        self.run(self.generator(streaming_callback=lambda chunk: pieces.append(chunk.content)), QUESTION)
        return pieces

    def structure(self) -> Any:
        reply = self.run(self.generator(), "The weather?", generation_kwargs={"response_format": Weather})
        return Weather.model_validate_json(reply.text).model_dump()

    def error(self) -> None:
        self.run(self.generator("none"), "hi")


PROVIDERS = ("openai", "hosted_vllm", "ollama", "ollama_chat", "anthropic", "text-completion-openai")
LIBRARIES: dict[str, Any] = {
    "openai": OpenAI,
    "openai responses": OpenAIResponses,
    "anthropic": Anthropic,
    "ollama": Ollama,
    **{f"litellm {name}": (LiteLLM, name) for name in PROVIDERS},
    **{f"langchain {name}": (LangChain, name) for name in ("openai", "anthropic", "ollama")},
    **{f"instructor {mode}": (Instructor, mode) for mode in ("TOOLS", "JSON", "JSON_SCHEMA", "MD_JSON")},
    "pydantic-ai": PydanticAI,
    **{f"openai-agents {api}": (Agents, api) for api in ("chat", "responses")},
    "llama-index": LlamaIndex,
    "dspy": DSPy,
    "smolagents": SmolAgents,
    "haystack": Haystack,
}


def main() -> None:
    """Print the result."""
    library, feature, url, key = sys.argv[1:]
    os.environ |= {"OPENAI_API_KEY": key, "DO_NOT_TRACK": "1", "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    found = LIBRARIES[library]
    kind, *options = found if isinstance(found, tuple) else (found,)
    client = kind(url, key, *options)
    work = getattr(client, feature)
    try:
        result = asyncio.run(work()) if inspect.iscoroutinefunction(work) else work()
    except Exception as error:  # the last thing that the program does
        names = [item.__name__ for item in type(error).__mro__]
        if feature != "error" or not set(names) & set(client.errors):
            raise
        result = names[0]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
