// Entry point of the page of `unisono top --web`: a job that runs, asked again and again.

import { bandwidth, bytes, drawing, duration, h, s, set } from "./dom.js";
import { themes } from "./themes.js";

/** @typedef {{rank: number, pid: number, group: string, seq: number, behind: number, doing: string, seconds: number, sent: number,
 *   rate: number | null, host: string, calls_rate: number | null, waits_for: number[], failure: string}} Row */
/** @typedef {{src: number, dst: number, near: boolean, sent: number, rate: number | null}} Link */
/** @typedef {{src: string, dst: string, links: number, sent: number, rate: number | null}} Pair */
/** @typedef {{job: string, world_size: number, rows: Row[], late: number[], failures: {rank: number, group: string, failure: string}[],
 *   links: Link[], hosts: Pair[], guessed: number, missing: number[], rank_hosts: string[]}} Seen */
/** @typedef {{every: number, ended: boolean, seen: Seen}} Answer */

/** How many of the latest values the curves have. */
const KEPT = 120;
/** Up to how many ranks there is a table of all links. */
const MOST_IN_TABLE = 16;
const MOST_LINKS = 40;

/** @param {number[]} ranks */
const named = (ranks) => `${ranks.length > 1 ? "ranks" : "rank"} ${ranks.join(", ")}`;

/** @param {number | null} rate */
const per = (rate) => (rate === null ? "" : bandwidth(rate));

/** @param {number} calls */
const count = (calls) => Number(calls.toPrecision(4)).toLocaleString("en");

class Top {
  /** @param {HTMLElement} root */
  constructor(root) {
    /** @type {{calls: number[], sent: number[]}} */
    this.history = { calls: [], sent: [] };
    this.paused = false;
    this.every = 1;
    this.updates = 0;
    this.root = root;
    this.summary = h("p", { class: "summary" });
    this.state = h("p", { class: "state", role: "status" });
    this.failures = h("ul", { class: "trouble", role: "alert" });
    this.waits = h("ul", { class: "waits", "aria-live": "polite" });
    this.hosts = h("div", { class: "hosts" });
    this.curves = h("div", { class: "curves-of-time" });
    this.ranks = h("div", { class: "panel", tabindex: 0, role: "region", "aria-label": "Ranks" });
    this.links = h("div", { class: "panel", tabindex: 0, role: "region", "aria-label": "Links" });
    const pause = h("button", { type: "button", "aria-pressed": "false" }, "Pause");
    pause.addEventListener("click", () => {
      this.paused = !this.paused;
      set(pause, { "aria-pressed": String(this.paused) });
      this.say(this.paused ? "Paused." : "Live.");
    });
    root.replaceChildren(
      h("header", {}, h("div", {}, h("h1", {}, "unisono top"), this.summary), h("div", { class: "buttons-in-words" }, pause, " ", themes())),
      this.state,
      this.failures,
      h("div", { class: "columns" }, h("section", {}, h("h2", {}, "Who waits for whom"), this.waits, h("h2", {}, "Hosts"), this.hosts), h("section", {}, h("h2", {}, "Rates"), this.curves)),
      h("section", {}, h("h2", {}, "Ranks"), this.ranks),
      h("section", {}, h("h2", {}, "Links"), this.links),
    );
  }

  /** @param {string} words */
  say(words) {
    if (this.state.textContent !== words) this.state.textContent = words;
  }

  /** Ask, show, and ask again a little later; until the job has ended. */
  async run() {
    try {
      if (!this.paused && !document.hidden) {
        const answer = await fetch("/api/snapshot");
        const body = await answer.json();
        if (!answer.ok) throw new Error(body.error);
        this.every = body.every;
        if (!this.paused) this.show(body);
        if (body.ended) return;
      }
    } catch (error) {
      const why = error instanceof TypeError ? "it was ended" : error instanceof Error ? error.message : String(error);
      this.say(`unisono top does not answer: ${why}. What is shown is what was seen last.`);
      if (!(error instanceof TypeError)) return;
    }
    setTimeout(() => this.run(), 1000 * this.every);
  }

