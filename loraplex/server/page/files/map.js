// Where every adapter is: named chips while there are few, else one square each, always in the same place.

import { get } from "./api.js";
import { $, count, h, setText, TIER_OF, TIERS } from "./dom.js";

const MOST_CHIPS = 60;
const FLASH_MS = 1500;
const HIGHEST = 230; // pixels

let map = null; // as the server sent it
let overview = null;
let names = []; // of all adapters, while there are few
let namesOf = null; // the map that they belong to
let onOpen = () => {};
const fields = [];
const flashes = new Map(); // position -> end of its flash

export const etag = () => map?.etag ?? "";

/** One memory: that of the server, or of one replica. */
class Field {
  constructor() {
    this.title = h("h3", {});
    this.chips = h("div", { className: "chips" });
    this.canvas = h("canvas", { role: "img" });
    this.tip = h("div", { className: "tip", hidden: true });
    this.element = h("div", { className: "field" }, this.title, this.chips, this.canvas, this.tip);
    this.canvas.addEventListener("pointermove", (event) => this.hover(event));
    this.canvas.addEventListener("pointerleave", () => (this.tip.hidden = true));
    this.canvas.addEventListener("click", async (event) => {
      const found = await adapterAt(this.position(event));
      if (found) onOpen(found);
    });
    new ResizeObserver(() => this.draw()).observe(this.element);
  }

  show(title, letters) {
    setText(this.title, title);
    this.title.hidden = !title;
    this.letters = letters;
    this.draw();
  }

  draw() {
    if (this.letters === undefined) return;
    const isFew = names.length === this.letters.length && this.letters.length <= MOST_CHIPS;
    this.chips.hidden = !isFew;
    this.canvas.hidden = isFew;
    if (isFew) this.drawChips();
    else this.drawSquares();
  }

  drawChips() {
    while (this.chips.childElementCount > names.length) this.chips.lastChild.remove();
    while (this.chips.childElementCount < names.length) {
      const chip = h("button", { type: "button", className: "chip" });
      chip.addEventListener("click", async () => {
        const found = await adapterAt([...this.chips.children].indexOf(chip));
        if (found) onOpen(found);
      });
      this.chips.append(chip);
    }
    names.forEach((name, position) => {
      const chip = this.chips.children[position];
      const tier = TIER_OF[this.letters[position]];
      setText(chip, name);
      chip.dataset.tier = tier;
      chip.title = `${name}: ${TIERS[tier].label}`;
      chip.classList.toggle("flash", flashes.has(position));
    });
  }

  drawSquares() {
    const width = this.element.clientWidth;
    if (!width) return;
    const number = this.letters.length;
    const sizes = [16, 14, 12, 10, 8, 7, 6, 5, 4];
    this.cell = sizes.find((size) => Math.ceil(number / Math.floor(width / size)) * size <= HIGHEST) ?? 4;
    this.across = Math.floor(width / this.cell);
    const height = Math.ceil(number / this.across) * this.cell;
    const scale = devicePixelRatio || 1;
    this.canvas.width = width * scale;
    this.canvas.height = height * scale;
    this.canvas.style.height = `${height}px`;
    const pen = this.canvas.getContext("2d");
    const style = getComputedStyle(document.documentElement);
    const colours = Object.fromEntries(
      Object.entries(TIERS).map(([tier, { letter }]) => [letter, style.getPropertyValue(`--${tier}`)]),
    );
    pen.scale(scale, scale);
    const side = this.cell - (this.cell > 6 ? 2 : 1);
    for (let position = 0; position < number; position++) {
      const x = (position % this.across) * this.cell;
      const y = Math.floor(position / this.across) * this.cell;
      pen.fillStyle = flashes.has(position) ? style.getPropertyValue("--flash") : colours[this.letters[position]];
      pen.fillRect(x, y, side, side);
    }
    const held = [...this.letters].filter((letter) => letter !== "-").length;
    this.canvas.setAttribute("aria-label", `${count(held)} of ${count(number)} adapters are in memory`);
  }

  position(event) {
    return Math.floor(event.offsetY / this.cell) * this.across + Math.floor(event.offsetX / this.cell);
  }

