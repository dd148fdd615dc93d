// The page that `unisono explain --html` writes: one story, or two under one clock.

import { h } from "./dom.js";
import { Player } from "./player.js";
import { themes } from "./themes.js";

/** @typedef {import("./story.js").Story} Story */

/**
 * @param {HTMLElement} root
 * @param {Story[]} stories
 * @param {EventTarget} [ears] whose keys are listened to: all, or those pressed in a part of the page
 */
export function page(root, stories, ears = document) {
  const [story] = stories;
  const title = stories.length > 1 ? stories.map((one) => one.title).join(" beside ") : story.title;
  const stage = h("div", { class: "player" });
  const facts = h("dl", { class: "facts" });
  for (const one of stories) {
    if (stories.length > 1) facts.append(h("dt", {}, one.algorithm), h("dd", {}, one.about));
    for (const [word, sentence] of [...one.facts, ["times", one.times]]) facts.append(h("dt", {}, word), h("dd", {}, sentence));
  }
  root.replaceChildren(
    h("header", {}, h("div", {}, h("h1", {}, title), h("p", {}, `${story.collective}: ${story.meaning}. ${stories.length > 1 ? "" : story.about}`)), themes()),
    stage,
    facts,
    h("p", { class: "keys" }, "Keys: space plays, ← and → go step by step, Home and End to the ends, 1 to 5 change the view, t scrubs by time."),
  );
  return new Player(stage, stories, ears);
}