  /** @param {Answer} answer */
  show({ seen, ended }) {
    this.say(ended ? "The job has ended. What is shown is what was seen last." : "Live.");
    if (ended || !seen.rows) return;
    const answering = new Set(seen.rows.filter((row) => row.failure !== "does not answer").map((row) => row.rank));
    const calls = Math.max(0, ...seen.rows.map((row) => row.calls_rate ?? 0));
    const sent = seen.rows.reduce((sum, row) => sum + (row.rate ?? 0), 0);
    if (seen.rows.some((row) => row.rate !== null)) {
      this.history.calls = [...this.history.calls, calls].slice(-KEPT);
      this.history.sent = [...this.history.sent, sent].slice(-KEPT);
    }
    const places = new Set(seen.rank_hosts).size || 1;
    this.summary.textContent = `${answering.size} of ${seen.world_size} ranks answer here; the job has ${places} ${places > 1 ? "hosts" : "host"}.`;
    this.failures.replaceChildren(...seen.failures.map(({ rank, group, failure }) => h("li", {}, `rank ${rank}, ${group}: ${failure}`)));
    this.waits.replaceChildren(...waits(seen).map((line) => h("li", {}, line)));
    this.hosts.replaceChildren(...cards(seen, answering));
    this.curves.replaceChildren(curve("calls per second", this.history.calls, count), curve("bytes per second, all ranks", this.history.sent, bandwidth));
    this.ranks.replaceChildren(ranks(seen));
    this.links.replaceChildren(...links(seen));
    this.updates += 1;
    set(this.root, { "data-updates": this.updates });
  }
}

/**
 * One sentence for all that wait for the same ranks in the same group.
 * @param {Seen} seen
 */
function waits(seen) {
  /** @type {Map<string, {ranks: number[], row: Row}>} */
  const found = new Map();
  for (const row of seen.rows.filter((one) => one.waits_for.length)) {
    const key = `${row.group}/${row.waits_for}`;
    const entry = found.get(key) ?? { ranks: [], row };
    entry.ranks.push(row.rank);
    found.set(key, entry);
  }
  const lines = [...found.values()].map(({ ranks, row }) => `${named(ranks)} ${ranks.length > 1 ? "wait" : "waits"} for ${named(row.waits_for)} in ${row.group}, call ${row.seq}`);
  return lines.length ? lines : ["No rank waits for one of this host that is behind."];
}

/**
 * A frame for each host, with its ranks.
 * @param {Seen} seen
 * @param {Set<number>} answering
 */
function cards(seen, answering) {
  /** @type {Map<string, number[]>} */
  const places = new Map();
  const known = seen.rank_hosts.length ? seen.rank_hosts : seen.rows.map((row) => row.host);
  known.forEach((host, rank) => places.set(host, [...(places.get(host) ?? []), rank]));
  const broken = new Set(seen.failures.map(({ rank }) => rank));
  const waiting = new Set(seen.rows.filter((row) => row.waits_for.length).map((row) => row.rank));
  /** @param {number} rank */
  const chip = (rank) => {
    const word = broken.has(rank) ? "failed" : seen.late.includes(rank) ? "late" : waiting.has(rank) ? "waits" : answering.has(rank) ? "" : "not asked";
    return h("span", { class: `rank-chip ${word.replace(" ", "-")}` }, `${rank}${word ? ` ${word}` : ""}`);
  };
  return [...places].map(([host, ranks]) => h("div", { class: "host" }, h("h3", {}, host || "this host", h("span", {}, ` ${ranks.length} ${ranks.length > 1 ? "ranks" : "rank"}`)), h("p", {}, ...ranks.map(chip))));
}

/**
 * The latest values as a curve, with the last and the largest as words.
 * @param {string} title
 * @param {number[]} values
 * @param {(value: number) => string} words
 */
function curve(title, values, words) {
  const [width, height] = [480, 70];
  const most = Math.max(...values, 0) || 1;
  const last = values[values.length - 1] ?? 0;
  const node = drawing(width, height, `${title}: now ${words(last)}, at most ${words(Math.max(...values, 0))}`, 0.5);
  node.style.maxWidth = "100%";
  const points = values.map((value, k) => `${(width * k) / (KEPT - 1)} ${height - 2 - (value / most) * (height - 6)}`);
  node.append(s("line", { class: "rule", x1: 0, x2: width, y1: height - 1, y2: height - 1 }));
  if (points.length > 1) node.append(s("path", { class: "curve named l0", d: `M${points.join("L")}` }));
  return h("figure", {}, h("figcaption", {}, h("strong", {}, words(last)), ` ${title}; at most ${words(Math.max(...values, 0))}`), node);
}

