// Training strategies: which collective when, and what a rank holds meanwhile.
//
// Drawn is the order in which things began and ended, each as wide as the next: times of
// a small run would mostly show the machine it ran on.

import { bytes, drawing, h, s, set } from "./dom.js";

/** One thing that happened: computing (what is a part of the model) or communicating.
 * @typedef {{kind: "compute" | "comm", name: string, what: string, start: number, end: number, nbytes: number}} Happening */
/** @typedef {{at: number, parts: Record<string, number>}} Held */
/** @typedef {{name: string, about: string, sent: number, happenings: Happening[], memory: Held[]}} Strategy */
/** @typedef {{about: string, n: number, strategies: Strategy[]}} Strategies */

const WIDTH = 1000;
const LEFT = 96;
const ROW = 30;
const MEMORY = 170;
/** @type {Record<string, number>} */
const COLOURS = { Forward: 0, Backward: 3, Step: 2 };
const CALLS = ["all_reduce", "all_gather", "reduce_scatter", "send", "recv", "broadcast", "all_to_all", "reduce"];
const KINDS = ["parameters", "gathered", "gradients", "optimizer", "activations"];

/** @param {Strategies} data */
export function strategies(data) {
  const picture = h("div", { class: "panel", tabindex: 0, role: "tabpanel", "aria-label": "Strategy" });
  const list = h("div", { role: "tablist", class: "tabs", "aria-label": "Strategies" });
  const tabs = data.strategies.map((strategy, at) => {
    const tab = h("button", { type: "button", role: "tab" }, strategy.name);
    tab.addEventListener("click", () => show(at));
    tab.addEventListener("keydown", (event) => {
      const turn = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
      if (!turn) return;
      event.preventDefault();
      const next = (at + turn + tabs.length) % tabs.length;
      show(next);
      tabs[next].focus();
    });
    list.append(tab);
    return tab;
  });

  /** @param {number} at */
  function show(at) {
    tabs.forEach((tab, k) => set(tab, { "aria-selected": String(k === at), tabindex: k === at ? 0 : -1 }));
    picture.replaceChildren(...one(data.strategies[at]));
  }
  if (tabs.length) show(0);
  return h("section", { class: "strategies", "aria-label": "Training strategies" }, h("p", {}, data.about), list, picture);
}

/** @param {Strategy} strategy */
function one(strategy) {
  const sentence = h("p", { class: "sentence", "aria-live": "polite" });
  const slider = h("input", { type: "range", class: "scrub", min: 0, max: strategy.happenings.length - 1, step: 1, value: 0, "aria-label": "Event" });
  const where = h("span", { class: "number" });
  const { node, mark } = chart(strategy);
  const go = () => {
    const at = Number(slider.value);
    where.textContent = `Event ${at + 1} of ${strategy.happenings.length}`;
    sentence.textContent = describe(strategy, at);
    set(slider, { "aria-valuetext": sentence.textContent });
    mark(at);
  };
  slider.addEventListener("input", go);
  go();
  const order = h("ol", { class: "moves" }, ...strategy.happenings.map((_, at) => h("li", {}, describe(strategy, at))));
  return [
    h("p", {}, `${strategy.about} Each rank sent ${bytes(strategy.sent)} in this step.`),
    h("div", { class: "caption" }, h("div", { class: "where" }, where), sentence),
    node,
    slider,
    h("details", {}, h("summary", {}, "The whole order in words"), order),
  ];
}

/**
 * @param {Strategy} strategy
 * @param {number} at
 */
function describe(strategy, at) {
  const event = strategy.happenings[at];
  const during = strategy.happenings.find((other) => other.kind === "compute" && other !== event && other.start <= event.start && other.end > event.start);
  if (event.kind === "compute") return `${event.name} of ${event.what}.`;
  const ends = strategy.happenings.find((other) => other.kind === "compute" && other.end >= event.end);
  const begun = during ? ` begins during the ${during.name.toLowerCase()} of ${during.what}` : " begins";
  const done = ends && ends !== during ? `, and is done in the ${ends.name.toLowerCase()} of ${ends.what}` : "";
  return `${event.name} of ${bytes(event.nbytes)}${event.what ? ` (${event.what})` : ""}${begun}${done}.`;
}

