// The page: asks the server once a second how it is, and hands the answer to its parts.

import * as adapters from "./adapters.js";
import { get, keepKeys, keys } from "./api.js";
import * as charts from "./charts.js";
import * as chat from "./chat.js";
import * as dialogs from "./dialogs.js";
import { $, setText } from "./dom.js";
import * as map from "./map.js";
import * as server from "./server.js";

const PERIOD_MS = 1000;
const MOST_WAIT_MS = 10_000;
const VIEWS = ["chat", "adapters", "server"];

let failures = 0;
let timer = 0;
let isAsking = false;
let hasNewKeys = false; // since it was asked
let process = null; // which one has answered

async function poll() {
  clearTimeout(timer);
  if (isAsking) return;
  isAsking = true;
  hasNewKeys = false;
  let wait = PERIOD_MS;
  try {
    const query = { samples_after: charts.lastSample(), changes_after: adapters.changesAfter(), map: map.etag() };
    take(await get("v1/overview", query));
    failures = 0;
  } catch (error) {
    wait = hasNewKeys ? 0 : failed(error);
  } finally {
    isAsking = false;
  }
  if (wait !== null && !document.hidden) timer = setTimeout(poll, wait);
}

function take(overview) {
  if (process !== null && overview.process !== process) {
    // Its times are others: ask it for all samples and changes.
    charts.forget();
    adapters.forget();
    overview = { ...overview, samples: [], changes: [] };
  }
  process = overview.process;
  banner("");
  setText($("model"), overview.model);
  $("model").title = `${overview.model}, loraplex ${overview.version}, context ${overview.max_model_len}`;
  document.title = `${overview.model} · loraplex`;
  $("state").dataset.state = overview.state;
  setText($("state"), overview.state);
  charts.update(overview);
  chat.update(overview);
  adapters.update(overview);
  map.update(overview);
  server.update(overview);
  chat.start(overview);
  if (overview.state !== "ready") banner(overview.message);
}

/** Say what is wrong; return when to ask again, in milliseconds, or null to wait for the user. */
function failed(error) {
  failures += 1;
  if (error.status === 401) {
    const why = keys().api || keys().admin ? "The server does not accept this key." : "This server asks for a key.";
    $("state").dataset.state = "away";
    setText($("state"), "no key");
    banner(`${why} “Keys” takes one.`);
    askForKeys(why);
    return null;
  }
  const wait = Math.min(PERIOD_MS * 2 ** Math.min(failures - 1, 6), MOST_WAIT_MS);
  $("state").dataset.state = "away";
  if (error.body?.status === "starting") {
    setText($("state"), "starting");
    const { phase, fraction } = error.body;
    const share = fraction === null ? "" : `, ${Math.round(fraction * 100)}%`;
    banner(`The server is starting${phase ? `: ${phase}${share}` : ""}.`);
    return PERIOD_MS;
  }
  setText($("state"), "away");
  banner(error instanceof TypeError ? "The server does not answer; trying again." : chat.explain(error));
  return wait;
}

function banner(text) {
  $("banner").hidden = !text;
  setText($("banner"), text);
}

/** Open the dialog of the keys, or say why they are asked for in the open one, where the user may be typing. */
function askForKeys(why, first = null) {
  setText($("keys-why"), why);
  $("keys-why").hidden = !why;
  if ($("keys-dialog").open) return;
  const { api, admin } = keys();
  $("api-key").value = api;
  $("admin-key").value = admin;
  dialogs.openDialog($("keys-dialog"), first);
}

function show(view) {
  const shown = VIEWS.includes(view) ? view : "chat";
  for (const each of VIEWS) {
    $(each).hidden = each !== shown;
    $(`tab-${each}`).setAttribute("aria-selected", each === shown);
    $(`tab-${each}`).tabIndex = each === shown ? 0 : -1;
  }
  document.body.classList.toggle("chatting", shown === "chat");
  if (shown === "adapters") adapters.shown();
  if (shown === "server") charts.draw();
  poll();
}

function wireTabs() {
  for (const view of VIEWS) $(`tab-${view}`).addEventListener("click", () => (location.hash = view));
  document.querySelector("[role=tablist]").addEventListener("keydown", (event) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (!step) return;
    const now = VIEWS.findIndex((view) => !$(view).hidden);
    const next = VIEWS[(now + step + VIEWS.length) % VIEWS.length];
    location.hash = next;
    $(`tab-${next}`).focus();
  });
  addEventListener("hashchange", () => show(location.hash.slice(1)));
}

charts.wire();
chat.wire();
adapters.wire((why) => askForKeys(why, $("admin-key")), poll);
map.wire(adapters.show);
wireTabs();
$("keys-button").addEventListener("click", () => askForKeys(""));
$("keys-form").addEventListener("submit", () => {
  keepKeys($("api-key").value.trim(), $("admin-key").value.trim());
  hasNewKeys = true;
  poll();
});
dialogs.wire();
document.addEventListener("visibilitychange", () => {
  if (!document.hidden) poll();
});
show(location.hash.slice(1));
