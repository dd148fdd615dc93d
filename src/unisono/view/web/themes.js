// The choice of a theme.

import { h, set } from "./dom.js";

/** Light, dark, or as the reader's system has it. */
export function themes() {
  const made = h("select", { "aria-label": "Theme" });
  for (const name of ["auto", "light", "dark"]) made.append(h("option", { value: name }, name));
  made.addEventListener("change", () => {
    const whose = made.closest(".unisono-page, .unisono-alone");
    if (whose) set(whose, { "data-theme": made.value });
  });
  return h("label", { class: "themes" }, "theme", made);
}

/** In a frame of a site: the theme that the site has, if it names one. */
export function followSite() {
  if (parent === window) return;
  addEventListener("message", ({ source, data }) => {
    const theme = data?.unisonoTheme;
    if (source !== parent || (theme !== "light" && theme !== "dark")) return;
    set(document.body, { "data-theme": theme });
    for (const chosen of document.querySelectorAll("select")) {
      if (chosen.getAttribute("aria-label") === "Theme") chosen.value = theme;
    }
  });
  parent.postMessage("unisono theme?", "*");
}
