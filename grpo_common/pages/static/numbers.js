"use strict";
// What all plots of a page share, how numbers are written, and the ranges of axes. A page's own script fills `data` and `on`.

let data = {runs: [], plots: []};
const state = {x: "step", log: false, whole: false, smoothing: 0, zoom: null, hidden: new Set()};
const on = {zoom() {}, pick() {}};  // the horizontal range has changed; a place of it was chosen

function short(value, percent = false, tiny = 1e-3) {
  if (value === null || value === undefined) return "–";
  if (percent) return Number((100 * value).toPrecision(3)) + "%";
  const size = Math.abs(value);
  for (const [limit, divisor, unit] of [[1e9, 1e9, "G"], [1e6, 1e6, "M"], [1e4, 1e3, "k"]])
    if (size >= limit) return Number((value / divisor).toPrecision(3)) + unit;
  if (size > 0 && size < tiny) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(4)));
}

/** `90 s`, `12 min`, `3.4 h`; `unit` is the time to which it is exact. */
function duration(seconds, unit = seconds < 120 ? 1 : seconds < 7200 ? 60 : 3600) {
  if (unit < 60) return Math.round(seconds) + " s";
  return unit < 3600 ? Math.round(seconds / 60) + " min" : Number((seconds / 3600).toFixed(1)) + " h";
}

// places and ranges ----------------------------------------------------------------------------------------

/** What a line's steps are on the horizontal axis: a run with `seconds` says how many had passed at its `steps`. */
function places(line) {
  const {steps, seconds} = data.runs[line.run];
  if (state.x === "step" || !seconds) return line.xs;
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
const extent = ranges => [ranges.reduce((low, each) => Math.min(low, each[0]), Infinity),
  ranges.reduce((high, each) => Math.max(high, each[1]), -Infinity)];

/** From where to where a line's usual values go: a twentieth at either end does not count if it lies far from the rest. */
function usual(values) {
  const sorted = [...values].sort((a, b) => a - b), last = sorted[sorted.length - 1];
  if (sorted.length < FEW) return [sorted[0], last];
  const low = quantile(sorted, 0.05), high = quantile(sorted, 0.95), reach = high - low || last - sorted[0];
  return [Math.max(sorted[0], low - reach), Math.min(last, high + reach)];
}

/** One range for the same figure of several runs: a run that is far wider than the others does not stretch it. */
function common(ranges) {
  const spans = ranges.map(([low, high]) => high - low).sort((a, b) => a - b);
  const span = spans.slice(0, Math.ceil(spans.length / 2)).pop();
  if (!span) return extent(ranges);
  const [lowest, highest] = extent(ranges), [low, high] = extent(ranges.filter(([low, high]) => high - low <= 10 * span));
  return [Math.max(lowest, low - span), Math.min(highest, high + span)];
}

/** The horizontal range of all plots. */
function horizontal() {
  const [first, last] = state.zoom ?? bounds();
  return first < last ? [first, last] : [first - 1, last + 1];
}

function bounds() {
  const ends = data.runs.flatMap((run, at) => state.hidden.has(at) || !run.steps.length ? []
    : [places({run: at, xs: [run.steps[0], run.steps[run.steps.length - 1]]})]);
  return ends.length ? extent(ends) : [0, 1];
}
