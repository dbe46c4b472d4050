// Small plots of the last minutes, one value a second.

import { duration, el } from "./dom.js";

// What a second is sent as, in order.
const FIELDS = ["number", "prompt", "generated", "numFirst", "sumFirst", "maxFirst", "numNext", "sumNext", "maxNext",
  "running", "waiting", "usage", "queries", "hits"];
const SECOND_COLOR = "#c2703d";
const HEIGHT = 54;

const mean = (sum, number) => (number ? sum / number : null);
const rate = (value) => value === null ? ["\u2013", ""] : [value.toFixed(value >= 100 ? 0 : 1), "tokens/s"];
const share = (value) => value === null ? ["\u2013", ""] : [(100 * value).toFixed(value < 0.1 ? 1 : 0), "%"];

const PLOTS = [
  { id: "speed", label: "Throughput", lines: ["generated", "prompt"], format: rate,
    of: (second) => [second.generated, second.prompt], empty: 0,
    now: (history) => history.over(4, (seconds, length) => sum(seconds, "generated") / length) },
  { id: "usage", label: "KV cache in use", lines: ["in use", "prefix hits"], format: share, top: 1,
    of: (second) => [second.usage, second.hitRate], keep: true,
    now: (history) => history.latest((second) => second.usage),
    aside: (history) => history.over(60, (seconds) => seconds.at(-1).hitShare) },
  { id: "first", label: "Time to first token", lines: ["mean", "longest"], format: duration,
    of: (second) => [mean(second.sumFirst, second.numFirst), second.numFirst ? second.maxFirst : null], points: true,
    now: (history) => history.over(30, (seconds) => mean(sum(seconds, "sumFirst"), sum(seconds, "numFirst"))) },
  { id: "next", label: "Time per output token", lines: ["mean", "longest"], format: duration,
    of: (second) => [mean(second.sumNext, second.numNext), second.numNext ? second.maxNext : null],
    now: (history) => history.over(10, (seconds) => mean(sum(seconds, "sumNext"), sum(seconds, "numNext"))) },
];

const sum = (seconds, name) => seconds.reduce((total, second) => total + second[name], 0);

/** The seconds in which something happened. */
export class History {
  constructor() {
    this.seconds = new Map();
    this.now = 0;
    this.length = 300;
  }

  /** From which second on news is wanted; the last one may not have been over. */
  get since() {
    return Math.max(0, this.now - 1);
  }

  add({ now, length, seconds }) {
    if (now < this.now) this.seconds.clear(); // another server
    this.now = now;
    this.length = length;
    for (const row of seconds) {
      const second = Object.fromEntries(FIELDS.map((name, index) => [name, row[index]]));
      this.seconds.set(second.number, second);
    }
    for (const number of this.seconds.keys()) if (number < now - length) this.seconds.delete(number);
    this.rateHits();
  }

  /** Share of the prompt tokens of each second that were found in the prefix cache, and of the last minute up to it. */
  rateHits() {
    let before = null;
    const minute = [];
    for (const number of [...this.seconds.keys()].sort((a, b) => a - b)) {
      const second = this.seconds.get(number);
      const queries = before ? second.queries - before.queries : 0;
      second.hitRate = queries > 0 ? Math.max(0, second.hits - before.hits) / queries : null;
      minute.push(second);
      while (minute[0].number < number - 60) minute.shift();
      const looked = second.queries - minute[0].queries;
      second.hitShare = looked > 0 ? Math.max(0, second.hits - minute[0].hits) / looked : null;
      before = second;
    }
  }

  /** A value over the last so many seconds, the present one left out. */
  over(length, value) {
    const found = [];
    for (let number = this.now - length; number < this.now; number++) {
      if (this.seconds.has(number)) found.push(this.seconds.get(number));
    }
    return found.length ? value(found, length) : null;
  }

  latest(value) {
    const last = Math.max(-1, ...this.seconds.keys());
    return last < 0 ? null : value(this.seconds.get(last));
  }
}

export class Plots {
  constructor(root) {
    this.span = 120;
    this.history = new History();
    this.items = PLOTS.map((plot) => {
      const value = el("b");
      const canvas = el("canvas", { "aria-hidden": "true" });
      const keys = plot.lines.map((name, index) => el("span", { class: `key ${index ? "two" : "one"}`, text: name }));
      root.append(el("figure", { class: "plot", "data-plot": plot.id },
        el("figcaption", {}, plot.label, value), canvas,
        el("p", {}, ...keys)));
      return { plot, canvas, value, keys };
    });
    new ResizeObserver(() => this.draw()).observe(root);
    for (const input of document.querySelectorAll("input[name=span]")) {
      input.addEventListener("change", () => {
        this.span = Number(input.value);
        this.draw();
      });
    }
  }

