// Elements, made in one line each.

/** @typedef {Record<string, string | number | boolean>} Attributes */

/**
 * @param {Element} node
 * @param {Attributes} attributes
 */
export function set(node, attributes) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value === false) node.removeAttribute(name);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
}

/**
 * An element of the page.
 * @template {keyof HTMLElementTagNameMap} K
 * @param {K} tag
 * @param {Attributes} [attributes]
 * @param {...(Node | string)} children
 * @returns {HTMLElementTagNameMap[K]}
 */
export function h(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  set(node, attributes);
  node.append(...children);
  return node;
}

/**
 * An element of a drawing.
 * @template {keyof SVGElementTagNameMap} K
 * @param {K} tag
 * @param {Attributes} [attributes]
 * @param {...(Node | string)} children
 * @returns {SVGElementTagNameMap[K]}
 */
export function s(tag, attributes = {}, ...children) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", tag);
  set(node, attributes);
  node.append(...children);
  return node;
}

/**
 * A drawing that scales with the page but is never smaller than is legible, nor so large that it coarsens.
 * @param {number} width
 * @param {number} height
 * @param {string} label
 * @param {number} [least] the least part of its size at which it can be read
 */
export function drawing(width, height, label, least = 0.62) {
  const made = s("svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  made.style.width = "100%";
  made.style.maxWidth = `${Math.round(width * 2)}px`;
  made.style.minWidth = `${Math.round(width * least)}px`;
  return made;
}

/**
 * A field to choose from, below its name: the last word of `name`.
 * @param {string} name
 * @param {[string, string][]} options values, and how they are shown
 */
export function choice(name, options) {
  const field = h("select", { name }, ...options.map(([value, text]) => h("option", { value }, text)));
  return { field, label: h("label", { class: "field" }, h("span", {}, name.slice(name.lastIndexOf("-") + 1)), field) };
}

let serial = 0;

/**
 * A name that no other element of the page has.
 * @param {string} word
 */
export function unique(word) {
  serial += 1;
  return `${word}-${serial}`;
}

/**
 * The letter that stands for a rank's contribution.
 * @param {number} rank
 */
export function letter(rank) {
  return String.fromCharCode(97 + rank);
}

/** @param {number} nbytes */
export function bytes(nbytes) {
  const units = ["B", "KiB", "MiB", "GiB", "TiB"];
  let unit = 0;
  while (Math.abs(nbytes) >= 1024 && unit < units.length - 1) {
    nbytes /= 1024;
    unit += 1;
  }
  return `${Number(nbytes.toPrecision(3))} ${units[unit]}`;
}

/**
 * Bytes per second, in powers of ten as networks have them.
 * @param {number} rate
 */
export function bandwidth(rate) {
  const units = ["B/s", "kB/s", "MB/s", "GB/s", "TB/s"];
  let unit = 0;
  while (rate >= 1000 && unit < units.length - 1) {
    rate /= 1000;
    unit += 1;
  }
  return `${Number(rate.toPrecision(4))} ${units[unit]}`;
}

/** @param {number} micro */
export function duration(micro) {
  if (micro >= 1e6) return `${Number((micro / 1e6).toPrecision(4))} s`;
  if (micro >= 1e3) return `${Number((micro / 1e3).toPrecision(4))} ms`;
  return `${Number(micro.toPrecision(4))} µs`;
}

/**
 * Arrow heads: full adds, hollow copies.
 * @param {string} key
 */
export function heads(key) {
  const shape = { viewBox: "0 0 8 8", refX: 7, refY: 4, markerWidth: 7, markerHeight: 7, orient: "auto" };
  return s(
    "defs",
    {},
    s("marker", { id: `${key}-add`, ...shape }, s("path", { class: "head", d: "M0 0 8 4 0 8z" })),
    s("marker", { id: `${key}-copy`, ...shape }, s("path", { class: "hollow", d: "M.7 .9 7.3 4 .7 7.1z" })),
  );
}
