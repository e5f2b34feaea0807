"use strict";
// Plots: what is drawn, how it is controlled, and what all of them share.

const data = JSON.parse(document.getElementById("data").textContent);
for (const plot of data.plots) for (const line of plot.lines) line.xs = data.places[line.xs];
const state = {x: "step", log: false, whole: false, smoothing: 0, zoom: null, hidden: new Set()};
const figures = [];

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

const WHOLE = [...Array(10).keys()].flatMap(power => [1, 2, 5].map(times => times * 10 ** power));
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = line => css("--c" + line.colour % 8);
const faded = (hex, share) => hex + Math.round(255 * share).toString(16).padStart(2, "0");

function short(value, percent = false) {
  if (value === null || value === undefined) return "–";
  if (percent) return Number((100 * value).toPrecision(3)) + "%";
  const size = Math.abs(value);
  for (const [limit, divisor, unit] of [[1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]])
    if (size >= limit) return Number((value / divisor).toPrecision(3)) + unit;
  if (size > 0 && size < 1e-3) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(4)));
}

// numbers --------------------------------------------------------------------------------------------------

/** What a line's steps are on the horizontal axis. */
function places(line) {
  if (state.x === "step") return line.xs;
  const {steps, seconds} = data.runs[line.run];
  let at = 0;
  return line.xs.map(step => {
    while (at + 2 < steps.length && steps[at + 1] < step) at++;
    if (steps.length < 2) return seconds[0] ?? 0;
    const share = (step - steps[at]) / (steps[at + 1] - steps[at]);
    return seconds[at] + share * (seconds[at + 1] - seconds[at]);
  });
}

/** An exponential mean that begins without a bias, as in W&B and TensorBoard; gaps stay gaps. */
function smoothed(ys) {
  let mean = 0, weight = 0;
  return ys.map(y => {
    if (y === null) return null;
    mean = state.smoothing * mean + (1 - state.smoothing) * y;
    weight = state.smoothing * weight + (1 - state.smoothing);
    return mean / weight;
  });
}

const FEW = 20; // points, of which none is extreme
const quantile = (sorted, share) => sorted[Math.round(share * (sorted.length - 1))];

/** From where to where a line's usual values go: what lies far from its middle half does not count. */
function usual(values) {
  const sorted = [...values].sort((a, b) => a - b);
  if (sorted.length < FEW) return [sorted[0], sorted[sorted.length - 1]];
  const low = quantile(sorted, 0.25), high = quantile(sorted, 0.75);
  const reach = 3 * (high - low) || sorted[sorted.length - 1] - sorted[0];
  return [Math.max(sorted[0], low - reach), Math.min(sorted[sorted.length - 1], high + reach)];
}

/** One range for the same figure of several runs: a run that is far wider than the others does not stretch it. */
function common(ranges) {
  const spans = ranges.map(([low, high]) => high - low).sort((a, b) => a - b);
  const span = spans.slice(0, Math.ceil(spans.length / 2)).pop();
  const fine = span > 0 ? ranges.filter(([low, high]) => high - low <= 4 * span) : ranges;
  const low = Math.min(...fine.map(range => range[0])), high = Math.max(...fine.map(range => range[1]));
  const lowest = Math.min(...ranges.map(range => range[0])), highest = Math.max(...ranges.map(range => range[1]));
  return span > 0 ? [Math.max(lowest, low - span), Math.min(highest, high + span)] : [lowest, highest];
}

