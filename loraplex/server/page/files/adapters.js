// The list of adapters, of which only the visible rows exist, and what can be done to one.

import { call, get, keys } from "./api.js";
import { chatWith, explain } from "./chat.js";
import { openDialog } from "./dialogs.js";
import { $, bytes, clock, count, h, setText, TIERS } from "./dom.js";

const ROW = 40;
const PAGE = 100;
const MORE_ROWS = 8; // above and below the visible ones
const MOST_EVENTS = 200;

let overview = null;
let total = 0;
let active = -1;
let turn = 0; // of the query: answers to earlier ones are dropped
const pages = new Map();
const rows = []; // row elements, each used for every so many-th adapter
let spacer = null;
let lastChange = 0;
let open = null; // the adapter in the dialog
let askForKeys = () => {};
let onChange = () => {};

export const changesAfter = () => lastChange;

const COLUMNS = [
  ["name", "Adapter", (a) => a.name],
  ["where", "Where", null],
  ["num", "Rank", (a) => count(a.rank)],
  ["num", "Size", (a) => bytes(a.bytes)],
  ["num", "In flight", (a) => count(a.in_flight)],
  ["num key-column", "Requests", (a) => count(a.requests)],
  ["num", "Tokens", (a) => count(a.tokens)],
  ["num", "Loads", (a) => count(a.loads)],
];

const SIZE = COLUMNS.findIndex(([, title]) => title === "Size"); // in a fleet, a sum over the replicas that have it

const query = () => ({ contains: $("search").value.trim(), tier: $("tier").value, order: $("order").value });

async function fetchPage(number) {
  const mine = turn;
  const answer = await get("v1/adapters", { ...query(), offset: number * PAGE, limit: PAGE });
  if (mine !== turn) return;
  pages.set(number, answer.data);
  if (total !== answer.total) {
    total = answer.total;
    if (active >= total) activate(total - 1);
  }
  render();
}

function visible() {
  const grid = $("grid");
  const first = Math.max(0, Math.floor(grid.scrollTop / ROW) - MORE_ROWS);
  const last = Math.min(total, Math.ceil((grid.scrollTop + grid.clientHeight) / ROW) + MORE_ROWS);
  return [first, last];
}

function neededPages() {
  const [first, last] = visible();
  const from = Math.floor(first / PAGE);
  const to = Math.max(from, Math.floor((last - 1) / PAGE));
  return Array.from({ length: to - from + 1 }, (_, index) => from + index);
}

/** Begin again with another query. */
async function restart() {
  turn += 1;
  pages.clear();
  activate(-1);
  $("grid").scrollTop = 0;
  await refresh();
}

const asking = new Set();
async function refresh(onlyMissing = false) {
  const wanted = neededPages().filter((number) => !asking.has(number) && !(onlyMissing && pages.has(number)));
  for (const number of wanted) {
    asking.add(number);
    fetchPage(number).catch(() => null).finally(() => asking.delete(number));
  }
}

function render() {
  const grid = $("grid");
  if (!grid.clientHeight) return;
  spacer.style.height = `${total * ROW}px`;
  grid.setAttribute("aria-rowcount", total);
  grid.classList.toggle("none", total === 0);
  setText($("grid-none"), noneText());
  const needed = Math.ceil(grid.clientHeight / ROW) + 2 * MORE_ROWS + 2;
  while (rows.length < needed) {
    rows.push(h("div", { className: "row", role: "row", id: `row-${rows.length}` }, ...cells()));
    spacer.append(rows.at(-1));
  }
  const [first, last] = visible();
  const used = new Set();
  for (let index = first; index < last; index++) {
    const row = rows[index % rows.length];
    used.add(row);
    fill(row, index);
  }
  for (const row of rows) row.hidden = !used.has(row);
  refresh(true);
}

const cells = () => COLUMNS.map(([kind]) => h("span", { className: kind, role: "gridcell" }));

function fill(row, index) {
  const adapter = pages.get(Math.floor(index / PAGE))?.[index % PAGE];
  row.style.transform = `translateY(${index * ROW}px)`;
  row.setAttribute("aria-rowindex", index + 1);
  row.dataset.index = index;
  row.classList.toggle("active", index === active);
  COLUMNS.forEach(([kind, , text], column) => {
    const cell = row.children[column];
    if (kind === "where") fillWhere(cell, adapter);
    else setText(cell, adapter ? text(adapter) : "");
    if (kind === "name") cell.title = adapter?.name ?? "";
  });
}

