// The list of conversations beside the chat: which there are, and what can be done with the one that is open.

import { CheckError } from "./checks.js";
import { MAX_FILE_BYTES } from "./conversations.js";
import { $, button, download, el } from "./dom.js";

const FULL = "The browser does not keep this conversation: its storage is full, or forbidden. Export it, or delete others.";

export class ConversationList {
  constructor(conversations, chat) {
    this.conversations = conversations;
    this.chat = chat;
    this.root = $("conversations");
    conversations.onChange = () => this.draw();
    conversations.onOther = (id) => this.reload(id);
    chat.onOpen = () => this.draw();
    $("new-conversation").addEventListener("click", () => chat.open(conversations.begin()));
    $("export-all").addEventListener("click", () => this.export(conversations.titles().map(([id]) => id)));
    $("import").addEventListener("click", () => $("import-file").click());
    $("import-file").addEventListener("change", () => this.import());
    this.draw();
  }

  /** Show what another tab has made of a conversation, if it is open here. One that it deleted stays until it is left. */
  reload(id) {
    if (id !== this.chat.conversation.id || this.chat.running) return;
    const kept = this.conversations.open(id);
    if (kept) this.chat.open(kept);
  }

  draw() {
    if (this.root.querySelector("form")) return; // a title is being written
    this.note(this.conversations.full ? FULL : "");
    const titles = this.conversations.titles();
    const focused = document.activeElement?.closest?.("#conversations li")?.dataset.id;
    this.root.replaceChildren(...titles.map(([id, title]) => this.row(id, title)));
    if (focused) [...this.root.children].find((item) => item.dataset.id === focused)?.querySelector("button").focus();
    $("export-all").disabled = !titles.length;
    $("conversations-mark").textContent = titles.length ? String(titles.length) : "";
  }

  row(id, title) {
    const current = id === this.chat.conversation.id;
    const open = button(title, () => { if (!current) this.chat.open(this.conversations.open(id) || this.conversations.begin()); },
      { class: "quiet title", title, "aria-current": current ? "true" : null });
    const item = el("li", { "data-id": id, class: current ? "current" : null }, open);
    if (current) {
      item.append(el("span", { class: "row" },
        button("Rename", () => this.rename(title, open), { class: "link" }),
        button("Export", () => this.export([id]), { class: "link" }),
        this.deleter()));
    }
    return item;
  }

  /** Return a button that has to be pressed twice. */
  deleter() {
    const control = button("Delete", () => {
      if (control.textContent === "Delete") {
        control.textContent = "Really delete?";
        return;
      }
      const { conversation } = this.chat;
      this.chat.open(this.conversations.begin());
      conversation.delete();
    }, { class: "link" });
    control.addEventListener("blur", () => { control.textContent = "Delete"; });
    return control;
  }

  rename(title, open) {
    const field = el("input", { type: "text", maxlength: "80", "aria-label": "Title", spellcheck: "false" });
    field.value = title;
    const { conversation } = this.chat;
    let over = false;
    const finish = (wanted) => {
      if (over) return;
      over = true; // replacing the form takes the focus from it, which ends here again
      form.replaceWith(open);
      open.focus();
      if (wanted && wanted !== title) conversation.rename(wanted);
      else this.draw();
    };
    const form = el("form", { on: {
      submit: (event) => { event.preventDefault(); finish(field.value.trim()); },
      keydown: (event) => { if (event.key === "Escape") { event.stopPropagation(); finish(""); } },
      focusout: () => finish(field.value.trim()),
    } }, field);
    open.replaceWith(form);
    field.select();
  }

  export(ids) {
    download("quire-conversations.json", this.conversations.exported(ids));
  }

  async import() {
    const [file] = $("import-file").files;
    if (!file) return;
    try {
      if (file.size > MAX_FILE_BYTES) throw new CheckError(`it is larger than ${MAX_FILE_BYTES / 2 ** 20} MiB`);
      const ids = this.conversations.imported(await file.text());
      if (ids.length) this.chat.open(this.conversations.open(ids[0]));
    } catch (error) {
      if (!(error instanceof CheckError)) throw error;
      this.note(`Nothing imported from ${file.name}: ${error.message}`);
    } finally {
      $("import-file").value = "";
    }
  }

  note(text) {
    $("conversations-note").textContent = text;
    $("conversations-note").hidden = !text;
  }
}
