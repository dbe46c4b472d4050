// The requests the engine has, by queue: how far each has come, and what it holds.

import { count, el } from "./dom.js";

const QUEUES = [
  ["running", "Running"],
  ["waiting", "Waiting"],
  ["swapped", "Swapped out"],
  ["loading", "Loading from disk"],
];
const MAX_ROWS = 24;
// Told apart from each other and from the page's own colour, on light and dark ground.
const PALETTE = ["#4f7cc4", "#c2703d", "#8a62b8", "#6a9440", "#b8527f", "#a98c1f", "#5a6fd0", "#c25b52", "#7f8f45",
  "#a566a0", "#4c9c6e", "#ae7a55"];

/** Gives requests names and colours that stay the same from picture to picture. */
export class Names {
  constructor() {
    this.own = new Set();
    this.colors = new Map();
    this.next = 0;
  }

  /** Return what is to be known of a request: name, color(theme), mine, key. */
  of(request) {
    if (request.id === null) return { name: "another key", color: (colors) => colors["cell-other"], mine: false, key: "" };
    const mine = [...this.own].some((id) => request.id === id || request.id.endsWith(`-${id}`));
    if (mine) return { name: "this chat", color: (colors) => colors["cell-mine"], mine, key: request.id };
    const color = this.colorOf(request.id);
    return { name: short(request.id), color: () => color, mine, key: request.id };
  }

  colorOf(id) {
    if (!this.colors.has(id)) {
      this.colors.set(id, PALETTE[this.next++ % PALETTE.length]);
      if (this.colors.size > 2000) this.colors.delete(this.colors.keys().next().value);
    }
    return this.colors.get(id);
  }
}

function short(id) {
  const kinds = { chatcmpl: "chat", cmpl: "text", resp: "response", msg: "message", embd: "embedding" };
  const [, kind, rest] = /^([a-z]+)[-_](.+)$/s.exec(id) || [null, "", id];
  const tail = rest.length > 12 ? rest.slice(-6) : rest;
  return kind ? `${kinds[kind] || kind} ${tail}` : tail;
}

export class Queues {
  /** `onHighlight(key)` is told which request is pointed at, null if none. */
  constructor(root, onHighlight) {
    this.root = root;
    this.onHighlight = onHighlight;
    this.pinned = null;
    this.rows = new Map();
  }

  update(picture, infos) {
    const byQueue = new Map(QUEUES.map(([name]) => [name, []]));
    picture.requests.forEach((request, index) => byQueue.get(request.queue)?.push([request, infos[index], index]));
    const used = new Set();
    const parts = [];
    for (const [name, title] of QUEUES) {
      const total = picture.queues[name] || 0;
      if (!total && name !== "running") continue;
      const entries = byQueue.get(name).sort((a, b) => Number(b[1].mine) - Number(a[1].mine));
      const list = entries.slice(0, MAX_ROWS).map(([request, info, index]) => {
        const key = info.key || `#${index}`;
        used.add(key);
        return this.row(key, request, info);
      });
      const more = total - list.length;
      parts.push(el("section", { class: "queue", "aria-label": title },
        el("p", {}, title, el("small", { text: count.format(total) })),
        ...list, more > 0 ? el("p", { class: "more", text: `and ${count.format(more)} more` }) : null));
    }
    for (const key of this.rows.keys()) if (!used.has(key)) this.rows.delete(key);
    if (this.pinned !== null && !used.has(this.pinned)) this.pin(null);
    const focused = document.activeElement;
    this.root.replaceChildren(...parts);
    if (focused?.classList.contains("request") && focused.isConnected) focused.focus();
  }

  row(key, request, info) {
    let item = this.rows.get(key);
    if (!item) {
      const parts = { swatch: el("span", { class: "swatch" }), name: el("span", { class: "name" }),
        prefill: el("i", { class: "prefill" }), bar: el("i"), facts: el("span", { class: "facts" }) };
      const root = el("button", { type: "button", class: "request", "aria-pressed": "false", on: {
        pointerenter: () => this.onHighlight(info.key || null),
        pointerleave: () => this.onHighlight(this.pinned),
        click: () => this.pin(this.pinned === key ? null : key),
      } }, parts.swatch, parts.name, el("span", { class: "progress" }, parts.prefill, parts.bar), parts.facts);
      item = { root, ...parts };
      this.rows.set(key, item);
    }
    const { tokens_done: done, tokens_left: left, tokens_generated: generated, max_tokens: most } = request;
    const style = getComputedStyle(document.documentElement);
    item.swatch.style.background = info.color({
      "cell-mine": style.getPropertyValue("--cell-mine"), "cell-other": style.getPropertyValue("--cell-other") });
    item.root.classList.toggle("mine", info.mine);
    item.name.textContent = info.name + (request.sequences > 1 ? ` \u00d7${request.sequences}` : "");
    const reading = generated === 0;
    item.prefill.style.width = reading ? `${percent(done, done + left)}%` : "0";
    item.bar.style.width = reading ? "0" : `${percent(generated, most)}%`;
    const facts = [reading
      ? `${count.format(done)} of ${count.format(done + left)} prompt`
      : `${count.format(generated)} of ${count.format(most)}`];
    const blocks = request.blocks || request.host_blocks;
    if (blocks) facts.push(`${blocks} block${blocks === 1 ? "" : "s"}`);
    if (request.preemptions) facts.push(`preempted ${request.preemptions}\u00d7`);
    item.facts.textContent = facts.join(" \u00b7 ");
    return item.root;
  }

  pin(key) {
    for (const [name, item] of this.rows) item.root.setAttribute("aria-pressed", String(name === key));
    this.pinned = key;
    this.onHighlight(key !== null && key.startsWith("#") ? null : key);
  }
}

const percent = (part, whole) => (whole ? Math.min(100, (100 * part) / whole).toFixed(1) : 0);