function fillWhere(cell, adapter) {
  const text = adapter ? shortly(adapter) : "";
  cell.title = adapter ? where(adapter) : "";
  if (cell.firstChild === null) cell.append(h("span", { className: "pill" }));
  cell.firstChild.dataset.tier = adapter?.tier ?? "";
  setText(cell.firstChild, text);
}

export function where(adapter) {
  const { tier, held_by: replicas } = adapter;
  if (!replicas?.length) return TIERS[tier]?.label ?? tier;
  return `${replicas.length === 1 ? "replica" : "replicas"} ${replicas.join(", ")}`;
}

const shortly = (adapter) => {
  const number = adapter.held_by?.length ?? 0;
  return number > 2 ? `${count(number)} replicas` : where(adapter);
};

function noneText() {
  const { contains, tier } = query();
  if (contains) return `No adapter's name contains “${contains}”.`;
  if (tier) return "No adapter is there now.";
  return "No adapters are served. Load one, or start the server with --adapters FOLDER.";
}

function activate(index) {
  active = index;
  for (const row of rows) row.classList.toggle("active", Number(row.dataset.index) === index);
  if (index < 0) {
    $("grid").removeAttribute("aria-activedescendant");
    return;
  }
  const grid = $("grid");
  if (index * ROW < grid.scrollTop) grid.scrollTop = index * ROW;
  const bottom = (index + 1) * ROW - grid.clientHeight;
  if (bottom > grid.scrollTop) grid.scrollTop = bottom;
  grid.setAttribute("aria-activedescendant", `row-${index % Math.max(rows.length, 1)}`);
}

function onKey(event) {
  const page = Math.max(1, Math.floor($("grid").clientHeight / ROW) - 1);
  const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: page, PageUp: -page, Home: -total, End: total };
  if (event.key in moves && total) {
    event.preventDefault();
    activate(Math.min(Math.max(active + moves[event.key], 0), total - 1));
  } else if (event.key === "Enter" && active >= 0) openAt(active);
}

function openAt(index) {
  const adapter = pages.get(Math.floor(index / PAGE))?.[index % PAGE];
  if (adapter) show(adapter);
}

/** Open the dialog of one adapter. */
export function show(adapter) {
  open = adapter;
  setText($("detail-title"), adapter.name);
  problem("detail-problem", null);
  const facts = [
    ["Where", where(adapter)],
    ["Placed on", adapter.placed_on && `replicas ${adapter.placed_on.join(", ")}`],
    ["Version", h("code", {}, adapter.version)],
    ["Canary", adapter.canary && `${adapter.canary.version.slice(0, 12)}, ${adapter.canary.share * 100}% of requests`],
    ["Rank", count(adapter.rank)],
    ["Size", `${bytes(adapter.bytes)}${adapter.held_by?.length > 1 ? ", of all replicas together" : ""}`],
    ["Requests", `${count(adapter.requests)}${adapter.requests ? `, of which ${count(adapter.hits)} found it in memory` : ""}`],
    ["Tokens", count(adapter.tokens)],
    ["In flight", count(adapter.in_flight)],
    ["Loads", count(adapter.loads)],
    ["From", adapter.source && h("code", {}, adapter.source)],
  ].filter(([, value]) => value);
  $("detail-facts").replaceChildren(...facts.flatMap(([label, value]) => [h("dt", {}, label), h("dd", {}, value)]));
  setText($("detail-unload"), "Unload");
  $("detail-unload").dataset.sure = "";
  openDialog($("detail-dialog"));
}

function problem(id, error) {
  const element = $(id);
  element.hidden = error === null;
  setText(element, error === null ? "" : explain(error));
}

/** Do what needs an administrator; return false if it failed, with the reason shown in the dialog. */
async function change(path, body, { button, shownIn, during }) {
  problem(shownIn, null);
  const label = button.textContent;
  const focused = document.activeElement;
  button.disabled = true;
  setText(button, during);
  const error = await call(path, { body }).then(() => null, (reason) => reason);
  button.disabled = false;
  setText(button, label);
  if (document.activeElement === document.body) focused.focus(); // a button that is disabled loses the focus
  if (error === null) {
    refresh();
    onChange();
    return true;
  }
  problem(shownIn, error);
  const isKey = error.status === 401 || error.body?.error?.code === "admin_only";
  if (isKey && overview?.has_admin_key) askForKeys(keys().admin ? explain(error) : "Changing adapters needs the admin key.");
  return false;
}

