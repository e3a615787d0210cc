// Line charts over the last minutes, and the key figures with their small ones.

import { $, count, duration, h, rate, s, setText } from "./dom.js";

// The spans of the charts, of which the shortest that shows all samples is taken: seconds, seconds between
// two marks, and its name.
const SPANS = [
  [60, 15, "minute"],
  [120, 30, "two minutes"],
  [300, 60, "five minutes"],
];
const SPARK_S = 120;
const KEPT_S = 620;
const HEIGHT = 170;
const EDGE = { left: 54, right: 12, top: 10, bottom: 24 };

const samples = [];

export const lastSample = () => samples.at(-1)?.at_s ?? 0;

export function forget() {
  samples.length = 0;
}

const CHARTS = [
  {
    title: "Throughput",
    unit: "tokens per second",
    format: rate,
    least: 10,
    lines: [
      { key: "tokens_per_s", label: "generated" },
      { key: "prompt_tokens_per_s", label: "prompts read" },
    ],
  },
  {
    title: "Time to first token",
    unit: "TTFT",
    format: duration,
    least: 0.01,
    lines: [
      { key: "ttft_s", label: "mean" },
      { key: "ttft_p95_s", label: "95th percentile" },
    ],
  },
  {
    title: "Time between tokens",
    unit: "ITL",
    format: duration,
    least: 0.005,
    lines: [
      { key: "itl_s", label: "mean" },
      { key: "itl_p95_s", label: "95th percentile" },
    ],
  },
  {
    title: "Queue",
    unit: "requests",
    format: count,
    least: 4,
    whole: true,
    lines: [
      { key: "running", label: "generating" },
      { key: "waiting", label: "waiting for a first token" },
    ],
  },
];

/** Return about four round numbers from 0 to at least `top`. */
export function ticks(top, isWhole = false) {
  const rough = top / 3;
  const power = 10 ** Math.floor(Math.log10(rough));
  let step = [1, 2, 2.5, 5, 10].map((each) => each * power).find((each) => each >= rough * 0.999);
  if (isWhole) step = Math.max(1, Math.ceil(step));
  const number = Math.ceil(top / step - 1e-9);
  return Array.from({ length: number + 1 }, (_, index) => index * step);
}

const ago = (seconds) => (seconds % 60 ? `−${seconds} s` : `−${seconds / 60} min`);

const marked = (mark, format) => (mark === 0 ? "0" : format(mark).replace(/\.0\b/, ""));

/** Return the path of a line; where there is no value, it is interrupted. */
function pathOf(points) {
  let text = "";
  let isDown = false;
  for (const [x, y] of points) {
    if (y === null) isDown = false;
    else {
      text += `${isDown ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`;
      // A lone point is a dot: a line of no length with round ends.
      if (!isDown) text += "h0";
      isDown = true;
    }
  }
  return text;
}

