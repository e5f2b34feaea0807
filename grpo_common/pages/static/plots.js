"use strict";
// Plots: how their lines are drawn, read, zoomed and hidden.

const figures = [];
const STEPS = [...Array(10).keys()].flatMap(power => [1, 2, 5].map(times => times * 10 ** power));
const TIMES = [1, 2, 5, 10, 30, ...[1, 2, 5, 10, 30, 60, 120, 360, 720, 1440, 7200].map(minutes => 60 * minutes)];
const DASHES = [[], [5, 4], [2, 3], [9, 3, 2, 3]];
const css = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const colour = number => css("--c" + number % 8);
const faded = (hex, share) => hex + Math.round(255 * share).toString(16).padStart(2, "0");

function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function drawing(tag, attributes, ...children) {
  const element = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

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

  /** Shares of a whole have no logarithmic scale: the lowest begins at 0. */
  get log() {
    return state.log && !this.plot.stacked;
  }

  /** The lines as they are drawn, each with its places and values. */
  drawn() {
    let below = null;
    return this.plot.lines.filter(line => !state.hidden.has(line.run) && !this.off.has(line)).map(line => {
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

  /** Draw new values of the same lines; cursor and range stay. */
  update() {
    if (!this.visible || !this.chart) return this.refresh();
    this.shown = this.drawn();
    this.chart.setData(this.columns(this.shown));
    this.readOut();
  }

  columns(drawn) {
    const positive = ys => this.log ? ys.map(y => y > 0 ? y : null) : ys;
    const tables = drawn.map(each => [each.xs, positive(each.ys)]);
    if (this.faint()) tables.push(...drawn.map(each => [each.xs, positive(each.raw)]));
    return uPlot.join(tables);
  }

  /** The values before smoothing are drawn, too. */
  faint() {
    return state.smoothing > 0 && !this.plot.stacked && !this.plot.lines.some(line => line.band !== null);
  }

  options(drawn) {
    const {plot} = this, grid = {stroke: faded("#888888", 0.22), width: 1};
    const series = drawn.map(({line}) => ({
      stroke: colour(line.colour), width: line.band !== null || line.dash ? 1.2 : 1.8, dash: DASHES[line.dash % 4],
      points: {size: 7, fill: colour(line.colour),
        show: (u, at) => line.marked || u.data[at].filter(y => y !== null && y !== undefined).length < 3}}));
    if (plot.stacked && series.length) series[0].fill = faded(series[0].stroke, 0.6);
    const faint = this.faint() ? series.map(({stroke}) => ({stroke: faded(stroke, 0.28), width: 1, points: {show: false}})) : [];
    const axis = {stroke: css("--dim"), grid, ticks: {...grid, size: 4}, font: "11px system-ui, sans-serif"};
    const tiny = found => Math.max(...found.map(Math.abs)) < 0.01 ? 0.01 : 1e-3;  // ticks of one axis look alike
    const size = (u, values) => values ? 14 + 6.5 * Math.max(...values.map(value => String(value ?? "").length)) : 40;
    const across = state.x === "step" ? {incrs: STEPS, values: (u, found) => found.map(value => short(value))}
      : {incrs: TIMES, values: (u, found, axis, space, unit) => found.map(value => duration(value, unit))};
    return {
      width: this.width(), height: 190, series: [{}, ...series, ...faint], bands: this.bands(drawn), legend: {show: false},
      scales: {x: {time: false, range: () => horizontal()},
        y: {distr: this.log ? 3 : 1, range: () => this.vertical()}},
      axes: [{...axis, size: 26, ...across},
        {...axis, size, values: (u, found) => found.map(value => value === null ? "" : short(value, plot.percent, tiny(found)))}],
      cursor: {sync: {key: "all", scales: ["x", null]}, drag: {x: true, y: false, setScale: false}, y: false,
        points: {size: 6}, bind: {dblclick: () => () => zoom(null)}},
      hooks: {setCursor: [() => this.readOut()], setSelect: [u => this.selected(u)],
        drawClear: [u => drawEpisodes(u, plot)], draw: [u => drawMarks(u, plot)],
        ready: [u => u.over.addEventListener("click", event => this.picked(u, event))]}};
  }

  bands(drawn) {
    if (this.plot.stacked)
      return drawn.slice(1).map(({line}, at) => ({series: [at + 2, at + 1], fill: faded(colour(line.colour), 0.6)}));
    return drawn.flatMap(({line}, at) => {
      const below = line.band === null ? -1 : drawn.findIndex(each =>
        each.line === this.plot.lines[this.plot.lines.indexOf(line) + line.band]);
      return below < 0 ? [] : [{series: [at + 1, below + 1], fill: faded(colour(line.colour), 0.16 / Math.sqrt(data.runs.length))}];
    });
  }

  /** The vertical range, and a note of how many points are beyond it. */
  vertical() {
    const [min, max] = horizontal(), {stacked} = this.plot, alike = new Map(), all = [];
    for (const {line, xs, ys, raw} of this.shown) {
      const values = (stacked ? ys : raw).filter((y, i) => y !== null && xs[i] >= min && xs[i] <= max);
      const fit = this.log ? values.filter(y => y > 0) : values;
      all.push(...values);
      if (fit.length) alike.set(line.name, [...alike.get(line.name) ?? [], state.whole || stacked || this.log
        ? extent(fit.map(y => [y, y])) : usual(fit)]);
    }
    const whole = state.whole || this.log;
    let [low, high] = extent([...alike.values()].map(whole ? extent : common));
    if (!alike.size) [low, high] = this.log ? [0.1, 1] : [0, 1];
    else if (this.log) [low, high] = low < high ? [low / 1.2, high * 1.2] : [low / 2, high * 2];
    else {
      const margin = (high - low) * 0.06 || Math.abs(high) * 0.1 || 0.1;
      [low, high] = [stacked ? 0 : low - margin, high + margin];
    }
    const beyond = all.filter(y => y < low || y > high).length;
    this.note.hidden = !beyond;
    this.note.textContent = (beyond === 1 ? "1 point is " : `${beyond} points are `) +
      (this.log ? "not above 0 and not drawn" : "beyond; Whole range shows them");
    return [low, high];
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
    if (!this.dragged && event.pointerType !== "touch" && u.cursor.idx !== null) on.pick(u.data[0][u.cursor.idx]);
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
    else if (event.key === "Enter") on.pick(xs[at]);
    else return;
    event.preventDefault();
  }

  /** A button for each line; where several runs have several figures each, a row for a figure and a column for a run. */
  drawLegend() {
    const lines = this.plot.lines.filter(line => !state.hidden.has(line.run)), names = new Set(lines.map(line => line.name));
    const runs = [...new Set(lines.map(line => line.run))];
    this.values = new Map(lines.map(line => [line, make("b")]));
    const button = (name, own, ...more) => {
      const item = make("button", {type: "button", "aria-pressed": !this.off.has(own[0]), title: "hide or show"}, name, ...more);
      item.addEventListener("click", () => {
        const hide = !this.off.has(own[0]), at = [...this.legend.querySelectorAll("button")].indexOf(item);
        for (const line of own) hide ? this.off.add(line) : this.off.delete(line);
        this.refresh();
        this.legend.querySelectorAll("button")[at].focus();
      });
      return item;
    };
    if (runs.length < 2 || names.size < 2) {
      this.legend.replaceChildren(...lines.map(line => button(this.sign(line, colour(line.colour)), [line],
        names.size < 2 && data.runs.length > 1 ? data.runs[line.run].name : line.name, this.values.get(line))));
      return;
    }
    const head = runs.map(run => make("th", {}, make("i", {class: `c${run % 8}`}), data.runs[run].name));
    const rows = [...names].map(name => {
      const own = lines.filter(line => line.name === name);
      const cells = runs.map(run => make("td", {}, this.values.get(own.find(line => line.run === run)) ?? "–"));
      return make("tr", {}, make("td", {}, button(this.sign(own[0], css("--dim")), own, name)), ...cells);
    });
    this.legend.replaceChildren(make("table", {}, make("thead", {}, make("tr", {}, make("th"), ...head)), make("tbody", {}, ...rows)));
  }

  sign(line, stroke) {
    return drawing("svg", {width: 22, height: 8}, drawing("line", {x1: 0, x2: 22, y1: 4, y2: 4, stroke,
      "stroke-width": this.plot.stacked ? 8 : 2.5, "stroke-dasharray": DASHES[line.dash % 4].join(" ") || "none"}));
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
    const said = x === Infinity ? "" : state.x === "step" ? ` · step ${short(x)}` : ` · ${duration(x)}`;
    this.element.querySelector("small").textContent = this.plot.note + said;
  }
}

function zoom(ends) {
  state.zoom = ends;
  on.zoom(ends);
  const [min, max] = horizontal();
  for (const figure of figures)
    if (figure.visible && figure.chart) figure.chart.setScale("x", {min, max}); else figure.fresh = false;
}

/** The runs that a plot shows, with their numbers. */
const runsOf = plot => [...data.runs.entries()].filter(([at]) => !state.hidden.has(at) && plot.lines.some(line => line.run === at));

/** Shade the steps at which a figure was out of its usual range: its own plot as a whole, others at their lower edge. */
function drawEpisodes(u, plot) {
  const {ctx, bbox} = u, {min, max} = u.scales.x;
  for (const [at, run] of runsOf(plot))
    for (const {key, ends} of run.episodes ?? []) {
      const [first, last] = places({run: at, xs: ends});
      if (last < min || first > max) continue;
      const [from, to] = [Math.max(min, first), Math.min(max, last)].map(x => u.valToPos(x, "x", true));
      const own = plot.lines.some(line => line.key === key), height = own ? bbox.height : 4 * devicePixelRatio;
      ctx.fillStyle = faded(data.runs.length > 1 ? colour(at) : css("--bad"), own ? 0.13 : 0.5);
      ctx.fillRect(from, bbox.top + bbox.height - height, Math.max(to - from, 2 * devicePixelRatio), height);
    }
}

/** A line where a run was resumed. */
function drawMarks(u, plot) {
  const {ctx, bbox} = u, scale = devicePixelRatio;
  ctx.save();
  for (const [at, run] of runsOf(plot))
    for (const x of places({run: at, xs: run.resumed ?? []})) {
      if (x < u.scales.x.min || x > u.scales.x.max) continue;
      const left = Math.round(u.valToPos(x, "x", true));
      ctx.strokeStyle = ctx.fillStyle = data.runs.length > 1 ? colour(at) : css("--dim");
      ctx.lineWidth = scale;
      ctx.setLineDash([2 * scale, 3 * scale]);
      ctx.beginPath(); ctx.moveTo(left, bbox.top); ctx.lineTo(left, bbox.top + bbox.height); ctx.stroke();
      ctx.font = `${10 * scale}px system-ui, sans-serif`;
      const right = left < bbox.left + bbox.width * 0.8;
      ctx.textAlign = right ? "left" : "right";
      ctx.fillText("resumed", left + (right ? 3 : -3) * scale, bbox.top + 10 * scale);
    }
  ctx.restore();
}

function refreshAll() {
  for (const figure of figures) figure.refresh();
}

/** Put a figure for each plot into `parent`, section by section; a plot is drawn when it comes near the screen. */
function buildFigures(parent) {
  const sections = new Map(), of = element => figures.find(each => each.element === element);
  const seen = new IntersectionObserver(entries => entries.forEach(entry => {
    const figure = of(entry.target);
    figure.visible = entry.isIntersecting;
    if (figure.visible) { figure.draw(); figure.resize(); }
  }), {rootMargin: "300px"});
  const sized = new ResizeObserver(entries => entries.forEach(entry => of(entry.target).resize()));
  for (const plot of data.plots) {
    if (!sections.has(plot.section)) {
      const grid = make("div", {class: "figures"}), count = data.plots.filter(each => each.section === plot.section).length;
      parent.append(plot.section === "More metrics"
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
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", refreshAll);
}
