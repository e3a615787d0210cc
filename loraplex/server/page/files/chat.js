// Columns that answer one prompt side by side, each by a model of its own.

import { get, stream } from "./api.js";
import { $, count, duration, h, rate, setText } from "./dom.js";

const MAX_COLUMNS = 6;
const MOST_TOKENS = 512; // at first
const columns = [];
let server = null; // the latest overview
let isRunning = false;
let hasBegun = false;

class Column {
  constructor(model) {
    this.messages = []; // what was said so far, as the API wants it
    this.abort = null;
    this.input = h("input", {
      value: model,
      className: "model-input",
      autocomplete: "off",
      spellcheck: false,
      "aria-label": "Model or adapter",
      placeholder: "adapter",
    });
    this.input.setAttribute("list", "models");
    this.input.addEventListener("input", () => suggest(this.input.value));
    this.input.addEventListener("focus", () => suggest(""));
    this.input.addEventListener("change", () => remember());
    this.closing = h("button", { type: "button", className: "icon", "aria-label": "Remove column" }, "×");
    this.closing.addEventListener("click", () => remove(this));
    this.log = h("div", { className: "log", tabIndex: 0, role: "log", "aria-label": "Answers" });
    this.stats = h("div", { className: "stats" });
    this.element = h(
      "article",
      { className: "column" },
      h("header", {}, this.input, this.closing),
      this.log,
      this.stats,
    );
    this.empty();
  }

  get model() {
    return this.input.value.trim();
  }

  empty() {
    this.messages = [];
    this.log.replaceChildren(h("p", { className: "empty" }, "Answers appear here."));
    setText(this.stats, "");
  }

  async ask(prompt, options) {
    if (this.messages.length === 0) this.log.replaceChildren();
    const answer = h("div", { className: "said answer" });
    answer.classList.add("waiting");
    this.log.append(h("div", { className: "said prompt" }, prompt), answer);
    this.scroll(true);
    this.abort = new AbortController();
    const timing = { start: performance.now(), first: null, last: null, tokens: 0, exact: null };
    const asked = { role: "user", content: prompt };
    const reasoning = document.createTextNode("");
    const text = document.createTextNode("");
    answer.append(h("div", { className: "reasoning" }, reasoning), text);
    try {
      const [path, body] = this.request(asked, options);
      for await (const chunk of stream(path, body, this.abort.signal)) {
        this.take(chunk, { text, reasoning }, timing);
        if (text.data || reasoning.data) answer.classList.remove("waiting");
      }
      this.messages.push(asked, { role: "assistant", content: text.data });
      if (!text.data) answer.append(h("span", { className: "muted" }, "(an empty answer)"));
    } catch (error) {
      if (error.name === "AbortError") answer.append(h("span", { className: "muted" }, " (stopped)"));
      else answer.append(h("p", { className: "problem", role: "alert" }, explain(error)));
    } finally {
      answer.classList.remove("waiting");
      this.abort = null;
      this.show(timing, true);
      this.scroll();
    }
  }

  request(asked, { system, ...sampling }) {
    const model = this.model;
    const shared = { model, stream: true, stream_options: { include_usage: true }, ...sampling };
    if (!server?.has_chat) return ["v1/completions", { ...shared, prompt: asked.content }];
    const begin = system ? [{ role: "system", content: system }] : [];
    return ["v1/chat/completions", { ...shared, messages: [...begin, ...this.messages, asked] }];
  }

  take(chunk, { text, reasoning }, timing) {
    if (chunk.usage) timing.exact = chunk.usage;
    const choice = chunk.choices?.[0];
    if (!choice) return;
    const piece = choice.delta?.content ?? choice.text ?? "";
    const thought = choice.delta?.reasoning_content ?? "";
    const now = performance.now();
    timing.first ??= now;
    timing.last = now;
    if (piece || thought) {
      timing.tokens += 1;
      text.appendData(text.data ? piece : piece.trimStart());
      reasoning.appendData(thought);
      this.scroll();
      this.show(timing, false);
    }
  }

  show(timing, isOver) {
    if (timing.first === null) {
      setText(this.stats, "");
      return;
    }
    const tokens = timing.exact?.completion_tokens ?? timing.tokens;
    const seconds = (timing.last - timing.first) / 1e3;
    const parts = [
      h("span", {}, h("b", {}, tokens > 1 && seconds > 0 ? rate((tokens - 1) / seconds) : "–"), " tok/s"),
      h("span", {}, `${count(tokens)} tokens`),
      h("span", {}, `first after ${duration((timing.first - timing.start) / 1e3)}`),
    ];
    const version = isOver ? timing.exact?.adapter_version : null;
    if (version) parts.push(h("code", { title: `version ${version}` }, version.slice(0, 8)));
    this.stats.replaceChildren(h("div", {}, ...parts));
  }

  /** Keep the end in view, unless the user has scrolled up. */
  scroll(force = false) {
    const log = this.log;
    if (force || log.scrollHeight - log.scrollTop - log.clientHeight < 80) log.scrollTop = log.scrollHeight;
  }
}

