// Asks the server again and again how the engine is, as long as somebody looks, and has it drawn.

import { ApiError, getJSON } from "./api.js";
import { $, count, el } from "./dom.js";
import { Plots } from "./plots.js";
import { Pool } from "./pool.js";
import { Names, Queues } from "./queues.js";

const QUIET_SECONDS = 1; // between questions while nothing runs
const FAILED_SECONDS = 3;
const STATES = { draining: "shutting down", sleeping: "asleep", unloaded: "not loaded", stalled: "not reacting",
  unreachable: "not reachable", locked: "needs a key" };
// What is told of a model that has no picture.
const REASONS = { loading: "The model is being loaded.", unloaded: "The model is loaded when somebody asks it something.",
  sleeping: "The engine is asleep, and wakes up when somebody asks it something.",
  restarting: "The engine died and is being replaced. Requests wait meanwhile.", failed: "The model cannot be used." };
const LEGEND = [["mine", "this chat", null], ["used", "in use", "used"], ["shared", "shared", "shared"],
  ["cached", "cached", "cached"], ["kept", "cached, of this chat", null], ["free", "free", "free"],
  ["loading", "loading", "loading"]];

export class Engine {
  constructor() {
    this.names = new Names();
    this.plots = new Plots($("plots"));
    this.pools = new Map();
    this.queues = new Queues($("queues"), (key) => { for (const pool of this.pools.values()) pool.highlight(key); });
    this.model = "";
    this.seen = 0;
    this.active = 0;
    this.timer = 0;
    this.asking = false;
    document.addEventListener("visibilitychange", () => { if (!document.hidden) this.soon(); });
    $("engine-panel").addEventListener("toggle", () => this.soon());
  }

  /** Watch this model from now on. */
  watch(model) {
    this.model = model;
    this.seen = 0;
    this.soon();
  }

  /** Be told that a request of the page begins, by its id, or that it has ended (null). */
  onActivity(id) {
    if (id) this.names.own.add(id);
    this.active += id ? 1 : -1;
    this.soon();
  }

  soon() {
    clearTimeout(this.timer);
    this.timer = setTimeout(() => this.ask(), 20);
  }

  async ask() {
    if (document.hidden || this.asking) return;
    this.asking = true;
    let wait = FAILED_SECONDS;
    try {
      const query = new URLSearchParams({ seen: this.seen, since: this.plots.history.since });
      if (this.model) query.set("model", this.model);
      const state = await getJSON(`playground/state?${query}`);
      this.show(state);
      const busy = this.active > 0 || state.stats.num_running > 0 || state.stats.num_waiting > 0;
      wait = busy ? state.ask_again : Math.max(state.ask_again, QUIET_SECONDS);
    } catch (error) {
      const locked = error instanceof ApiError && error.status === 401;
      this.showState(locked ? "locked" : "unreachable");
      if (locked) wait = 0; // until there is a key
    } finally {
      this.asking = false;
    }
    clearTimeout(this.timer);
    if (wait) this.timer = setTimeout(() => this.ask(), 1000 * wait);
  }

  showState(name) {
    const pill = $("engine-state");
    if (pill.dataset.state !== name || !pill.dataset.told) {
      pill.dataset.state = name;
      pill.dataset.told = "yes";
      pill.textContent = STATES[name] || name;
    }
  }

  show(state) {
    this.showState(state.state);
    this.plots.stats = state.stats;
    if (state.history) this.plots.update(state.history);
    if (state.picture) {
      this.seen = state.picture_number;
      this.draw(state.picture);
    } else if (state.picture_age === undefined) {
      this.drawNothing(state.state);
    }
    this.brief(state.stats);
    document.body.dataset.pictures = state.picture_number;
  }

  draw(picture) {
    const infos = picture.requests.map((request) => this.names.of(request));
    const tiers = new Set(picture.maps.map((map) => map.tier));
    for (const [tier, pool] of this.pools) {
      if (!tiers.has(tier)) {
        pool.root.remove();
        this.pools.delete(tier);
      }
    }
    $("pools").querySelector(".nothing")?.remove();
    for (const map of picture.maps) {
      if (!this.pools.has(map.tier)) {
        const pool = new Pool(map.tier, (nodes) => this.read(nodes));
        this.pools.set(map.tier, pool);
        $("pools").append(pool.root);
      }
      this.pools.get(map.tier).update(map, infos);
    }
    this.legend(picture);
    this.queueSizes = picture.queues;
    this.queues.update(picture, infos);
  }

  drawNothing(state) {
    this.queueSizes = null;
    this.seen = 0;
    for (const pool of this.pools.values()) pool.root.remove();
    this.pools.clear();
    $("legend").replaceChildren();
    $("queues").replaceChildren();
    $("pool-size").textContent = "";
    $("pools").replaceChildren(el("p", { class: "nothing", text: REASONS[state] || "There is no picture of the engine." }));
  }

  /** Draw again with other colours. */
  redraw() {
    this.plots.draw();
    for (const pool of this.pools.values()) pool.draw();
  }

  read(nodes) {
    $("pool-readout").replaceChildren(...(nodes || ["Point at a block, or move over the blocks with the arrow keys."]));
  }

  legend(picture) {
    const device = picture.maps.find((map) => map.tier === "device");
    if (!device) return;
    const { counts, num_blocks: total, per_cell: each, states } = device;
    const mapped = states.length * each;
    const slots = count.format(total * picture.block_size);
    $("pool-size").textContent = `${count.format(total)} blocks of ${picture.block_size} tokens, ${slots} in all`
      + (mapped < total ? `; shown are the first ${count.format(mapped)}, the others are free` : "")
      + (each > 1 ? `; ${each} blocks a cell` : "")
      + (picture.disk.num_blocks ? `; ${count.format(picture.disk.cached)} on disk` : "");
    const items = LEGEND.filter(([name]) => name !== "loading" || counts.loading);
    $("legend").replaceChildren(...items.map(([name, text, key]) => el("li", {},
      el("span", { class: `swatch ${name}` }), text, key ? el("b", { text: count.format(counts[key]) }) : null)));
  }

  brief(stats) {
    const [speed, unit] = this.plots.value("speed");
    const [usage] = this.plots.value("usage", stats);
    const { running = stats.num_running, waiting = stats.num_waiting } = this.queueSizes || {};
    const parts = [`${running} running`, `KV ${usage} %`];
    if (waiting) parts.splice(1, 0, `${waiting} waiting`);
    if (speed !== "\u2013") parts.push(`${speed} ${unit}`);
    $("engine-brief").textContent = parts.join(" \u00b7 ");
  }
}
