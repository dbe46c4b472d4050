// A little Markdown: fenced code, lists, headings as bold lines, `code` and **bold**. Text becomes text nodes only, so
// nothing that a model writes can be more than text.

import { el } from "./dom.js";

const FENCE = /^\s*(```+|~~~+)\s*([\w+-]*)/;
const BULLET = /^\s{0,3}[-*+]\s+(.*)$/;
const NUMBER = /^\s{0,3}\d{1,9}[.)]\s+(.*)$/;
const HEADING = /^#{1,6}\s+(.*)$/;
const INLINE = /(`+)(.+?)\1(?!`)|\*\*(?=\S)(.+?\S|\S)\*\*/gs;

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
        el("code", { text: code.join("\n") })));
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
