// Predicted against published: a point for each row that others measured.

import { bytes, choice, drawing, duration, h, s, set } from "./dom.js";
import { table } from "./table.js";

/** source, what, size in bytes (0: none), measured, predicted, whether it was fitted on
 * @typedef {[string, string, number, number, number, boolean]} Row */
/** @typedef {{sources: Record<string, {url: string, about: string}>, collectives: Row[], training: Row[]}} Truth */
/** @typedef {"collectives" | "training"} Kind */

const WIDTH = 760;
const HEIGHT = 520;
const BOX = { left: 84, right: 740, top: 16, bottom: 462 };
/** The errors that nine in ten rows shall be below, as bands beside the diagonal. */
const BANDS = { collectives: 0.25, training: 0.2 };

/** @param {Truth} truth */
export function truth(truth) {
  const place = h("div");
  const about = h("p", { class: "sentence", "aria-live": "polite" });
  const kind = choice("truth-what", [["collectives", "collectives"], ["training", "training steps"]]);
  const half = choice("truth-rows", [["judged", "judged"], ["fitted", "fitted"], ["", "all"]]);
  const source = choice("truth-source", []);
  kind.field.addEventListener("change", offer);
  for (const { field } of [half, source]) field.addEventListener("change", draw);

  const chosen = () => truth[/** @type {Kind} */ (kind.field.value)];

  function offer() {
    const names = [...new Set(chosen().map((row) => row[0]))];
    source.field.replaceChildren(h("option", { value: "" }, "all"), ...names.map((name) => h("option", { value: name }, name)));
    draw();
  }

  function draw() {
    const rows = chosen().filter((row) => (!source.field.value || row[0] === source.field.value) && (!half.field.value || row[5] === (half.field.value === "fitted")));
    if (!rows.length) {
      place.replaceChildren(h("p", {}, "No such rows: a source with few of them is judged alone."));
      about.textContent = "";
      return;
    }
    const names = [...new Set(chosen().map((row) => row[0]))];
    const picture = chart(/** @type {Kind} */ (kind.field.value), rows, names, tell);
    place.replaceChildren(h("div", { class: "panel" }, picture), summaries(rows));
    tell(rows.reduce((worst, row) => (error(row) > error(worst) ? row : worst)), "Farthest off: ");
  }

  /**
   * @param {Row} row
   * @param {string} [before]
   */
  function tell(row, before = "") {
    const { url, about: where } = truth.sources[row[0]];
    const off = row[4] / row[3] - 1;
    const value = kind.field.value === "training" ? rate : seconds;
    const size = row[2] ? `, ${bytes(row[2])}` : "";
    const link = h("a", { href: url.split(" ")[0], rel: "noreferrer", target: "_blank" }, row[0]);
    const used = row[5] ? "fitted" : "judged";
    about.replaceChildren(`${before}${row[1]}${size}: published ${value(row[3])}, predicted ${value(row[4])}, ${(100 * off).toFixed(1)} % (${used}). `, link, ` (${where})`);
  }

  offer();
  const form = h("form", { class: "query", "aria-label": "Which rows" }, kind.label, source.label, half.label);
  form.addEventListener("submit", (event) => event.preventDefault());
  const how = "On the diagonal the simulator is right; the band is the error that nine in ten rows shall be below. Press a point, or go through them with the arrow keys.";
  return h("section", { class: "truth", "aria-label": "Predicted against published" }, form, about, place, h("p", { class: "keys" }, how));
}

/** @param {Row} row */
const error = (row) => Math.abs(row[4] / row[3] - 1);
/** @param {number} value */
const seconds = (value) => duration(value * 1e6);
/** @param {number} value */
const rate = (value) => `${Number(value.toPrecision(4)).toLocaleString("en")} tokens/s`;

/**
 * @param {Kind} kind
 * @param {Row[]} rows
 * @param {string[]} names
 * @param {(row: Row) => void} tell
 */
