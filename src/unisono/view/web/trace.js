// A recorded trace (Chrome's JSON, also gzipped) as lanes: read here, sent nowhere.

import { drawing, duration, h, s } from "./dom.js";
import { nice } from "./timeline.js";

/** @typedef {{ph: string, name?: string, pid?: number | string, tid?: number | string, ts?: number,
 *   dur?: number, id?: number | string, args?: Record<string, unknown>}} Event */
/** @typedef {{name: string, start: number, end: number, args: Record<string, unknown>}} Slice */
/** @typedef {{name: string, slices: Slice[]}} Lane */
/** @typedef {{lanes: Lane[], arrows: {from: [number, number], to: [number, number]}[], start: number,
 *   end: number, left: number}} Trace */

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
  const told = JSON.parse(await new Response(body).text());
  const found = Array.isArray(told) ? told : told?.traceEvents;
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
  const shown = slices.slice(0, MOST);
  for (const { pid = 0, tid = 0, name = "", ts = 0, dur = 0, args = {} } of shown) {
    const key = `${pid}/${tid}`;
    const title = `${names.get(`${pid}`) ?? `process ${pid}`}, ${names.get(key) ?? tid}`;
    const lane = lanes.get(key) ?? { name: title, slices: [], order: [pid, tid] };
    lane.slices.push({ name, start: ts, end: ts + Math.max(0, dur), args });
    lanes.set(key, lane);
  }
  const sorted = [...lanes].sort(([, a], [, b]) => (`${a.order}`).localeCompare(`${b.order}`, undefined, { numeric: true }));
  const place = new Map(sorted.map(([key], at) => [key, at]));
  const starts = new Map(all.filter((event) => event.ph === "s").map((event) => [event.id, event]));
  /** @type {Trace["arrows"]} */
  const arrows = [];
  for (const end of all.filter((event) => event.ph === "f").slice(0, MOST)) {
    const begin = starts.get(end.id);
    const [a, b] = [place.get(`${begin?.pid}/${begin?.tid}`), place.get(`${end.pid}/${end.tid}`)];
    if (begin && a !== undefined && b !== undefined) arrows.push({ from: [begin.ts ?? 0, a], to: [end.ts ?? 0, b] });
  }
  const times = shown.flatMap((event) => [event.ts ?? 0, (event.ts ?? 0) + (event.dur ?? 0)]);
  const [start, end] = times.reduce(([low, high], t) => [Math.min(low, t), Math.max(high, t)], [Infinity, -Infinity]);
  return { lanes: sorted.map(([, lane]) => lane), arrows, start, end, left: slices.length - shown.length };
}

/**
 * @param {string} name the file's
 * @param {Trace} trace
 */
export function trace(name, trace) {
  if (!trace.lanes.length) return h("p", { role: "alert" }, `${name}: no slices with a time in it; there is nothing to draw.`);
  const whole = Math.max(trace.end - trace.start, 1e-9);
  const height = TOP + trace.lanes.length * LANE + 30;
  const total = trace.lanes.reduce((sum, lane) => sum + lane.slices.length, 0);
  const node = drawing(WIDTH, height, `${name}: ${total} slices in ${trace.lanes.length} lanes, ${duration(whole)}`, 0.6);
  const scale = (WIDTH - LEFT - 12) / whole;
  /** @param {number} at */
  const x = (at) => LEFT + (at - trace.start) * scale;
  const every = nice(whole / 8);
  for (let at = 0; at <= whole * 1.0001; at += every) {
    node.append(
      s("line", { class: "rule", x1: LEFT + at * scale, x2: LEFT + at * scale, y1: TOP - 4, y2: height - 24 }),
      s("text", { class: "small", x: LEFT + at * scale, y: 14, "text-anchor": "middle" }, duration(at)),
    );
  }
  const kinds = [...new Set(trace.lanes.flatMap((lane) => lane.slices.map((slice) => kind(slice))))];
  trace.lanes.forEach((lane, k) => {
    const y = TOP + k * LANE;
    node.append(s("text", { class: "small", x: LEFT - 10, y: y + 16, "text-anchor": "end" }, lane.name));
    for (const slice of lane.slices) {
      const wide = Math.max(1, (slice.end - slice.start) * scale - 0.6);
      const about = Object.entries(slice.args).map(([key, value]) => `${key} ${value}`).join(", ");
      const title = s("title", {}, `${slice.name}: ${duration(slice.end - slice.start)} ${about}`);
      node.append(s("rect", { class: `bar r${kinds.indexOf(kind(slice)) % 16}`, x: x(slice.start), y: y + 3, width: wide, height: LANE - 6, rx: 2 }, title));
      if (wide > 7.4 * slice.name.length + 4) {
        node.append(s("text", { class: "letter tiny", x: x(slice.start) + wide / 2, y: y + 17 }, slice.name));
      }
    }
  });
  for (const { from, to } of trace.arrows) {
    const y = /** @param {number} lane */ (lane) => TOP + lane * LANE + LANE / 2;
    node.append(s("line", { class: "flow", x1: x(from[0]), y1: y(from[1]), x2: x(to[0]), y2: y(to[1]) }));
  }
  const more = trace.left ? ` The first ${MOST} slices are drawn; ${trace.left} more are in the file.` : "";
  return h("div", { class: "panel" }, h("p", {}, `${name}: ${total} slices in ${trace.lanes.length} lanes over ${duration(whole)}, ${trace.arrows.length} arrows from send to receive.${more}`), node);
}

/**
 * What a slice is coloured by: its name without numbers.
 * @param {Slice} slice
 */
function kind(slice) {
  return slice.name.replace(/[0-9]+/g, "#");
}
