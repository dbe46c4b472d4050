// A little Markdown: fenced code, tables, lists, headings as bold lines, `code` and **bold**. Text becomes text nodes only,
// so nothing that a model writes can be more than text.

import { el } from "./dom.js";
import { highlight } from "./highlight.js";

const FENCE = /^\s*(```+|~~~+)\s*([\w+-]*)/;
const BULLET = /^\s{0,3}[-*+]\s+(.*)$/;
const NUMBER = /^\s{0,3}\d{1,9}[.)]\s+(.*)$/;
const HEADING = /^#{1,6}\s+(.*)$/;
// Bounded, so that marks which are never closed do not make it slow.
const INLINE = /(`{1,9})(.{1,999}?)\1(?!`)|\*\*(?=\S)(.{0,999}?\S)\*\*/gs;
const ALIGNMENT = /^:?-+:?$/;

/** Return the nodes for a text. */
export function render(text) {
  const nodes = [];
  const lines = text.split("\n");
  let paragraph = [];
  const flush = () => {
    const joined = paragraph.join("\n").replace(/^\n+|\s+$/g, "");
    if (joined) nodes.push(withInline(el("p"), joined));
    paragraph = [];
  };
  for (let at = 0; at < lines.length; at++) {
    const fence = FENCE.exec(lines[at]);
    if (fence) {
      flush();
      const code = [];
      while (++at < lines.length && !lines[at].trimStart().startsWith(fence[1])) code.push(lines[at]);
      nodes.push(el("pre", { tabindex: "0", "aria-label": fence[2] ? `Code, ${fence[2]}` : "Code" },
        el("code", {}, ...highlight(code.join("\n"), fence[2]))));
      continue;
    }
    const aligned = alignments(lines[at], lines[at + 1]);
    if (aligned) {
      flush();
      const header = cells(lines[at]);
      const rows = [];
      for (at += 2; at < lines.length && lines[at].includes("|"); at++) rows.push(cells(lines[at]));
      at--;
      nodes.push(table(header, rows, aligned));
      continue;
    }
    const pattern = BULLET.test(lines[at]) ? BULLET : NUMBER.test(lines[at]) ? NUMBER : null;
    if (pattern) {
      flush();
      const list = el(pattern === BULLET ? "ul" : "ol");
      if (pattern === NUMBER) list.setAttribute("start", parseInt(lines[at], 10));
      for (; at < lines.length && pattern.test(lines[at]); at++) {
        list.append(withInline(el("li"), pattern.exec(lines[at])[1]));
      }
      at--;
      nodes.push(list);
      continue;
    }
    const heading = HEADING.exec(lines[at]);
    if (heading) {
      flush();
      nodes.push(el("p", {}, withInline(el("strong"), heading[1])));
    } else if (lines[at].trim() === "") {
      flush();
    } else {
      paragraph.push(lines[at]);
    }
  }
  flush();
  return nodes;
}

/** Return how the columns of a table are aligned, null if these two lines do not begin one. */
function alignments(header, delimiter) {
  if (!header.includes("|") || !delimiter?.includes("-")) return null;
  const marks = cells(delimiter);
  if (!marks.every((mark) => ALIGNMENT.test(mark)) || marks.length !== cells(header).length) return null;
  return marks.map((mark) => (mark.endsWith(":") ? (mark.startsWith(":") ? "center" : "right") : "left"));
}

/** Return the cells of a line: what is between its bars, but for those after a backslash. */
function cells(line) {
  const found = line.trim().split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
  if (found[0] === "") found.shift();
  if (found.at(-1) === "") found.pop();
  return found;
}

/** Make a table. Rows may be short; what they have beyond the header is left out. */
function table(header, rows, aligned) {
  const row = (tag, texts) => el("tr", {}, ...texts.slice(0, header.length).map((text, column) =>
    withInline(el(tag, { class: aligned[column], scope: tag === "th" ? "col" : null }), text)));
  return el("div", { class: "table", tabindex: "0", role: "region", "aria-label": "Table" },
    el("table", {}, el("thead", {}, row("th", header)), el("tbody", {}, ...rows.map((texts) => row("td", texts)))));
}

function withInline(node, text) {
  let last = 0;
  for (const match of text.matchAll(INLINE)) {
    node.append(text.slice(last, match.index));
    node.append(match[1] ? el("code", { text: match[2] }) : el("strong", { text: match[3] }));
    last = match.index + match[0].length;
  }
  node.append(text.slice(last));
  return node;
}
