// The chat: sends the conversation, streams the answer in, and lets the user stop, repeat and change it.

import { ApiError, postStream } from "./api.js";
import { Attachments } from "./attachments.js";
import { applyDelta, forRequest } from "./conversation.js";
import { $, button, el, randomHex, showFieldError } from "./dom.js";
import { MessageView } from "./message.js";
import { SettingsError } from "./settings.js";
import { asCurl, asPython, showSnippet } from "./snippets.js";

const SUGGESTIONS = ["What is Quire?", "What is 27 + 48?", "Reverse the word \"stone\".", "What is the opposite of black?"];
const NEAR = 80; // pixels from the end within which new text scrolls along

export class Chat {
  /** `onActivity(requestId)` is told of each request that begins and ends (null); `onOpen()` of another conversation. */
  constructor(settings, conversation, onActivity) {
    this.settings = settings;
    this.onActivity = onActivity;
    this.onOpen = () => {};
    this.conversation = conversation;
    this.running = null;
    this.views = [];
    this.list = $("messages");
    this.prompt = $("prompt");
    this.attachments = new Attachments((reason) => this.fail(reason));
    this.listen();
    this.draw();
  }

  listen() {
    $("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.submit();
    });
    this.prompt.addEventListener("input", () => this.fit());
    this.prompt.addEventListener("keydown", (event) => {
      if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
        event.preventDefault();
        this.submit();
      }
    });
    document.addEventListener("keydown", (event) => {
      if (event.key === "Escape" && this.running && !document.querySelector("dialog[open]")) this.stop();
    });
    $("stop-button").addEventListener("click", () => this.stop());
    $("as-curl").addEventListener("click", () => this.show("This request with curl", asCurl));
    $("as-python").addEventListener("click", () => this.show("This request in Python", asPython));
  }

  fit() {
    this.prompt.style.height = "auto";
    this.prompt.style.height = `${this.prompt.scrollHeight}px`;
  }

  /** Bring the list up to date. What is there already stays, so that screen readers hear only what is new. */
  draw() {
    const { messages } = this.conversation;
    this.views = messages.map((message, place) => {
      const view = this.views[place];
      return view?.message === message ? view : this.viewOf(message, place);
    });
    const wanted = this.views.length ? this.views.map((view) => view.root) : [this.welcome()];
    wanted.forEach((root, place) => {
      if (this.list.children[place] !== root) this.list.insertBefore(root, this.list.children[place] || null);
    });
    while (this.list.children.length > wanted.length) this.list.lastElementChild.remove();
    this.toEnd();
  }

  viewOf(message, place) {
    const model = message.role === "assistant";
    return new MessageView(message, {
      edit: message.role === "user" ? (text) => this.edit(place, text) : null,
      regenerate: model ? () => this.regenerate(place) : null,
      answer: model ? (call, text) => this.answer(call, text) : null,
    });
  }

  welcome() {
    return el("div", { class: "welcome" },
      el("h2", { text: "Ask the model something" }),
      el("p", { text: "While it answers, its requests and blocks appear in the picture of the engine." }),
      el("div", { class: "suggestions" }, ...SUGGESTIONS.map((text) => button(text, () => {
        this.prompt.value = text;
        this.submit();
      }))));
  }

  /** Go on with another conversation; an answer that is under way is stopped. */
  open(conversation) {
    this.stop();
    this.conversation = conversation;
    this.draw();
    this.fail("");
    this.onOpen();
    this.prompt.focus();
  }

  /** Return the message in the box, null if there is none. */
  written() {
    const content = this.prompt.value.trim();
    const { files } = this.attachments;
    if (!content && !files.length) return null;
    return files.length ? { role: "user", content, files } : { role: "user", content };
  }

  submit() {
    const message = this.written();
    if (!message || this.running) return;
    if (!this.ready()) return;
    this.conversation.add(message);
    this.attachments.set([]);
    this.prompt.value = "";
    this.fit();
    this.draw();
    this.generate();
  }

  edit(place, text) {
    const { files } = this.conversation.messages[place];
    if ((!text.trim() && !files) || this.running) return;
    this.conversation.cut(place, { role: "user", content: text.trim(), ...(files && { files }) });
    this.draw();
    this.generate();
  }

  regenerate(place) {
    if (this.running) return;
    this.conversation.cut(place);
    this.draw();
    this.generate();
  }

  /** Say what a function returned; the model goes on once all calls of the message are answered. */
  answer(call, text) {
    if (this.running) return;
    const { messages } = this.conversation;
    const caller = messages.findLastIndex((message) => message.role === "assistant");
    this.conversation.add({ role: "tool", tool_call_id: call.id, content: text });
    const answered = new Set(messages.slice(caller + 1).map((message) => message.tool_call_id));
    const left = messages[caller].tool_calls.some((item) => !answered.has(item.id));
    this.draw();
    if (!left) this.generate();
  }

  /** Return the request that would be sent now. Raises `SettingsError`. */
  request() {
    const { messages, places } = this.conversation.forRequest(this.settings.system);
    const body = { model: $("model").value, messages, ...this.settings.fields() };
    return { body: { ...body, stream: true, stream_options: { include_usage: true } }, places };
  }

  ready() {
    try {
      this.settings.fields();
      return true;
    } catch (error) {
      if (error instanceof SettingsError) return false;
      throw error;
    }
  }

  show(title, write) {
    if (!this.ready()) return;
    const { body } = this.request();
    const message = this.written();
    if (message) body.messages.push(forRequest(message));
    if (!body.messages.length) body.messages.push({ role: "user", content: "Hello!" });
    showSnippet(title, write(body));
  }

  stop() {
    if (this.running) this.running.abort();
  }

  async generate() {
    if (!this.ready()) return;
    const { body, places } = this.request();
    const id = `page-${randomHex(6)}`;
    const { conversation } = this;
    const message = conversation.add({ role: "assistant", content: "" });
    this.draw();
    const view = this.views.at(-1);
    view.streaming = true;
    this.fail("");
    showFieldError($("model"), "");
    const abort = this.busy(new AbortController());
    this.onActivity(id);
    const clock = new Clock();
    try {
      for await (const chunk of postStream("v1/chat/completions", { ...body, request_id: id }, abort.signal)) {
        this.take(message, chunk, clock);
        this.refresh(view);
      }
    } catch (error) {
      if (abort.signal.aborted) message.finish = "stopped";
      else this.explain(error, message, places);
    } finally {
      this.busy(null);
      this.onActivity(null);
    }
    message.stats = clock.stats();
    if (!message.content && !message.tool_calls && message.error === undefined && !message.finish) message.finish = "stop";
    conversation.save();
    const atEnd = this.isAtEnd();
    view.streaming = false;
    view.update();
    if (atEnd) this.toEnd();
    this.list.removeAttribute("aria-busy"); // from here on, the whole answer is read out
  }

  take(message, chunk, clock) {
    const choice = chunk.choices?.[0];
    if (choice) {
      const before = (message.content || "").length + (message.reasoning || "").length + (message.tool_calls ? 1 : 0);
      applyDelta(message, choice.delta || {});
      const after = (message.content || "").length + (message.reasoning || "").length + (message.tool_calls ? 1 : 0);
      if (after > before || choice.finish_reason) clock.token();
      if (choice.finish_reason) message.finish = choice.finish_reason;
    }
    if (chunk.usage) clock.usage = chunk.usage;
  }

  /** Redraw a message that streams, at most once a frame. */
  refresh(view) {
    if (view.queued) return;
    view.queued = true;
    requestAnimationFrame(() => {
      view.queued = false;
      const atEnd = this.isAtEnd();
      view.update();
      if (atEnd) this.toEnd();
    });
  }

  busy(abort) {
    this.running = abort;
    $("send").hidden = Boolean(abort);
    $("stop-button").hidden = !abort;
    if (abort) this.list.setAttribute("aria-busy", "true");
    const focused = document.activeElement;
    if (focused === $("send") || focused === $("stop-button") || focused === document.body) this.prompt.focus();
    return abort;
  }

  /** Show an error where it belongs: at the field that is to blame, or else at the answer that failed. */
  explain(error, message, places) {
    if (!(error instanceof ApiError)) {
      message.error = error instanceof TypeError ? "The server cannot be reached." : `The answer could not be read: ${error.message}`;
      return;
    }
    if (error.status === 401) {
      this.withdraw(message, "");
      return;
    }
    const told = message.content || message.tool_calls || message.reasoning;
    const control = this.blamed(error.param, places);
    if (!control || told) {
      message.error = error.message;
      return;
    }
    this.withdraw(message, `Not sent: ${error.message}`);
    if (control.id === "model") showFieldError(control, error.message);
    else this.settings.showError(control, error.message);
  }

  /** Return the control for the field that an error names, if there is one. */
  blamed(param, places) {
    const index = /^messages\[(\d+)\]/.exec(param);
    if (index) return places[Number(index[1])] === -1 ? $("system") : null;
    return param === "model" ? $("model") : this.settings.controlOf(param);
  }

  /** Take back an answer that never began, and give the user the text to send again. */
  withdraw(message, reason) {
    const { messages } = this.conversation;
    const place = messages.indexOf(message);
    if (place < 0) return; // another conversation was opened meanwhile
    const asked = messages[place - 1];
    if (asked?.role === "user" && !this.written()) {
      this.prompt.value = asked.content;
      this.attachments.set(asked.files || []);
      this.fit();
      this.conversation.cut(place - 1);
    } else {
      this.conversation.cut(place);
    }
    this.draw();
    this.fail(reason);
  }

  fail(text) {
    $("chat-error").textContent = text;
    $("chat-error").hidden = !text;
  }

  get scroller() {
    return this.list.scrollHeight > this.list.clientHeight + 1 ? this.list : document.scrollingElement;
  }

  isAtEnd() {
    const { scrollTop, scrollHeight, clientHeight } = this.scroller;
    return scrollHeight - scrollTop - clientHeight < NEAR;
  }

  toEnd() {
    if (this.views.length) this.scroller.scrollTop = this.scroller.scrollHeight;
  }
}

/** When the tokens of one answer came. */
class Clock {
  constructor() {
    this.began = performance.now();
    this.first = null;
    this.last = null;
    this.usage = null;
  }

  token() {
    this.last = performance.now();
    this.first ??= this.last;
  }

  stats() {
    if (this.first === null && !this.usage) return undefined;
    const stats = {};
    if (this.first !== null) stats.first = (this.first - this.began) / 1000;
    if (this.usage) {
      stats.tokens = this.usage.completion_tokens;
      stats.prompt = this.usage.prompt_tokens;
      stats.cached = this.usage.prompt_tokens_details?.cached_tokens || 0;
      const seconds = (this.last - this.first) / 1000;
      if (stats.tokens > 1 && seconds > 0) stats.rate = (stats.tokens - 1) / seconds;
    }
    return stats;
  }
}
