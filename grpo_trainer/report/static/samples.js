"use strict";
// Samples by step and by text; at its end the page is built.

const SEPARATOR = "\u001f", SAME = 80, UNIT = 0.04, MOST_FOUND = 60, STRONGEST = 0.7;

class Samples {
  constructor() {
    this.form = document.getElementById("find");
    if (!this.form) return;
    const {elements} = this.form;
    if (data.samples.length > 1) this.form.querySelector(".of-runs").hidden = false;
    data.samples.forEach((each, at) => elements.run.append(make("option", {value: at}, data.runs[each.run].name)));
    elements.before.addEventListener("click", () => this.move(-1));
    elements.after.addEventListener("click", () => this.move(1));
    this.form.addEventListener("submit", event => event.preventDefault());
    this.form.addEventListener("input", event => event.target === elements.run ? this.choose() : this.show());
    this.choose();
  }

  choose() {
    this.own = data.samples[Number(this.form.elements.run.value)];
    this.steps = [...new Set(this.own.samples.map(each => each.step))];
    this.form.elements.step.replaceChildren(...this.steps.map(step => make("option", {value: step}, String(step))));
    this.form.elements.step.value = this.steps[this.steps.length - 1];
    this.show();
  }

  move(by) {
    const {step} = this.form.elements;
    step.selectedIndex = Math.max(0, Math.min(this.steps.length - 1, step.selectedIndex + by));
    this.show();
  }

  /** Show the samples of the step nearest to a place in the plots. */
  near(wanted) {
    if (!this.form) return;
    this.form.elements.text.value = "";
    this.form.elements.step.value = this.steps.reduce((best, step) =>
      Math.abs(step - wanted) < Math.abs(best - wanted) ? step : best, this.steps[0]);
    this.show();
    document.getElementById("samples").scrollIntoView({block: "start"});
  }

  show() {
    const {elements} = this.form, text = elements.text.value.toLowerCase(), step = Number(elements.step.value);
    const words = sample => (sample.prompt + sample.pieces.replaceAll(SEPARATOR, "")).toLowerCase();
    const found = this.own.samples.filter(each => text ? words(each).includes(text) : each.step === step);
    const [, down, key] = /^(-?)(.*)$/.exec(elements.order.value);
    const value = sample => key === "length" ? sample.ratios.length + sample.cut : sample.reward;
    if (key) found.sort((a, b) => (down ? -1 : 1) * (value(a) - value(b)));
    document.getElementById("found").replaceChildren(...found.slice(0, MOST_FOUND).map(sampleCard));
    const here = this.own.samples.length, all = this.own.of;
    elements.count.value = `${found.length} of ${here} samples` +
      (found.length > MOST_FOUND ? `, the first ${MOST_FOUND} are shown` : "") +
      (here < all ? `; the page holds ${here} of ${all}, samples.jsonl all of them` : "");
  }
}

function sampleCard(sample) {
  const sign = sample.advantage > 0 ? "good" : sample.advantage < 0 ? "bad" : "dim";
  const answer = sample.pieces.replaceAll(SEPARATOR, "");
  const whose = [`group ${sample.group}`, sample.version === null ? "" : `v${sample.version}`,
    sample.environment === null ? "" : sample.environment].filter(Boolean).join(", ");
  const summary = make("summary", {}, `Step ${sample.step}: reward `, make("b", {}, short(sample.reward)), ", advantage ",
    make("b", {class: sign}, (sample.advantage > 0 ? "+" : "") + sample.advantage.toFixed(2)), " ", make("small", {}, whose),
    " ", make("span", {class: "dim"}, `${sample.prompt.slice(-40)} → ${answer.slice(0, 80)}`));
  const card = make("details", {class: "sample"}, summary);
  card.addEventListener("toggle", () => card.children.length > 1 || card.append(make("pre", {class: "dim"}, sample.prompt),
    make("pre", {}, ...tokens(sample), sample.cut ? make("span", {class: "dim"}, ` … ${sample.cut} more tokens`) : "")));
  return card;
}

function tokens(sample) {
  return sample.pieces.split(SEPARATOR).map((piece, at) => {
    const sign = sample.ratios[at];
    if (sign === "!") return make("span", {class: "u"}, piece);
    if (sign === undefined || sign === "~") return make("span", {}, piece);
    const change = (sign.charCodeAt(0) - SAME) * UNIT, step = Math.min(4, Math.round(4 * Math.abs(change) / STRONGEST));
    const title = "ratio " + Math.exp(change).toPrecision(2);
    return make("span", {class: step ? (change > 0 ? "p" : "m") + step : "", title}, piece);
  });
}

buildFigures(document.getElementById("plots"));
bindControls();
const samples = new Samples();
on.pick = x => samples.near(stepAt(x));
document.body.dataset.ready = "yes";
