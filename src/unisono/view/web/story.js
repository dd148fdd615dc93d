// A story is a schedule as plain data from Python (view/story.py); a scene is one moment of it.

/** @typedef {{name: string, nbytes: number, before: number, after: number, goal: number}} Row */
/** src, dst, chunk, into, adds, carries, message
 * @typedef {[number, number, number, number, number, number, number]} Move */
/** @typedef {{phase: string, caption: string, moves: Move[], done: number}} Beat */
/** step, src, dst, bytes, leaves, arrives
 * @typedef {[number, number, number, number, number, number]} Message */
/** @typedef {{name: string, labels: string[], places: [number, number][], hosts: number[],
 *   links: [number, number][], routes: Record<string, number[]>}} Topology */
/** @typedef {{title: string, collective: string, algorithm: string, meaning: string,
 *   about: string, opening: string, promise: string, n: number, reduces: boolean,
 *   nbytes: number, size: string, rows: Row[], beats: Beat[], due: number,
 *   facts: [string, string][], map: Topology, messages: Message[], time: number,
 *   bound: number, times: string}} Story */

/** A transfer under way: how far, from 0 to 1.
 * @typedef {{move: Move, step: number, part: number}} Flight */
/** @typedef {{masks: Int32Array, fresh: Uint8Array, flights: Flight[], step: number,
 *   time: number, done: number, traffic: Float64Array}} Scene */
/** @typedef {"step" | "time"} By */

/** Whatever can draw a scene.
 * @typedef {{node: Element, draw: (scene: Scene) => void}} View */

export const EVERYWHERE = -1;

/** A story with what every scene needs worked out once. */
export class Reel {
  /** @param {Story} story */
  constructor(story) {
    this.story = story;
    /** When the last message of each step has arrived; 0 before the first. */
    this.ends = [0];
    /**
     * When the first message of each step leaves.
     * @type {number[]}
     */
    this.starts = [];
    for (let step = 1; step <= story.beats.length; step += 1) {
      const mine = story.messages.filter((m) => m[0] === step);
      const last = Math.max(this.ends[step - 1], ...mine.map((m) => m[5]));
      this.starts.push(mine.length ? Math.min(...mine.map((m) => m[4])) : this.ends[step - 1]);
      this.ends.push(last);
    }
    /**
     * All transfers in the order in which they arrive.
     * @type {{move: Move, step: number, leaves: number, arrives: number}[]}
     */
    this.arrivals = story.beats
      .flatMap((beat, at) => beat.moves.map((move) => ({ move, step: at + 1, ...this.times(move, at + 1) })))
      .sort((a, b) => a.arrives - b.arrives || a.step - b.step || a.move[4] - b.move[4]);
  }

  /**
   * @param {Move} move
   * @param {number} step
   */
  times(move, step) {
    if (move[6] < 0) return { leaves: this.starts[step - 1], arrives: this.starts[step - 1] };
    const message = this.story.messages[move[6]];
    return { leaves: message[4], arrives: message[5] };
  }

  get steps() {
    return this.story.beats.length;
  }

  /**
   * How far one can scrub.
   * @param {By} by
   */
  length(by) {
    return by === "step" ? this.steps : this.story.time;
  }

  /**
   * The moment `at`, which is a step and its part, or a time.
   * @param {By} by
   * @param {number} at
   * @returns {Scene}
   */
  scene(by, at) {
    return by === "step" ? this.byStep(Math.min(at, this.steps)) : this.byTime(Math.min(at, this.story.time));
  }

  /** @param {number} at */
  byStep(at) {
    const step = Math.ceil(at - 1e-9);
    const part = step ? at - (step - 1) : 1;
    const whole = part > 1 - 1e-6 ? step : step - 1;
    const scene = this.blank(step);
    scene.time = step ? this.ends[step - 1] + part * (this.ends[step] - this.ends[step - 1]) : 0;
    for (let k = 1; k <= whole; k += 1) {
      for (const move of this.story.beats[k - 1].moves) this.apply(scene, move, k === step);
    }
    if (step) for (const move of this.story.beats[step - 1].moves) scene.flights.push({ move, step, part });
    return this.finish(scene);
  }

