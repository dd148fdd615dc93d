// What each link has to do over time, as lanes; and on the topology at one moment.

import { bandwidth, bytes, drawing, duration, h, s, set } from "./dom.js";
import { network } from "./network.js";
import { nice } from "./timeline.js";

/** @typedef {{name: string, kind: string, src: number, dst: number, nbytes: number, bandwidth: number, used: number,
 *   use: number[]}} Link */
/** @typedef {{title: string, time: number, links: Link[], all: number, map: import("./story.js").Topology}} Loads */

const WIDTH = 900;
const LEFT = 190;
const RIGHT = 60;
const TOP = 10;
const LANE = 15;
const MOST = 64;

/** @param {number} part */
const percent = (part) => `${Math.round(100 * part)} %`;

/** @param {Loads} loads */
export function links(loads) {
  if (!loads.links.length) return h("p", {}, `${loads.title}: no link carries anything.`);
  const columns = loads.links[0].use.length;
  const map = network(loads.map, `The links of ${loads.map.name}`);
  const lines = loads.links.map((link) => {
    const made = s("path", { class: "load", d: map.line(link.src, link.dst) });
    map.over.append(made);
    return made;
  });
  const { node, head } = lanes(loads, (column) => show(column));
  const words = h("p", { class: "sentence", "aria-live": "polite" });
  const scrub = h("input", { class: "scrub", type: "range", min: 0, max: columns - 1, value: 0, "aria-label": "Time" });
  scrub.addEventListener("input", () => show(Number(scrub.value)));

  /** @param {number} column */
  function show(column) {
    scrub.value = String(column);
    const x = LEFT + ((column + 0.5) / columns) * (WIDTH - LEFT - RIGHT);
    set(head, { x1: x, x2: x });
    loads.links.forEach((link, k) => {
      const part = Math.min(1, link.use[column]);
      set(lines[k], { "stroke-opacity": part ? (0.2 + 0.8 * part).toFixed(3) : 0, "stroke-width": (1 + 5 * part).toFixed(2) });
    });
    const busy = loads.links.filter((link) => link.use[column] > 0.005);
    const most = busy.reduce((best, link) => (link.use[column] > best.use[column] ? link : best), busy[0]);
    const at = duration(((column + 0.5) / columns) * loads.time);
    words.textContent = busy.length
      ? `At ${at}: ${busy.length} of ${loads.all} links are in use, ${most.name} most, at ${percent(most.use[column])}.`
      : `At ${at}: no link is in use; messages are on their way.`;
  }

  const most = loads.links.reduce((best, link) => (link.used > best.used ? link : best));
  const facts = [
    `${loads.title} takes ${duration(loads.time)}, simulated. ${loads.links.length} of ${loads.all} links carry something.`,
    `${most.name} (${most.kind}, ${bandwidth(most.bandwidth)}) has most to do: ${bytes(most.nbytes)}, ${percent(most.used)} of what it could carry in this time.`,
    "A lane is one direction of a link; the darker, the more of its bandwidth is in use. Press into the lanes, or move the slider, for another moment.",
  ];
  if (loads.links.length > MOST) facts.push(`The ${MOST} links with most to do have lanes; all are in the drawing.`);
  show(0);
  const list = h("ul", { class: "moves" }, ...facts.map((text) => h("li", {}, text)));
  return h("section", { class: "links", "aria-label": "Load of links over time" }, words, h("div", { class: "panel" }, map.node), scrub, h("div", { class: "panel" }, node), list);
}

/**
 * @param {Loads} loads
 * @param {(column: number) => void} seek
 */
function lanes(loads, seek) {
  const shown = loads.links.slice(0, MOST);
  const columns = shown[0].use.length;
  const bottom = TOP + shown.length * LANE;
  const node = drawing(WIDTH, bottom + 30, `Use of ${shown.length} links over ${duration(loads.time)}`, 0.5);
  const wide = (WIDTH - LEFT - RIGHT) / columns;
  shown.forEach((link, k) => {
    const y = TOP + k * LANE;
    node.append(
      s("text", { class: "small", x: LEFT - 8, y: y + 11, "text-anchor": "end" }, link.name),
      s("rect", { class: "lane odd", x: LEFT, y: y + 1, width: wide * columns, height: LANE - 2 }),
      ...runs(link.use).map(({ from, to, part }) =>
        s("rect", { class: "heat", x: LEFT + from * wide, y: y + 1, width: (to - from) * wide + 0.2, height: LANE - 2, "fill-opacity": (0.12 + 0.88 * Math.min(1, part)).toFixed(3) }, s("title", {}, `${link.name}: ${percent(part)}`)),
      ),
      s("text", { class: "small", x: WIDTH - RIGHT + 6, y: y + 11 }, percent(link.used)),
    );
  });
  const every = nice(loads.time / 8);
  for (let at = 0; at <= loads.time * 1.0001; at += every) {
    const x = LEFT + (at / loads.time) * wide * columns;
    node.append(
      s("line", { class: "rule", x1: x, x2: x, y1: bottom, y2: bottom + 6 }),
      s("text", { class: "small", x, y: bottom + 20, "text-anchor": "middle" }, duration(at)),
    );
  }
  const head = s("line", { class: "playhead", y1: TOP - 4, y2: bottom + 4 });
  node.append(head);
  node.addEventListener("pointerdown", (event) => {
    const place = node.getScreenCTM();
    if (!place) return;
    const column = Math.floor(((event.clientX - place.e) / place.a - LEFT) / wide);
    seek(Math.min(columns - 1, Math.max(0, column)));
  });
  return { node, head };
}

/**
 * Neighbouring parts of the time with the same use, as one.
 * @param {number[]} use
 */
function runs(use) {
  /** @type {{from: number, to: number, part: number}[]} */
  const found = [];
  use.forEach((part, column) => {
    const last = found[found.length - 1];
    if (last && last.part === part) last.to = column + 1;
    else found.push({ from: column, to: column + 1, part });
  });
  return found.filter(({ part }) => part > 0);
}
