// Time over size, one line an algorithm, both axes by powers; and who wins where.

import { bytes, drawing, duration, h, s } from "./dom.js";

/** @typedef {{name: string, times: number[]}} Curve */
/** @typedef {{collective: string, topology: string, n: number, sizes: number[], bound: number[],
 *   curves: Curve[], winners: string[], crossovers: {size: number, from: string, to: string}[]}} Curves */

const WIDTH = 900;
const HEIGHT = 460;
const BOX = { left: 76, right: 690, top: 18, bottom: 380 };

/**
 * The whole view: a chart and the same in words.
 * @param {Curves} told
 */
export function curves(told) {
  return h("section", { class: "curves", "aria-label": "Costs over sizes" }, chart(told), inWords(told));
}

/**
 * The lines that get a colour and a name: all winners, and the runners-up for the largest size.
 * @param {Curves} told
 */
function main(told) {
  const winners = [...new Set(told.winners)];
  const last = told.sizes.length - 1;
  const others = told.curves
    .filter((curve) => !winners.includes(curve.name))
    .sort((a, b) => a.times[last] - b.times[last]);
  return [...winners, ...others.map((curve) => curve.name)].slice(0, Math.max(winners.length, 8));
}

/** @param {Curves} told */
function chart(told) {
  const all = [...told.curves.flatMap((curve) => curve.times), ...told.bound].filter((t) => t > 0);
  const [low, high] = [Math.log10(Math.min(...all)), Math.log10(Math.max(...all))];
  const [first, last] = [Math.log2(told.sizes[0]), Math.log2(told.sizes[told.sizes.length - 1])];
  /** @param {number} size */
  const x = (size) => BOX.left + ((Math.log2(size) - first) / (last - first)) * (BOX.right - BOX.left);
  /** @param {number} time */
  const y = (time) => BOX.bottom - ((Math.log10(Math.max(time, 1e-6)) - low) / (high - low || 1)) * (BOX.bottom - BOX.top);
  /** @param {number[]} times */
  const line = (times) => `M${times.map((time, k) => `${x(told.sizes[k]).toFixed(1)} ${y(time).toFixed(1)}`).join("L")}`;

  const label = `Time over size of ${told.curves.length} algorithms for ${told.collective} on ${told.topology}`;
  const node = drawing(WIDTH, HEIGHT, label, 0.6);
  for (let power = Math.ceil(low); power <= Math.floor(high); power += 1) {
    node.append(
      s("line", { class: "rule", x1: BOX.left, x2: BOX.right, y1: y(10 ** power), y2: y(10 ** power) }),
      s("text", { class: "small", x: BOX.left - 8, y: y(10 ** power) + 4, "text-anchor": "end" }, duration(10 ** power)),
    );
  }
  told.sizes.forEach((size, k) => {
    if (k % 2) return;
    node.append(
      s("line", { class: "rule", x1: x(size), x2: x(size), y1: BOX.top, y2: BOX.bottom }),
      s("text", { class: "small", x: x(size), y: BOX.bottom + 18, "text-anchor": "middle" }, bytes(size)),
    );
  });
  node.append(s("path", { class: "bound", d: line(told.bound) }));
  const named = main(told);
  for (const curve of told.curves) {
    if (!named.includes(curve.name)) node.append(s("path", { class: "curve", d: line(curve.times) }, s("title", {}, curve.name)));
  }
  node.append(...labels(told, named, y, line), ...band(told, named, x));
  return node;
}

/**
 * The named lines, and their names at the right, none on top of another.
 * @param {Curves} told
 * @param {string[]} named
 * @param {(time: number) => number} y
 * @param {(times: number[]) => string} line
 */
function labels(told, named, y, line) {
  const last = told.sizes.length - 1;
  const ends = told.curves
    .filter((curve) => named.includes(curve.name))
    .map((curve) => ({ curve, at: y(curve.times[last]) }))
    .sort((a, b) => a.at - b.at);
  ends.forEach((end, k) => {
    if (k) end.at = Math.max(end.at, ends[k - 1].at + 16);
  });
  const over = Math.max(0, (ends[ends.length - 1]?.at ?? 0) - BOX.bottom);
  return ends.flatMap(({ curve, at }) => {
    const colour = named.indexOf(curve.name) % 16;
    const wins = told.winners.includes(curve.name);
    return [
      s("path", { class: `curve named l${colour}${wins ? " wins" : ""}`, d: line(curve.times) }),
      s("line", { class: `curve l${colour}`, x1: BOX.right, y1: y(curve.times[last]), x2: BOX.right + 12, y2: at - over }),
      s("text", { class: "small strong", x: BOX.right + 16, y: at - over + 4 }, `${curve.name}${wins ? " ★" : ""}`),
    ];
  });
}

/**
 * Which algorithm is the fastest, as a band below.
 * @param {Curves} told
 * @param {string[]} named
 * @param {(size: number) => number} x
 */
function band(told, named, x) {
  const stops = [told.sizes[0], ...told.crossovers.map((cross) => cross.size), told.sizes[told.sizes.length - 1]];
  const who = [told.winners[0], ...told.crossovers.map((cross) => cross.to)];
  return who.flatMap((name, k) => {
    const [from, to] = [x(stops[k]), x(stops[k + 1])];
    const room = to - from > 7 * name.length + 8;
    return [
      s("rect", { class: `r${named.indexOf(name) % 16}`, x: from, y: BOX.bottom + 34, width: Math.max(0, to - from - 1), height: 22, rx: 4 }),
      s("text", { class: "letter", x: (from + to) / 2, y: BOX.bottom + 49 }, room ? name : ""),
    ];
  });
}

/** @param {Curves} told */
function inWords(told) {
  const lines = [`Up to the first crossover ${told.winners[0]} is the fastest of ${told.curves.length}.`];
  for (const cross of told.crossovers) {
    lines.push(`From about ${bytes(cross.size)} on, ${cross.to} is faster than ${cross.from}.`);
  }
  lines.push("★ wins somewhere; the dotted line is what nothing can beat on this topology; grey lines are the other algorithms.");
  return h("ul", { class: "moves" }, ...lines.map((text) => h("li", {}, text)));
}
