"use strict";
// The status page: asks for the overview every two seconds and shows it.

const key = sessionStorage.getItem("key");
const ask = path => fetch(path, {headers: key ? {Authorization: "Bearer " + key} : {}});

function add(parent, tag, text, cls) {
  const node = document.createElement(tag);
  if (text !== undefined) node.textContent = text;
  if (cls) node.className = cls;
  parent.append(node);
  return node;
}

const $ = id => document.getElementById(id);
const WINDOW = 12; // newest steps, of which the mean is shown

const size = bytes => bytes < 1e6 ? short(bytes / 1e3) + " kB" : short(bytes / 1e6) + " MB";
const ago = seconds => seconds < 1 ? "now" : duration(seconds) + " ago";

const line = (name, more = {}) => ({name, run: 0, colour: 0, dash: 0, band: null, xs: [], ys: [], ...more});
const reward = {title: "Reward", note: "mean score of groups", section: "Progress",
  lines: [line("highest group", {dash: 1, band: 2}), line("mean"), line("lowest group", {dash: 1})]};
const speed = {title: "Throughput", note: "tokens/s of the groups that came", section: "Progress", lines: [line("tokens/s")]};
data = {runs: [{name: "", steps: []}], plots: [reward, speed]};
Object.assign(state, {x: "step", smoothing: 0.6});

function tiles(o) {
  const s = o.status, box = $("tiles"), steps = s.num_steps > 0, old = s.staleness, newest = o.points.slice(-WINDOW);
  const [groups, sum] = newest.reduce(([count, sum], each) => [count + each.groups, sum + each.groups * each.mean], [0, 0]);
  box.replaceChildren();
  const tile = (name, value, note) => {
    const t = add(box, "div", undefined, "tile");
    add(t, "small", name); add(t, "b", value); add(t, "small", note || "\u00a0");
  };
  tile("step", s.current_step, steps ? "of " + s.num_steps : "");
  tile("time left", o.seconds_left === null ? "–" : duration(o.seconds_left),
    o.seconds_per_step === null ? "known after two steps" : short(Number(o.seconds_per_step.toPrecision(3))) + " s a step");
  tile("reward", groups ? (sum / groups).toFixed(3) : "–", `newest ${groups} groups`);
  tile("tokens/s", short(Math.round(speed.lines[0].ys[speed.lines[0].ys.length - 1] ?? 0)), "of the newest groups");
  const batch = s.batch_size < 0 ? "" : ` of ${s.batch_size}`;
  tile("queued groups", s.queue_size, `${s.queued_sequences}${batch} sequences, ${size(s.queued_bytes)}`);
  tile("leased groups", s.leased_groups, "not in a checkpoint yet");
  tile("staleness", old ? old.behind : "–", old ? "steps behind, oldest group" : "no versions sent");
}

function plots(o) {
  const {points} = o, whole = points.length > 1 ? points.slice(0, -1) : points;  // the newest step goes on
  for (const [at, key] of ["high", "mean", "low"].entries())
    Object.assign(reward.lines[at], {xs: points.map(point => point.step), ys: points.map(point => point[key])});
  Object.assign(speed.lines[0], {xs: whole.map(point => point.step), ys: whole.map(point => point.tokens / Math.max(point.seconds, 0.001))});
  data.runs[0].steps = points.length ? [points[0].step, points[points.length - 1].step] : [];
  for (const figure of figures) figure.update();
}

function why(o) {
  const {waiting_for, warnings} = o.status;
  $("waiting").textContent = waiting_for ? `The next batch waits for ${waiting_for}.` : "The next batch is ready.";
  const all = [...warnings];
  if (o.refused) all.push(`Refused requests: ${o.refused}, the newest ${ago(o.now - o.refusals[0].at)}; see below.`);
  $("banner").className = "banner " + (warnings.length ? "bad" : o.refused ? "warn" : "good");
  $("warnings").hidden = !all.length;
  $("warnings").replaceChildren(...all.map(text => make("li", {}, text)));
  $("fine").hidden = o.refused > 0;
  $("refusals").replaceChildren(...o.refusals.map(each => make("li", {},
    make("small", {}, `${ago(o.now - each.at)}, ${each.request}: ${each.status}`), " ", each.detail)));
}

function environments(o) {
  const body = $("environments");
  body.replaceChildren();
  for (const e of o.status.environments.slice(0, 200)) {
    const row = add(body, "tr");
    add(row, "td", e.name);
    add(row, "td", !e.connected ? "left" : e.alive ? "alive" : "silent", e.alive ? "good" : "bad");
    for (const value of [e.group_size, e.received_groups, e.queued_groups, e.buffered_sequences, e.reserved,
      e.weight.toFixed(2), ago(e.idle_s)]) add(row, "td", value);
  }
  $("none").hidden = o.status.environments.length > 0;
}

function samples(o) {
  const box = $("samples"), open = new Set([...box.querySelectorAll("details[open]")].map(d => d.dataset.id));
  const first = box.childElementCount === 0, ids = o.samples.map(s => s.id).join();
  if (box.dataset.ids === ids) return;
  box.dataset.ids = ids;
  const names = new Map(o.status.environments.map(e => [e.env_id, e.name]));
  box.replaceChildren();
  o.samples.forEach((sample, i) => {
    const d = add(box, "details", undefined, "sample");
    d.dataset.id = sample.id;
    d.open = open.has(String(sample.id)) || (first && i === 0);
    const version = sample.policy_version === null ? "" : ", policy version " + sample.policy_version;
    const from = sample.env_id === null ? "" : ", " + (names.get(sample.env_id) ?? "environment " + sample.env_id);
    add(d, "summary", `Group ${sample.id}${from}${version}: scores ` + sample.scores.map(score => score.toFixed(2)).join("  "));
    sample.scores.forEach((score, k) => {
      add(d, "div", `score ${score.toFixed(3)}, ${sample.lengths[k]} tokens`, score > 0 ? "good" : "dim");
      if (sample.texts[k] !== undefined) add(d, "pre", sample.texts[k]);
    });
    if (!sample.texts.length) add(d, "p", "This environment sends no messages, only tokens.", "dim");
  });
}

function heading(o) {
  const named = o.status.registered ? [o.project, o.group].filter(Boolean).join(" / ") : "no trainer has registered";
  $("run").textContent = o.run?.replace(/\/+$/, "").split("/").pop() || named || "Rollout API";
  $("what").textContent = ["rollout API", named, o.status.durable ? "kept on disk" : "in memory only"].filter(Boolean).join(", ");
  document.title = `${$("run").textContent}: rollout API`;
  const found = o.has_report && !key;  // a link carries no key
  $("report").replaceChildren(...found ? [make("a", {href: "report"}, "Report")]
    : ["Report: ", make("code", {}, `grpo report ${o.run ?? "RUN_DIR"} --watch`)]);
}

async function refresh() {
  try {
    const answer = await ask("overview");
    $("login").hidden = answer.status !== 401;
    if (!answer.ok) throw new Error(answer.status === 401 ? "give the API key" : "status " + answer.status);
    const o = await answer.json();
    for (const part of [heading, plots, tiles, why, environments, samples]) part(o);
    $("state").textContent = ""; document.body.dataset.ready = "yes";
  } catch (error) {
    $("state").textContent = "Not up to date: " + error.message;
  }
  setTimeout(refresh, document.hidden ? 10000 : 2000);
}

buildFigures($("plots"));
$("key").addEventListener("change", () => { sessionStorage.setItem("key", $("key").value); location.reload(); });
refresh();
