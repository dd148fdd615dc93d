// Lanes: what each rank sends (full) and receives (hollow), over time.

import { drawing, duration, heads, s, set, unique } from "./dom.js";

/** @typedef {import("./story.js").Reel} Reel */
/** @typedef {import("./story.js").Scene} Scene */
/** @typedef {import("./story.js").View} View */

const LEFT = 84;
const TOP = 46;

/**
 * A round number of about this size.
 * @param {number} about
 */
export function nice(about) {
  const power = 10 ** Math.floor(Math.log10(about));
  return ([1, 2, 5, 10].find((k) => k * power >= about) ?? 10) * power;
}

/**
 * @param {Reel} reel
 * @param {(time: number) => void} seek
 * @param {number} [span]
 * @returns {View}
 */
export function timeline(reel, seek, span = reel.story.time) {
  const { n, messages, time } = reel.story;
  const whole = Math.max(span, 1e-9);
  const many = n > 8;
  const [WIDTH, LANE] = many ? [1300, 34] : [900, 46];
  /** Where the bars of a lane lie: sent above, received below. */
  const bar = many ? { out: 3, sent: 14, into: 18, got: 13 } : { out: 4, sent: 18, into: 25, got: 16 };
  const height = TOP + n * LANE + 34;
  const node = drawing(WIDTH, height, "", 0.55);
  const key = unique("timeline");
  const scale = (WIDTH - LEFT - 16) / whole;
  /** @param {number} at */
  const x = (at) => LEFT + at * scale;

  const back = s("g");
  for (let rank = 0; rank < n; rank += 1) {
    const y = TOP + rank * LANE;
    back.append(
      s("rect", { class: rank % 2 ? "lane" : "lane odd", x: LEFT, y, width: WIDTH - LEFT - 16, height: LANE }),
      s("rect", { class: `r${rank}`, x: 8, y: y + 8, width: 5, height: LANE - 16, rx: 2 }),
      s("text", { class: "name", x: 19, y: y + (many ? 21 : 20) }, `rank ${rank}`),
      ...(many ? [] : [s("text", { class: "small", x: 19, y: y + 36 }, "out, in")]),
    );
  }
  for (const phase of reel.phases()) {
    const wide = x(phase.end) - x(phase.start);
    back.append(
      s("rect", { class: "phase", x: x(phase.start) + 0.5, y: 8, width: Math.max(0, wide - 1), height: 22, rx: 4 }),
      s("text", { class: "small", x: x(phase.start) + 8, y: 23 }, wide > 7 * phase.name.length + 8 ? phase.name : ""),
    );
  }
  const every = nice(whole / 8);
  for (let at = 0; at <= whole * 1.0001 && whole > 1e-6; at += every) {
    back.append(
      s("line", { class: "rule", x1: x(at), x2: x(at), y1: TOP, y2: TOP + n * LANE }),
      s("text", { class: "small", x: x(at), y: TOP + n * LANE + 18, "text-anchor": "middle" }, duration(at)),
    );
  }

  const bars = messages.map(([step, src, dst, , leaves, arrives]) => {
    const wide = Math.max(1.5, (arrives - leaves) * scale - 1.5);
    const out = { x: x(leaves), y: TOP + src * LANE + bar.out, width: wide, height: bar.sent, rx: 3 };
    const into = { ...out, y: TOP + dst * LANE + bar.into, height: bar.got };
    const sends = s("rect", { class: `bar r${src}`, ...out });
    const receives = s("rect", { class: `bar s${src}`, ...into });
    const group = s("g", { class: "message" }, sends, receives);
    if (wide > 34) {
      group.append(
        s("text", { class: "letter", x: out.x + wide / 2, y: out.y + bar.sent - 4 }, `→ ${dst}`),
        s("text", { class: "small", x: out.x + wide / 2, y: into.y + bar.got - 3.5, "text-anchor": "middle" }, `← ${src}`),
      );
    }
    return { group, step, leaves, arrives, src, dst };
  });
  const arrows = s("g");
  const head = s("line", { class: "playhead", y1: 34, y2: TOP + n * LANE + 4 });
  const flag = s("path", { class: "head", d: "M-5 0h10l-5 7z" });
  node.append(heads(key), back, s("g", {}, ...bars.map(({ group }) => group)), arrows, head, flag);

  node.addEventListener("pointerdown", (event) => {
    const place = node.getScreenCTM();
    if (!place) return;
    const at = (event.clientX - place.e) / place.a;
    seek(Math.min(time, Math.max(0, (at - LEFT) / scale)));
  });

  let shown = -1;
  /**
   * The arrows of one step, from send to receive.
   * @param {number} step
   */
  function join(step) {
    arrows.replaceChildren();
    for (const one of bars.filter((b) => b.step === step)) {
      const down = one.src < one.dst;
      const y1 = TOP + one.src * LANE + (down ? bar.out + bar.sent : bar.out);
      const y2 = TOP + one.dst * LANE + (down ? bar.into : bar.into + bar.got);
      const d = `M${x(one.leaves) + 4} ${y1}L${x(one.arrives) - 4} ${y2}`;
      arrows.append(s("path", { class: "arrow thin", d, "marker-end": `url(#${key}-add)` }));
    }
  }

  /** @param {Scene} scene */
  function draw(scene) {
    for (const { group, leaves, arrives } of bars) {
      const state = leaves > scene.time ? "later" : arrives > scene.time ? "now" : "past";
      set(group, { class: `message ${state}` });
    }
    if (scene.step !== shown) join(scene.step);
    shown = scene.step;
    set(head, { x1: x(scene.time), x2: x(scene.time) });
    set(flag, { transform: `translate(${x(scene.time)} 34)` });
    const under = bars.filter(({ leaves, arrives }) => leaves <= scene.time && arrives > scene.time).length;
    node.setAttribute("aria-label", `Timeline at ${duration(scene.time)} of ${duration(time)}: ${under} messages under way.`);
  }

  return { node, draw };
}