/**
 * @param {string[]} heads
 * @param {(string | number)[][]} lines
 * @param {(at: number) => string} [kind] the class of a line
 */
function table(heads, lines, kind = () => "") {
  return h(
    "table",
    { class: "list" },
    h("thead", {}, h("tr", {}, ...heads.map((head) => h("th", { scope: "col" }, head)))),
    h("tbody", {}, ...lines.map((line, at) => h("tr", { class: kind(at) }, ...line.map((cell) => h("td", {}, String(cell)))))),
  );
}

/** @param {Seen} seen */
function ranks(seen) {
  const heads = ["rank", "host", "pid", "group", "call", "calls/s", "behind", "waits for", "sent", "rate", "doing"];
  const lines = seen.rows.map((row) => [
    row.rank,
    row.host,
    row.pid,
    row.group,
    row.seq,
    row.calls_rate === null ? "" : count(row.calls_rate),
    row.behind ? `${row.behind}${seen.late.includes(row.rank) ? " late" : ""}` : "",
    row.waits_for.join(", "),
    bytes(row.sent),
    per(row.rate),
    `${row.doing}${row.seconds ? `, ${duration(row.seconds * 1e6)}` : ""}`,
  ]);
  return table(heads, lines, (at) => (seen.rows[at].failure ? "failed" : seen.late.includes(seen.rows[at].rank) ? "late" : ""));
}

/** @param {Seen} seen */
function links(seen) {
  const made = seen.world_size <= MOST_IN_TABLE && seen.links.length ? [between(seen)] : [];
  const lines = seen.links.slice(0, MOST_LINKS).map((link) => [link.src, link.dst, per(link.rate), bytes(link.sent), link.near ? "near" : "between hosts"]);
  made.push(table(["from", "to", "rate", "sent", "where"], lines));
  const notes = [];
  if (seen.links.length > MOST_LINKS) notes.push(`and ${seen.links.length - MOST_LINKS} more links`);
  if (seen.missing.length) notes.push(`The destinations of ${named(seen.missing)} are not known.`);
  if (seen.guessed) notes.push(`The destinations of ${bytes(seen.guessed)} are estimated from other calls: there were too many since the last update.`);
  const pairs = seen.hosts.map((pair) => [pair.src, pair.dst, per(pair.rate), bytes(pair.sent), pair.links]);
  const by = new Set(seen.rank_hosts).size > 1 ? [h("h3", {}, "From host to host"), table(["from", "to", "rate", "sent", "links"], pairs)] : [];
  return [h("div", { class: "side-by-side" }, ...made), ...notes.map((note) => h("p", {}, note)), ...by];
}

/**
 * Bytes per second from rank to rank; a full cell is the busiest.
 * @param {Seen} seen
 */
function between(seen) {
  const numbers = [...Array(seen.world_size).keys()];
  const busiest = Math.max(...seen.links.map((link) => link.rate ?? 0)) || 1;
  const head = h("tr", {}, h("th", { scope: "col", class: "corner" }, "from ↓ to →"), ...numbers.map((dst) => h("th", { scope: "col" }, String(dst))));
  const body = numbers.map((src) => {
    const row = h("tr", {}, h("th", { scope: "row" }, String(src)));
    for (const dst of numbers) {
      const link = seen.links.find((one) => one.src === src && one.dst === dst);
      const fill = h("span", { class: `fill b${src % 16}` });
      fill.style.width = `${(100 * (link?.rate ?? 0)) / busiest}%`;
      row.append(h("td", {}, fill, h("span", { class: "amount" }, link ? per(link.rate) || bytes(link.sent) : "·")));
    }
    return row;
  });
  return h("table", { class: "bytes" }, h("caption", {}, "Bytes per second from rank to rank"), h("thead", {}, head), h("tbody", {}, ...body));
}

const top = document.getElementById("unisono");
if (top) new Top(top).run();
