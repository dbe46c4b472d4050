// Text files that go along with a message: taken by drop, paste or button, shown as chips, sent in fenced blocks.

import { $, button, count, el } from "./dom.js";

const MAX_FILES = 8; // of one message
const MAX_BYTES = 256 * 1024; // of all files of one message
const MAX_NAME = 100;

export class Attachments {
  /** `onRefused(reason)` is told why a file is not taken, and "" when files are. */
  constructor(onRefused) {
    this.onRefused = onRefused;
    this.files = [];
    this.root = $("attachments");
    $("attach").addEventListener("click", () => $("attach-file").click());
    $("attach-file").addEventListener("change", async () => {
      await this.take([...$("attach-file").files]);
      $("attach-file").value = "";
    });
    $("prompt").addEventListener("paste", (event) => {
      if (!event.clipboardData?.files.length) return;
      event.preventDefault();
      this.take([...event.clipboardData.files]);
    });
    // Anywhere on the page: where nobody takes a file, the browser leaves the page for it.
    document.addEventListener("dragover", (event) => {
      if (event.dataTransfer?.types.includes("Files")) event.preventDefault();
    });
    document.addEventListener("drop", (event) => {
      if (!event.dataTransfer?.files.length) return;
      event.preventDefault();
      this.take([...event.dataTransfer.files]);
    });
  }

  /** Take those of the browser's files that are texts and fit. */
  async take(found) {
    this.onRefused("");
    for (const file of found) {
      const reason = await this.add(file);
      if (reason) this.onRefused(`${file.name} was not attached: ${reason}`);
    }
    $("prompt").focus();
  }

  /** Take a file; return why it is not taken. */
  async add(file) {
    if (file.size > MAX_BYTES) return tooLarge;
    let text;
    try {
      text = new TextDecoder("utf-8", { fatal: true }).decode(await file.arrayBuffer());
    } catch (error) {
      return error instanceof TypeError ? "it is not a text in UTF-8" : "it cannot be read";
    }
    if (text.includes("\0")) return "it is not a text";
    // What else there is may have come while this one was read.
    if (this.files.length >= MAX_FILES) return `a message has at most ${MAX_FILES} files`;
    if (file.size + this.files.reduce((sum, item) => sum + sizeOf(item), 0) > MAX_BYTES) return tooLarge;
    this.set([...this.files, { name: cleaned(file.name), text }]);
    return "";
  }

  set(files) {
    this.files = files;
    this.root.hidden = !files.length;
    this.root.replaceChildren(...files.map((file) => el("li", { class: "chip" }, label(file),
      button("\u00d7", () => {
        this.set(this.files.filter((item) => item !== file));
        $("prompt").focus();
      }, { class: "link", "aria-label": `Remove ${file.name}` }))));
  }
}

const tooLarge = `the files of a message may have ${MAX_BYTES / 1024} KiB in all`;

/** Return the chip of a file that was sent; opened, it shows the text. */
export function chip(file) {
  return el("details", { class: "chip" }, el("summary", {}, label(file)),
    el("pre", { class: "code", tabindex: "0", "aria-label": file.name, text: file.text }));
}

function label(file) {
  return el("span", {}, file.name, " ", el("small", { text: `${count.format(Math.ceil(sizeOf(file) / 1024))} KiB` }));
}

const sizeOf = ({ text }) => new TextEncoder().encode(text).length;
const cleaned = (name) => name.replace(/[\u0000-\u001f\u007f`]/g, "_").slice(-MAX_NAME) || "file";

/** Return a message's text with its files, each in a fenced block after its name. */
export function withFiles(content, files = []) {
  const blocks = files.map(({ name, text }) => {
    const longest = (text.match(/`+/g) || []).reduce((most, run) => Math.max(most, run.length), 0);
    const fence = "`".repeat(Math.max(3, longest + 1));
    const language = /\.([a-z0-9]{1,12})$/i.exec(name)?.[1].toLowerCase() || "";
    return `${name}:\n\n${fence}${language}\n${text}${text.endsWith("\n") ? "" : "\n"}${fence}`;
  });
  return [content, ...blocks].filter(Boolean).join("\n\n");
}
