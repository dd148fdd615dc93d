// One clock, and one or two schedules under it.

import { duration, h, s, set, unique } from "./dom.js";
import { Stage, VIEWS, legend } from "./stage.js";

/** @typedef {import("./story.js").Story} Story */
/** @typedef {import("./story.js").By} By */

const ICONS = {
  first: "M5 4v16M19 4 8 12l11 8z",
  back: "M17 4 6 12l11 8z",
  play: "M7 4l12 8-12 8z",
  pause: "M7 4v16M17 4v16",
  next: "M7 4l11 8-11 8z",
  last: "M5 4l11 8-11 8zM19 4v16",
};

/** How high drawings are in low windows. */
const LEAST_ROOM = 360;
/** Seconds for one step at speed 1. */
const PACE = 1.8;

export class Player {
  /**
   * @param {HTMLElement} root
   * @param {Story[]} stories
   * @param {EventTarget} ears
   */
  constructor(root, stories, ears) {
    this.root = root;
    this.ears = ears;
    /** @type {By} */
    this.by = "step";
    this.at = 0;
    this.view = "grid";
    this.speed = 1;
    this.playing = false;
    this.frame = 0;
    this.before = 0;
    this.calm = matchMedia("(prefers-reduced-motion: reduce)");
    const span = Math.max(...stories.map((story) => story.time));
    /** @param {number} time */
    const seek = (time) => {
      this.pause();
      this.switchTo("time");
      this.go(time);
    };
    this.stages = stories.map((story) => new Stage(story, seek, span, stories.length > 1));
    this.buttons = this.makeButtons();
    this.slider = h("input", { type: "range", min: 0, step: "any", value: 0, class: "scrub", "aria-label": "Position" });
    this.slider.addEventListener("input", () => {
      this.pause();
      this.go(Number(this.slider.value));
    });
    this.marks = h("div", { class: "marks", "aria-hidden": "true" });
    this.where = h("output", { class: "position" });
    this.tabs = this.makeTabs();
    root.append(
      h("div", { class: "bar-top" }, this.tabs.list, this.makeChoices()),
      h("div", { class: stories.length > 1 ? "stages two" : "stages" }, ...this.stages.map((stage) => stage.node)),
      legend(stories[0]),
      h("div", { class: "controls", role: "group", "aria-label": "Playback" }, this.buttons.node, h("div", { class: "scrubber" }, this.slider, this.marks), this.where),
    );
    /** @param {Event} event */
    this.ear = (event) => {
      if (event instanceof KeyboardEvent) this.key(event);
    };
    ears.addEventListener("keydown", this.ear);
    this.fitting = () => this.fit();
    addEventListener("resize", this.fitting);
    this.show("grid");
    this.switchTo("step");
  }

  /** Stop the clock and the ear; the page may have another player now. */
  close() {
    this.pause();
    this.ears.removeEventListener("keydown", this.ear);
    removeEventListener("resize", this.fitting);
    this.root.replaceChildren();
  }

  get length() {
    return Math.max(...this.stages.map((stage) => stage.reel.length(this.by)), 0);
  }

  makeButtons() {
    /**
     * @param {keyof typeof ICONS} icon
     * @param {string} label
     * @param {() => void} act
     */
    const button = (icon, label, act) => {
      const path = s("path", { d: ICONS[icon] });
      const made = h("button", { type: "button", "aria-label": label, title: label }, s("svg", { viewBox: "0 0 24 24", "aria-hidden": "true" }, path));
      made.addEventListener("click", act);
      return made;
    };
    const play = button("play", "Play (space)", () => this.toggle());
    play.classList.add("play");
    const node = h(
      "div",
      { class: "buttons" },
      button("first", "To the start (Home)", () => this.jump(0)),
      button("back", "One step back (left arrow)", () => this.step(-1)),
      play,
      button("next", "One step on (right arrow)", () => this.step(1)),
      button("last", "To the end (End)", () => this.jump(this.length)),
    );
    return { node, play };
  }

