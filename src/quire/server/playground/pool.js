// The blocks of a tier on a canvas: one cell each, in the colour of the request that holds it.

import { count, el } from "./dom.js";

const REFS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZ";
const DIGITS = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_";
const MAX_HEIGHT = { device: 216, host: 44 };
const MANY = 8192; // cells that need more height
const LARGEST = 17;
const SMALLEST = 2;
const MIN_OWN = 7; // pixels of a cell of this chat, or of the request that is pointed at, among smaller ones

/** Return the state of each cell, and the requests that hold it (null where it is not in use). */
export function decode(map) {
  const owners = new Array(map.states.length).fill(null);
  let at = 0;
  for (let cell = 0; cell < map.states.length; cell++) {
    const state = map.states[cell];
    if (state === "." || state === "c") continue;
    owners[cell] = map.sets[DIGITS.indexOf(map.owners[at]) * 64 + DIGITS.indexOf(map.owners[at + 1])] || [];
    at += 2;
  }
  return owners;
}

export class Pool {
  /** `describe(requestIndex)` names a request; `onRead(nodes)` is given what to say of the cell pointed at. */
  constructor(tier, onRead) {
    this.tier = tier;
    this.onRead = onRead;
    this.map = null;
    this.owners = [];
    this.requests = [];
    this.keptBy = new Map(); // cached cells -> who was last seen to hold them
    this.marked = -1;
    this.only = null;
    this.canvas = el("canvas", { tabindex: "0", role: "application", "aria-roledescription": "map of blocks" });
    this.title = el("h4");
    this.root = el("div", { class: "pool" }, this.title, this.canvas);
    this.canvas.addEventListener("pointermove", (event) => this.point(event));
    this.canvas.addEventListener("pointerdown", (event) => this.point(event));
    this.canvas.addEventListener("pointerleave", () => this.mark(-1));
    this.canvas.addEventListener("focus", () => { if (this.marked < 0 && this.canvas.matches(":focus-visible")) this.mark(0); });
    this.canvas.addEventListener("blur", () => this.mark(-1));
    this.canvas.addEventListener("keydown", (event) => this.steer(event));
    new ResizeObserver(() => this.draw()).observe(this.root);
  }

  /** Show a new map. `requests`: what is known of those that its sets number: { name, color, mine, key }. */
  update(map, requests) {
    if (map.per_cell !== this.map?.per_cell) {
      this.keptBy.clear();
      this.marked = -1;
    }
    this.map = map;
    this.requests = requests;
    this.owners = decode(map);
    this.remember();
    const { used, cached, free, loading, shared } = map.counts;
    const text = `${count.format(map.num_blocks)} blocks: ${used} in use, ${shared} of them shared, ${cached} cached, ${free} free`
      + (loading ? `, ${loading} loading` : "");
    this.canvas.setAttribute("aria-label", `${this.tier === "host" ? "Host memory" : "KV cache"}, ${text}`);
    Object.assign(this.canvas.dataset, { used, cached, free, shared, loading, cells: map.states.length, mine: this.countMine() });
    this.title.textContent = `Host memory: ${used} blocks swapped out, ${cached} cached, ${free} free`;
    this.title.hidden = this.tier !== "host";
    this.draw();
    if (this.marked >= 0) this.read();
  }

  countMine() {
    return this.owners.filter((owners) => owners && this.isMine(owners)).length;
  }

  isMine(owners) {
    return owners.some((index) => this.requests[index]?.mine);
  }

  remember() {
    const kept = new Map();
    for (let cell = 0; cell < this.owners.length; cell++) {
      const owners = this.owners[cell];
      if (owners && owners.length) {
        const owner = owners.find((index) => this.requests[index]?.mine) ?? owners[0];
        if (this.requests[owner]) kept.set(cell, this.requests[owner]);
      } else if (this.map.states[cell] === "c" && this.keptBy.has(cell)) {
        kept.set(cell, this.keptBy.get(cell));
      }
    }
    this.keptBy = kept;
  }

  /** Let the blocks of one request stand out, or of none (null). `key`: as in what `update` is given. */
  highlight(key) {
    if (this.only === key) return;
    this.only = key;
    this.draw();
  }