/** @param {Strategy} strategy */
function chart(strategy) {
  const stops = [...new Set(strategy.happenings.flatMap((event) => [event.start, event.end]))].sort((a, b) => a - b);
  const last = stops[stops.length - 1];
  const wide = (WIDTH - LEFT - 14) / Math.max(stops.length - 1, 1);
  /** @param {number} at */
  const x = (at) => LEFT + wide * Math.max(0, stops.findIndex((stop) => stop >= Math.min(at, last)));
  const lanes = placed(strategy.happenings);
  const deep = 1 + Math.max(...lanes);
  const top = 24 + deep * ROW + 30;
  const node = drawing(WIDTH, top + MEMORY + 34, `${strategy.name}: ${strategy.happenings.length} events in their order, and memory meanwhile`, 0.6);
  node.append(s("text", { class: "small", x: LEFT - 10, y: 40, "text-anchor": "end" }, "computes"));
  if (deep > 1) node.append(s("text", { class: "small", x: LEFT - 10, y: 40 + ROW, "text-anchor": "end" }, "sends"));
  const calls = CALLS.filter((name) => strategy.happenings.some((event) => event.name === name));
  const signs = [...Object.entries(COLOURS), ...calls.map((name) => /** @type {[string, number]} */ ([name, 4 + CALLS.indexOf(name)]))];
  signs.forEach(([name, colour], k) => {
    node.append(
      s("rect", { class: `r${colour}`, x: LEFT + k * 118, y: 4, width: 12, height: 12, rx: 3 }),
      s("text", { class: "small", x: LEFT + k * 118 + 17, y: 14 }, name),
    );
  });
  const bars = strategy.happenings.map((event, k) => {
    const y = 24 + lanes[k] * ROW;
    const long = Math.max(2, x(event.end) - x(event.start) - 1);
    const colour = event.kind === "compute" ? COLOURS[event.name] ?? 2 : 4 + CALLS.indexOf(event.name);
    const bar = s("rect", { class: `bar r${colour}`, x: x(event.start), y, width: long, height: ROW - 6, rx: 3 }, s("title", {}, describe(strategy, k)));
    const text = event.kind === "compute" ? event.what : event.name;
    const label = s("text", { class: "letter tiny", x: x(event.start) + long / 2, y: y + 16 }, long > 6.6 * text.length + 4 ? text : "");
    node.append(bar, label);
    return bar;
  });
  node.append(...memory(strategy, top, x, last));
  const head = s("line", { class: "playhead", y1: 14, y2: top + MEMORY });
  node.append(head);
  /** @param {number} at */
  const mark = (at) => {
    bars.forEach((bar, k) => bar.classList.toggle("chosen", k === at));
    const middle = x(strategy.happenings[at].start);
    set(head, { x1: middle, x2: middle });
  };
  return { node, mark };
}

/**
 * Computing in the first lane; what travels in the first lane that is free.
 * @param {Happening[]} happenings
 */
function placed(happenings) {
  /** @type {number[]} */
  const busy = [];
  return happenings.map((event) => {
    if (event.kind === "compute") return 0;
    let lane = busy.findIndex((end) => end <= event.start);
    if (lane < 0) lane = Math.min(busy.length, 5);
    busy[lane] = Math.max(busy[lane] ?? 0, event.end);
    return lane + 1;
  });
}

/**
 * What a rank holds over time, kind upon kind.
 * @param {Strategy} strategy
 * @param {number} top
 * @param {(at: number) => number} x
 * @param {number} last
 */
function memory(strategy, top, x, last) {
  const held = new Set(strategy.memory.flatMap((moment) => Object.keys(moment.parts)));
  const parts = KINDS.filter((kind) => held.has(kind));
  const most = Math.max(...strategy.memory.map((moment) => Object.values(moment.parts).reduce((a, b) => a + b, 0)), 1);
  /** @param {number} nbytes */
  const y = (nbytes) => top + MEMORY - (nbytes / most) * (MEMORY - 12);
  /** @type {SVGElement[]} */
  const made = [s("text", { class: "small", x: LEFT - 10, y: top + 16, "text-anchor": "end" }, bytes(most)), s("text", { class: "small", x: LEFT - 10, y: top + MEMORY, "text-anchor": "end" }, "memory")];
  const below = strategy.memory.map(() => 0);
  parts.forEach((part, k) => {
    let up = "";
    let back = "";
    const colour = 8 + KINDS.indexOf(part);
    strategy.memory.forEach((moment, i) => {
      const from = below[i];
      below[i] += moment.parts[part] ?? 0;
      const until = strategy.memory[i + 1]?.at ?? last;
      up += `${up ? "L" : "M"}${x(moment.at)} ${y(below[i])}H${x(until)}`;
      back = `L${x(until)} ${y(from)}H${x(moment.at)}${back}`;
    });
    made.push(
      s("path", { class: `r${colour}`, d: `${up}${back}Z` }),
      s("rect", { class: `r${colour}`, x: LEFT + k * 170, y: top + MEMORY + 12, width: 14, height: 14, rx: 3 }),
      s("text", { class: "small", x: LEFT + k * 170 + 20, y: top + MEMORY + 24 }, part),
    );
  });
  return made;
}
