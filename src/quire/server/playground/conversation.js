// The conversation: a list of messages as the API has them, with what the page knows besides. Kept in this tab only.

import { recall, store } from "./dom.js";

const NAME = "quire.conversation";
// What a message has for the page alone.
const OWN = ["reasoning", "stats", "error", "finish"];

export class Conversation {
  constructor() {
    this.messages = [];
    try {
      const kept = JSON.parse(recall(sessionStorage, NAME) || "[]");
      if (Array.isArray(kept)) this.messages = kept.filter((item) => item && typeof item.role === "string");
    } catch {
      // Not what this page wrote.
    }
  }

  save() {
    store(sessionStorage, NAME, JSON.stringify(this.messages));
  }

  add(message) {
    this.messages.push(message);
    this.save();
    return message;
  }

  /** Forget message `index` and everything after it. */
  cut(index) {
    this.messages.length = index;
    this.save();
  }

  /** Return the messages for a request, and for each the place that it has in the conversation. */
  forRequest(system) {
    const messages = [];
    const places = [];
    if (system) {
      messages.push({ role: "system", content: system });
      places.push(-1);
    }
    this.messages.forEach((message, place) => {
      if (message.role === "assistant" && !message.content && !message.tool_calls) return;
      const plain = { ...message };
      for (const name of OWN) delete plain[name];
      messages.push(plain);
      places.push(place);
    });
    return { messages, places };
  }
}

/** Put what a stream says of the first choice into `message`. */
export function applyDelta(message, delta) {
  if (delta.reasoning) message.reasoning = (message.reasoning || "") + delta.reasoning;
  if (delta.content) message.content = (message.content || "") + delta.content;
  for (const part of delta.tool_calls || []) {
    message.tool_calls ||= [];
    const call = (message.tool_calls[part.index] ||= { id: "", type: "function", function: { name: "", arguments: "" } });
    if (part.id) call.id = part.id;
    if (part.function?.name) call.function.name += part.function.name;
    if (part.function?.arguments) call.function.arguments += part.function.arguments;
  }
}