  layOut() {
    const width = this.root.clientWidth;
    const cells = this.map.states.length;
    const most = MAX_HEIGHT[this.tier] * (cells > MANY ? 1.5 : 1);
    let size = Math.ceil(Math.sqrt((width * most) / cells));
    while (size > SMALLEST && Math.ceil(cells / Math.floor(width / size)) * size > most) size--;
    size = Math.min(LARGEST, Math.max(SMALLEST, size));
    const columns = Math.max(1, Math.min(cells, Math.floor(width / size)));
    const gap = size >= 9 ? 2 : size >= 4 ? 1 : 0;
    const pitch = gap && size < LARGEST ? width / columns : size; // a little more than `size`, to fill the width
    return { width, size, columns, pitch, gap, rows: Math.ceil(cells / columns) };
  }

  draw() {
    if (!this.map || !this.root.clientWidth) return;
    const grid = (this.grid = this.layOut());
    const scale = window.devicePixelRatio || 1;
    const height = grid.rows * grid.size;
    const { canvas } = this;
    const [w, h] = [Math.round(grid.width * scale), Math.round(height * scale)];
    if (canvas.width !== w || canvas.height !== h) {
      canvas.width = w;
      canvas.height = h;
      canvas.style.height = `${height}px`;
    }
    const context = canvas.getContext("2d");
    context.setTransform(scale, 0, 0, scale, 0, 0);
    context.clearRect(0, 0, grid.width, height);
    const style = getComputedStyle(document.documentElement);
    const colors = Object.fromEntries(["cell-free", "cell-cached", "cell-mine", "cell-other", "surface", "ink", "warn"]
      .map((name) => [name, style.getPropertyValue(`--${name}`).trim()]));
    for (let cell = 0; cell < this.owners.length; cell++) this.drawCell(context, cell, colors);
    if (grid.size - grid.gap < MIN_OWN) {
      for (const cell of this.outstanding()) this.drawCell(context, cell, colors, MIN_OWN);
    }
    context.globalAlpha = 1;
    if (this.marked >= 0 && this.marked < this.owners.length) {
      const [x, y, side] = this.place(this.marked);
      context.strokeStyle = colors.ink;
      context.lineWidth = 2;
      context.strokeRect(x - 1, y - 1, side + 2, side + 2);
    }
  }

  /** Return the cells that must be seen however small the others are. */
  outstanding() {
    const stands = (index) => this.requests[index]?.mine || (this.only !== null && this.requests[index]?.key === this.only);
    return [...this.owners.keys()].filter((cell) => this.owners[cell]?.some(stands));
  }

  /** Return where a cell is and how large; around its middle if it has to be larger, but within the canvas. */
  place(cell, least = 0) {
    const { columns, pitch, size, gap, width, rows } = this.grid;
    const side = Math.max(size - gap, least);
    const more = (side - (size - gap)) / 2;
    const x = Math.round((cell % columns) * pitch) + gap / 2 - more;
    const y = Math.floor(cell / columns) * size + gap / 2 - more;
    return more ? [within(x, width - side), within(y, rows * size - side), side] : [x, y, side];
  }

