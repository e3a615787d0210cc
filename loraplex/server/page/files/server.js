// Memory, replicas, the plan in force and the twin's picture.

import { get } from "./api.js";
import { $, bytes, count, duration, h, rate } from "./dom.js";

const PLAN_PERIOD_MS = 10_000;

let placement = null;
let plansSeen = null;
let askedAt = -Infinity;
let drawn = "";

export async function update(overview) {
  if ($("server").hidden) return;
  await followPlan(overview);
  const cards = [memory(overview), replicas(overview), plan(overview), twin(overview), leftOut(overview)];
  const described = JSON.stringify([overview.engine, overview.replicas, placement, overview.twin, overview.left_out]);
  if (described === drawn) return; // nothing that the user has selected goes away
  drawn = described;
  $("server-cards").replaceChildren(...cards.filter(Boolean));
}

async function followPlan({ num_plans: number }) {
  if (number === null) {
    placement = null;
    return;
  }
  const now = performance.now();
  if (number === plansSeen && now - askedAt < PLAN_PERIOD_MS) return;
  [plansSeen, askedAt] = [number, now];
  placement = await get("v1/fleet/placement").catch(() => placement);
}

const card = (title, note, ...parts) =>
  h("section", { className: "card" }, h("div", { className: "card-head" }, h("h2", {}, title), h("span", { className: "muted" }, note)), ...parts);

function meter(label, used, all, text) {
  const bar = h("div", { className: "bar", role: "img", "aria-label": `${label}: ${text}` }, h("i"));
  bar.firstChild.style.width = `${Math.min(100, all ? (100 * used) / all : 0)}%`;
  return h("div", { className: "meter" }, h("span", {}, label), bar, h("span", { className: "num" }, text));
}

function memory({ engine, replicas }) {
  if (!engine) return null;
  const meters = [
    meter("KV cache", engine.kv_blocks_used, engine.kv_blocks, `${count(engine.kv_blocks_used)} of ${count(engine.kv_blocks)} blocks`),
  ];
  if (engine.device_arena_bytes)
    meters.push(meter("Adapters on the device", engine.device_adapter_bytes, engine.device_arena_bytes, `${bytes(engine.device_adapter_bytes)} of ${bytes(engine.device_arena_bytes)}`));
  if (engine.host_adapter_budget_bytes)
    meters.push(meter("Adapters in host memory", engine.host_adapter_bytes, engine.host_adapter_budget_bytes, `${bytes(engine.host_adapter_bytes)} of ${bytes(engine.host_adapter_budget_bytes)}`));
  return card("Memory", replicas ? "all replicas together" : "", ...meters);
}

/** Return a table. On a narrow screen each line is a block: its first cell is the heading of the others, which have
 * the titles of their columns. */
function table(head, lines) {
  const titles = head.map(({ text, kind }) => h("th", { className: kind, scope: "col" }, text));
  const rows = lines.map((line) =>
    h("tr", {}, ...line.map((cell, column) => h("td", { className: head[column].kind, data: { title: head[column].text } }, cell))),
  );
  return h("div", { className: "table-box", tabIndex: 0 }, h("table", {}, h("thead", {}, h("tr", {}, ...titles)), h("tbody", {}, ...rows)));
}

const text = (name) => ({ text: name, kind: "" });
const num = (name) => ({ text: name, kind: "num" });
const numbered = (name) => ({ text: name, kind: "numbered" }); // a title that belongs to the heading: "Replica 0"
const long = (name) => ({ text: name, kind: "long" }); // has a line of its own in a block

function replicas({ replicas: all }) {
  if (!all) return null;
  const head = [numbered("Replica"), text("State"), num("In flight"), num("Sent"), num("Migrated"), num("Restarts")];
  const lines = all.map((each) => [
    h("span", {}, String(each.replica), each.node ? h("small", { className: "muted" }, ` ${each.node}`) : null),
    h("span", { title: each.message }, h("i", { className: "dot", data: { state: each.drained ? "drained" : each.state } }), each.drained ? `${each.state}, drained` : each.state),
    count(each.in_flight),
    count(each.sent),
    count(each.migrated),
    count(each.restarts),
  ]);
  const ready = all.filter((each) => each.state === "ready" && !each.drained).length;
  return card("Replicas", `${ready} of ${all.length} take requests`, table(head, lines));
}

function plan({ num_plans: number }) {
  if (number === null || placement === null) return null;
  const lines = placement.replicas.map((replica) => {
    const there = placement.data.filter((each) => each.replicas === null || each.replicas.includes(replica));
    const versions = [...new Map(there.map((each) => [each.version, each])).values()]; // several names may share one
    const waiting = placement.data.filter((each) => each.waiting.includes(replica));
    const names = there.slice(0, 6).map((each) => each.name);
    const more = there.length - names.length;
    return [
      String(replica),
      count(there.length),
      count(versions.reduce((sum, each) => sum + each.rank, 0)),
      bytes(versions.reduce((sum, each) => sum + each.bytes, 0)),
      count(waiting.length),
      h("span", { className: "names" }, names.join(", ") + (more > 0 ? ` and ${count(more)} more` : "") || "none"),
    ];
  });
  const head = [numbered("Replica"), num("Adapters"), num("Ranks, summed"), num("Size, summed"), num("To be loaded"), long("Which")];
  const origin = placement.is_given ? "a plan that was applied" : "made by the fleet's policy";
  const state = placement.is_given && !placement.stands ? ", not carried out yet" : "";
  return card("Plan in force", `${origin}${state}; changed ${number === 1 ? "once" : `${count(number)} times`}`, table(head, lines));
}

function twin({ twin: picture }) {
  if (!picture) return null;
  const note = picture.is_measured
    ? ["by a measured profile"]
    : ["by guessed costs: ", h("code", {}, "loraplex profile"), " measures them"];
  if (!picture.measured || !picture.predicted)
    return card("The twin's picture", h("span", {}, ...note), h("p", { className: "empty" }, "No requests in the last minutes to replay. It replays them every half minute."));
  const lines = [
    ["Throughput, tok/s", "tokens_per_s", rate],
    ["Time to first token", "ttft_s", duration],
    ["Time between tokens", "itl_s", duration],
  ].map(([label, key, format]) => {
    const [was, predicted] = [picture.measured[key], picture.predicted[key]];
    const error = was && predicted !== null ? predicted / was - 1 : null;
    return [label, format(was), format(predicted), error === null ? "–" : signed(error)];
  });
  const head = [text("The last two minutes"), num("Measured"), num("Predicted"), num("Error")];
  return card("The twin's picture", h("span", {}, `${count(picture.num_requests)} requests replayed, `, ...note), table(head, lines));
}

function signed(share) {
  const percent = Math.abs(share * 100).toFixed(1);
  return `${percent === "0.0" ? "" : share > 0 ? "+" : "−"}${percent}%`;
}

function leftOut({ left_out: all }) {
  if (!all.length) return null;
  return card("Left out", "tried again every 30 seconds", table([text("Adapter"), long("Why")], all.map((each) => [each.name, each.reason])));
}
