"use strict";
// How the plots of a report are drawn is chosen here, and remembered.

data = JSON.parse(document.getElementById("data").textContent);
for (const plot of data.plots) for (const line of plot.lines) line.xs = data.places[line.xs];

/** The step at a place of the horizontal axis. */
function stepAt(x) {
  if (state.x === "step") return x;
  const {steps, seconds} = data.runs[0];
  return steps[seconds.reduce((best, each, i) => Math.abs(each - x) < Math.abs(seconds[best] - x) ? i : best, 0)];
}

// A page that is refreshed while a run goes on looks as it did before.

const remembered = "#controls [name]:not(button), #find [name=text], #find [name=order], [data-run], #plots > details";
const nameOf = each => each.name || each.dataset.run || each.tagName;
const chosen = each => each.type === "checkbox" ? "checked" : each.tagName === "DETAILS" ? "open" : "value";

function remember() {
  const found = Object.fromEntries([...document.querySelectorAll(remembered)].map(each => [nameOf(each), each[chosen(each)]]));
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
  for (const each of document.querySelectorAll(remembered))
    if (found && nameOf(each) in found) each[chosen(each)] = found[nameOf(each)];
}

function bindControls() {
  const form = document.getElementById("controls"), {elements} = form;
  const most = Math.max(0, ...data.runs.map(run => run.steps.length));
  elements.smoothing.value = most >= 60 ? 0.6 : 0;
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
  on.zoom = ends => {
    [elements.from.value, elements.to.value] = ends ? ends.map(end => Number(end.toPrecision(5))) : ["", ""];
    remember();
  };
  document.addEventListener("input", remember);
  document.addEventListener("toggle", remember, true);
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
}
