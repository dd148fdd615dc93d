// The spanning trees that synthesis packs into a topology: one of them, those of a root, or all.

import { choice, h, s, set } from "./dom.js";
import { network } from "./network.js";
import { table } from "./table.js";

/** @typedef {{root: number, times: number, share: number, depth: number, links: [number, number][]}} Tree */
/** @typedef {{title: string, why: string, optimum: number, up: boolean, both: boolean, trees: Tree[],
 *   map: import("./story.js").Topology}} Forest */

/** @param {Forest} forest */
export function trees(forest) {
  if (!forest.trees.length) return h("p", { class: "trees" }, `There are no trees: ${forest.why}.`);
  const map = network(forest.map, "");
  const words = h("p", { class: "sentence", "aria-live": "polite" });
  const roots = [...new Set(forest.trees.map((tree) => tree.root))];
  const root = choice("trees-root", [["", "all roots"], ...roots.map((rank) => /** @type {[string, string]} */ ([`${rank}`, `rank ${rank}`]))]);
  const which = choice("trees-tree", []);
  root.field.addEventListener("change", offer);
  which.field.addEventListener("change", draw);
  const name = /** @param {Tree} tree */ (tree) => `tree ${forest.trees.indexOf(tree)}${tree.times > 1 ? ` (${tree.times} times)` : ""}`;

  /** The trees of the root that was chosen; the first of them is shown. */
  function offer() {
    const mine = forest.trees.filter((tree) => !root.field.value || `${tree.root}` === root.field.value);
    const options = mine.map((tree) => h("option", { value: forest.trees.indexOf(tree) }, `${name(tree)}, root ${tree.root}`));
    which.field.replaceChildren(h("option", { value: "" }, `all ${mine.length}`), ...options);
    which.field.value = `${forest.trees.indexOf(mine[0])}`;
    draw();
  }

  function draw() {
    const of = root.field.value;
    const shown = which.field.value ? [forest.trees[Number(which.field.value)]] : forest.trees.filter((tree) => !of || `${tree.root}` === of);
    /** @type {Map<string, {ends: [number, number], times: number, root: number}>} */
    const loads = new Map();
    for (const tree of shown) for (const [a, b] of tree.links) load(tree, a, b);

    /**
     * What a link of a tree puts on the links of its route.
     * @param {Tree} tree
     * @param {number} a
     * @param {number} b
     */
    function load(tree, a, b) {
      const route = forest.map.routes[`${a}>${b}`];
      route.slice(1).forEach((to, k) => {
        const ends = /** @type {[number, number]} */ (forest.up ? [to, route[k]] : [route[k], to]);
        const before = loads.get(ends.join(">"));
        loads.set(ends.join(">"), { ends, times: (before?.times ?? 0) + tree.times, root: tree.root });
      });
    }
    const most = Math.max(...[...loads.values()].map(({ times }) => times));
    const lines = [...loads.values()].map(({ ends, times, root: rank }) => {
      const title = `${ends.map((at) => forest.map.labels[at]).join(" to ")}: ${times}`;
      const line = s("path", { class: `curve l${rank % 16}`, d: map.line(...ends) }, s("title", {}, title));
      line.style.strokeWidth = `${(1 + (4 * times) / most).toFixed(2)}px`;
      return line;
    });
    const alone = shown.length === 1 ? shown[0] : null;
    const arrows = alone ? alone.links.map(([a, b]) => (forest.up ? map.arrow(b, a) : map.arrow(a, b))) : [];
    map.over.replaceChildren(...lines, ...arrows);
    words.textContent = alone ? sentence(alone) : `${shown.length} trees together: the wider a line, the more of them use the link.`;
    set(map.node, { "aria-label": words.textContent });
  }

  /** @param {Tree} tree */
  function sentence(tree) {
    const part = `${Number((100 * tree.share).toPrecision(3))} % of the data`;
    const far = `${tree.depth} ${tree.depth === 1 ? "link" : "links"} deep`;
    const way = forest.both ? "summed up on the way to it, and handed out again the same way" : forest.up ? "summed up on the way to it" : "handed out from it";
    return `${name(tree)}: root rank ${tree.root}, ${far}; ${part} is ${way}.`;
  }

  const rows = forest.trees.map((tree, k) => [k, tree.root, tree.times, tree.depth].map((value) => ({ text: `${value}`, value })));
  const form = h("form", { class: "query", "aria-label": "Which trees" }, root.label, which.label);
  form.addEventListener("submit", (event) => event.preventDefault());
  const reached = `The busiest link reaches ${Number((100 * forest.optimum).toPrecision(4))} % of the rate that the cuts of the topology allow.`;
  offer();
  return h(
    "section",
    { class: "trees", "aria-label": "Synthesized trees" },
    h("p", {}, `${forest.title}. ${reached}`),
    form,
    words,
    h("div", { class: "panel" }, map.node),
    h("details", {}, h("summary", {}, "All trees as a table"), table(forest.title, ["tree", "root", "times", "depth"], rows)),
  );
}