async function unload() {
  const button = $("detail-unload");
  if (!button.dataset.sure) {
    button.dataset.sure = "yes";
    setText(button, `Really unload ${open.name}?`);
    return;
  }
  const body = { lora_name: open.name };
  if (await change("v1/unload_lora_adapter", body, { button, shownIn: "detail-problem", during: "Unloading…" }))
    $("detail-dialog").close();
}

/** Open the dialog that loads an adapter, or another version of `adapter`. */
function openLoad(adapter = null) {
  problem("load-problem", null);
  setText($("load-title"), adapter ? `Reload ${adapter.name}` : "Load an adapter");
  setText($("load-submit"), adapter ? "Reload" : "Load");
  $("load-form").dataset.replace = adapter ? "yes" : "";
  $("load-name").value = adapter?.name ?? "";
  $("load-name").readOnly = adapter !== null;
  $("load-path").value = adapter?.source ?? "";
  openDialog($("load-dialog"), $(adapter ? "load-path" : "load-name"));
}

async function load(event) {
  event.preventDefault();
  const name = $("load-name").value.trim();
  const body = { lora_name: name, lora_path: $("load-path").value.trim() };
  if ($("load-form").dataset.replace) body.load_inplace = true;
  const done = await change("v1/load_lora_adapter", body, {
    button: $("load-submit"),
    shownIn: "load-problem",
    during: "Loading…",
  });
  if (done) $("load-dialog").close();
}

const KINDS = {
  added: () => "added",
  removed: () => "removed",
  switched: () => "another version",
  loaded: ({ tier, replica }) => (replica === null ? `loaded${tier ? ` to ${TIERS[tier].label}` : ""}` : `loaded by replica ${replica}`),
  evicted: ({ tier, replica }) => (replica === null ? `evicted to ${TIERS[tier].label}` : `evicted by replica ${replica}`),
};

function showChanges({ changes, now_s }) {
  const list = $("events");
  for (const each of changes) {
    lastChange = each.at_s;
    const at = new Date(Date.now() - (now_s - each.at_s) * 1e3);
    list.prepend(
      h(
        "li",
        { data: { kind: each.kind } },
        h("time", {}, clock(at)),
        h("span", { className: "who", title: each.name }, each.name),
        h("span", { className: "what" }, KINDS[each.kind](each)),
      ),
    );
  }
  while (list.childElementCount > MOST_EVENTS) list.lastChild.remove();
}

export function forget() {
  lastChange = 0;
  $("events").replaceChildren();
}

export function update(latest) {
  overview = latest;
  setText($("count"), count(latest.num_adapters));
  setText($("grid-head").children[SIZE], latest.replicas ? "Size, summed" : "Size");
  showChanges(latest);
  if (!$("adapters").hidden) refresh();
}

export const shown = () => {
  render();
  refresh();
};

export function wire(onKeys, afterChange) {
  askForKeys = onKeys;
  onChange = afterChange;
  const grid = $("grid");
  spacer = h("div", { className: "spacer", role: "presentation" });
  grid.append(spacer, h("p", { className: "empty", id: "grid-none" }));
  $("grid-head").append(...COLUMNS.map(([kind, title]) => h("span", { className: kind }, title)));
  grid.addEventListener("scroll", () => requestAnimationFrame(render), { passive: true });
  grid.addEventListener("keydown", onKey);
  grid.addEventListener("click", (event) => {
    const row = event.target.closest(".row");
    if (!row) return;
    activate(Number(row.dataset.index));
    openAt(active);
  });
  new ResizeObserver(render).observe(grid);
  for (const id of ["search", "tier", "order"]) $(id).addEventListener("input", restart);
  $("load-button").addEventListener("click", () => openLoad());
  $("load-form").addEventListener("submit", load);
  $("detail-unload").addEventListener("click", unload);
  $("detail-reload").addEventListener("click", () => {
    $("detail-dialog").close();
    openLoad(open);
  });
  $("detail-chat").addEventListener("click", () => {
    $("detail-dialog").close();
    chatWith(open.name);
    location.hash = "chat";
  });
}
