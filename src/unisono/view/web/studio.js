// Entry point of the studio: choices above, what was chosen below.

import { curves } from "./curves.js";
import { h, set } from "./dom.js";
import { links } from "./links.js";
import { page } from "./page.js";
import { search } from "./search.js";
import { strategies } from "./strategy.js";
import { themes } from "./themes.js";
import { arranged, events, trace } from "./trace.js";
import { trees } from "./trees.js";
import { truth } from "./truth.js";

/** @typedef {import("./player.js").Player} Player */
/** @typedef {{collectives: Record<string, string>, algorithms: string[], topologies: string[],
 *   codecs: string[], most: number}} Choices */

const SIZES = ["1K", "16K", "256K", "1M", "4M", "16M", "64M", "256M", "1G"];
const FIELDS = ["collective", "algorithm", "beside", "n", "size", "topology", "codec"];
/**
 * The pages, and the choices that each has.
 * @type {Record<string, string[]>}
 */
const PAGES = {
  Explain: FIELDS,
  Costs: ["collective", "n", "topology", "codec"],
  Links: ["collective", "algorithm", "n", "size", "topology", "codec"],
  Trees: ["collective", "n", "topology"],
  Strategies: [],
  Search: [],
  Truth: [],
  Trace: [],
};

/**
 * Ask the server; what it refuses is an error with its words.
 * @param {string} what
 * @param {Record<string, string>} [parameters]
 */
async function ask(what, parameters = {}) {
  const query = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value)).toString();
  const answer = await fetch(`/api/${what}${query ? `?${query}` : ""}`);
  const body = await answer.json();
  if (!answer.ok) throw new Error(body.error);
  return body;
}

class Desk {
  /** @param {HTMLElement} root */
  constructor(root) {
    this.shown = "Explain";
    /** @type {Player | null} */
    this.player = null;
    this.number = 0;
    this.trouble = h("p", { role: "alert", class: "trouble" });
    this.place = h("div", { class: "place", "aria-busy": "false" });
    /** @type {Record<string, HTMLSelectElement>} */
    this.fields = {};
    this.form = h("form", { class: "query", "aria-label": "Choices" });
    for (const name of FIELDS) {
      const field = h("select", { name });
      field.addEventListener("change", () => this.change());
      this.fields[name] = field;
      this.form.append(h("label", { class: `field ${name}` }, h("span", {}, name === "n" ? "ranks" : name), field));
    }
    this.form.addEventListener("submit", (event) => event.preventDefault());
    const list = h("div", { role: "tablist", class: "tabs pages", "aria-label": "Pages" });
    this.tabs = Object.keys(PAGES).map((name) => {
      const tab = h("button", { type: "button", role: "tab" }, name);
      tab.addEventListener("click", () => this.enter(name));
      list.append(tab);
      return tab;
    });
    root.replaceChildren(h("header", {}, h("h1", {}, "unisono studio"), themes()), list, this.form, this.trouble, this.place);
  }

  async start() {
    this.offer("n", [...Array(16).keys()].map((k) => String(k + 1)), "5");
    this.offer("size", SIZES, "1M");
    await this.enter("Explain");
  }

  /**
   * Fill a field; what was chosen stays if it is still there.
   * @param {string} name
   * @param {string[]} values
   * @param {string} [first]
   */
  offer(name, values, first) {
    const field = this.fields[name];
    const before = field.value;
    field.replaceChildren(...values.map((value) => h("option", { value }, value || "nothing")));
    field.value = values.includes(before) ? before : first ?? values[0];
  }

  /** @param {string} title */
  async enter(title) {
    this.shown = title;
    this.tabs.forEach((tab) => set(tab, { "aria-selected": String(tab.textContent === title) }));
    this.form.hidden = !PAGES[title].length;
    for (const name of FIELDS) {
      const label = this.fields[name].parentElement;
      if (label) label.hidden = !PAGES[title].includes(name);
    }
    await this.change();
  }

  get parameters() {
    return Object.fromEntries(Object.entries(this.fields).map(([name, field]) => [name, field.value]));
  }

  /** What was chosen of that which this page asks for. */
  get chosen() {
    return Object.fromEntries(PAGES[this.shown].map((name) => [name, this.fields[name].value]));
  }

  /** Something else was chosen: ask again, and show the newest answer only. */
  async change() {
    this.number += 1;
    const mine = this.number;
    set(this.place, { "aria-busy": "true" });
    try {
      const made = await this.make(() => mine === this.number);
      if (mine !== this.number) return;
      this.trouble.textContent = "";
      if (made) this.put(made);
    } catch (error) {
      if (mine !== this.number) return;
      this.trouble.textContent = error instanceof Error ? error.message : String(error);
    }
    set(this.place, { "aria-busy": "false", "data-page": this.shown, "data-number": mine });
  }

  /** @param {Element} made */
  put(made) {
    this.player?.close();
    this.player = null;
    this.place.replaceChildren(made);
  }

  /**
   * What the page shows; nothing if it has been put there already.
   * @param {() => boolean} wanted
   * @returns {Promise<Element | null>}
   */
  async make(wanted) {
    if (this.shown === "Strategies") return strategies(await ask("strategies"));
    if (this.shown === "Search") return search(ask);
    if (this.shown === "Truth") return truth(await ask("truth"));
    if (this.shown === "Trace") return this.opener();
    await this.refresh();
    const chosen = this.chosen;
    if (this.shown === "Costs") return h("div", { class: "panel" }, curves(await ask("curves", { ...chosen, n: "" })));
    if (this.shown === "Links") return links(await ask("links", chosen));
    if (this.shown === "Trees") return trees(await ask("trees", chosen));
    const stories = await ask("stories", chosen);
    if (!wanted()) return null;
    const root = h("div");
    this.put(root);
    this.player = page(root, stories);
    return null;
  }

  /** What can be chosen hangs on what was. */
  async refresh() {
    const { collective, n, topology } = this.parameters;
    /** @type {Choices} */
    const choices = await ask("choices", { collective, n, topology });
    this.offer("collective", Object.keys(choices.collectives), "all_reduce");
    this.offer("topology", choices.topologies);
    this.offer("codec", choices.codecs);
    this.offer("algorithm", choices.algorithms, choices.algorithms.includes("ring") ? "ring" : choices.algorithms[0]);
    this.offer("beside", ["", ...choices.algorithms], "");
  }

  opener() {
    const input = h("input", { type: "file", accept: ".json,.gz,.trace" });
    const shown = h("div");
    input.addEventListener("change", async () => {
      const file = input.files?.[0];
      if (!file) return;
      try {
        shown.replaceChildren(trace(file.name, arranged(await events(file))));
      } catch (error) {
        const why = error instanceof Error ? error.message : String(error);
        shown.replaceChildren(h("p", { role: "alert", class: "trouble" }, `${file.name}: ${why}`));
      }
      set(shown, { "data-file": file.name });
    });
    return h("section", { class: "traces" }, h("label", {}, "A trace in Chrome's format (unisono trace run, unisono simulate --trace, a profiler's): ", input), shown);
  }
}

const studio = document.getElementById("unisono");
if (studio) new Desk(studio).start();