  drawCell(context, cell, colors, least = 0) {
    const [x, y, side] = this.place(cell, least);
    const state = this.map.states[cell];
    const owners = this.owners[cell];
    const round = side >= 7 ? 2.5 : 0;
    const fill = (color) => {
      context.fillStyle = color;
      if (round) {
        context.beginPath();
        context.roundRect(x, y, side, side, round);
        context.fill();
      } else {
        context.fillRect(x, y, side, side);
      }
    };
    if (owners === null) {
      const kept = state === "c" ? this.keptBy.get(cell) : undefined;
      context.globalAlpha = this.only !== null && kept?.key !== this.only ? 0.45 : 1;
      if (state === "c") fill(colors["cell-cached"]);
      else this.drawFree(context, x, y, side, round, colors);
      if (kept?.mine && side >= 5) {
        context.strokeStyle = colors["cell-mine"];
        context.lineWidth = side >= 9 ? 2 : 1;
        context.strokeRect(x + 1, y + 1, side - 2, side - 2);
      }
      return;
    }
    const shown = this.ownerOf(owners);
    const lit = this.only === null || owners.some((index) => this.requests[index]?.key === this.only);
    context.globalAlpha = lit ? 1 : 0.2;
    fill(shown ? shown.color(colors) : colors["cell-other"]);
    if (shown?.mine && side >= 5) {
      context.strokeStyle = colors.ink;
      context.lineWidth = side >= 9 ? 1.5 : 1;
      context.strokeRect(x + 0.5, y + 0.5, side - 1, side - 1);
    }
    if (state === "~") {
      context.fillStyle = colors.warn;
      context.fillRect(x, y + side / 3, side, Math.max(1, side / 3));
    } else if (REFS.indexOf(state) > 1 && side >= 5) {
      const notch = Math.max(3, side * 0.48);
      context.fillStyle = colors.surface;
      context.beginPath();
      context.moveTo(x + side - notch, y);
      context.lineTo(x + side, y);
      context.lineTo(x + side, y + notch);
      context.fill();
    }
  }

  drawFree(context, x, y, side, round, colors) {
    if (side < 5) {
      context.globalAlpha *= 0.45;
      context.fillStyle = colors["cell-free"];
      context.fillRect(x, y, side, side);
      return;
    }
    context.strokeStyle = colors["cell-free"];
    context.lineWidth = 1;
    context.beginPath();
    context.roundRect(x + 0.5, y + 0.5, side - 1, side - 1, round);
    context.stroke();
  }

  ownerOf(owners) {
    const index = owners.find((item) => this.requests[item]?.key === this.only && this.only !== null)
      ?? owners.find((item) => this.requests[item]?.mine) ?? owners[0];
    return this.requests[index];
  }

  point(event) {
    if (!this.grid) return;
    const box = this.canvas.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left) / this.grid.pitch);
    const row = Math.floor((event.clientY - box.top) / this.grid.size);
    const cell = row * this.grid.columns + column;
    this.mark(column >= 0 && column < this.grid.columns && cell >= 0 && cell < this.owners.length ? cell : -1);
  }

  steer(event) {
    if (!this.grid) return;
    const { columns } = this.grid;
    const steps = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -columns, ArrowDown: columns };
    const last = this.owners.length - 1;
    let next;
    if (event.key in steps) next = Math.max(this.marked, 0) + steps[event.key];
    else if (event.key === "Home") next = 0;
    else if (event.key === "End") next = last;
    else return;
    event.preventDefault();
    if (next >= 0 && next <= last) this.mark(next);
  }

  mark(cell) {
    if (cell === this.marked) return;
    this.marked = cell;
    this.draw();
    this.read();
  }

  /** Say what is known of the marked cell. */
  read() {
    const cell = this.marked;
    if (cell < 0 || cell >= this.owners.length) {
      this.onRead(null);
      return;
    }
    const { per_cell: each, states, num_blocks: total } = this.map;
    const first = cell * each;
    const name = each === 1 ? `Block ${first}` : `Blocks ${first} to ${Math.min(first + each, total) - 1}`;
    this.onRead([el("strong", { text: name }), `: ${this.words(states[cell], this.owners[cell], this.keptBy.get(cell))}`]);
  }

  words(state, owners, kept) {
    if (state === ".") return "free";
    if (state === "c") return `cached, found by its content if a prompt begins so${kept ? `; last seen with ${kept.name}` : ""}`;
    const names = owners.map((index) => this.requests[index]?.name).filter(Boolean);
    const shown = names.slice(0, 4).join(", ") + (names.length > 4 ? ` and ${names.length - 4} more` : "");
    if (state === "~") return `being read from disk${shown ? ` for ${shown}` : ""}`;
    const refs = REFS.indexOf(state);
    const many = refs > 1 ? `, in ${refs}${refs === REFS.length - 1 ? " or more" : ""} block tables` : "";
    return `held by ${shown || "a request"}${many}`;
  }
}

const within = (value, most) => Math.max(0, Math.min(value, most));