  async hover(event) {
    const position = this.position(event);
    const { offsetX, offsetY } = event;
    const found = await adapterAt(position);
    if (!found) {
      this.tip.hidden = true;
      return;
    }
    setText(this.tip, `${found.name}: ${TIERS[TIER_OF[this.letters[position] ?? "-"]].label}`);
    this.tip.hidden = false;
    const most = this.element.clientWidth - this.tip.offsetWidth;
    this.tip.style.left = `${Math.max(0, Math.min(offsetX + 12, most))}px`;
    this.tip.style.top = `${offsetY + this.canvas.offsetTop + 18}px`;
  }
}

const found = new Map(); // adapters by position, of this map
let asked = Promise.resolve();

/** Return the adapter at a position; one is asked for at a time, and only the latest of those that wait. */
let wanted = -1;
async function adapterAt(position) {
  if (position < 0 || position >= (map?.tiers.length ?? 0)) return null;
  wanted = position;
  if (!found.has(position)) {
    await asked;
    if (wanted !== position) return null;
    asked = get("v1/adapters", { offset: position, limit: 1 }).then(
      ({ data }) => found.set(position, data[0]),
      () => null,
    );
    await asked;
  }
  return found.get(position) ?? null;
}

export function wire(open) {
  onOpen = open;
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => fields.forEach((field) => field.draw()));
}

export async function update(latest) {
  overview = latest;
  if (latest.map === null) {
    show();
    return;
  }
  const before = map;
  map = latest.map;
  found.clear();
  if (before && before.tiers.length === map.tiers.length) mark(before, map);
  if (map.tiers.length <= MOST_CHIPS) {
    const answer = await get("v1/adapters", { limit: MOST_CHIPS }).catch(() => null);
    if (answer === null) {
      map = null; // the next look gets all of it again
      return;
    }
    names = answer.data.map((each) => each.name);
  } else names = [];
  namesOf = map;
  show();
}

/** Let those flash that have moved. */
function mark(before, now) {
  const until = performance.now() + FLASH_MS;
  const held = (each) => each.held?.map((positions) => new Set(positions)) ?? [];
  const [was, is] = [held(before), held(now)];
  for (let position = 0; position < now.tiers.length; position++) {
    const hasMoved =
      before.tiers[position] !== now.tiers[position] ||
      is.some((each, number) => each.has(position) !== was[number]?.has(position));
    if (hasMoved) flashes.set(position, until);
  }
  setTimeout(() => {
    for (const [position, end] of flashes) if (end <= performance.now() + 50) flashes.delete(position);
    fields.forEach((field) => field.draw());
  }, FLASH_MS);
}

function show() {
  if (map === null || namesOf !== map) return;
  const hasDevice = (overview.engine?.device_arena_bytes ?? 1) > 0;
  drawLegend(hasDevice);
  const titled = map.held === null ? [["", map.tiers]] : overview.replicas.map(ofReplica);
  while (fields.length > titled.length) fields.pop().element.remove();
  while (fields.length < titled.length) {
    fields.push(new Field());
    $("map").append(fields.at(-1).element);
  }
  titled.forEach(([title, letters], index) => fields[index].show(title, letters));
  $("map").classList.toggle("none", map.tiers.length === 0);
}

/** Return the title of a replica's field, and where the adapters are as seen from there. */
function ofReplica(replica, index) {
  const held = new Set(map.held[index] ?? []);
  const letters = [...map.tiers].map((letter, position) => {
    if (!held.has(position)) return "-";
    return letter === "-" ? "h" : letter;
  });
  const words = [
    `Replica ${replica.replica}`,
    replica.drained ? "drained" : replica.state,
    `${count(replica.in_flight)} in flight`,
    held.size === 1 ? "1 adapter" : `${count(held.size)} adapters`,
  ];
  return [words.join(" · "), letters.join("")];
}

function drawLegend(hasDevice) {
  const shown = hasDevice ? ["device", "loading", "host", "disk"] : ["host", "disk"];
  const words = shown.map((tier) => `${TIERS[tier].label} ${count(overview.tiers[tier] ?? 0)}`);
  const legend = $("legend");
  if (legend.childElementCount !== shown.length)
    legend.replaceChildren(...shown.map((tier) => h("span", { className: "key", data: { tier } }, h("i"), h("span"))));
  words.forEach((text, index) => setText(legend.children[index].lastChild, text));
}
