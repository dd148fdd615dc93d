// Who holds what: rank is a column, chunk a row; arrows are the transfers of the step.

import { segments, shape, slots } from "./cell.js";
import { drawing, heads, letter, s, set, unique } from "./dom.js";
import { eased, travels } from "./story.js";

/** @typedef {import("./story.js").Reel} Reel */
/** @typedef {import("./story.js").Scene} Scene */
/** @typedef {import("./story.js").Flight} Flight */
/** @typedef {import("./story.js").View} View */

const TOP = 40;
const ACROSS = 46;
const DOWN = 28;
/** How large what travels is beside a cell. */
const SMALL = 0.7;

/**
 * @param {Reel} reel
 * @param {boolean} beside whether another stands beside it
 * @returns {View}
 */
export function grid(reel, beside) {
  const { n, rows, reduces } = reel.story;
  const narrow = beside || innerWidth < 600;
  const form = shape(n, reduces, narrow, beside);
  const crowded = n > 8 || (beside && n > 6);
  const across = crowded ? 14 : narrow ? 22 : ACROSS;
  const down = n > 8 ? 18 : DOWN;
  const left = 18 + 7.4 * Math.max(...rows.map((row) => row.name.length));
  const pitch = { x: form.width + across, y: form.height + down };
  const width = left + n * pitch.x;
  const height = TOP + rows.length * pitch.y + 8;
  const key = unique("grid");
  const node = drawing(width, height, "");
  const arrows = s("g");
  const tokens = s("g");
  /** @param {number} cell */
  const place = (cell) => ({
    x: left + (cell % n) * pitch.x,
    y: TOP + down - 6 + Math.floor(cell / n) * pitch.y,
  });

  const cells = s("g");
  /** @type {{group: SVGGElement, frame: SVGRectElement, tick: SVGPathElement, drawn: SVGGElement, mask: number}[]} */
  const made = [];
  for (let cell = 0; cell < rows.length * n; cell += 1) {
    const { x, y } = place(cell);
    const frame = s("rect", { class: "cell", width: form.width, height: form.height, rx: 4 });
    const tick = s("path", { class: "tick", d: `M${form.width - 5} -2l3.5 4.5 7-10` });
    const drawn = s("g");
    const group = s("g", { transform: `translate(${x} ${y})` }, frame);
    if (!form.whole && n <= 8) group.append(slots(form));
    group.append(drawn, tick);
    cells.append(group);
    made.push({ group, frame, tick, drawn, mask: -1 });
  }
  node.append(heads(key), ...titles(), cells, arrows, tokens);

  function titles() {
    const found = [];
    for (let rank = 0; rank < n; rank += 1) {
      const x = left + rank * pitch.x + form.width / 2;
      found.push(
        s("text", { class: "name", x, y: 16, "text-anchor": "middle" }, `rank ${rank}`),
        s("rect", { class: `r${rank}`, x: x - 16, y: 23, width: 32, height: 4, rx: 2 }),
      );
    }
    rows.forEach((row, r) => {
      const y = place(r * n).y + form.height / 2 + 4;
      found.push(s("text", { class: "small", x: left - 12, y, "text-anchor": "end" }, row.name));
    });
    return found;
  }

  /**
   * The way of a transfer, above the row it is in.
   * @param {Flight} flight
   */
  function pathOf({ move }) {
    const from = place(move[2] * n + move[0]);
    const to = place(move[3] * n + move[1]);
    const right = move[0] < move[1];
    if (Math.abs(move[0] - move[1]) === 1 && move[2] === move[3]) {
      const y = from.y + form.height / 2;
      return right ? `M${from.x + form.width + 3} ${y}H${to.x - 4}` : `M${from.x - 3} ${y}H${to.x + form.width + 4}`;
    }
    const x1 = from.x + form.width * (right ? 0.72 : 0.28);
    const x2 = to.x + form.width * (right ? 0.2 : 0.8);
    const bend = Math.min(from.y, to.y) - Math.min(down - 3, 14 + Math.abs(x2 - x1) / 60);
    return `M${x1} ${from.y - 1}C${x1} ${bend} ${x2} ${bend} ${x2} ${to.y - 2}`;
  }

  let shown = "";
  /** @type {{path: SVGPathElement, token: SVGGElement, length: number}[]} */
  let moving = [];

  /** @param {Flight[]} flights */
  function launch(flights) {
    arrows.replaceChildren();
    tokens.replaceChildren();
    moving = flights.map((flight) => {
      const [, , , , adds, carries] = flight.move;
      const head = `url(#${key}-${adds ? "add" : "copy"})`;
      const path = s("path", { class: adds ? "arrow" : "arrow copy", d: pathOf(flight), "marker-end": head });
      const small = { ...form, width: form.width * SMALL, height: form.height * SMALL };
      const token = s(
        "g",
        { class: "token" },
        s("rect", { class: "halo", x: -2, y: -2, width: small.width + 4, height: small.height + 4, rx: 4 }),
        segments(carries, n, small),
      );
      arrows.append(path);
      tokens.append(token);
      return { path, token, length: path.getTotalLength?.() || 0 };
    });
  }

  /** @param {Scene} scene */
  function draw(scene) {
    made.forEach((cell, at) => {
      const mask = scene.masks[at];
      const ready = reel.isResult(at, mask);
      set(cell.frame, { class: `cell${scene.fresh[at] ? " fresh" : ""}${ready ? " ready" : ""}` });
      set(cell.tick, { class: ready ? "tick" : "tick none" });
      if (mask === cell.mask) return;
      cell.mask = mask;
      const now = segments(mask, n, form);
      cell.drawn.replaceWith(now);
      cell.drawn = now;
    });
    const flights = scene.flights.filter(travels);
    const name = flights.map((f) => `${f.step}:${f.move}`).join();
    if (name !== shown) launch(flights);
    shown = name;
    flights.forEach((flight, k) => {
      const { path, token, length } = moving[k];
      const part = eased(flight.part);
      const landed = flight.part > 1 - 1e-6 || flight.part < 1e-6 || !length;
      set(token, { class: landed ? "token none" : "token" });
      if (landed) return;
      const at = path.getPointAtLength(part * length);
      set(token, { transform: `translate(${at.x - (form.width * SMALL) / 2} ${at.y - (form.height * SMALL) / 2})` });
    });
    node.setAttribute("aria-label", inWords(scene));
  }

  /**
   * What the drawing shows, for those who hear it.
   * @param {Scene} scene
   */
  function inWords(scene) {
    const lines = [`Grid: who holds what${scene.step ? ` at step ${scene.step}` : " before the first step"}.`];
    if (rows.length > 24) return `${lines[0]} ${scene.done} of ${reel.story.due} results are in place.`;
    for (let rank = 0; rank < n; rank += 1) {
      const held = rows.map((row, r) => {
        const mask = scene.masks[r * n + rank];
        const whose = [...Array(n).keys()].filter((k) => (mask >> k) & 1).map(letter);
        return whose.length ? `${row.name}: ${whose.join("+")}` : "";
      });
      lines.push(`Rank ${rank} has ${held.filter(Boolean).join(", ") || "nothing"}.`);
    }
    return lines.join(" ");
  }

  return { node, draw };
}
