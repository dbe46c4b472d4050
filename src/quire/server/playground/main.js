// Puts the page together: theme, API key, models, the chat and the picture of the engine.

import { getJSON, hasKey, setKey, whenRefused } from "./api.js";
import { Chat } from "./chat.js";
import { ConversationList } from "./conversation_list.js";
import { Conversations } from "./conversations.js";
import { $, el, recall, store } from "./dom.js";
import { Engine } from "./engine.js";
import { Settings } from "./settings.js";

const THEMES = ["auto", "light", "dark"];
const RETRY_SECONDS = 2;
const NARROW = 1100;

const dark = matchMedia("(prefers-color-scheme: dark)");
let theme = recall(localStorage, "quire.theme") || "auto";

function showTheme() {
  if (!THEMES.includes(theme)) theme = "auto";
  document.documentElement.dataset.theme = theme === "auto" ? (dark.matches ? "dark" : "light") : theme;
  $("theme-name").textContent = theme;
  window.dispatchEvent(new Event("themechange"));
}

function changeTheme() {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  store(localStorage, "quire.theme", theme);
  showTheme();
}

function askForKey(error) {
  $("key-button").hidden = false;
  if (error) {
    $("key-reason").textContent = hasKey()
      ? "The server does not accept this key. Try another one."
      : "This server asks for a key. It stays in this tab until you close it.";
  }
  if (!$("key-dialog").open) $("key-dialog").showModal();
}

async function loadModels(engine) {
  let models;
  try {
    models = (await getJSON("v1/models")).data;
  } catch (error) {
    if (error.status !== 401) setTimeout(() => loadModels(engine), 1000 * RETRY_SECONDS);
    return;
  }
  const wanted = $("model").value || recall(localStorage, "quire.model");
  $("model").replaceChildren(...models.map(({ id }) => el("option", { value: id, text: id })));
  if (models.some(({ id }) => id === wanted)) $("model").value = wanted;
  $("key-button").hidden = !hasKey();
  engine.watch($("model").value);
}

function start() {
  showTheme();
  dark.addEventListener("change", showTheme);
  $("theme-button").addEventListener("click", changeTheme);
  if (innerWidth <= NARROW) {
    $("settings-panel").open = false;
    $("conversations-panel").open = false;
    $("engine-panel").open = innerHeight > innerWidth && innerWidth > 700;
  }
  const engine = new Engine();
  const settings = new Settings();
  const conversations = new Conversations();
  const chat = new Chat(settings, conversations.last(), (id) => engine.onActivity(id));
  new ConversationList(conversations, chat);
  window.addEventListener("themechange", () => engine.redraw());
  whenRefused(askForKey);
  $("key-button").addEventListener("click", () => askForKey());
  $("key-cancel").addEventListener("click", () => $("key-dialog").close());
  $("key-form").addEventListener("submit", () => {
    setKey($("key").value.trim());
    $("key").value = "";
    loadModels(engine);
  });
  $("model").addEventListener("change", () => {
    store(localStorage, "quire.model", $("model").value);
    engine.watch($("model").value);
  });
  loadModels(engine);
  engine.soon();
  if (matchMedia("(pointer: fine)").matches) $("prompt").focus();
}

start();