/** The vertical range of some drawn lines within the horizontal one. */
function verticalRange(plot, drawn, from, to) {
  const alike = new Map();
  let lowest = Infinity, highest = -Infinity;
  for (const {line, xs, ys, raw} of drawn) {
    const values = (plot.stacked ? ys : raw).filter((y, i) => y !== null && xs[i] >= from && xs[i] <= to && (!state.log || y > 0));
    if (!values.length) continue;
    lowest = values.reduce((a, b) => Math.min(a, b), lowest);
    highest = values.reduce((a, b) => Math.max(a, b), highest);
    const key = data.runs.length > 1 ? line.name.slice(data.runs[line.run].name.length) : line.name;
    alike.set(key, [...(alike.get(key) ?? []), state.whole || plot.stacked ? [lowest, highest] : usual(values)]);
  }
  if (!alike.size) return null;
  const ranges = [...alike.values()].map(common);
  let low = Math.min(...ranges.map(range => range[0])), high = Math.max(...ranges.map(range => range[1]));
  if (state.whole || state.log) [low, high] = [lowest, highest];
  if (plot.stacked) low = 0;
  if (state.log) return low < high ? [low / 1.2, high * 1.2] : [low / 2, high * 2];
  const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.1;
  return [plot.stacked ? 0 : low - margin, high + margin];
}

// a figure -------------------------------------------------------------------------------------------------

class Figure {
  constructor(plot) {
    this.plot = plot;
    this.off = new Set();
    this.box = make("div", {class: "plot", tabindex: 0, role: "img", "aria-label": plot.title});
    this.legend = make("div", {class: "legend"});
    this.note = make("p", {class: "clipped", hidden: ""});
    this.element = make("figure", {}, make("figcaption", {}, make("b", {}, plot.title), " ", make("small", {}, plot.note)),
      this.box, this.note, this.legend);
    this.fresh = this.visible = false;
    this.box.addEventListener("keydown", event => this.key(event));
  }

  lines() {
    return this.plot.lines.filter((line, at) => !state.hidden.has(line.run) && !this.off.has(at));
  }

  /** The lines as they are drawn, each with its places and values. */
  drawn() {
    let below = null;
    return this.lines().map(line => {
      const raw = line.ys;
      let ys = state.smoothing && !line.marked ? smoothed(raw) : raw;
      if (this.plot.stacked) ys = below = ys.map((y, i) => (y ?? 0) + (below ? below[i] : 0));
      return {line, raw, xs: places(line), ys};
    });
  }

  refresh() {
    this.fresh = false;
    if (this.visible) this.draw();
  }

  draw() {
    if (this.fresh) return;
    this.fresh = true;
    this.chart?.destroy();
    this.chart = null;
    this.box.replaceChildren();
    const drawn = this.shown = this.drawn();
    if (!drawn.some(each => each.ys.some(y => y !== null))) this.box.append(make("p", {class: "dim"}, "no numbers"));
    else this.chart = new uPlot(this.options(drawn), this.columns(drawn), this.box);
    this.drawLegend();
    this.readOut();
  }

  columns(drawn) {
    const positive = ys => state.log ? ys.map(y => y > 0 ? y : null) : ys;
    const tables = drawn.map(each => [each.xs, positive(each.ys)]);
    if (this.faint()) tables.push(...drawn.map(each => [each.xs, positive(each.raw)]));
    return uPlot.join(tables);
  }

  /** The values before smoothing are drawn, too. */
  faint() {
    return state.smoothing > 0 && !this.plot.stacked && !this.plot.lines.some(line => line.band !== null);
  }

