// The request of the page as code that one can take away. The key is never in it.

import { $, copyFrom } from "./dom.js";
import { hasKey } from "./api.js";

const base = () => new URL("v1", document.baseURI).href;

export function asCurl(body) {
  const lines = [`curl ${base()}/chat/completions \\`, "  -H 'Content-Type: application/json' \\"];
  if (hasKey()) lines.push("  -H \"Authorization: Bearer $QUIRE_API_KEY\" \\");
  lines.push(`  -d '${JSON.stringify(body, null, 2).replaceAll("'", "'\\''")}'`);
  return lines.join("\n");
}

export function asPython(body) {
  const { stream, stream_options, top_k, min_p, ...known } = body;
  const extra = Object.fromEntries(Object.entries({ top_k, min_p }).filter(([, value]) => value !== undefined));
  const lines = ["from openai import OpenAI", ""];
  if (hasKey()) lines.unshift("import os");
  const key = hasKey() ? 'os.environ["QUIRE_API_KEY"]' : '"none"';
  lines.push(`client = OpenAI(base_url=${literal(base())}, api_key=${key})`, "stream = client.chat.completions.create(");
  for (const [name, value] of Object.entries(known)) lines.push(`    ${name}=${literal(value, 1)},`);
  if (Object.keys(extra).length) lines.push(`    extra_body=${literal(extra, 1)},`);
  lines.push("    stream=True,", ")", "for chunk in stream:", "    if chunk.choices:",
    '        print(chunk.choices[0].delta.content or "", end="", flush=True)', "print()");
  return lines.join("\n");
}

/** Return a value as Python writes it, indented by so many levels. */
export function literal(value, level = 0) {
  if (value === null) return "None";
  if (value === true) return "True";
  if (value === false) return "False";
  if (typeof value !== "object") return JSON.stringify(value);
  const list = Array.isArray(value);
  const [open, close] = list ? ["[", "]"] : ["{", "}"];
  const items = list
    ? value.map((item) => literal(item, level + 1))
    : Object.entries(value).map(([name, item]) => `${JSON.stringify(name)}: ${literal(item, level + 1)}`);
  const line = open + items.join(", ") + close;
  if (line.length < 70 && !line.includes("\n")) return line;
  const pad = "    ".repeat(level + 1);
  return `${open}\n${items.map((item) => `${pad}${item},\n`).join("")}${"    ".repeat(level)}${close}`;
}

export function showSnippet(title, code) {
  $("snippet-title").textContent = title;
  $("snippet").textContent = code;
  $("snippet-dialog").showModal();
}

$("snippet-copy").addEventListener("click", () => copyFrom($("snippet-copy"), $("snippet").textContent));
