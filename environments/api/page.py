"""The pages for a browser: status at `/`, reference at `/docs`. Each is one file that asks nobody else for anything.

Groups carry text from models: the pages put it into the document as text only (`textContent`), and the policy
below lets no script run but the page's own, which it knows by its hash.
"""

import base64
import hashlib

_STYLE = """
:root { color-scheme: light dark; --line: #8884; --dim: #888; --good: #2a8a4a; --bad: #c0392b; --ink: #3b6fd4 }
* { box-sizing: border-box }
body { font: 15px/1.45 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 62rem }
h1 { font-size: 1.25rem; margin: 0 } h2 { font-size: 1rem; margin: 1.6rem 0 .5rem }
.dim, small { color: var(--dim) } .bad { color: var(--bad) } .good { color: var(--good) }
.tiles { display: grid; grid-template-columns: repeat(auto-fit, minmax(8.5rem, 1fr)); gap: .6rem; margin: 1rem 0 }
.tile { border: 1px solid var(--line); border-radius: .5rem; padding: .5rem .7rem }
.tile b { display: block; font-size: 1.35rem; font-variant-numeric: tabular-nums }
.scroll { overflow-x: auto }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums }
th, td { text-align: right; padding: .25rem .5rem; border-bottom: 1px solid var(--line); white-space: nowrap }
th:first-child, td:first-child { text-align: left }
svg { width: 100%; height: 11rem; border: 1px solid var(--line); border-radius: .5rem }
pre { white-space: pre-wrap; overflow-wrap: anywhere; margin: .2rem 0 .6rem; padding: .5rem .7rem;
  border-left: 3px solid var(--line); font: 13px/1.4 ui-monospace, monospace; max-height: 14rem; overflow-y: auto }
details { border: 1px solid var(--line); border-radius: .5rem; padding: .4rem .7rem; margin: .4rem 0 }
summary { cursor: pointer } li { margin: .2rem 0 }
input { font: inherit; padding: .3rem .5rem; width: 100% }
"""

_COMMON_SCRIPT = """
"use strict";
const add = (parent, tag, text, cls) => {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (cls) node.className = cls;
  parent.append(node);
  return node;
};
const key = sessionStorage.getItem("key");
const ask = path => fetch(path, {headers: key ? {Authorization: "Bearer " + key} : {}});
"""

