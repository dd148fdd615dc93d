// A topology: hosts, switches and ranks where layout.py puts them, and lines for what is on its links.

import { drawing, heads, s, unique } from "./dom.js";

/** @typedef {import("./story.js").Topology} Topology */
/** @typedef {{x: number, y: number}} Point */

const WIDTH = 900;
const HEIGHT = 460;
const RADIUS = 15;
/** How far a line for one direction lies beside the middle of its link. */
const ASIDE = 3;

/**
 * The drawing; `over` is where lines are put, between links and nodes.
 * @param {Topology} map
 * @param {string} label
 */
export function network(map, label) {
  const node = drawing(WIDTH, HEIGHT, label, 0.5);
  const key = unique("network");
  const over = s("g");
  const lines = map.links.map(([a, b]) => s("path", { class: "link used", d: line(a, b, 0) }));
  node.append(heads(key), homes(), s("g", {}, ...lines), over, nodes());

  /**
   * @param {number} at
   * @returns {Point}
   */
  function place(at) {
    return { x: WIDTH / 2 + map.places[at][0] * (WIDTH / 2 - 70), y: HEIGHT / 2 + map.places[at][1] * (HEIGHT / 2 - 44) };
  }

  /**
   * One direction of a link, from the edge of a node to that of the other.
   * @param {number} from
   * @param {number} to
   * @param {number} [aside]
   */
  function line(from, to, aside = ASIDE) {
    const [a, b] = [place(from), place(to)];
    const far = Math.hypot(b.x - a.x, b.y - a.y) || 1;
    const way = { x: (b.x - a.x) / far, y: (b.y - a.y) / far };
    const [x, y] = [-way.y * aside, way.x * aside];
    const cut = Math.min(RADIUS + 2, far / 3);
    return `M${a.x + x + way.x * cut} ${a.y + y + way.y * cut}L${b.x + x - way.x * cut} ${b.y + y - way.y * cut}`;
  }

  /**
   * From rank to rank, whatever lies between.
   * @param {number} from
   * @param {number} to
   */
  function arrow(from, to) {
    const [a, b] = [place(from), place(to)];
    const far = Math.hypot(b.x - a.x, b.y - a.y) || 1;
    const bend = { x: (a.x + b.x) / 2 + (b.y - a.y) * 0.1, y: (a.y + b.y) / 2 - (b.x - a.x) * 0.1 };
    /** @param {Point} end */
    const edge = (end) => {
      const near = Math.hypot(bend.x - end.x, bend.y - end.y) || 1;
      const cut = Math.min(RADIUS + 2, far / 3);
      return { x: end.x + ((bend.x - end.x) * cut) / near, y: end.y + ((bend.y - end.y) * cut) / near };
    };
    const [first, last] = [edge(a), edge(b)];
    return s("path", { class: "arrow", d: `M${first.x} ${first.y}Q${bend.x} ${bend.y} ${last.x} ${last.y}`, "marker-end": `url(#${key}-add)` });
  }

  /** A frame around the ranks of each host. */
  function homes() {
    const made = s("g");
    for (const host of new Set(map.hosts)) {
      const mine = map.hosts.flatMap((other, rank) => (other === host ? [place(rank)] : []));
      const [xs, ys] = [mine.map(({ x }) => x), mine.map(({ y }) => y)];
      const box = { x: Math.min(...xs) - 30, y: Math.min(...ys) - 24 };
      const size = { width: Math.max(...xs) + 30 - box.x, height: Math.max(...ys) + 34 - box.y };
      made.append(
        s("rect", { class: "home", ...box, ...size, rx: 12 }),
        s("text", { class: "small host-name", x: box.x + 8, y: box.y + size.height - 6 }, `host ${host}`),
      );
    }
    return made;
  }

  /** Switches and cards, and ranks above them. */
  function nodes() {
    const [others, ranks] = [s("g"), s("g")];
    map.labels.forEach((name, at) => {
      const { x, y } = place(at);
      if (/^[0-9]+$/.test(name)) {
        ranks.append(s("circle", { class: `r${Number(name) % 16}`, cx: x, cy: y, r: RADIUS }), s("text", { class: "letter", x, y: y + 4.5 }, name));
        return;
      }
      const half = 8 + 3.2 * name.length;
      others.append(
        s("rect", { class: "switch", x: x - half, y: y - 11, width: 2 * half, height: 22, rx: 11 }),
        s("text", { class: "small", x, y: y + 4, "text-anchor": "middle" }, name),
      );
    });
    return s("g", {}, others, ranks);
  }

  return { node, over, line, arrow };
}
