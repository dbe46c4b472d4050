// Small helpers for the document. Text always becomes text nodes; nothing here parses HTML.

export const $ = (id) => document.getElementById(id);

/** Make an element. `props`: class, text, on (listeners), anything else is an attribute. */
export function el(tag, props = {}, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(props)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "class") node.className = value;
    else if (name === "text") node.textContent = value;
    else if (name === "on") for (const [type, handler] of Object.entries(value)) node.addEventListener(type, handler);
    else node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.filter((child) => child !== null && child !== undefined));
  return node;
}

export function button(text, onClick, props = {}) {
  return el("button", { type: "button", text, on: { click: onClick }, ...props });
}

/** Show `message` below a control, or take it away where it is empty. */
export function showFieldError(control, message) {
  const place = $(`${control.id}-error`);
  if (message) control.setAttribute("aria-invalid", "true");
  else control.removeAttribute("aria-invalid");
  if (place) {
    place.textContent = message || "";
    place.hidden = !message;
  }
}

export async function copyText(text) {
  if (navigator.clipboard && window.isSecureContext) {
    await navigator.clipboard.writeText(text);
    return;
  }
  // Without TLS there is no clipboard but this one.
  const area = el("textarea", { class: "sr", "aria-hidden": "true", tabindex: "-1" });
  area.value = text;
  const host = document.querySelector("dialog[open]") || document.body;
  const before = document.activeElement;
  host.append(area);
  area.select();
  document.execCommand("copy");
  area.remove();
  if (before) before.focus();
}

/** Copy, and say so on the button for a moment. */
export async function copyFrom(control, text) {
  const label = control.textContent;
  try {
    await copyText(text);
    control.textContent = "Copied";
  } catch {
    control.textContent = "Not copied";
  }
  setTimeout(() => { control.textContent = label; }, 1400);
}

/** Keep a text, or forget it (null). Returns whether that worked. */
export function store(area, name, value) {
  try {
    if (value === null) area.removeItem(name);
    else area.setItem(name, value);
    return true;
  } catch {
    return false; // full, or forbidden by the browser: the page works without
  }
}

export function recall(area, name) {
  try {
    return area.getItem(name);
  } catch {
    return null;
  }
}

/** Have the browser save a text as a file. */
export function download(name, text) {
  const url = URL.createObjectURL(new Blob([text], { type: "application/json" }));
  el("a", { href: url, download: name }).click();
  setTimeout(() => URL.revokeObjectURL(url), 60_000);
}

export function randomHex(bytes) {
  return [...crypto.getRandomValues(new Uint8Array(bytes))].map((byte) => byte.toString(16).padStart(2, "0")).join("");
}

export const count = new Intl.NumberFormat("en-US");

/** Seconds, in the unit that reads best: [number, unit]. */
export function duration(seconds) {
  if (seconds === null || !Number.isFinite(seconds)) return ["\u2013", ""];
  if (seconds >= 1) return [seconds.toFixed(seconds < 10 ? 2 : 1), "s"];
  const ms = seconds * 1000;
  return [ms.toFixed(ms < 10 ? 1 : 0), "ms"];
}
