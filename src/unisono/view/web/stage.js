// One schedule on the page: its sentence, its four views, and how to read them.

import { drawing, duration, h, letter, s } from "./dom.js";
import { graph } from "./graph.js";
import { grid } from "./grid.js";
import { matrix } from "./matrix.js";
import { Reel } from "./story.js";
import { timeline } from "./timeline.js";

/** @typedef {import("./story.js").Story} Story */
/** @typedef {import("./story.js").By} By */
/** @typedef {import("./story.js").View} View */

/** The views by name, and what each answers. */
export const VIEWS = [
  ["grid", "Grid", "who holds what"],
  ["graph", "Graph", "chunks on their way"],
  ["timeline", "Timeline", "when"],
  ["matrix", "Matrix", "how much, from whom to whom"],
  ["all", "All four", "side by side"],
];

/** One schedule on the page: its heading, its sentence, its views. */
export class Stage {
  /**
   * @param {Story} story
   * @param {(time: number) => void} seek
   * @param {number} span what the timeline spans, so that two have one scale
   * @param {boolean} several
   */
  constructor(story, seek, span, several) {
    this.reel = new Reel(story);
    this.number = h("span", { class: "number" });
    this.phase = h("span", { class: "phase-name" });
    this.sentence = h("p", { class: "sentence", "aria-live": "polite", "aria-atomic": "true" });
    this.words = h("ul", { class: "moves" });
    /** @type {Record<string, View>} */
    this.views = {
      grid: grid(this.reel, several),
      graph: graph(this.reel),
      timeline: timeline(this.reel, seek, span),
      matrix: matrix(this.reel, several),
    };
    /** @type {Record<string, HTMLElement>} */
    this.panels = {};
    const panels = h("div", { class: "panels" });
    for (const [name, title, about] of VIEWS.slice(0, 4)) {
      const heading = h("h3", {}, title, h("span", {}, ` ${about}`));
      this.panels[name] = h("div", { class: `panel ${name}`, tabindex: 0, role: "tabpanel", "aria-label": `${title}: ${about}` }, heading, this.views[name].node);
      panels.append(this.panels[name]);
    }
    const details = h("details", {}, h("summary", {}, "This step in words"), this.words);
    this.node = h(
      "section",
      { class: "stage", "aria-label": story.title },
      ...(several ? [h("h2", {}, story.algorithm, h("span", {}, ` ${duration(story.time)}, ${story.beats.length} steps`))] : []),
      h("div", { class: "caption" }, h("div", { class: "where" }, this.number, this.phase), this.sentence),
      panels,
      details,
    );
    this.announced = "";
  }

  /**
   * @param {By} by
   * @param {number} at
   * @param {string} view
   */
  draw(by, at, view) {
    const scene = this.reel.scene(by, at);
    for (const [name, made] of Object.entries(this.views)) {
      if (view === "all" || view === name) made.draw(scene);
    }
    const name = `${scene.step}`;
    if (name === this.announced) return;
    this.announced = name;
    const beat = scene.step ? this.reel.story.beats[scene.step - 1] : null;
    this.number.textContent = beat ? `Step ${scene.step} of ${this.reel.steps}` : "Start";
    this.phase.textContent = beat ? beat.phase : this.reel.story.collective;
    this.sentence.textContent = this.reel.caption(scene);
    this.words.replaceChildren(...inWords(this.reel.story, beat).map((line) => h("li", {}, line)));
  }
}

/**
 * Every transfer of a step, spelled out.
 * @param {Story} story
 * @param {import("./story.js").Beat | null} beat
 */
function inWords(story, beat) {
  if (!beat) return [story.opening];
  return beat.moves.map(([src, dst, chunk, into, adds, carries]) => {
    const whose = [...Array(story.n).keys()].filter((k) => (carries >> k) & 1).map(letter).join("+");
    const what = `${story.rows[chunk].name} (${whose})`;
    const where = into === chunk ? "" : ` into ${story.rows[into].name}`;
    if (src === dst) return `rank ${src} moves ${what}${where}`;
    return `rank ${src} sends ${what} to rank ${dst}${where}, which ${adds ? "adds it" : "keeps it"}`;
  });
}

/**
 * How to read the pictures.
 * @param {Story} story
 */
export function legend(story) {
  const letters = h("span", { class: "letters" });
  for (let rank = 0; rank < story.n; rank += 1) {
    letters.append(h("span", { class: `swatch b${rank}` }, letter(rank)), ` rank ${rank} `);
  }
  const cell = story.reduces ? "In a cell, one segment for each rank whose share is in the sum:" : "A cell has the colour and letter of the rank it began at:";
  /** @param {boolean} adds */
  const arrow = (adds) => {
    const made = drawing(34, 12, adds ? "full arrow" : "hollow arrow");
    made.append(s("path", { class: adds ? "arrow" : "arrow copy", d: "M2 6h22" }), s("path", { class: adds ? "head" : "hollow", d: "M24 2 32 6 24 10z" }));
    made.style.width = made.style.minWidth = "34px";
    return made;
  };
  return h(
    "p",
    { class: "legend" },
    h("span", {}, cell, " ", letters),
    ...(story.reduces ? [h("span", {}, arrow(true), " adds")] : []),
    h("span", {}, arrow(false), " copies"),
    h("span", {}, h("span", { class: "ringed" }), " just changed"),
    h("span", {}, "✓ final"),
  );
}
