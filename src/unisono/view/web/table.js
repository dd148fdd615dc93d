// A table that is sorted by the column whose head is pressed; pressed again, the other way round.

import { h, set } from "./dom.js";

/** @typedef {{text: string, value: number | string}} Cell what is shown, and what it is sorted by */

/**
 * @param {string} caption
 * @param {string[]} heads
 * @param {Cell[][]} rows in the order in which they are shown at first
 */
export function table(caption, heads, rows) {
  const body = h("tbody");
  const columns = heads.map((head, k) => {
    const button = h("button", { type: "button" }, head);
    const cell = h("th", { scope: "col", "aria-sort": "none" }, button);
    button.addEventListener("click", () => sort(k));
    return cell;
  });

  /** @param {number} k */
  function sort(k) {
    const down = columns[k].getAttribute("aria-sort") === "ascending";
    columns.forEach((column, other) => set(column, { "aria-sort": other !== k ? "none" : down ? "descending" : "ascending" }));
    show([...rows].sort((a, b) => (down ? -1 : 1) * compare(a[k].value, b[k].value)));
  }

  /** @param {Cell[][]} sorted */
  function show(sorted) {
    body.replaceChildren(
      ...sorted.map((row) => h("tr", {}, ...row.map((cell) => h("td", { class: typeof cell.value === "number" ? "number" : "" }, cell.text)))),
    );
  }

  show(rows);
  const made = h("table", { class: "sortable" }, h("caption", {}, caption), h("thead", {}, h("tr", {}, ...columns)), body);
  return h("div", { class: "panel" }, made);
}

/**
 * @param {number | string} a
 * @param {number | string} b
 */
function compare(a, b) {
  return typeof a === "number" && typeof b === "number" ? a - b : String(a).localeCompare(String(b));
}
