// The settings of requests: fields, what is wrong with them, and the part of a request that they make.

import { $, el, recall, showFieldError, store } from "./dom.js";

const NAME = "quire.settings";
const NUMBERS = [
  { name: "temperature", label: "Temperature", hint: "default" },
  { name: "max_tokens", label: "Max tokens", hint: "no limit", whole: true },
  { name: "top_p", label: "Top p", hint: "1" },
  { name: "top_k", label: "Top k", hint: "all", whole: true },
  { name: "min_p", label: "Min p", hint: "0" },
  { name: "seed", label: "Seed", hint: "random", whole: true },
];
const TEXTS = ["system", "stop", "schema", "tools", "tool-choice", "parallel"];
const ALIASES = { max_completion_tokens: "max_tokens", response_format: "schema", tool_choice: "tool-choice",
  parallel_tool_calls: "parallel" };

const EXAMPLE_SCHEMA = {
  type: "object",
  properties: {
    title: { type: "string", maxLength: 40 },
    pages: { type: "integer", minimum: 1, maximum: 999 },
    bound: { type: "boolean" },
  },
  required: ["title", "pages", "bound"],
  additionalProperties: false,
};
const EXAMPLE_TOOLS = [{
  type: "function",
  function: {
    name: "get_weather",
    description: "Current weather of a city",
    parameters: {
      type: "object",
      properties: { city: { enum: ["Oslo", "Lisbon", "Nairobi"] }, unit: { enum: ["C", "F"] } },
      required: ["city", "unit"],
      additionalProperties: false,
    },
  },
}];

export class SettingsError extends Error {}

export class Settings {
  constructor() {
    $("numbers").append(...NUMBERS.flatMap(({ name, label, hint }) => [
      el("div", {}, el("label", { for: name, text: label }),
        el("input", { id: name, inputmode: "decimal", placeholder: hint, "aria-describedby": `${name}-error` })),
    ]));
    for (const { name } of NUMBERS) {
      $(name).parentElement.append(el("p", { id: `${name}-error`, class: "field-error", role: "alert", hidden: true }));
    }
    this.controls = [...NUMBERS.map(({ name }) => name), ...TEXTS].map((name) => $(name));
    for (const control of this.controls) {
      control.addEventListener("input", () => this.changed(control));
    }
    $("settings").addEventListener("submit", (event) => event.preventDefault());
    $("schema-example").addEventListener("click", () => this.insert($("schema"), EXAMPLE_SCHEMA));
    $("tools-example").addEventListener("click", () => this.insert($("tools"), EXAMPLE_TOOLS));
    $("reset-settings").addEventListener("click", () => this.reset());
    this.load();
  }

  load() {
    let kept = {};
    try {
      kept = JSON.parse(recall(localStorage, NAME) || "{}") || {};
    } catch {
      // Not what this page wrote.
    }
    for (const control of this.controls) {
      if (typeof kept[control.id] === "string") control.value = kept[control.id];
    }
    this.mark();
  }

  changed(control) {
    showFieldError(control, "");
    if (control.id === "schema" || control.id === "tools") this.parsed(control);
    store(localStorage, NAME, JSON.stringify(Object.fromEntries(this.controls.map((item) => [item.id, item.value]))));
    this.mark();
  }

  insert(control, example) {
    control.value = JSON.stringify(example, null, 2);
    this.changed(control);
    control.focus();
  }

  reset() {
    for (const control of this.controls) {
      control.value = "";
      this.changed(control);
    }
  }

  mark() {
    for (const name of ["schema", "tools"]) $(`${name}-mark`).textContent = $(name).value.trim() ? "\u00b7 on" : "";
  }

  /** Return the JSON in an editor, undefined if it is empty or wrong; what is wrong is shown. */
  parsed(control) {
    const text = control.value.trim();
    if (!text) return undefined;
    try {
      return JSON.parse(text);
    } catch (error) {
      showFieldError(control, `This is not JSON: ${error.message}`);
      return undefined;
    }
  }

  get system() {
    return $("system").value.trim();
  }

  /** Return the fields of a request. Raises `SettingsError` after showing what is wrong, with the first such field focused. */
  fields() {
    for (const control of this.controls) showFieldError(control, "");
    const fields = {};
    for (const { name, label, whole } of NUMBERS) {
      const text = $(name).value.trim();
      if (!text) continue;
      const value = Number(text.replace(",", "."));
      if (!Number.isFinite(value)) showFieldError($(name), `${label} must be a number`);
      else if (whole && !Number.isSafeInteger(value)) showFieldError($(name), `${label} must be a whole number`);
      else fields[name] = value;
    }
    const stop = $("stop").value.split("\n").filter((line) => line !== "").map(unescape);
    if (stop.length) fields.stop = stop;
    const schema = this.parsed($("schema"));
    if (schema !== undefined) {
      fields.response_format = { type: "json_schema", json_schema: { name: "answer", schema } };
    }
    const tools = this.parsed($("tools"));
    if (tools !== undefined) fields.tools = Array.isArray(tools) ? tools : [tools];
    if ($("tool-choice").value && tools !== undefined) fields.tool_choice = $("tool-choice").value;
    if ($("parallel").value && tools !== undefined) fields.parallel_tool_calls = false;
    if (this.reveal()) throw new SettingsError("the settings need another look");
    return fields;
  }

  /** Return the control that a field of a request belongs to, such as `tools[0].function.name`. */
  controlOf(param) {
    const root = param.split(/[.[]/)[0];
    return this.controls.find((item) => item.id === (ALIASES[root] || root));
  }

  /** Show what the server says of a control, and go there. */
  showError(control, message) {
    showFieldError(control, message);
    this.reveal();
  }

  /** Open what hides the first field with an error, and go there. Returns whether there is one. */
  reveal() {
    const wrong = this.controls.find((control) => control.hasAttribute("aria-invalid"));
    if (!wrong) return false;
    for (let up = wrong.parentElement; up; up = up.parentElement) {
      if (up instanceof HTMLDetailsElement) up.open = true;
    }
    wrong.focus();
    return true;
  }
}

function unescape(line) {
  return line.replace(/\\(n|t|\\)/g, (_, letter) => ({ n: "\n", t: "\t", "\\": "\\" })[letter]);
}