function chart(kind, rows, names, tell) {
  const all = rows.flatMap((row) => [row[3], row[4]]);
  const [low, high] = [Math.log10(Math.min(...all)) - 0.1, Math.log10(Math.max(...all)) + 0.1];
  /** @param {number} value */
  const part = (value) => (Math.log10(value) - low) / (high - low);
  /** @param {number} value */
  const x = (value) => BOX.left + Math.min(1, Math.max(0, part(value))) * (BOX.right - BOX.left);
  /** @param {number} value */
  const y = (value) => BOX.bottom - Math.min(1, Math.max(0, part(value))) * (BOX.bottom - BOX.top);
  const node = drawing(WIDTH, HEIGHT, `Predicted against published: ${rows.length} rows`, 0.5);
  set(node, { tabindex: 0 });
  const [from, to, off] = [10 ** low, 10 ** high, BANDS[kind]];
  const band = [[from, from * (1 + off)], [to / (1 + off), to], [to, to], [to, to * (1 - off)], [from / (1 - off), from], [from, from]];
  node.append(s("path", { class: "phase", d: `M${band.map(([a, b]) => `${x(a)} ${y(b)}`).join("L")}z` }));
  for (let power = Math.ceil(low); power <= high; power += 1) {
    const at = 10 ** power;
    const text = kind === "training" ? at.toLocaleString("en") : seconds(at);
    node.append(
      s("line", { class: "rule", x1: x(at), x2: x(at), y1: BOX.top, y2: BOX.bottom }),
      s("line", { class: "rule", x1: BOX.left, x2: BOX.right, y1: y(at), y2: y(at) }),
      s("text", { class: "small", x: x(at), y: BOX.bottom + 18, "text-anchor": "middle" }, text),
      s("text", { class: "small", x: BOX.left - 6, y: y(at) + 4, "text-anchor": "end" }, text),
    );
  }
  const unit = kind === "training" ? " (tokens/s)" : "";
  const middle = { x: (BOX.left + BOX.right) / 2, y: (BOX.top + BOX.bottom) / 2 };
  node.append(
    s("line", { class: "bound", x1: x(from), y1: y(from), x2: x(to), y2: y(to) }),
    s("text", { class: "small axis", x: middle.x, y: BOX.bottom + 40, "text-anchor": "middle" }, `published${unit}`),
    s("text", { class: "small axis", x: 14, y: middle.y, transform: `rotate(-90 14 ${middle.y})`, "text-anchor": "middle" }, `predicted${unit}`),
  );
  const sorted = [...rows].sort((a, b) => a[3] - b[3]);
  const points = sorted.map((row, k) => {
    const point = s("circle", { class: `point r${names.indexOf(row[0]) % 16}`, cx: x(row[3]), cy: y(row[4]), r: 4 }, s("title", {}, `${row[0]}: ${(100 * (row[4] / row[3] - 1)).toFixed(1)} %`));
    point.addEventListener("click", () => choose(k));
    return point;
  });
  node.append(...points);
  let shown = -1;

  /** @param {number} k */
  function choose(k) {
    points[shown]?.classList.remove("chosen");
    shown = Math.min(points.length - 1, Math.max(0, k));
    points[shown].classList.add("chosen");
    node.append(points[shown]);
    tell(sorted[shown]);
  }
  node.addEventListener("keydown", (event) => {
    const turn = { ArrowRight: 1, ArrowUp: 1, ArrowLeft: -1, ArrowDown: -1 }[event.key];
    if (!turn) return;
    event.preventDefault();
    choose(shown + turn);
  });
  return node;
}

/**
 * The errors of each source, as a table.
 * @param {Row[]} rows
 */
function summaries(rows) {
  const names = [...new Set(rows.map((row) => row[0]))];
  const lines = [...names.map((name) => ({ name, some: rows.filter((row) => row[0] === name) })), ...(names.length > 1 ? [{ name: "all", some: rows }] : [])];
  const cells = lines.map(({ name, some }) => {
    const errors = some.map(error).sort((a, b) => a - b);
    const [half, most] = [quantile(errors, 0.5), quantile(errors, 0.9)];
    return [{ text: name, value: name }, { text: `${some.length}`, value: some.length }, ...[half, most].map((value) => ({ text: `${(100 * value).toFixed(1)} %`, value }))];
  });
  return table("Errors, as parts of what was published", ["source", "rows", "median", "p90"], cells);
}

/**
 * @param {number[]} sorted
 * @param {number} part
 */
function quantile(sorted, part) {
  const at = part * (sorted.length - 1);
  const low = Math.floor(at);
  return sorted[low] + (at - low) * (sorted[Math.min(low + 1, sorted.length - 1)] - sorted[low]);
}
