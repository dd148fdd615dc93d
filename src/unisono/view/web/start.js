// Entry point of the self-contained page: the stories lie in it as JSON.

import { page } from "./page.js";
import { followSite } from "./themes.js";

const root = document.getElementById("unisono");
const data = document.getElementById("stories");
if (root && data) {
  page(root, JSON.parse(data.textContent ?? "[]"));
  followSite();
}
