// What the page asks its own server: JSON, and streams of events. The API key lives here, and in this tab's storage.

import { recall, store } from "./dom.js";

const KEY = "quire.key";
let key = recall(sessionStorage, KEY) || "";
let onRefused = () => {};

/** An answer that is an error. `param` names the field of the request that is to blame, where one is. */
export class ApiError extends Error {
  constructor(status, body) {
    const error = (body && body.error) || {};
    super(typeof error.message === "string" ? error.message : `the server answered ${status}`);
    this.status = status;
    this.code = error.code || "";
    this.param = typeof error.param === "string" ? error.param : "";
  }
}

export function hasKey() {
  return key !== "";
}

export function setKey(value) {
  key = value;
  store(sessionStorage, KEY, value || null);
}

/** Call `handler` whenever the server asks for a key, or for another one. */
export function whenRefused(handler) {
  onRefused = handler;
}

async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  const response = await fetch(path, { ...options, headers, cache: "no-store", credentials: "omit" });
  if (response.ok) return response;
  let body = null;
  try {
    body = await response.json();
  } catch {
    // Not ours, such as a proxy's page.
  }
  const error = new ApiError(response.status, body);
  if (error.status === 401) onRefused(error);
  throw error;
}

export async function getJSON(path, signal) {
  return (await ask(path, { signal })).json();
}

/** Post a request for a stream; yield its events as values, until `[DONE]`. Raises `ApiError`. */
export async function* postStream(path, body, signal) {
  const response = await ask(path, {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
    signal,
  });
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  try {
    for (;;) {
      const { value, done } = await reader.read();
      if (done) return;
      const events = (rest + value).split("\n\n");
      rest = events.pop();
      for (const event of events) {
        const data = event.split("\n").filter((line) => line.startsWith("data:")).map((line) => line.slice(5).trim());
        if (!data.length) continue;
        if (data[0] === "[DONE]") return;
        const parsed = JSON.parse(data.join("\n"));
        if (parsed.error) throw new ApiError(response.status, parsed);
        yield parsed;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
