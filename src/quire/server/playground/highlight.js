// Colours of code: comments, strings, numbers and keywords, told apart by one regular expression for each language.
//
// Every part of an expression matches as soon as it has begun, whether or not it ends, so that time is linear in the text.

import { el } from "./dom.js";

const MAX_HIGHLIGHTED = 20_000; // characters; what is longer stays plain
const KINDS = ["comment", "string", "number", "keyword"];

const HASH = /#[^\n]*/;
const SLASHES = /\/\/[^\n]*|\/\*(?:[^*]|\*(?!\/))*(?:\*\/)?/;
const DASHES = /--[^\n]*|\/\*(?:[^*]|\*(?!\/))*(?:\*\/)?/;
const MARKUP = /<!--(?:[^-]|-(?!->))*(?:-->)?/;
const QUOTED = /"(?:\\.|[^"\\\n])*"?|'(?:\\.|[^'\\\n])*'?/;
const DOUBLE = /"(?:\\.|[^"\\\n])*"?/;
const BACKTICK = /`(?:\\[^]|[^`\\])*`?/;
const TRIPLE = /"""(?:[^"]|"(?!""))*(?:""")?|'''(?:[^']|'(?!''))*(?:''')?/;

const words = (text) => new Set(text.split(" "));
const C_LIKE = "auto bool break case char class const constexpr continue default delete do double else enum extern false "
  + "float for if inline int long namespace new nullptr operator private protected public return short signed sizeof "
  + "static struct switch template this throw true try catch typedef typename union unsigned using virtual void while";
const LANGUAGES = {
  python: { parts: [HASH, [TRIPLE, QUOTED]], keywords: words("False None True and as assert async await break case class "
    + "continue def del elif else except finally for from global if import in is lambda match nonlocal not or pass raise "
    + "return self try while with yield") },
  javascript: { parts: [SLASHES, [QUOTED, BACKTICK]], keywords: words("any as async await boolean break case catch class "
    + "const continue default delete do else enum export extends false finally for from function if implements import in "
    + "instanceof interface let new null number of private public readonly return static string super switch this throw "
    + "true try type typeof undefined unknown var void while yield") },
  shell: { parts: [HASH, [QUOTED]], keywords: words("case cd do done echo elif else esac exit export fi for function if in "
    + "local return set shift source then until while") },
  c: { parts: [SLASHES, [QUOTED]], keywords: words(C_LIKE) },
  java: { parts: [SLASHES, [QUOTED]], keywords: words("abstract boolean break byte case catch char class const continue "
    + "default do double else enum extends false final finally float for foreach get if implements import instanceof int "
    + "interface internal is long namespace new null object override package private protected public readonly record "
    + "return sealed set short static string super switch this throw throws true try using var void while fun val when") },
  go: { parts: [SLASHES, [QUOTED, BACKTICK]], keywords: words("any bool break byte case chan const continue default defer "
    + "else error fallthrough false float64 for func go goto if import int interface map nil package range return select "
    + "string struct switch true type var") },
  rust: { parts: [SLASHES, [DOUBLE]], keywords: words("as async await bool break const continue crate dyn else enum extern "
    + "false fn for if impl in let loop match mod move mut pub ref return self static str struct super trait true type "
    + "unsafe use usize where while") },
  sql: { parts: [DASHES, [QUOTED]], anyCase: true, keywords: words("add all alter and as asc between by case create cross "
    + "delete desc distinct drop else end exists false from full group having in index inner insert into is join key left "
    + "like limit not null offset on or order outer primary references right select set table then true union unique "
    + "update using values view when where with") },
  css: { parts: [/\/\*(?:[^*]|\*(?!\/))*(?:\*\/)?/, [QUOTED]], keywords: words("important media import supports root var calc") },
  markup: { parts: [MARKUP, [DOUBLE], /<[/!]?[\w:-]+|\/?>/], keywords: null },
  data: { parts: [HASH, [DOUBLE]], keywords: words("true false null yes no on off") },
};
const ALIASES = { py: "python", js: "javascript", jsx: "javascript", ts: "javascript", tsx: "javascript",
  typescript: "javascript", sh: "shell", bash: "shell", zsh: "shell", console: "shell", dockerfile: "shell", cpp: "c",
  "c++": "c", h: "c", hpp: "c", cuda: "c", cs: "java", csharp: "java", kotlin: "java", golang: "go", rs: "rust",
  postgresql: "sql", sqlite: "sql", html: "markup", xml: "markup", svg: "markup", json: "data", jsonl: "data", yaml: "data",
  yml: "data", toml: "data", ini: "data" };

const patterns = new Map();

/** Return the expression of a language; its groups are `KINDS`. */
function patternOf(name) {
  if (!patterns.has(name)) {
    const [comment, strings, word = /[A-Za-z_]\w*/] = LANGUAGES[name].parts;
    const number = /\b(?:0[xXbBoO][\da-fA-F_]+|\d[\d_]*(?:\.\d+)?(?:[eE][+-]?\d+)?)\b/;
    const groups = [comment, new RegExp(strings.map((part) => part.source).join("|")), number, word];
    patterns.set(name, new RegExp(groups.map((part) => `(${part.source})`).join("|"), "g"));
  }
  return patterns.get(name);
}

/** Return the code as texts and coloured elements; as it is if the language is not known. */
export function highlight(code, language) {
  const name = language.toLowerCase();
  const known = Object.hasOwn(ALIASES, name) ? ALIASES[name] : name;
  if (!Object.hasOwn(LANGUAGES, known) || code.length > MAX_HIGHLIGHTED) return [code];
  const { keywords, anyCase } = LANGUAGES[known];
  const nodes = [];
  let last = 0;
  for (const match of code.matchAll(patternOf(known))) {
    const kind = KINDS[match.slice(1).findIndex((group) => group !== undefined)];
    if (kind === "keyword" && keywords && !keywords.has(anyCase ? match[0].toLowerCase() : match[0])) continue;
    if (match.index > last) nodes.push(code.slice(last, match.index));
    nodes.push(el("span", { class: `code-${kind}`, text: match[0] }));
    last = match.index + match[0].length;
  }
  nodes.push(code.slice(last));
  return nodes;
}