  makeTabs() {
    const list = h("div", { role: "tablist", "aria-label": "Views", class: "tabs" });
    /** @type {Record<string, HTMLButtonElement>} */
    const tabs = {};
    VIEWS.forEach(([name, title, about], at) => {
      const tab = h("button", { type: "button", role: "tab", id: unique("tab"), title: `${about} (${at + 1})` }, title);
      tab.addEventListener("click", () => this.show(name));
      tab.addEventListener("keydown", (event) => {
        const turn = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
        if (!turn) return;
        event.preventDefault();
        event.stopPropagation();
        const next = VIEWS[(at + turn + VIEWS.length) % VIEWS.length][0];
        this.show(next);
        tabs[next].focus();
      });
      tabs[name] = tab;
      list.append(tab);
    });
    return { list, tabs };
  }

  makeChoices() {
    const name = unique("by");
    const made = h("fieldset", { class: "choices" }, h("legend", {}, "Scrub by"));
    for (const by of /** @type {const} */ (["step", "time"])) {
      const input = h("input", { type: "radio", name, value: by });
      input.addEventListener("change", () => this.switchTo(by));
      made.append(h("label", {}, input, by));
    }
    const speed = h("select", { "aria-label": "Speed" });
    for (const times of [0.25, 0.5, 1, 2, 4]) {
      speed.append(h("option", { value: times, ...(times === 1 ? { selected: true } : {}) }, `${times}×`));
    }
    speed.addEventListener("change", () => {
      this.speed = Number(speed.value);
    });
    made.append(h("label", {}, "speed", speed));
    this.radios = made;
    return made;
  }

  /** @param {string} view */
  show(view) {
    this.view = view;
    for (const [name, tab] of Object.entries(this.tabs.tabs)) {
      set(tab, { "aria-selected": String(name === view), tabindex: name === view ? 0 : -1 });
    }
    for (const stage of this.stages) {
      for (const [name, panel] of Object.entries(stage.panels)) panel.hidden = view !== "all" && view !== name;
      stage.node.classList.toggle("four", view === "all");
    }
    this.draw();
    this.fit();
  }

  /** Drawings are no higher than the window between what is above them and the controls. */
  fit() {
    const controls = this.root.querySelector(".controls");
    const panels = this.stages[0].node.querySelector(".panels");
    if (!controls || !panels) return;
    const top = panels.getBoundingClientRect().top + scrollY;
    const free = innerHeight - top - controls.getBoundingClientRect().height - 12;
    const rows = this.view === "all" && innerWidth > 760 && this.stages.length === 1 ? 2 : 1;
    this.root.style.setProperty("--room", `${Math.round(Math.max(free / rows - (rows > 1 ? 56 : 8), LEAST_ROOM / rows))}px`);
  }

  /**
   * Another clock, at the same moment.
   * @param {By} by
   */
  switchTo(by) {
    const scene = this.stages[0].reel.scene(this.by, this.at);
    if (by !== this.by) this.at = by === "time" ? scene.time : scene.step;
    this.by = by;
    set(this.slider, { max: this.length });
    for (const radio of this.radios?.querySelectorAll("input") ?? []) radio.checked = radio.value === by;
    this.mark();
    this.draw();
  }

  /** Where steps end, under the slider. */
  mark() {
    const reel = this.stages[0].reel;
    this.marks.replaceChildren();
    if (this.length <= 0 || reel.steps > 64) return;
    for (let step = 0; step <= reel.steps; step += 1) {
      const tick = h("span", {}, reel.steps <= 16 ? String(step) : "");
      tick.style.left = `${(100 * (this.by === "step" ? step : reel.ends[step])) / this.length}%`;
      this.marks.append(tick);
    }
  }

