// One message of the conversation as elements, and how it is kept up to date while its text streams in.

import { chip } from "./attachments.js";
import { button, copyFrom, count, duration, el } from "./dom.js";
import { render } from "./markdown.js";

const NAMES = { user: "You", assistant: "Assistant", tool: "Tool result" };
const FINISHED = { length: "cut off at the limit", stop: "", tool_calls: "calls tools", repetition: "went round in circles" };

export class MessageView {
  /** `actions`: edit(text), regenerate(), answer(call, text); those that are missing are not offered. */
  constructor(message, actions = {}) {
    this.message = message;
    this.actions = actions;
    this.calls = [];
    this.shown = { content: null, reasoning: null };
    this.body = el("div", { class: "body" });
    this.before = el("div");
    this.after = el("div");
    this.foot = el("footer");
    this.error = el("p", { class: "field-error", role: "alert", hidden: true });
    this.root = el("article", { class: `message ${message.role}`, "aria-label": NAMES[message.role] || message.role },
      el("header", {}, el("strong", { text: NAMES[message.role] || message.role }), this.buttons()),
      this.before, this.body, this.after, this.error, this.foot);
    this.before.append(...(message.files || []).map(chip));
    this.update();
  }

  buttons() {
    const { edit, regenerate } = this.actions;
    const copy = button("Copy", () => copyFrom(copy, this.message.content || ""), { class: "quiet" });
    return el("span", { class: "actions" },
      copy,
      edit ? button("Edit", () => this.openEditor(), { class: "quiet" }) : null,
      regenerate ? button("Regenerate", regenerate, { class: "quiet last-only" }) : null);
  }

  /** Show what the message has by now. */
  update() {
    const { content, reasoning, tool_calls: calls, stats, error, finish, files } = this.message;
    if (content !== this.shown.content) {
      this.body.replaceChildren(...(this.message.role === "assistant"
        ? render(content || "") : [el("p", { text: content || "" })]));
      this.shown.content = content;
    }
    this.body.hidden = !content && Boolean(calls || error || files);
    if (reasoning && reasoning !== this.shown.reasoning) this.showReasoning(reasoning);
    (calls || []).forEach((call, index) => this.showCall(call, index));
    this.error.textContent = error || "";
    this.error.hidden = !error;
    this.foot.replaceChildren(...facts(stats, finish).map((text) => el("span", { text })));
  }

  set streaming(value) {
    this.root.classList.toggle("streaming", value);
    this.root.setAttribute("aria-busy", value);
  }

  showReasoning(text) {
    if (!this.reasoning) {
      this.reasoning = el("div");
      this.before.append(el("details", { class: "reasoning" }, el("summary", { text: "Reasoning" }), this.reasoning));
    }
    this.reasoning.textContent = text;
    this.shown.reasoning = text;
  }

  showCall(call, index) {
    if (!this.calls[index]) {
      const name = el("strong");
      const given = el("pre", { class: "code", tabindex: "0", "aria-label": "Arguments" });
      const box = el("details", { class: "call", open: true }, el("summary", {}, "calls ", name), given);
      if (this.actions.answer) box.append(this.answerForm(call));
      this.after.append(box);
      this.calls[index] = { name, given };
    }
    this.calls[index].name.textContent = call.function.name;
    this.calls[index].given.textContent = pretty(call.function.arguments);
  }

  answerForm(call) {
    const field = el("input", { type: "text", spellcheck: "false" });
    return el("form", { class: "answer", on: { submit: (event) => {
      event.preventDefault();
      event.currentTarget.remove();
      this.actions.answer(call, field.value);
    } } }, el("label", {}, "What the function returned", field), el("button", { type: "submit", class: "small", text: "Answer" }));
  }

  openEditor() {
    const area = el("textarea", { rows: "3", "aria-label": "Edit message" });
    area.value = this.message.content;
    const close = () => { form.replaceWith(this.body); };
    const form = el("form", { class: "edit", on: {
      submit: (event) => { event.preventDefault(); this.actions.edit(area.value); },
      keydown: (event) => {
        if (event.key === "Escape") { event.stopPropagation(); close(); }
        if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); form.requestSubmit(); }
      },
    } }, area, el("div", { class: "row" },
      el("button", { type: "submit", class: "primary small", text: "Send again" }), button("Cancel", close, { class: "small" })));
    this.body.replaceWith(form);
    area.focus();
  }
}

function pretty(text) {
  try {
    return JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    return text; // not complete yet
  }
}

function facts(stats, finish) {
  const parts = [];
  if (stats) {
    if (stats.tokens !== undefined) parts.push(`${count.format(stats.tokens)} tokens`);
    if (stats.first !== undefined) parts.push(`first after ${duration(stats.first).join(" ")}`);
    if (stats.rate) parts.push(`${stats.rate.toFixed(stats.rate < 10 ? 1 : 0)} tokens/s`);
    if (stats.prompt !== undefined) {
      parts.push(`prompt ${count.format(stats.prompt)}${stats.cached ? `, ${count.format(stats.cached)} cached` : ""}`);
    }
  }
  const end = finish in FINISHED ? FINISHED[finish] : finish;
  if (end) parts.push(end);
  return parts;
}