_STATUS_SCRIPT = (
    _COMMON_SCRIPT
    + """
const $ = id => document.getElementById(id);
const number = (value, digits = 2) => value === null ? "–" : Number(value).toFixed(digits);
const size = bytes => bytes < 1e6 ? (bytes / 1e3).toFixed(0) + " kB" : (bytes / 1e6).toFixed(1) + " MB";

function tiles(o) {
  const s = o.status, box = $("tiles");
  box.replaceChildren();
  const tile = (name, value, note) => {
    const t = add(box, "div", undefined, "tile");
    add(t, "small", name); add(t, "b", value); add(t, "small", note || "\\u00a0");
  };
  const last = o.rewards.at(-1);
  tile("step", s.current_step, s.num_steps > 0 ? "of " + s.num_steps : "");
  tile("queue", s.queue_size, s.queued_sequences + " sequences, " + size(s.queued_bytes));
  tile("batch", s.batch_size < 0 ? "–" : s.batch_size, s.batch_ready ? "ready" : "not ready");
  tile("leased", s.leased_groups, "groups being trained");
  tile("reward", last ? number(last.mean, 3) : "–", last ? "newest " + last.groups + " groups" : "");
  const old = s.staleness;
  tile("staleness", old ? old.behind : "–", old ? "steps behind, oldest group" : "no versions sent");
}

function why(o) {
  const s = o.status;
  const wait = s.waiting_for;
  $("waiting").textContent = wait ? "The next batch waits for " + wait + "." : "The next batch is ready.";
  const list = $("warnings");
  list.replaceChildren();
  for (const warning of s.warnings) add(list, "li", warning, "bad");
}

function environments(o) {
  const body = $("environments");
  body.replaceChildren();
  for (const e of o.status.environments.slice(0, 200)) {
    const row = add(body, "tr");
    add(row, "td", e.name);
    add(row, "td", !e.connected ? "left" : e.alive ? "alive" : "silent", e.alive ? "good" : "bad");
    for (const value of [e.group_size, e.received_groups, e.queued_groups, e.buffered_sequences, e.reserved,
      number(e.weight), number(e.idle_s, 0) + " s"]) add(row, "td", value);
  }
  $("none").hidden = o.status.environments.length > 0;
}

function chart(points) {
  const svg = $("chart"), w = 600, h = 160, pad = 8;
  svg.replaceChildren();
  $("range").textContent = points.length ? "" : "No groups yet.";
  if (!points.length) return;
  let low = Math.min(...points.map(p => p.low)), high = Math.max(...points.map(p => p.high));
  if (low === high) { low -= 1; high += 1; }
  const x = i => points.length < 2 ? w / 2 : pad + i * (w - 2 * pad) / (points.length - 1);
  const y = v => h - pad - (v - low) * (h - 2 * pad) / (high - low);
  const draw = (tag, attributes) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
    for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
    svg.append(node);
  };
  const at = (p, i, key) => x(i).toFixed(1) + "," + y(p[key]).toFixed(1);
  const band = points.map((p, i) => at(p, i, "high")).concat(points.map((p, i) => at(p, i, "low")).reverse());
  draw("polygon", {points: band.join(" "), fill: "var(--ink)", opacity: .15});
  draw("polyline", {points: points.map((p, i) => at(p, i, "mean")).join(" "), fill: "none", stroke: "var(--ink)",
    "stroke-width": 2, "vector-effect": "non-scaling-stroke"});
  const groups = points.reduce((n, p) => n + p.groups, 0);
  $("range").textContent = groups + " groups, mean scores from " + number(low, 3) + " to " + number(high, 3);
}

function samples(o) {
  const box = $("samples"), open = new Set([...box.querySelectorAll("details[open]")].map(d => d.dataset.id));
  const first = box.childElementCount === 0;
  const ids = o.samples.map(s => s.id).join();
  if (box.dataset.ids === ids) return;
  box.dataset.ids = ids;
  box.replaceChildren();
  o.samples.forEach((sample, i) => {
    const d = add(box, "details");
    d.dataset.id = sample.id;
    d.open = open.has(String(sample.id)) || (first && i === 0);
    const version = sample.policy_version === null ? "" : ", policy version " + sample.policy_version;
    const from = sample.env_id === null ? "" : ", environment " + sample.env_id;
    const scores = sample.scores.map(score => number(score)).join("  ");
    add(d, "summary", "Group " + sample.id + from + version + ": scores " + scores);
    sample.scores.forEach((score, k) => {
      add(d, "div", "score " + number(score, 3) + ", " + sample.lengths[k] + " tokens", score > 0 ? "good" : "dim");
      if (sample.texts[k] !== undefined) add(d, "pre", sample.texts[k]);
    });
    if (!sample.texts.length) add(d, "p", "This environment sends no messages, only tokens.", "dim");
  });
}

async function refresh() {
  try {
    const answer = await ask("overview");
    $("login").hidden = answer.status !== 401;
    if (!answer.ok) throw new Error(answer.status === 401 ? "give the API key" : "status " + answer.status);
    const o = await answer.json();
    $("run").textContent = o.project === null ? "no trainer has registered" : o.project + " / " + o.group;
    $("store").textContent = o.status.durable ? "kept on disk" : "in memory only";
    tiles(o); why(o); environments(o); chart(o.rewards); samples(o);
    $("state").textContent = ""; document.body.dataset.ready = "yes";
  } catch (error) {
    $("state").textContent = "Not up to date: " + error.message;
  }
  setTimeout(refresh, document.hidden ? 10000 : 2000);
}
$("key").addEventListener("change", () => { sessionStorage.setItem("key", $("key").value); location.reload(); });
refresh();
"""
)

