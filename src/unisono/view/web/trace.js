// A recorded trace (Chrome's JSON, also gzipped) as lanes: read here, sent nowhere.

import { drawing, duration, h, s } from "./dom.js";
import { nice } from "./timeline.js";

/** @typedef {{ph: string, name?: string, pid?: number | string, tid?: number | string, ts?: number,
 *   dur?: number, id?: number | string, args?: Record<string, unknown>}} Event */
/** @typedef {{name: string, start: number, end: number, args: Record<string, unknown>}} Slice */
/** @typedef {{name: string, slices: Slice[]}} Lane */
/** @typedef {{lanes: Lane[], arrows: {from: [number, number], to: [number, number]}[], start: number,
 *   end: number}} Trace */

const WIDTH = 1000;
const LEFT = 190;
const LANE = 26;
const TOP = 26;
const MOST = 6000;

/**
 * The events of a file.
 * @param {File} file
 * @returns {Promise<Event[]>}
 */
export async function events(file) {
  const raw = new Uint8Array(await file.arrayBuffer());
  let body = file.stream();
  // Older compilers do not know this name, which all browsers have.
  const Unzip = /** @type {any} */ (globalThis).DecompressionStream;
  if (raw[0] === 0x1f && raw[1] === 0x8b) body = body.pipeThrough(new Unzip("gzip"));
  const parsed = JSON.parse(await new Response(body).text());
  const found = Array.isArray(parsed) ? parsed : parsed?.traceEvents;
  if (!Array.isArray(found)) throw new Error("no traceEvents in it: expected a trace in Chrome's format");
  return found;
}

/**
 * Lanes by process and thread, in the order of their names; times in microseconds.
 * @param {Event[]} all
 * @returns {Trace}
 */
export function arranged(all) {
  /** @type {Map<string, Lane & {order: (number | string)[]}>} */
  const lanes = new Map();
  /** @type {Map<string, string>} */
  const names = new Map();
  for (const event of all) {
    if (event.ph !== "M" || typeof event.args?.name !== "string") continue;
    if (event.name === "process_name") names.set(`${event.pid}`, event.args.name);
    if (event.name === "thread_name") names.set(`${event.pid}/${event.tid}`, event.args.name);
  }
  const slices = all.filter((event) => event.ph === "X" && Number.isFinite(event.ts));
  for (const { pid = 0, tid = 0, name = "", ts = 0, dur = 0, args = {} } of slices) {
    const key = `${pid}/${tid}`;
    const owner = (names.get(`${pid}`) ?? `process ${pid}`).replace(/ \(.*\)$/, "");
    const title = `${owner}, ${names.get(key) ?? tid}`;
    const lane = lanes.get(key) ?? { name: title, slices: [], order: [pid, tid] };
    lane.slices.push({ name, start: ts, end: ts + Math.max(0, dur), args });
    lanes.set(key, lane);
  }
  const sorted = [...lanes].sort(([, a], [, b]) => (`${a.order}`).localeCompare(`${b.order}`, undefined, { numeric: true }));
  const place = new Map(sorted.map(([key], at) => [key, at]));
  const starts = new Map(all.filter((event) => event.ph === "s").map((event) => [event.id, event]));
  /** @type {Trace["arrows"]} */
  const arrows = [];
  for (const end of all.filter((event) => event.ph === "f")) {
    const begin = starts.get(end.id);
    const [a, b] = [place.get(`${begin?.pid}/${begin?.tid}`), place.get(`${end.pid}/${end.tid}`)];
    if (begin && a !== undefined && b !== undefined) arrows.push({ from: [begin.ts ?? 0, a], to: [end.ts ?? 0, b] });
  }
  let [start, end] = [Infinity, -Infinity];
  for (const { ts = 0, dur = 0 } of slices) {
    start = Math.min(start, ts);
    end = Math.max(end, ts + Math.max(0, dur));
  }
  return { lanes: sorted.map(([, lane]) => lane), arrows, start, end };
}

/**
 * The trace, with buttons, the wheel and keys to look closer and to go on.
 * @param {string} name the file's
 * @param {Trace} all
 */