  /** @param {number} time */
  byTime(time) {
    let step = this.ends.findIndex((end, k) => k > 0 && end > time);
    if (step < 0) step = this.steps;
    const scene = this.blank(time > 0 ? step : 0);
    scene.time = time;
    for (const { move, step: of, leaves, arrives } of this.arrivals) {
      const landed = arrives <= time;
      if (landed) this.apply(scene, move, of === step);
      if (landed ? of === step && time > 0 : leaves <= time) {
        const part = landed ? 1 : (time - leaves) / (arrives - leaves);
        scene.flights.push({ move, step: of, part });
      }
    }
    return this.finish(scene);
  }

  /**
   * What is there before the first step.
   * @param {number} step
   * @returns {Scene}
   */
  blank(step) {
    const { n, rows } = this.story;
    const masks = new Int32Array(rows.length * n);
    rows.forEach((row, r) => {
      for (let rank = 0; rank < n; rank += 1) {
        if (row.before === EVERYWHERE || row.before === rank) masks[r * n + rank] = 1 << rank;
      }
    });
    const fresh = new Uint8Array(masks.length);
    return { masks, fresh, flights: [], step, time: 0, done: 0, traffic: new Float64Array(n * n) };
  }

  /**
   * A transfer arrives.
   * @param {Scene} scene
   * @param {Move} move
   * @param {boolean} now
   */
  apply(scene, move, now) {
    const { n, rows } = this.story;
    const cell = move[3] * n + move[1];
    scene.masks[cell] = move[4] ? scene.masks[cell] | move[5] : move[5];
    if (now) scene.fresh[cell] = 1;
    if (move[0] !== move[1]) scene.traffic[move[0] * n + move[1]] += rows[move[2]].nbytes;
  }

  /**
   * Bytes under way, and how much is as it shall be.
   * @param {Scene} scene
   */
  finish(scene) {
    const { n, rows } = this.story;
    for (const { move, part } of scene.flights) {
      if (part < 1 - 1e-6 && move[0] !== move[1]) {
        scene.traffic[move[0] * n + move[1]] += part * rows[move[2]].nbytes;
      }
    }
    for (let cell = 0; cell < scene.masks.length; cell += 1) {
      if (this.isResult(cell, scene.masks[cell])) scene.done += 1;
    }
    return scene;
  }

  /**
   * Whether a cell is one that the collective promises, and is as promised.
   * @param {number} cell
   * @param {number} mask
   */
  isResult(cell, mask) {
    const row = this.story.rows[Math.floor(cell / this.story.n)];
    const rank = cell % this.story.n;
    return (row.after === EVERYWHERE || row.after === rank) && mask === row.goal;
  }

  /**
   * What happens now, in one sentence.
   * @param {Scene} scene
   */
  caption(scene) {
    return scene.step ? this.story.beats[scene.step - 1].caption : this.story.opening;
  }

  /**
   * Runs of steps of one phase, with their times.
   * @returns {{name: string, first: number, last: number, start: number, end: number}[]}
   */
  phases() {
    /** @type {{name: string, first: number, last: number, start: number, end: number}[]} */
    const found = [];
    this.story.beats.forEach((beat, at) => {
      const last = found[found.length - 1];
      if (last && last.name === beat.phase) {
        last.last = at + 1;
        last.end = this.ends[at + 1];
      } else {
        found.push({ name: beat.phase, first: at + 1, last: at + 1, start: this.ends[at], end: this.ends[at + 1] });
      }
    });
    return found;
  }
}

/**
 * Whether the transfer goes from one rank to another.
 * @param {Flight} flight
 */
export function travels(flight) {
  return flight.move[0] !== flight.move[1];
}

/**
 * Ease in and out, so that what moves can be followed.
 * @param {number} part
 */
export function eased(part) {
  return part < 0.5 ? 2 * part * part : 1 - 2 * (1 - part) * (1 - part);
}
