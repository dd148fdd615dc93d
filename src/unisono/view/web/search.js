// The quickest ways of training a model that fit, as a table that can be sorted.

import { choice, h, set } from "./dom.js";
import { table } from "./table.js";

/** @typedef {{models: string[], topologies: string[], batches: string[]}} Offered */
/** @typedef {{title: string, heads: string[], rows: import("./table.js").Cell[][], lines: string[]}} Found */

/**
 * @param {(what: string, parameters?: Record<string, string>) => Promise<any>} ask
 */
export async function search(ask) {
  /** @type {Offered} */
  const offered = await ask("searchable");
  const found = h("div", { class: "found", "aria-live": "polite" });
  /** @type {Record<string, string[]>} */
  const values = { model: offered.models, topology: offered.topologies, batch: offered.batches };
  const fields = Object.entries(values).map(([name, some]) => ({ name, ...choice(`search-${name}`, some.map((value) => [value, value])) }));
  const button = h("button", { type: "submit" }, "Search");
  const form = h("form", { class: "query buttons-in-words", "aria-label": "What is trained" }, ...fields.map((field) => field.label), button);
  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    button.disabled = true;
    set(found, { "aria-busy": "true" });
    try {
      const answer = await ask("search", Object.fromEntries(fields.map(({ name, field }) => [name, field.value])));
      found.replaceChildren(shown(answer));
    } catch (error) {
      found.replaceChildren(h("p", { role: "alert", class: "trouble" }, error instanceof Error ? error.message : String(error)));
    }
    button.disabled = false;
    set(found, { "aria-busy": "false" });
  });
  return h("section", { class: "search" }, form, found);
}

/** @param {Found} answer */
function shown(answer) {
  const lines = h("ul", { class: "moves" }, ...answer.lines.map((text) => h("li", {}, text)));
  return h("div", {}, table(answer.title, answer.heads, answer.rows), lines);
}
