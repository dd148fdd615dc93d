// A cell: one segment for each contributor, filled when its share is in.

import { letter, s } from "./dom.js";

/** @typedef {{width: number, height: number, across: number, down: number, whole: boolean}} Shape */

const DEEP = 22;

/**
 * How a cell looks: segments side by side, in two lines if there are many.
 * @param {number} n
 * @param {boolean} reduces
 * @param {boolean} narrow whether the screen is
 * @param {boolean} beside whether another stands beside it
 * @returns {Shape}
 */
export function shape(n, reduces, narrow, beside = false) {
  if (!reduces) return { width: 40, height: DEEP, across: 1, down: 1, whole: true };
  const across = n <= 8 ? n : Math.ceil(n / 2);
  const down = n <= 8 ? 1 : 2;
  const side = n > 8 || (beside && n > 6) ? 12 : narrow ? 14 : 17;
  return { width: Math.max(34, across * side), height: down === 1 ? DEEP : 32, across, down, whole: false };
}

/**
 * The segments of the contributions in `mask`, as drawn in a cell at 0, 0.
 * @param {number} mask
 * @param {number} n
 * @param {Shape} form
 * @param {string} [mark]
 */
export function segments(mask, n, form, mark = "") {
  const made = s("g");
  const wide = form.width / form.across;
  const deep = form.height / form.down;
  for (let rank = 0; rank < n; rank += 1) {
    if (!((mask >> rank) & 1)) continue;
    const x = form.whole ? 0 : (rank % form.across) * wide;
    const y = form.whole ? 0 : Math.floor(rank / form.across) * deep;
    made.append(
      s("rect", { class: `r${rank}`, x: x + 0.5, y: y + 0.5, width: wide - 1, height: deep - 1, rx: 2.5 }),
      s("text", { class: wide < 14 ? "letter tiny" : "letter", x: x + wide / 2, y: y + deep / 2 + 4.5 }, letter(rank) + mark),
    );
  }
  return made;
}

/**
 * Thin lines where segments are still to come.
 * @param {Shape} form
 */
export function slots(form) {
  const made = s("g");
  const wide = form.width / form.across;
  for (let k = 1; k < form.across; k += 1) {
    made.append(s("line", { class: "slot", x1: k * wide, x2: k * wide, y1: 4, y2: form.height - 4 }));
  }
  return made;
}
