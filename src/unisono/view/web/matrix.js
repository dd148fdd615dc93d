// Bytes from rank to rank, so far and in all.

import { bytes, h } from "./dom.js";

/** @typedef {import("./story.js").Reel} Reel */
/** @typedef {import("./story.js").Scene} Scene */
/** @typedef {import("./story.js").View} View */

/**
 * @param {Reel} reel
 * @param {boolean} [beside] whether another stands beside it
 * @returns {View}
 */
export function matrix(reel, beside = false) {
  const { n } = reel.story;
  const dense = n > 8 || (beside && n > 4);
  const named = dense ? "" : "rank ";
  const whole = reel.scene("step", reel.steps).traffic;
  const head = h("tr", {}, h("th", { scope: "col", class: "corner" }, "from ↓ to →"));
  for (let dst = 0; dst < n; dst += 1) head.append(h("th", { scope: "col" }, `${named}${dst}`));
  head.append(h("th", { scope: "col" }, "sent"));
  /** @type {{cell: HTMLTableCellElement, fill: HTMLElement, amount: HTMLElement}[]} */
  const cells = [];
  /** @type {HTMLTableCellElement[]} */
  const sums = [];
  const body = h("tbody");
  for (let src = 0; src < n; src += 1) {
    const row = h("tr", {}, h("th", { scope: "row" }, `${named}${src}`));
    for (let dst = 0; dst < n; dst += 1) {
      const fill = h("span", { class: `fill b${src}` });
      const amount = h("span", { class: "amount" });
      const cell = h("td", {}, fill, amount);
      cells.push({ cell, fill, amount });
      row.append(cell);
    }
    const sum = h("td", { class: "sum" });
    sums.push(sum);
    row.append(sum);
    body.append(row);
  }
  const caption = h("caption", {}, "Bytes sent from rank to rank so far; a full cell has sent all that it will.");
  const node = h("table", { class: dense ? "bytes dense" : "bytes" }, caption, h("thead", {}, head), body);

  /** @param {Scene} scene */
  function draw(scene) {
    const busy = new Set(
      scene.flights.filter((f) => f.part > 1e-6 && f.move[0] !== f.move[1]).map((f) => f.move[0] * n + f.move[1]),
    );
    cells.forEach(({ cell, fill, amount }, at) => {
      const sent = scene.traffic[at];
      fill.style.width = `${(100 * sent) / (whole[at] || 1)}%`;
      amount.textContent = sent ? bytes(sent) : whole[at] ? "0" : "·";
      cell.className = busy.has(at) ? "busy" : "";
    });
    sums.forEach((sum, src) => {
      let total = 0;
      for (let dst = 0; dst < n; dst += 1) total += scene.traffic[src * n + dst];
      sum.textContent = bytes(total);
    });
  }

  return { node, draw };
}