export function explain(error) {
  if (error instanceof TypeError) return "The server does not answer. Is it running?";
  const isLong = error.body?.error?.code === "context_length_exceeded" && server?.has_chat;
  return sentence(error.message) + (isLong ? "; “New chat” leaves out what was said so far" : "");
}

const sentence = (text) => text.charAt(0).toUpperCase() + text.slice(1);

function add(model) {
  if (columns.length >= MAX_COLUMNS) return;
  const column = new Column(model);
  columns.push(column);
  $("columns").append(column.element);
  arranged();
}

/** Return the model that no column has yet: an adapter, or the base model, or none. */
async function unused() {
  const taken = new Set(columns.map((column) => column.model));
  const found = await get("v1/adapters", { order: "requests", limit: MAX_COLUMNS }).catch(() => ({ data: [] }));
  const names = found.data.map((each) => each.name);
  if (server?.uses_base) names.push(server.model);
  return names.find((name) => !taken.has(name)) ?? "";
}

function remove(column) {
  column.abort?.abort();
  const place = columns.indexOf(column);
  columns.splice(place, 1);
  column.element.remove();
  arranged();
  const next = columns[Math.min(place, columns.length - 1)];
  (next.closing.hidden ? next.input : next.closing).focus();
  remember();
}

function arranged() {
  $("columns").dataset.number = columns.length;
  $("add-column").disabled = columns.length >= MAX_COLUMNS;
  for (const column of columns) column.closing.hidden = columns.length === 1;
}

const remember = () => sessionStorage.setItem("loraplex.columns", JSON.stringify(columns.map((c) => c.model)));

let suggested = 0;
async function suggest(part) {
  const turn = ++suggested;
  const found = await get("v1/adapters", { contains: part, limit: 20 }).catch(() => null);
  if (found === null || turn !== suggested) return;
  const names = [server?.uses_base && server.model, ...found.data.map((each) => each.name)].filter(Boolean);
  $("models").replaceChildren(...names.map((name) => h("option", { value: name })));
}

/** Return the columns to begin with: those of this tab, or two adapters, or the base model. */
async function firstModels() {
  try {
    const kept = JSON.parse(sessionStorage.getItem("loraplex.columns"));
    if (Array.isArray(kept) && kept.length) return kept.map(String).slice(0, MAX_COLUMNS);
  } catch {
    // as if nothing was kept
  }
  const { data } = await get("v1/adapters", { order: "requests", limit: 2 });
  const names = data.map((each) => each.name);
  if (names.length < 2 && server.uses_base) names.unshift(server.model);
  return names.length ? names : [""];
}

export function chatWith(model) {
  const idle = columns.find((column) => column.messages.length === 0 && column.abort === null);
  if (columns.some((column) => column.model === model)) return;
  if (idle && columns.length >= 2) idle.input.value = model;
  else add(model);
  remember();
}

async function send() {
  const prompt = $("prompt").value;
  if (!prompt.trim() || isRunning) return;
  const wrong = ["max-tokens", "temperature", "seed"].map($).find((field) => !field.reportValidity());
  if (wrong) return;
  const number = (id) => ($(id).value === "" ? undefined : Number($(id).value));
  const options = {
    system: $("system").value.trim(),
    max_tokens: number("max-tokens"),
    temperature: number("temperature"),
    seed: number("seed"),
  };
  $("prompt").value = "";
  if ($("settings").contains(document.activeElement)) $("prompt").focus();
  $("settings").open = false;
  busy(true);
  await Promise.allSettled(columns.map((column) => column.ask(prompt, options)));
  busy(false);
}

function busy(is) {
  isRunning = is;
  const [shown, gone] = is ? [$("stop"), $("send")] : [$("send"), $("stop")];
  const hadFocus = document.activeElement === gone;
  shown.hidden = false;
  if (hadFocus) shown.focus();
  gone.hidden = true;
  $("clear").disabled = is;
}

export async function start(overview) {
  server = overview;
  if (hasBegun) return;
  hasBegun = true;
  $("max-tokens").value ||= Math.min(MOST_TOKENS, Math.ceil(server.max_model_len / 2));
  try {
    for (const model of await firstModels()) add(model);
  } catch {
    hasBegun = false; // tried again with the next answer
  }
}

export function update(overview) {
  server = overview;
}

function wireSettings() {
  const settings = $("settings");
  settings.addEventListener("keydown", (event) => {
    if (event.key !== "Escape" || !settings.open) return;
    settings.open = false;
    settings.querySelector("summary").focus();
  });
  document.addEventListener("pointerdown", (event) => {
    if (!settings.contains(event.target)) settings.open = false;
  });
}

export function wire() {
  wireSettings();
  $("composer").addEventListener("submit", (event) => {
    event.preventDefault();
    send();
  });
  $("prompt").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
      event.preventDefault();
      send();
    }
  });
  $("stop").addEventListener("click", () => columns.forEach((column) => column.abort?.abort()));
  $("clear").addEventListener("click", () => columns.forEach((column) => column.empty()));
  $("add-column").addEventListener("click", async () => {
    add(await unused());
    remember();
    columns.at(-1).input.focus();
  });
}
