// What a conversation must look like that comes from a file or from the browser's storage. Only known fields are taken.

const MAX_TITLE = 80;
const MAX_MESSAGES = 2000;

/** What is wrong with a value, and where it stands. */
export class CheckError extends Error {}

/** Return a conversation without id: title, updated, messages. Raises `CheckError`. */
export function checkedConversation(value, where) {
  mapping(value, where);
  const messages = list(value.messages, `${where}.messages`, MAX_MESSAGES);
  return {
    title: text(value.title, `${where}.title`).trim().slice(0, MAX_TITLE),
    updated: number(value.updated, `${where}.updated`),
    messages: messages.map((message, index) => checkedMessage(message, `${where}.messages[${index}]`)),
  };
}

function checkedMessage(value, where) {
  mapping(value, where);
  const fields = FIELDS[value.role];
  if (!fields || !Object.hasOwn(FIELDS, value.role)) fail(`${where}.role`, value.role, Object.keys(FIELDS).join(", "));
  const message = { role: value.role, content: text(value.content, `${where}.content`) };
  for (const [name, check] of Object.entries(fields)) {
    if (value[name] !== undefined) message[name] = check(value[name], `${where}.${name}`);
  }
  return message;
}

const FIELDS = {
  user: { files: (value, where) => list(value, where, 100).map((file, index) => checkedFile(file, `${where}[${index}]`)) },
  assistant: {
    reasoning: text,
    tool_calls: (value, where) => list(value, where, 1000).map((call, index) => checkedCall(call, `${where}[${index}]`)),
    finish: text,
    error: text,
    stats: checkedStats,
  },
  tool: { tool_call_id: text },
};

function checkedFile(value, where) {
  mapping(value, where);
  return { name: text(value.name, `${where}.name`), text: text(value.text, `${where}.text`) };
}

function checkedCall(value, where) {
  mapping(value, where);
  mapping(value.function, `${where}.function`);
  const called = {
    name: text(value.function.name, `${where}.function.name`),
    arguments: text(value.function.arguments, `${where}.function.arguments`),
  };
  return { id: text(value.id, `${where}.id`), type: "function", function: called };
}

function checkedStats(value, where) {
  mapping(value, where);
  const known = ["first", "tokens", "prompt", "cached", "rate"].filter((name) => value[name] !== undefined);
  return Object.fromEntries(known.map((name) => [name, number(value[name], `${where}.${name}`)]));
}

export function mapping(value, where) {
  if (value === null || typeof value !== "object" || Array.isArray(value)) fail(where, value, "an object");
  return value;
}

export function list(value, where, most) {
  if (!Array.isArray(value)) fail(where, value, "a list");
  if (value.length > most) throw new CheckError(`${where} has ${value.length} items (at most ${most} are allowed)`);
  return value;
}

function text(value, where) {
  return typeof value === "string" ? value : fail(where, value, "a text");
}

function number(value, where) {
  return Number.isFinite(value) && value >= 0 ? value : fail(where, value, "a number that is not negative");
}

export function fail(where, value, expected) {
  const shown = value === undefined ? "missing" : JSON.stringify(value);
  throw new CheckError(`${where} is ${shown.length > 60 ? `${shown.slice(0, 60)}...` : shown} (expected ${expected})`);
}
