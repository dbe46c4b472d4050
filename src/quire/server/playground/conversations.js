// All conversations, each under a key of its own in the browser's storage, so that tabs do not overwrite each other's.
// What is shown of them is the concern of `conversation_list.js`.

import { CheckError, checkedConversation, fail, list, mapping } from "./checks.js";
import { Conversation } from "./conversation.js";
import { randomHex, recall, store } from "./dom.js";

const PREFIX = "quire.conversation.";
const CURRENT = "quire.current"; // of this tab
const FORMAT = "quire-conversations";
const VERSION = 1;
const MAX_CONVERSATIONS = 100;
export const MAX_FILE_BYTES = 5 * 2 ** 20;

export class Conversations {
  /** `onChange()` is told that something changed in the list; `onOther(id)` before, if another tab did it. */
  constructor() {
    this.entries = new Map(); // id -> title, time of the last change
    this.full = false;
    this.onChange = () => {};
    this.onOther = () => {};
    for (const name of names()) this.look(name.slice(PREFIX.length));
    window.addEventListener("storage", (event) => {
      if (event.storageArea !== localStorage || !event.key?.startsWith(PREFIX)) return;
      const id = event.key.slice(PREFIX.length);
      this.look(id);
      this.onOther(id);
      this.onChange();
    });
  }

  /** Return what is kept under an id, null if that is nothing, and remember its title. */
  look(id) {
    let found = null;
    try {
      found = checkedConversation(JSON.parse(recall(localStorage, PREFIX + id)), "conversation");
      this.entries.set(id, { title: found.title, updated: found.updated });
    } catch {
      this.entries.delete(id); // it is not there, or not what this page wrote
    }
    return found;
  }

  /** Return [id, title] of all, the one that was changed last first. */
  titles() {
    const newest = [...this.entries].sort(([, one], [, other]) => other.updated - one.updated);
    return newest.map(([id, { title }]) => [id, title]);
  }

  /** Return the one that this tab had last, or an empty one. */
  last() {
    return this.open(recall(sessionStorage, CURRENT)) || this.begin();
  }

  open(id) {
    const found = id && this.look(id);
    if (!found) return null;
    store(sessionStorage, CURRENT, id);
    return new Conversation(this, id, found.title, found.messages);
  }

  /** Return an empty conversation, which is kept once it has a message. */
  begin() {
    const id = randomHex(8);
    store(sessionStorage, CURRENT, id);
    return new Conversation(this, id, "", []);
  }

  keep(conversation) {
    const { id, title, messages } = conversation;
    this.write(id, { title, updated: Date.now(), messages });
    const oldest = this.titles().slice(MAX_CONVERSATIONS);
    for (const [surplus] of oldest) this.remove(surplus);
    this.onChange();
  }

  write(id, { title, updated, messages }) {
    this.full = !store(localStorage, PREFIX + id, JSON.stringify({ title, updated, messages }));
    if (!this.full) this.entries.set(id, { title, updated });
    return !this.full;
  }

  rename(id, title) {
    const found = this.look(id);
    if (found) this.write(id, { ...found, title });
    this.onChange();
  }

  remove(id) {
    store(localStorage, PREFIX + id, null);
    this.entries.delete(id);
    this.full = false;
    this.onChange();
  }

  /** Return these conversations as the text of a file. */
  exported(ids) {
    const found = ids.map((id) => this.look(id)).filter(Boolean);
    return JSON.stringify({ format: FORMAT, version: VERSION, conversations: found }, null, 2);
  }

  /** Keep what a file holds, all or nothing; return the ids. Raises `CheckError`. */
  imported(text) {
    const found = parsed(text);
    const room = MAX_CONVERSATIONS - this.entries.size;
    if (found.length > room) {
      throw new CheckError(`the file holds ${found.length} conversations, and there is room for ${room} of `
        + `${MAX_CONVERSATIONS}; delete some first`);
    }
    const ids = found.map(() => randomHex(8));
    if (!ids.every((id, index) => this.write(id, found[index]))) {
      for (const id of ids) this.remove(id);
      throw new CheckError("the browser's storage has no room for them");
    }
    this.onChange();
    return ids;
  }
}

function names() {
  try {
    return Object.keys(localStorage).filter((name) => name.startsWith(PREFIX));
  } catch {
    return []; // forbidden by the browser
  }
}

function parsed(text) {
  let file;
  try {
    file = JSON.parse(text);
  } catch (error) {
    throw new CheckError(`it is not JSON: ${error.message}`);
  }
  mapping(file, "the file");
  if (file.format !== FORMAT) fail("format", file.format, JSON.stringify(FORMAT));
  if (file.version !== VERSION) fail("version", file.version, VERSION);
  const items = list(file.conversations, "conversations", MAX_CONVERSATIONS);
  return items.map((item, index) => checkedConversation(item, `conversations[${index}]`));
}