  options(drawn) {
    const {plot} = this, dim = css("--dim"), grid = {stroke: faded("#888888", 0.22), width: 1};
    const series = drawn.map(({line, ys}) => {
      const count = ys.filter(y => y !== null).length;
      return {
        stroke: colour(line), width: line.band !== null || line.dash ? 1.2 : 1.8, dash: line.dash ? [5, 4] : [],
        points: line.marked || count < 3 ? {show: true, size: 7, fill: colour(line)} : {show: false}};
    });
    if (plot.stacked && series.length) series[0].fill = faded(colour(drawn[0].line), 0.6);
    const faint = this.faint() ? drawn.map(({line}) =>
      ({stroke: faded(colour(line), 0.28), width: 1, points: {show: false}})) : [];
    const axis = {stroke: dim, grid, ticks: {...grid, size: 4}, font: "11px system-ui, sans-serif"};
    const size = (u, values) => values ? 14 + 6.5 * Math.max(...values.map(value => String(value ?? "").length)) : 40;
    return {
      width: this.width(), height: 190, series: [{}, ...series, ...faint], bands: this.bands(drawn), legend: {show: false},
      scales: {x: {time: false, range: () => horizontal()},
        y: {distr: state.log ? 3 : 1, range: () => this.vertical()}},
      axes: [{...axis, size: 26, ...(state.x === "step" ? {incrs: WHOLE} : {}), values: (u, found) => found.map(value => short(value))},
        {...axis, size, values: (u, found) => found.map(value => value === null ? "" : short(value, plot.percent))}],
      cursor: {sync: {key: "all", scales: ["x", null]}, drag: {x: true, y: false, setScale: false}, y: false,
        points: {size: 6}, bind: {dblclick: () => () => zoom(null)}},
      hooks: {setCursor: [() => this.readOut()], setSelect: [u => this.selected(u)], draw: [u => drawMarks(u)],
        ready: [u => u.over.addEventListener("click", event => this.picked(u, event))]}};
  }

  bands(drawn) {
    if (this.plot.stacked)
      return drawn.slice(1).map(({line}, at) => ({series: [at + 2, at + 1], fill: faded(colour(line), 0.6)}));
    return drawn.flatMap(({line}, at) => {
      const below = line.band === null ? -1 : drawn.findIndex(each =>
        each.line === this.plot.lines[this.plot.lines.indexOf(line) + line.band]);
      return below < 0 ? [] : [{series: [at + 1, below + 1], fill: faded(colour(line), 0.16 / Math.sqrt(data.runs.length))}];
    });
  }

  vertical() {
    const [min, max] = horizontal(), found = verticalRange(this.plot, this.shown, min, max);
    if (!found) return state.log ? [0.1, 1] : [0, 1];
    const beyond = this.shown.reduce((sum, {xs, ys, raw}) => sum + (this.plot.stacked ? ys : raw).filter((y, i) =>
      y !== null && xs[i] >= min && xs[i] <= max && (y < found[0] || y > found[1])).length, 0);
    this.note.hidden = !beyond;
    this.note.textContent = (beyond === 1 ? "1 point is " : `${beyond} points are `) +
      (state.log ? "not above 0 and not drawn" : "beyond the range");
    return found;
  }

  width() {
    return Math.max(120, Math.floor(this.box.clientWidth));
  }

  resize() {
    if (this.chart && this.chart.width !== this.width()) this.chart.setSize({width: this.width(), height: 190});
  }

  selected(u) {
    if (u.select.width > 4) {
      this.dragged = true;
      const ends = [u.posToVal(u.select.left, "x"), u.posToVal(u.select.left + u.select.width, "x")];
      u.setSelect({left: 0, top: 0, width: 0, height: 0}, false);
      zoom(ends);
    }
  }

  /** A finger that touches a plot only reads its values. */
  picked(u, event) {
    if (!this.dragged && event.pointerType !== "touch" && u.cursor.idx !== null) samples.near(stepAt(u.data[0][u.cursor.idx]));
    this.dragged = false;
  }

  key(event) {
    const u = this.chart, moves = {ArrowLeft: -1, ArrowRight: 1};
    if (!u || event.ctrlKey || event.metaKey || event.altKey) return;
    const xs = u.data[0], at = u.cursor.idx ?? xs.length - 1, {min, max} = u.scales.x;
    if (event.key in moves) {
      const next = Math.min(xs.length - 1, Math.max(0, at + moves[event.key] * (event.shiftKey ? 10 : 1)));
      u.setCursor({left: u.valToPos(xs[next], "x"), top: 10}, true, true);
    } else if (event.key === "+" || event.key === "-") {
      const half = (max - min) * (event.key === "+" ? 0.3 : 0.8), middle = xs[at];
      zoom([middle - half, middle + half]);
    } else if (event.key === "0" || event.key === "Escape") zoom(null);
    else if (event.key === "Enter") samples.near(stepAt(xs[at]));
    else return;
    event.preventDefault();
  }