class Chart {
  constructor(about) {
    this.about = about;
    this.svg = s("svg", { class: "chart", role: "img" });
    this.now = about.lines.map(() => h("b", { className: "num" }, "–"));
    const legend = about.lines.map(({ label }, index) =>
      h("span", { className: `key line-${index}` }, h("i"), label, this.now[index]),
    );
    this.hint = h("div", { className: "chart-hint", hidden: true });
    this.element = h(
      "figure",
      { className: "card chart-card" },
      h("figcaption", {}, h("h2", {}, about.title, h("small", {}, about.unit)), h("div", { className: "legend" }, ...legend)),
      h("div", { className: "chart-box" }, this.svg, this.hint),
    );
    this.svg.addEventListener("pointermove", (event) => this.point(event));
    this.svg.addEventListener("pointerleave", () => this.point(null));
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  draw() {
    const width = this.svg.clientWidth;
    if (!width) return; // not shown
    const { lines, format, least, whole, title } = this.about;
    const end = samples.at(-1)?.at_s ?? 0;
    const there = end - (samples[0]?.at_s ?? 0);
    const [span, step, words] = SPANS.find(([seconds]) => seconds >= there) ?? SPANS.at(-1);
    const shown = samples.filter((sample) => sample.at_s >= end - span);
    const top = Math.max(least, ...shown.flatMap((sample) => lines.map(({ key }) => sample[key] ?? 0)));
    const marks = ticks(top, whole);
    const x = (at) => EDGE.left + ((at - end) / span + 1) * (width - EDGE.left - EDGE.right);
    const y = (value) => EDGE.top + (1 - value / marks.at(-1)) * (HEIGHT - EDGE.top - EDGE.bottom);
    this.place = { x, y, shown, width };
    const parts = [];
    for (const mark of marks) {
      parts.push(s("line", { class: "rule", x1: EDGE.left, x2: width - EDGE.right, y1: y(mark), y2: y(mark) }));
      parts.push(s("text", { class: "tick", x: EDGE.left - 8, y: y(mark) + 4, "text-anchor": "end" }, marked(mark, format)));
    }
    for (let seconds = span; seconds; seconds -= step)
      parts.push(s("text", { class: "tick", x: x(end - seconds), y: HEIGHT - 6, "text-anchor": "middle" }, ago(seconds)));
    parts.push(s("text", { class: "tick", x: width - EDGE.right, y: HEIGHT - 6, "text-anchor": "end" }, "now"));
    for (const [index, { key }] of [...lines.entries()].reverse()) {
      const points = shown.map((sample) => [x(sample.at_s), sample[key] === null ? null : y(sample[key])]);
      parts.push(s("path", { class: `line line-${index}`, d: pathOf(points) }));
    }
    this.svg.setAttribute("viewBox", `0 0 ${width} ${HEIGHT}`);
    this.svg.replaceChildren(...parts);
    const latest = samples.at(-1);
    lines.forEach(({ key }, index) => setText(this.now[index], latest ? format(latest[key]) : "–"));
    const now = lines.map(({ key, label }) => `${label} ${latest ? format(latest[key]) : "unknown"}`);
    this.svg.setAttribute("aria-label", `${title} over the last ${words}; now: ${now.join(", ")}`);
  }

  point(event) {
    this.svg.querySelector(".cross")?.remove();
    this.hint.hidden = true;
    if (event === null || !this.place?.shown.length) return;
    const { x, shown, width } = this.place;
    const at = event.offsetX;
    const near = shown.reduce((a, b) => (Math.abs(x(b.at_s) - at) < Math.abs(x(a.at_s) - at) ? b : a));
    const place = x(near.at_s);
    this.svg.append(s("line", { class: "cross", x1: place, x2: place, y1: EDGE.top, y2: HEIGHT - EDGE.bottom }));
    const seconds = Math.round(samples.at(-1).at_s - near.at_s);
    const words = this.about.lines.map(({ key, label }) => `${label} ${this.about.format(near[key])}`);
    setText(this.hint, `${seconds} s ago: ${words.join(" · ")}`);
    this.hint.hidden = false;
    this.hint.style.left = `${Math.min(Math.max(place - this.hint.offsetWidth / 2, 0), width - this.hint.offsetWidth)}px`;
  }
}

class Figure {
  constructor(label, text, key = null) {
    this.text = text;
    this.key = key;
    this.value = h("b", { className: "num" }, "–");
    this.note = h("small", {});
    this.element = h("div", { className: "figure" }, h("span", {}, label), h("div", {}, this.value, this.note));
    if (key !== null) {
      this.svg = s("svg", { class: "spark", viewBox: "0 0 100 24", preserveAspectRatio: "none", "aria-hidden": "true" });
      this.element.append(this.svg);
    }
  }

  draw(overview) {
    const [value, note = ""] = this.text(samples.at(-1), overview);
    setText(this.value, value);
    setText(this.note, note);
    if (!this.key) return;
    const end = samples.at(-1)?.at_s ?? 0;
    const shown = samples.filter((sample) => sample.at_s >= end - SPARK_S);
    const top = Math.max(1e-9, ...shown.map((sample) => sample[this.key] ?? 0));
    const points = shown.map((sample) => [
      ((sample.at_s - end) / SPARK_S + 1) * 100,
      sample[this.key] === null ? null : 22 - (20 * sample[this.key]) / top,
    ]);
    const path = points.length > 1 ? [s("path", { class: "line line-0", d: pathOf(points) })] : [];
    this.svg.replaceChildren(...path);
  }
}

const FIGURES = [
  new Figure("Throughput", (now) => [rate(now?.tokens_per_s), "tok/s"], "tokens_per_s"),
  new Figure("First token", (now) => split(duration(now?.ttft_s)), "ttft_s"),
  new Figure("Between tokens", (now) => split(duration(now?.itl_s)), "itl_s"),
  new Figure("In flight", (now) => inFlight(now), "running"),
  new Figure("In memory", (_, overview) => [
    count(overview.num_adapters - (overview.tiers.disk ?? 0)),
    `of ${count(overview.num_adapters)} adapters`,
  ]),
];
const charts = CHARTS.map((about) => new Chart(about));

function inFlight(now) {
  if (!now) return ["–"];
  const number = now.running + now.waiting;
  const note = now.waiting ? `${count(now.waiting)} waiting` : number === 1 ? "request" : "requests";
  return [count(number), note];
}

/** Return "1.2 s" as its number and its unit. */
const split = (text) => text.split(" ");

export function wire() {
  $("figures").append(...FIGURES.map((figure) => figure.element));
  $("charts").append(...charts.map((chart) => chart.element));
}

export function update(overview) {
  samples.push(...overview.samples);
  const oldest = overview.now_s - KEPT_S;
  while (samples.length && samples[0].at_s < oldest) samples.shift();
  for (const figure of FIGURES) figure.draw(overview);
  draw();
}

export function draw() {
  for (const chart of charts) chart.draw();
}
