// The two HTTP clients of Node with their defaults: fetch, and http with an agent that keeps connections alive.
// The first argument is "fetch" or "agent"; see ../programs.py for the others.

import { readFileSync, writeSync } from "node:fs";
import http from "node:http";
import https from "node:https";

const [kind, mode, method, url, key, file, count] = process.argv.slice(2);
const headers = { Authorization: `Bearer ${key}` };
let body;
if (file !== "-") {
  body = readFileSync(file);
  headers["Content-Type"] = "application/json";
}
const library = url.startsWith("https:") ? https : http;
const agent = new library.Agent({ keepAlive: true });

const told = () => new Promise((resolve) => process.stdin.once("readable", () => resolve(process.stdin.read())));

/** Starts a request; returns a promise of status and pieces, and what ends it early. */
function start() {
  if (kind === "fetch") {
    const controller = new AbortController();
    const response = fetch(url, { method, headers, body, signal: controller.signal });
    return {
      response: response.then((got) => ({ status: got.status, pieces: got.body ?? [] })),
      end: () => controller.abort(),
    };
  }
  const request = library.request(url, { method, agent, headers });
  const response = new Promise((resolve, reject) => {
    request.on("response", (got) => resolve({ status: got.statusCode, pieces: got }));
    request.on("error", reject);
  });
  if (mode === "expect") {
    request.setHeader("Expect", "100-continue");
    if (body !== undefined) request.setHeader("Content-Length", body.length);
    request.once("continue", () => request.end(body));
    request.flushHeaders();
  } else {
    request.end(body);
  }
  return { response, end: () => request.destroy() };
}

async function send() {
  const { status, pieces } = await start().response;
  const parts = [];
  for await (const piece of pieces) parts.push(piece);
  return { status, data: Buffer.concat(parts) };
}

function show({ status, data }) {
  let left = Buffer.concat([Buffer.from(`${status} ${data.length}\n`), data, Buffer.from("\n")]);
  while (left.length) left = left.subarray(writeSync(1, left));
}

if (mode === "each" || mode === "expect") {
  for (let i = 0; i < count; i++) show(await send());
} else if (mode === "together") {
  (await Promise.all(Array.from({ length: count }, send))).forEach(show);
} else if (mode === "abort") {
  const { response, end } = start();
  let text = "";
  for await (const piece of (await response).pieces) {
    text += Buffer.from(piece).toString();
    if (/data: .*\n/.test(text)) break;
  }
  writeSync(1, text.match(/data: .*\n/)[0]);
  end();
  await told();
} else if (mode === "leave") {
  const { response, end } = start();
  response.catch(() => {});
  await told();
  end();
  await told();
} else {
  throw new Error(mode);
}
process.exit(0);