  drawLegend() {
    this.values = [];
    const items = this.plot.lines.map((line, at) => {
      if (state.hidden.has(line.run)) return null;
      const value = make("b");
      this.values.push([line, value]);
      const sign = document.createElementNS("http://www.w3.org/2000/svg", "svg");
      sign.setAttribute("width", 22); sign.setAttribute("height", 8);
      const stroke = document.createElementNS("http://www.w3.org/2000/svg", "line");
      for (const [name, set] of Object.entries({x1: 0, x2: 22, y1: 4, y2: 4, "stroke-width": this.plot.stacked ? 8 : 2.5,
        stroke: colour(line), "stroke-dasharray": line.dash ? "5 3" : "none"})) stroke.setAttribute(name, set);
      sign.append(stroke);
      const item = make("button", {type: "button", "aria-pressed": !this.off.has(at), title: "hide or show"}, sign,
        line.name, value);
      item.addEventListener("click", () => {
        this.off.has(at) ? this.off.delete(at) : this.off.add(at);
        this.refresh();
        this.legend.children[[...items.filter(Boolean)].indexOf(item)].focus();
      });
      return item;
    });
    this.legend.replaceChildren(...items.filter(Boolean));
  }

  /** The values under the cursor, of each line the newest up to there; without a cursor the last ones. */
  readOut() {
    if (!this.values) return;
    const at = this.chart?.cursor.idx, x = at == null ? Infinity : this.chart.data[0][at];
    for (const [line, element] of this.values) {
      const xs = places(line);
      let index = xs.length - 1;
      while (index >= 0 && (xs[index] > x || line.ys[index] === null)) index--;
      element.textContent = index < 0 ? "–" : short(line.ys[index], this.plot.percent);
    }
    const said = x === Infinity ? "" : state.x === "step" ? ` · step ${short(x)}` : ` · ${short(x)} s`;
    this.element.querySelector("small").textContent = this.plot.note + said;
  }
}

// what all figures share -----------------------------------------------------------------------------------

function bounds() {
  const all = data.runs.flatMap((run, at) => state.hidden.has(at) ? [] : state.x === "step" ? run.steps : run.seconds);
  return all.length ? [Math.min(...all), Math.max(...all)] : [0, 1];
}

/** The horizontal range of all plots. */
function horizontal() {
  const [first, last] = state.zoom ?? bounds();
  return first < last ? [first, last] : [first - 1, last + 1];
}

function zoom(ends) {
  state.zoom = ends;
  const form = document.getElementById("controls"), [from, to] = ends ?? ["", ""];
  form.elements.from.value = ends ? Number(from.toPrecision(5)) : "";
  form.elements.to.value = ends ? Number(to.toPrecision(5)) : "";
  remember();
  const [min, max] = horizontal();
  for (const figure of figures)
    if (figure.visible && figure.chart) figure.chart.setScale("x", {min, max}); else figure.fresh = false;
}

/** The step at a place of the horizontal axis. */
function stepAt(x) {
  if (state.x === "step") return x;
  const {steps, seconds} = data.runs[0];
  return steps[seconds.reduce((best, each, i) => Math.abs(each - x) < Math.abs(seconds[best] - x) ? i : best, 0)];
}

/** A line where a run was resumed. */
function drawMarks(u) {
  const {ctx, bbox} = u, scale = devicePixelRatio;
  ctx.save();
  data.runs.forEach((run, at) => {
    if (state.hidden.has(at)) return;
    for (const x of places({run: at, xs: run.resumed})) {
      if (x < u.scales.x.min || x > u.scales.x.max) continue;
      const left = Math.round(u.valToPos(x, "x", true));
      ctx.strokeStyle = ctx.fillStyle = data.runs.length > 1 ? css("--c" + at % 8) : css("--dim");
      ctx.lineWidth = scale;
      ctx.setLineDash([2 * scale, 3 * scale]);
      ctx.beginPath(); ctx.moveTo(left, bbox.top); ctx.lineTo(left, bbox.top + bbox.height); ctx.stroke();
      ctx.font = `${10 * scale}px system-ui, sans-serif`;
      const right = left < bbox.left + bbox.width * 0.8;
      ctx.textAlign = right ? "left" : "right";
      ctx.fillText("resumed", left + (right ? 3 : -3) * scale, bbox.top + 10 * scale);
    }
  });
  ctx.restore();
}