  /** @param {number} at */
  go(at) {
    this.at = Math.min(Math.max(at, 0), this.length);
    this.draw();
  }

  /** @param {number} at */
  jump(at) {
    this.pause();
    this.go(at);
  }

  /**
   * To the end of the next step, or of the one before.
   * @param {1 | -1} direction
   */
  step(direction) {
    this.pause();
    const reel = this.stages[0].reel;
    const stops = this.by === "step" ? [...Array(Math.max(this.length, 0) + 1).keys()] : [...reel.ends, this.length];
    const later = stops.filter((stop) => (direction > 0 ? stop > this.at + 1e-6 : stop < this.at - 1e-6));
    if (later.length) this.go(direction > 0 ? Math.min(...later) : Math.max(...later));
  }

  toggle() {
    if (this.playing) this.pause();
    else this.play();
  }

  play() {
    if (this.at >= this.length - 1e-9) this.go(0);
    this.playing = true;
    this.before = 0;
    this.update();
    this.frame = requestAnimationFrame((now) => this.tick(now));
  }

  pause() {
    cancelAnimationFrame(this.frame);
    this.playing = false;
    this.update();
  }

  /** Units of the slider a second: steps, or the whole time in as long as its steps take. */
  get rate() {
    const steps = Math.max(...this.stages.map((stage) => stage.reel.steps), 1);
    return (this.speed * (this.by === "step" ? 1 : this.length / steps)) / PACE;
  }

  /** @param {number} now */
  tick(now) {
    if (!this.playing) return;
    const passed = this.before ? (now - this.before) / 1000 : 0;
    // Who asked for less motion sees one picture a step, and nothing between.
    if (this.calm.matches && this.by === "step") {
      if (!this.before) this.before = now;
      else if (passed * this.rate >= 1) {
        this.before = now;
        this.go(Math.floor(this.at + 1e-6) + 1);
      }
    } else {
      this.before = now;
      this.go(this.at + Math.min(passed, 0.1) * this.rate);
    }
    if (this.at >= this.length - 1e-9) this.pause();
    else this.frame = requestAnimationFrame((then) => this.tick(then));
  }

  /** What the button says. */
  update() {
    if (!this.buttons) return;
    const { play } = this.buttons;
    const label = this.playing ? "Pause (space)" : "Play (space)";
    set(play, { "aria-label": label, title: label, "aria-pressed": String(this.playing) });
    play.querySelector("path")?.setAttribute("d", this.playing ? ICONS.pause : ICONS.play);
  }

  draw() {
    this.slider.value = String(this.at);
    const position = this.by === "step" ? `step ${Math.ceil(this.at - 1e-9)} of ${this.length}` : `${duration(this.at)} of ${duration(this.length)}`;
    this.where.textContent = position;
    set(this.slider, { "aria-valuetext": position });
    for (const stage of this.stages) stage.draw(this.by, this.at, this.view);
    set(this.root, { "data-at": this.at, "data-by": this.by, "data-view": this.view });
  }

  /** @param {KeyboardEvent} event */
  key(event) {
    if (event.ctrlKey || event.metaKey || event.altKey || !(event.target instanceof Element)) return;
    const field = event.target.closest("input, select, textarea, button, summary");
    const slider = field === this.slider;
    const view = VIEWS[Number(event.key) - 1];
    if (field && !slider && (event.key === " " || event.key === "Enter" || !field.matches("button, summary"))) return;
    /** @type {Record<string, () => void>} */
    const keys = {
      " ": () => this.toggle(),
      ArrowRight: () => this.step(1),
      ArrowLeft: () => this.step(-1),
      Home: () => this.jump(0),
      End: () => this.jump(this.length),
      t: () => this.switchTo(this.by === "step" ? "time" : "step"),
      ...(view ? { [event.key]: () => this.show(view[0]) } : {}),
    };
    const act = keys[event.key];
    if (!act) return;
    event.preventDefault();
    act();
  }
}
