// Chunks moving over the topology: nodes where layout.py puts them, a token a message.

import { drawing, heads, s, set, unique } from "./dom.js";
import { eased, travels } from "./story.js";

/** @typedef {import("./story.js").Reel} Reel */
/** @typedef {import("./story.js").Scene} Scene */
/** @typedef {import("./story.js").Flight} Flight */
/** @typedef {import("./story.js").View} View */


/**
 * @param {Reel} reel
 * @returns {View}
 */
export function graph(reel) {
  const { n, rows, map, reduces } = reel.story;
  const key = unique("graph");
  const many = n > 8;
  const WIDTH = many ? 1200 : map.hosts.length ? 1000 : 720;
  const tall = Math.min(many ? 34 : 64, Math.max(22, rows.length * 7));
  const wide = many ? 48 : 74;
  const high = many ? 580 : 470;
  const node = drawing(WIDTH, high, "", 0.5);
  const spread = { x: WIDTH / 2 - wide - 44, y: high / 2 - tall / 2 - 30 };
  /** @param {number} at */
  const place = (at) => ({
    x: WIDTH / 2 + map.places[at][0] * spread.x,
    y: high / 2 + 6 + map.places[at][1] * spread.y,
  });

  const used = new Set();
  for (const route of Object.values(map.routes)) {
    route.slice(1).forEach((b, k) => used.add(`${Math.min(route[k], b)}-${Math.max(route[k], b)}`));
  }
  const lines = map.links.map(([a, b]) => {
    const [from, to] = [place(a), place(b)];
    const name = used.has(`${a}-${b}`) ? "link used" : "link";
    return s("line", { class: name, x1: from.x, y1: from.y, x2: to.x, y2: to.y });
  });
  const ways = s("g");
  const tokens = s("g");
  const ranks = s("g");
  const labels = s("g");
  /** @type {{bars: SVGRectElement[][], frame: SVGRectElement, label: SVGTextElement}[]} */
  const boxes = [];
  for (let rank = 0; rank < n; rank += 1) boxes.push(box(rank));
  // Names come last: no chip on its way hides one.
  node.append(heads(key), homes(), s("g", {}, ...lines), ways, ranks, tokens, others(), labels);
  /** A frame around the ranks of each host. */
  function homes() {
    const made = s("g");
    for (const host of new Set(map.hosts)) {
      const mine = map.hosts.flatMap((other, rank) => (other === host ? [place(rank)] : []));
      const [xs, ys] = [mine.map(({ x }) => x), mine.map(({ y }) => y)];
      const box = { x: Math.min(...xs) - wide / 2 - 14, y: Math.min(...ys) - tall / 2 - 30 };
      const size = { width: Math.max(...xs) + wide / 2 + 14 - box.x, height: Math.max(...ys) + tall / 2 + 26 - box.y };
      made.append(s("rect", { class: "home", ...box, ...size, rx: 12 }));
      labels.append(s("text", { class: "small host-name", x: box.x + 8, y: box.y + size.height - 6 }, `host ${host}`));
    }
    return made;
  }

  function others() {
    const made = s("g");
    for (let at = n; at < map.labels.length; at += 1) {
      const { x, y } = place(at);
      const half = 8 + 3.2 * map.labels[at].length;
      made.append(
        s("rect", { class: "switch", x: x - half, y: y - 11, width: 2 * half, height: 22, rx: 11 }),
        s("text", { class: "small", x, y: y + 4, "text-anchor": "middle" }, map.labels[at]),
      );
    }
    return made;
  }

  /**
   * A rank: its number, and its chunks as bars that fill up.
   * @param {number} rank
   */
  function box(rank) {
    const { x, y } = place(rank);
    const group = s("g", { transform: `translate(${x - wide / 2} ${y - tall / 2})` });
    const frame = s("rect", { class: "cell", x: -4, y: -4, width: wide + 8, height: tall + 8, rx: 6 });
    const label = s("text", { class: "letter", x: wide / 2, y: -10 });
    group.append(frame);
    labels.append(
      s("g", { class: "rank-name", transform: `translate(${x - wide / 2} ${y - tall / 2})` }, s("rect", { class: `r${rank}`, x: -4, y: -22, width: wide + 8, height: 16, rx: 4 }), label),
    );
    const bars = rows.map((_, r) => {
      const deep = tall / rows.length;
      const parts = reduces ? n : 1;
      return [...Array(parts).keys()].map((k) => {
        const bar = s("rect", { class: "none", x: (k * wide) / parts, y: r * deep, width: wide / parts, height: Math.max(0.8, deep - (deep > 3 ? 1.2 : 0.2)) });
        group.append(bar);
        return bar;
      });
    });
    ranks.append(group);
    return { bars, frame, label };
  }

  /**
   * @param {Flight} flight
   * @param {boolean} back whether something comes the other way
   */
  function pathOf(flight, back) {
    const nodes = map.routes[`${flight.move[0]}>${flight.move[1]}`] ?? [flight.move[0], flight.move[1]];
    const points = nodes.map(place);
    const ends = clipped(points);
    if (points.length > 2) return `M${ends.map((p) => `${p.x} ${p.y}`).join("L")}`;
    const [a, b] = ends;
    const aside = back ? 0.09 : 0;
    const bend = { x: (a.x + b.x) / 2 + (b.y - a.y) * aside, y: (a.y + b.y) / 2 - (b.x - a.x) * aside };
    return `M${a.x} ${a.y}Q${bend.x} ${bend.y} ${b.x} ${b.y}`;
  }

  /**
   * The same way from edge to edge of the boxes.
   * @param {{x: number, y: number}[]} points
   */
  function clipped(points) {
    const made = points.slice();
    made[0] = edge(points[0], points[1]);
    made[made.length - 1] = edge(points[points.length - 1], points[points.length - 2]);
    return made;
  }

  /**
   * @param {{x: number, y: number}} at
   * @param {{x: number, y: number}} to
   */
  function edge(at, to) {
    const [dx, dy] = [to.x - at.x, to.y - at.y];
    const share = Math.min((wide / 2 + 9) / Math.abs(dx || 1e-9), (tall / 2 + (dy < 0 ? 27 : 9)) / Math.abs(dy || 1e-9), 0.45);
    return { x: at.x + dx * share, y: at.y + dy * share };
  }

  let shown = "";
  /** @type {{path: SVGPathElement, token: SVGGElement, length: number}[]} */
  let moving = [];

  /**
   * Chunks of one message travel together.
   * @param {Flight[]} flights
   */
  function messages(flights) {
    /** @type {Map<string, Flight[]>} */
    const found = new Map();
    for (const flight of flights) {
      const name = `${flight.step}:${flight.move[0]}>${flight.move[1]}`;
      found.set(name, [...(found.get(name) ?? []), flight]);
    }
    return found;
  }

  /** @param {Map<string, Flight[]>} groups */
  function launch(groups) {
    ways.replaceChildren();
    tokens.replaceChildren();
    moving = [...groups.values()].map((group) => {
      const adds = group.some((flight) => flight.move[4]);
      const head = `url(#${key}-${adds ? "add" : "copy"})`;
      const [src, dst] = group[0].move;
      const back = groups.has(`${group[0].step}:${dst}>${src}`);
      const path = s("path", { class: adds ? "arrow" : "arrow copy", d: pathOf(group[0], back), "marker-end": head });
      const token = tokenOf(group);
      ways.append(path);
      tokens.append(token);
      return { path, token, length: path.getTotalLength?.() || 0 };
    });
  }

  /**
   * What travels: whose contributions, and which chunk or how many.
   * @param {Flight[]} group
   */
  function tokenOf(group) {
    const union = group.reduce((mask, flight) => mask | flight.move[5], 0);
    const parts = [...Array(n).keys()].filter((k) => (union >> k) & 1);
    const one = rows[group[0].move[2]].name;
    const name = group.length > 1 ? `${group.length} chunks` : many ? one.replace("chunk ", "") : one;
    const half = Math.max(many ? 12 : 20, 5 + 3.6 * name.length);
    const made = s("g", { class: "token" }, s("rect", { class: "halo", x: -half, y: -13, width: 2 * half, height: 27, rx: 5 }));
    const each = (2 * half - 6) / parts.length;
    parts.forEach((rank, k) => {
      made.append(s("rect", { class: `r${rank}`, x: 3 - half + k * each, y: 5, width: each - 0.6, height: 6, rx: 1.5 }));
    });
    made.append(s("text", { class: "small strong", y: 1, "text-anchor": "middle" }, name));
    return made;
  }

  /** @param {Scene} scene */
  function draw(scene) {
    boxes.forEach(({ bars, frame, label }, rank) => {
      let ready = 0;
      let due = 0;
      let fresh = false;
      rows.forEach((row, r) => {
        const mask = scene.masks[r * n + rank];
        if (row.after === -1 || row.after === rank) due += 1;
        if (reel.isResult(r * n + rank, mask)) ready += 1;
        fresh ||= Boolean(scene.fresh[r * n + rank]);
        const origin = 31 - Math.clz32(mask);
        bars[r].forEach((bar, k) => {
          const filled = reduces ? (mask >> k) & 1 : mask;
          set(bar, { class: filled ? `r${reduces ? k : origin}` : "none" });
        });
      });
      set(frame, { class: `cell${fresh ? " fresh" : ""}${due && ready === due ? " ready" : ""}` });
      label.textContent = `${many ? "" : "rank "}${rank}${due && ready === due ? " ✓" : ""}`;
    });
    const groups = messages(scene.flights.filter(travels));
    const name = [...groups.keys()].join();
    if (name !== shown) launch(groups);
    shown = name;
    [...groups.values()].forEach(([flight], k) => {
      const { path, token, length } = moving[k];
      const rests = flight.part > 1 - 1e-6 || flight.part < 1e-6 || !length;
      // In the middle of a way over a switch is the switch, with its name.
      const direct = (map.routes[`${flight.move[0]}>${flight.move[1]}`] ?? []).length <= 2;
      const at = length ? path.getPointAtLength((rests ? (direct ? 0.5 : 0.28) : 0.1 + 0.8 * eased(flight.part)) * length) : { x: 0, y: 0 };
      set(token, { transform: `translate(${at.x} ${at.y})`, class: rests ? "token rests" : "token" });
    });
    const sent = groups.size === 1 ? "1 message" : `${groups.size} messages`;
    node.setAttribute("aria-label", `Graph of ${map.name}: ${sent}, ${scene.done} of ${reel.story.due} results in place.`);
  }

  return { node, draw };
}