function refreshAll() {
  for (const figure of figures) figure.refresh();
}

function buildFigures() {
  const main = document.getElementById("plots"), sections = new Map();
  const seen = new IntersectionObserver(entries => entries.forEach(entry => {
    const figure = figures.find(each => each.element === entry.target);
    figure.visible = entry.isIntersecting;
    if (figure.visible) { figure.draw(); figure.resize(); }
  }), {rootMargin: "300px"});
  const sized = new ResizeObserver(entries => entries.forEach(entry =>
    figures.find(each => each.element === entry.target).resize()));
  for (const plot of data.plots) {
    if (!sections.has(plot.section)) {
      const grid = make("div", {class: "figures"}), count = data.plots.filter(each => each.section === plot.section).length;
      main.append(plot.section === "More metrics"
        ? make("details", {}, make("summary", {}, `${count} more metrics`), grid)
        : make("section", {}, make("h2", {}, plot.section), grid));
      sections.set(plot.section, grid);
    }
    const figure = new Figure(plot);
    figures.push(figure);
    sections.get(plot.section).append(figure.element);
    seen.observe(figure.element);
    sized.observe(figure.element);
  }
}

// A page that is refreshed while a run goes on looks as it did before.

const remembered = "#controls [name]:not(button), #find [name=text], #find [name=order], [data-run]";

function remember() {
  const found = [...document.querySelectorAll(remembered)].map(each => each.type === "checkbox" ? each.checked : each.value);
  try {
    sessionStorage.setItem(location.href, JSON.stringify(found));
  } catch {
    // a browser that keeps nothing: the next refresh begins afresh
  }
}

function recall() {
  let found = null;
  try {
    found = JSON.parse(sessionStorage.getItem(location.href));
  } catch {
    // see above
  }
  if (!found) return;
  document.querySelectorAll(remembered).forEach((each, at) => {
    if (found[at] === undefined) return;  // the page has this control since it was refreshed
    if (each.type === "checkbox") each.checked = found[at]; else each.value = found[at];
  });
}

function bindControls() {
  const form = document.getElementById("controls"), {elements} = form;
  const most = Math.max(0, ...data.runs.map(run => run.steps.length));
  elements.smoothing.value = most >= 60 ? 0.8 : 0;
  recall();
  const read = () => Object.assign(state, {x: elements.x.value, smoothing: Number(elements.smoothing.value),
    log: elements.log.checked, whole: elements.whole.checked});
  const readRange = () => {
    const [first, last] = bounds(), given = element => element.value === "" ? null : Number(element.value);
    const ends = [given(elements.from) ?? first, given(elements.to) ?? last];
    if (ends[0] < ends[1]) state.zoom = elements.from.value + elements.to.value === "" ? null : ends;
  };
  read();
  for (const box of document.querySelectorAll("input[data-run]:not(:checked)")) state.hidden.add(Number(box.dataset.run));
  readRange();
  document.addEventListener("input", remember);
  form.addEventListener("submit", event => event.preventDefault());
  form.addEventListener("input", event => {
    if (event.target === elements.from || event.target === elements.to) readRange();
    else if (elements.x.value !== state.x) zoom(null);
    read();
    refreshAll();
  });
  elements.reset.addEventListener("click", () => zoom(null));
  for (const box of document.querySelectorAll("input[data-run]")) box.addEventListener("change", () => {
    const run = Number(box.dataset.run);
    box.checked ? state.hidden.delete(run) : state.hidden.add(run);
    refreshAll();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refreshAll);
}
