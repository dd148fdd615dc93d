// Time over size, one line an algorithm, both axes by powers; and who wins where.

import { bytes, drawing, duration, h, s } from "./dom.js";

/** @typedef {{name: string, times: number[]}} Curve */
/** @typedef {{collective: string, topology: string, n: number, sizes: number[], bound: number[],
 *   curves: Curve[], winners: string[], crossovers: {size: number, from: string, to: string}[]}} Curves */

const WIDTH = 900;
const HEIGHT = 476;
const BOX = { left: 96, right: 690, top: 18, bottom: 380 };
/** The least distance between the names of two lines. */
const APART = 16;

/**
 * The whole view: a chart and the same in words.
 * @param {Curves} comparison
 */
export function curves(comparison) {
  return h("section", { class: "curves", "aria-label": "Costs over sizes" }, chart(comparison), inWords(comparison));
}

/**
 * The lines that get a colour and a name: all winners, and the runners-up for the largest size.
 * @param {Curves} comparison
 */
function main(comparison) {
  const winners = [...new Set(comparison.winners)];
  const last = comparison.sizes.length - 1;
  const others = comparison.curves
    .filter((curve) => !winners.includes(curve.name))
    .sort((a, b) => a.times[last] - b.times[last]);
  return [...winners, ...others.map((curve) => curve.name)].slice(0, Math.max(winners.length, 8));
}

/** @param {Curves} comparison */
function chart(comparison) {
  const all = [...comparison.curves.flatMap((curve) => curve.times), ...comparison.bound].filter((t) => t > 0);
  const [low, high] = [Math.log10(Math.min(...all)), Math.log10(Math.max(...all))];
  const [first, last] = [Math.log2(comparison.sizes[0]), Math.log2(comparison.sizes[comparison.sizes.length - 1])];
  /** @param {number} size */
  const x = (size) => BOX.left + ((Math.log2(size) - first) / (last - first)) * (BOX.right - BOX.left);
  /** @param {number} time */
  const y = (time) => BOX.bottom - ((Math.log10(Math.max(time, 1e-6)) - low) / (high - low || 1)) * (BOX.bottom - BOX.top);
  /** @param {number[]} times */
  const line = (times) => `M${times.map((time, k) => `${x(comparison.sizes[k]).toFixed(1)} ${y(time).toFixed(1)}`).join("L")}`;

  const label = `Time over size of ${comparison.curves.length} algorithms for ${comparison.collective} on ${comparison.topology}`;
  const node = drawing(WIDTH, HEIGHT, label, 0.6);
  for (let power = Math.ceil(low); power <= Math.floor(high); power += 1) {
    node.append(
      s("line", { class: "rule", x1: BOX.left, x2: BOX.right, y1: y(10 ** power), y2: y(10 ** power) }),
      s("text", { class: "small", x: BOX.left - 8, y: y(10 ** power) + 4, "text-anchor": "end" }, duration(10 ** power)),
    );
  }
  comparison.sizes.forEach((size, k) => {
    if (k % 2) return;
    node.append(
      s("line", { class: "rule", x1: x(size), x2: x(size), y1: BOX.top, y2: BOX.bottom }),
      s("text", { class: "small", x: x(size), y: BOX.bottom + 18, "text-anchor": "middle" }, bytes(size)),
    );
  });
  const middle = { x: (BOX.left + BOX.right) / 2, y: (BOX.top + BOX.bottom) / 2 };
  node.append(
    s("text", { class: "small axis", x: middle.x, y: BOX.bottom + 38, "text-anchor": "middle" }, "size of the array on a rank"),
    s("text", { class: "small axis", x: 16, y: middle.y, transform: `rotate(-90 16 ${middle.y})`, "text-anchor": "middle" }, "time, simulated"),
    s("text", { class: "small axis", x: BOX.left - 8, y: BOX.bottom + 66, "text-anchor": "end" }, "fastest"),
    s("path", { class: "bound", d: line(comparison.bound) }),
  );
  const named = main(comparison);
  for (const curve of comparison.curves) {
    if (!named.includes(curve.name)) node.append(s("path", { class: "curve", d: line(curve.times) }, s("title", {}, curve.name)));
  }
  node.append(...labels(comparison, named, y, line), ...band(comparison, named, x));
  return node;
}

/**
 * The named lines and the bound, and their names at the right, none on top of another.
 * @param {Curves} comparison
 * @param {string[]} named
 * @param {(time: number) => number} y
 * @param {(times: number[]) => string} line
 */
function labels(comparison, named, y, line) {
  const last = comparison.sizes.length - 1;
  const ends = comparison.curves
    .filter((curve) => named.includes(curve.name))
    .concat([{ name: "lower bound", times: comparison.bound }])
    .map((curve) => ({ curve, at: y(curve.times[last]) }))
    .sort((a, b) => a.at - b.at);
  // Down where the one above is too near, then up again from the lower end.
  ends.forEach((end, k) => {
    if (k) end.at = Math.max(end.at, ends[k - 1].at + APART);
  });
  ends.reverse().forEach((end, k) => {
    end.at = Math.min(end.at, k ? ends[k - 1].at - APART : BOX.bottom);
  });
  return ends.flatMap(({ curve, at }) => {
    const colour = named.indexOf(curve.name) % 16;
    if (colour < 0) return [s("text", { class: "small", x: BOX.right + 16, y: at + 4 }, curve.name)];
    const wins = comparison.winners.includes(curve.name);
    return [
      s("path", { class: `curve named l${colour}${wins ? " wins" : ""}`, d: line(curve.times) }),
      s("line", { class: `curve l${colour}`, x1: BOX.right, y1: y(curve.times[last]), x2: BOX.right + 12, y2: at }),
      s("text", { class: "small strong", x: BOX.right + 16, y: at + 4 }, `${curve.name}${wins ? " ★" : ""}`),
    ];
  });
}

/**
 * Which algorithm is the fastest, as a band below.
 * @param {Curves} comparison
 * @param {string[]} named
 * @param {(size: number) => number} x
 */
function band(comparison, named, x) {
  const stops = [comparison.sizes[0], ...comparison.crossovers.map((cross) => cross.size), comparison.sizes[comparison.sizes.length - 1]];
  const who = [comparison.winners[0], ...comparison.crossovers.map((cross) => cross.to)];
  return who.flatMap((name, k) => {
    const [from, to] = [x(stops[k]), x(stops[k + 1])];
    const fits = to - from > 7 * name.length + 8;
    return [
      s("rect", { class: `r${named.indexOf(name) % 16}`, x: from, y: BOX.bottom + 50, width: Math.max(0, to - from - 1), height: 22, rx: 4 }),
      s("text", { class: "letter", x: (from + to) / 2, y: BOX.bottom + 65 }, fits ? name : ""),
    ];
  });
}

/** @param {Curves} comparison */
function inWords(comparison) {
  const lines = [`Up to the first crossover ${comparison.winners[0]} is the fastest of ${comparison.curves.length}.`];
  for (const cross of comparison.crossovers) {
    lines.push(`From about ${bytes(cross.size)} on, ${cross.to} is faster than ${cross.from}.`);
  }
  lines.push("★ wins somewhere; the dotted line is what nothing can beat on this topology; grey lines are the other algorithms.");
  return h("ul", { class: "moves" }, ...lines.map((text) => h("li", {}, text)));
}