_STATUS_BODY = """
<header><h1>Rollout API</h1>
<div><span id="run"></span> <small id="store"></small> <small id="state" class="bad"></small></div></header>
<p id="login" hidden><label>API key <input id="key" type="password" autocomplete="off"></label></p>
<div id="tiles" class="tiles"></div>
<p id="waiting"></p><ul id="warnings"></ul>
<h2>Reward</h2><svg id="chart" viewBox="0 0 600 160" preserveAspectRatio="none" role="img"
 aria-label="Mean score of the groups over time"></svg><small id="range"></small>
<h2>Environments</h2><div class="scroll"><table><thead><tr><th>name</th><th></th><th>group</th><th>received</th>
<th>queued</th><th>buffered</th><th>reserved</th><th>weight</th><th>heard</th></tr></thead>
<tbody id="environments"></tbody></table></div><p id="none" class="dim">None has registered.</p>
<h2>Newest groups</h2><div id="samples"></div>
<p class="dim"><a href="docs">Reference</a> · <a href="metrics">Metrics</a></p>
"""

_DOCS_SCRIPT = (
    _COMMON_SCRIPT
    + """
const name = schema => schema.$ref ? schema.$ref.split("/").pop() : schema.anyOf ? schema.anyOf.map(name).join(" or ")
  : schema.type === "array" ? "[" + name(schema.items || {}) + "]" : schema.type || "any";
ask("openapi.json").then(answer => {
  if (answer.ok) return answer.json();
  add(document.getElementById("reference"), "p", "Give the API key on the status page first.", "bad");
  throw new Error("status " + answer.status);
}).then(api => {
  const box = document.getElementById("reference");
  add(box, "pre", api.info.description);
  for (const [path, methods] of Object.entries(api.paths)) for (const [method, o] of Object.entries(methods)) {
    const d = add(box, "details");
    add(d, "summary", method.toUpperCase() + " " + path + "  –  " + o.summary);
    for (const p of o.parameters)
      add(d, "div", p.in + " " + p.name + ": " + name(p.schema) + (p.required ? "" : ", optional"));
    if (o.requestBody) for (const [type, content] of Object.entries(o.requestBody.content))
      add(d, "div", "body, " + type + ": " + name(content.schema));
    for (const [status, a] of Object.entries(o.responses)) for (const [type, content] of Object.entries(a.content))
      add(d, "div", status + ", " + type + ": " + name(content.schema) + " – " + a.description, "dim");
  }
  add(box, "h2", "Structures");
  for (const [title, schema] of Object.entries(api.components.schemas)) {
    const d = add(box, "details");
    add(d, "summary", title);
    if (schema.description) add(d, "p", schema.description);
    for (const [field, s] of Object.entries(schema.properties || {}))
      add(d, "div", field + ": " + name(s) + ((schema.required || []).includes(field) ? "" : ", optional"));
  }
  document.body.dataset.ready = "yes";
});
"""
)

_DOCS_BODY = """
<header><h1>Rollout API: reference</h1></header>
<p>Made from <a href="openapi.json">openapi.json</a>, which is made from the structures that requests are read with.</p>
<div id="reference"></div>
"""


def _page(title: str, body: str, script: str) -> str:
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}</title><style>{_STYLE}</style></head><body>{body}<script>{script}</script></body></html>"
    )


def _hash(inline: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(inline.encode()).digest()).decode()}'"


STATUS_HTML = _page("Rollout API", _STATUS_BODY, _STATUS_SCRIPT)
DOCS_HTML = _page("Rollout API: reference", _DOCS_BODY, _DOCS_SCRIPT)

PAGE_HEADERS = {
    "Cache-Control": "no-store",
    "Content-Security-Policy": (
        f"default-src 'none'; style-src {_hash(_STYLE)}; script-src {_hash(_STATUS_SCRIPT)} {_hash(_DOCS_SCRIPT)}; "
        "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}