export function trace(name, all) {
  if (!all.lanes.length) return h("p", { role: "alert" }, `${name}: no slices with a time in it; there is nothing to draw.`);
  const whole = Math.max(all.end - all.start, 1e-9);
  const total = all.lanes.reduce((sum, lane) => sum + lane.slices.length, 0);
  const place = h("div", { class: "lanes" });
  const range = h("span", { "aria-live": "polite" });
  let [from, to] = [all.start, all.start + whole];

  /**
   * @param {number} middle
   * @param {number} span
   */
  function show(middle, span) {
    const width = Math.min(whole, span);
    from = Math.max(all.start, Math.min(middle - width / 2, all.start + whole - width));
    to = from + width;
    const { node, left } = lanes(name, all, from, to);
    place.replaceChildren(node);
    const more = left ? ` ${left} more are there; look closer.` : "";
    range.textContent = `${duration(from - all.start)} to ${duration(to - all.start)}.${more}`;
  }
  const bar = h("p", { class: "buttons-in-words" });
  /** @type {[string, number, number][]} */
  const ways = [["closer", 0, 0.5], ["wider", 0, 2], ["earlier", -0.5, 1], ["later", 0.5, 1], ["all", 0, Infinity]];
  for (const [word, turn, by] of ways) {
    const button = h("button", { type: "button" }, word);
    button.addEventListener("click", () => show((from + to) / 2 + turn * (to - from), (to - from) * by));
    bar.append(button, " ");
  }
  bar.append(range);
  place.addEventListener("wheel", (event) => {
    const shape = place.querySelector("svg")?.getScreenCTM();
    if (!shape || event.ctrlKey) return;
    event.preventDefault();
    if (event.shiftKey || Math.abs(event.deltaX) > Math.abs(event.deltaY)) {
      show((from + to) / 2 + Math.sign(event.deltaX || event.deltaY) * 0.1 * (to - from), to - from);
      return;
    }
    // What is under the pointer stays there.
    const part = Math.min(Math.max(((event.clientX - shape.e) / shape.a - LEFT) / (WIDTH - LEFT - 12), 0), 1);
    const [under, span] = [from + part * (to - from), Math.min(whole, (to - from) * (event.deltaY < 0 ? 0.8 : 1.25))];
    show(under + (0.5 - part) * span, span);
  }, { passive: false });
  /** @type {Record<string, [number, number]>} */
  const keys = { w: [0, 0.8], s: [0, 1.25], a: [-0.2, 1], d: [0.2, 1] };
  const panel = h("div", { class: "panel", tabindex: 0, role: "region", "aria-label": "Trace" });
  panel.addEventListener("keydown", (event) => {
    const way = keys[event.key.toLowerCase()];
    if (!way || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    show((from + to) / 2 + way[0] * (to - from), (to - from) * way[1]);
  });
  show(from + whole / 2, whole);
  const about = `${name}: ${total} slices in ${all.lanes.length} lanes over ${duration(whole)}, ${all.arrows.length} arrows from send to receive.`;
  const keysInWords = "Wheel or W and S: closer, wider. Shift and wheel, or A and D: earlier, later.";
  panel.append(h("p", {}, about), bar, h("p", { class: "keys" }, keysInWords), place);
  return panel;
}

/**
 * What lies between two times; and how much of it is too much to draw.
 * @param {string} name
 * @param {Trace} all
 * @param {number} from
 * @param {number} to
 */
function lanes(name, all, from, to) {
  const height = TOP + all.lanes.length * LANE + 30;
  const node = drawing(WIDTH, height, `${name}: ${all.lanes.length} lanes, ${duration(to - from)}`, 0.6);
  const scale = (WIDTH - LEFT - 12) / (to - from);
  /** @param {number} at */
  const x = (at) => LEFT + (Math.min(Math.max(at, from), to) - from) * scale;
  const every = nice((to - from) / 8);
  for (let at = Math.ceil((from - all.start) / every) * every; at <= to - all.start; at += every) {
    const here = x(all.start + at);
    node.append(
      s("line", { class: "rule", x1: here, x2: here, y1: TOP - 4, y2: height - 24 }),
      s("text", { class: "small", x: here, y: 14, "text-anchor": "middle" }, duration(at)),
    );
  }
  const kinds = [...new Set(all.lanes.flatMap((lane) => lane.slices.map((slice) => kind(slice))))];
  let [drawn, left] = [0, 0];
  all.lanes.forEach((lane, k) => {
    const y = TOP + k * LANE;
    node.append(s("text", { class: "small", x: LEFT - 10, y: y + 16, "text-anchor": "end" }, lane.name));
    for (const slice of lane.slices) {
      if (slice.end < from || slice.start > to) continue;
      if (drawn >= MOST) {
        left += 1;
        continue;
      }
      drawn += 1;
      const wide = Math.max(1, x(slice.end) - x(slice.start) - 0.6);
      const about = Object.entries(slice.args).map(([key, value]) => `${key} ${value}`).join(", ");
      const title = s("title", {}, `${slice.name}: ${duration(slice.end - slice.start)} ${about}`);
      node.append(s("rect", { class: `bar r${kinds.indexOf(kind(slice)) % 16}`, x: x(slice.start), y: y + 3, width: wide, height: LANE - 6, rx: 2 }, title));
      if (wide > 7.4 * slice.name.length + 4) {
        node.append(s("text", { class: "letter tiny", x: x(slice.start) + wide / 2, y: y + 17 }, slice.name));
      }
    }
  });
  const seen = all.arrows.filter((arrow) => arrow.to[0] >= from && arrow.from[0] <= to).slice(0, MOST);
  for (const arrow of seen) {
    const y = /** @param {number} lane */ (lane) => TOP + lane * LANE + LANE / 2;
    node.append(s("line", { class: "flow", x1: x(arrow.from[0]), y1: y(arrow.from[1]), x2: x(arrow.to[0]), y2: y(arrow.to[1]) }));
  }
  return { node, left };
}

/**
 * What a slice is coloured by: its name without numbers.
 * @param {Slice} slice
 */
function kind(slice) {
  return slice.name.replace(/[0-9]+/g, "#");
}
