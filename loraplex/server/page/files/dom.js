// Elements and formats. All text becomes text nodes: nothing on this page is ever parsed as HTML.

export const $ = (id) => document.getElementById(id);

/** Return an element; `properties` are set as they are, `data` and `aria` as attributes. */
export function h(tag, properties = {}, ...children) {
  return filled(document.createElement(tag), properties, children);
}

/** Return an SVG element with these attributes. */
export function s(tag, attributes = {}, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function filled(element, properties, children) {
  for (const [name, value] of Object.entries(properties)) {
    if (name === "data") Object.assign(element.dataset, value);
    else if (name === "role" || name.startsWith("aria-")) element.setAttribute(name, value);
    else element[name] = value;
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

export const setText = (element, text) => {
  if (element.textContent !== text) element.textContent = text;
};

const whole = new Intl.NumberFormat("en-US", { maximumFractionDigits: 0 });
const oneDigit = new Intl.NumberFormat("en-US", { minimumFractionDigits: 1, maximumFractionDigits: 1 });

export const count = (number) => (number === null ? "–" : whole.format(number));

/** Return a number with three significant digits or so. */
export function rate(number) {
  if (number === null || number === undefined) return "–";
  return number === 0 ? "0" : Math.abs(number) < 100 ? oneDigit.format(number) : whole.format(number);
}

/** Return seconds as text, in the unit that fits. */
export function duration(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.01) return `${(seconds * 1e3).toFixed(1)} ms`;
  if (seconds < 1) return `${whole.format(seconds * 1e3)} ms`;
  return seconds < 100 ? `${seconds.toFixed(seconds < 10 ? 2 : 1)} s` : `${whole.format(seconds)} s`;
}

export function bytes(number) {
  if (!number) return "–";
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  const unit = Math.min(Math.floor(Math.log2(number) / 10), 4);
  const value = number / 1024 ** unit;
  return `${unit === 0 || value >= 100 ? whole.format(value) : oneDigit.format(value)} ${units[unit]}`;
}

export const TIERS = {
  device: { letter: "d", label: "device" },
  loading: { letter: "l", label: "loading" },
  host: { letter: "h", label: "host memory" },
  disk: { letter: "-", label: "disk" },
};
export const TIER_OF = Object.fromEntries(Object.entries(TIERS).map(([tier, { letter }]) => [letter, tier]));

export const clock = (date) => date.toLocaleTimeString([], { hour12: false });
