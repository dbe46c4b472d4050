// One conversation: a list of messages as the API has them, with what the page knows besides.

import { withFiles } from "./attachments.js";

// What a message has for the page alone.
const OWN = ["reasoning", "stats", "error", "finish", "files"];
const TITLE_LENGTH = 60;

export class Conversation {
  /** `conversations` is what keeps it. */
  constructor(conversations, id, title, messages) {
    this.conversations = conversations;
    this.id = id;
    this.title = title;
    this.messages = messages;
    this.gone = false;
  }

  /** Have it kept, unless it was deleted or has nothing that is worth it. */
  save() {
    if (this.gone) return;
    if (this.messages.length) {
      this.title ||= titleOf(this.messages);
      this.conversations.keep(this);
    } else {
      this.title = "";
      this.conversations.remove(this.id);
    }
  }

  delete() {
    this.gone = true; // an answer that is being stopped does not bring it back
    this.conversations.remove(this.id);
  }

  rename(title) {
    this.title = title;
    this.conversations.rename(this.id, title);
  }

  add(message) {
    this.messages.push(message);
    this.save();
    return message;
  }

  /** Forget message `index` and everything after it; `others` take their place. */
  cut(index, ...others) {
    this.messages.splice(index, Infinity, ...others);
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
      messages.push(forRequest(message));
      places.push(place);
    });
    return { messages, places };
  }
}

/** Return a message as the API has it. */
export function forRequest(message) {
  const plain = { ...message, content: withFiles(message.content, message.files) };
  for (const name of OWN) delete plain[name];
  return plain;
}

function titleOf([first]) {
  const line = (first.content || first.files?.[0]?.name || "").trim().split("\n")[0];
  return line.length > TITLE_LENGTH ? `${line.slice(0, TITLE_LENGTH)}\u2026` : line || "Conversation";
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
