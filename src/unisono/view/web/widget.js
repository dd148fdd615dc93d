// Entry point of the notebook's widget: anywidget calls `render` with a model.

import { page } from "./page.js";

/** @typedef {{get: (name: string) => unknown, on: (event: string, act: () => void) => void,
 *   off: (event: string, act: () => void) => void}} Model */

/**
 * Show the stories of the model, and again whenever they change.
 * @param {{model: Model, el: HTMLElement}} place
 */
export function render({ model, el }) {
  const root = document.createElement("div");
  root.className = "unisono unisono-alone";
  el.append(root);
  /** @type {import("./player.js").Player | null} */
  let player = null;
  const show = () => {
    player?.close();
    player = page(root, JSON.parse(String(model.get("stories"))), root);
  };
  model.on("change:stories", show);
  show();
  return () => {
    model.off("change:stories", show);
    player?.close();
  };
}