  update(news) {
    this.history.add(news);
    this.draw();
  }

  /** What the plots say now, by id. */
  value(id, stats) {
    const { plot } = this.items.find((item) => item.plot.id === id);
    return plot.format(id === "usage" && stats ? stats.kv_usage : plot.now(this.history));
  }

  draw(stats = this.stats) {
    this.stats = stats;
    for (const item of this.items) {
      const [number, unit] = this.value(item.plot.id, stats);
      item.value.replaceChildren(number, el("small", { text: unit }));
      const aside = item.plot.aside?.(this.history) ?? null;
      item.keys[1].textContent = item.plot.lines[1] + (aside === null ? "" : ` ${item.plot.format(aside).join("")}`);
      this.drawOne(item);
    }
  }

  series(plot, line) {
    const values = [];
    let last = null;
    const first = Math.min(...this.history.seconds.keys());
    for (let number = this.history.now - this.span; number < this.history.now; number++) {
      const second = this.history.seconds.get(number);
      let value = second ? plot.of(second)[line] : number > first ? (plot.empty ?? null) : null;
      if (plot.keep && line === 0) value = last = value ?? last;
      values.push(value);
    }
    return values;
  }

  drawOne({ plot, canvas }) {
    const width = canvas.clientWidth;
    if (!width) return;
    const scale = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * scale);
    canvas.height = Math.round(HEIGHT * scale);
    const context = canvas.getContext("2d");
    context.scale(scale, scale);
    const style = getComputedStyle(document.documentElement);
    const accent = style.getPropertyValue("--accent").trim();
    const lines = plot.lines.map((_, index) => this.series(plot, index));
    const most = Math.max(0, ...lines.flat().filter((value) => value !== null));
    const top = plot.top ?? nice(most);
    const y = (value) => HEIGHT - 1.5 - (Math.min(value, top) / top) * (HEIGHT - 16);
    const x = (index) => (index / (this.span - 1)) * (width - 4) + 2;
    this.drawAxis(context, width, plot.top || most ? plot.format(top) : ["", ""], style);
    lines.forEach((values, index) => {
      context.strokeStyle = context.fillStyle = index ? SECOND_COLOR : accent;
      context.lineWidth = index ? 1.25 : 1.75;
      context.globalAlpha = index ? 0.85 : 1;
      if (plot.points || (plot.keep && index)) this.drawPoints(context, values, x, y);
      else this.drawLine(context, values, x, y, index === 0);
    });
    context.globalAlpha = 1;
  }

  drawAxis(context, width, [number, unit], style) {
    context.strokeStyle = style.getPropertyValue("--line").trim();
    context.lineWidth = 1;
    context.beginPath();
    context.moveTo(0, 14.5);
    context.lineTo(width, 14.5);
    context.moveTo(0, HEIGHT - 0.5);
    context.lineTo(width, HEIGHT - 0.5);
    context.stroke();
    context.fillStyle = style.getPropertyValue("--muted").trim();
    context.font = `11px ${style.getPropertyValue("--sans")}`;
    context.textAlign = "right";
    context.fillText(`${number.replace(/\.0+$/, "")} ${unit}`.trim(), width, 11);
  }

  drawLine(context, values, x, y, filled) {
    let start = null;
    const close = (end) => {
      if (start === null) return;
      context.beginPath();
      for (let index = start; index <= end; index++) {
        if (index === start) context.moveTo(x(index), y(values[index]));
        else context.lineTo(x(index), y(values[index]));
      }
      if (start === end) context.lineTo(x(start) + 1.5, y(values[start]));
      context.stroke();
      if (filled) {
        context.lineTo(x(end), HEIGHT);
        context.lineTo(x(start), HEIGHT);
        context.globalAlpha = 0.1;
        context.fill();
        context.globalAlpha = 1;
      }
      start = null;
    };
    values.forEach((value, index) => {
      if (value === null) close(index - 1);
      else start ??= index;
    });
    close(values.length - 1);
  }

  drawPoints(context, values, x, y) {
    values.forEach((value, index) => {
      if (value === null) return;
      context.beginPath();
      context.arc(x(index), y(value), 1.7, 0, 7);
      context.fill();
    });
  }
}

/** The next larger of 1, 2, 5, 10, ... times a power of ten. */
function nice(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return power * [1, 2, 5, 10].find((step) => step * power >= value * 0.999);
}
