// Takes what the server pushes, and shows it: all runs, one run, or some beside each other.
"use strict";
(() => {
  const { node, number, seconds } = Charts, { Follower, Store, Stream, WORDS, say } = Streams;
  const main = document.getElementById("main"), where = document.getElementById("where");
  const ROWS = 100; // that are made at once: the next when the end of these comes into view
  let page = null;

  const address = (kind, names) => `#/${kind}/${names.map(encodeURIComponent).join("/")}`;

  class RunPage {
    constructor(name) {
      document.title = `${name} · instep`;
      where.replaceChildren(node("span", "/"), node("span", name));
      const parts = this.parts = {};
      const add = (key, title) => { parts[key] = View.section(title, parts[key + "In"] = node("div", "")); return parts[key]; };
      this.head = node("div", "", "head");
      const curves = View.section("Curves");
      this.board = new Charts.Board(curves, [name]);
      this.none = curves.appendChild(node("p", "No step yet.", "note"));
      this.some = curves.appendChild(node("p", "", "note"));
      this.some.hidden = true;
      const left = [add("workers", "Workers")], right = ["events", "audit", "checkpoints", "participants", "logs", "next", "settings"];
      const titles = { events: "Generations and failures", audit: "Audit of samples", checkpoints: "Checkpoints", participants: "Participants", logs: "Last lines of the logs", next: "Next commands", settings: "Settings" };
      const grid = node("div", "", "grid");
      grid.append(...right.map((key) => add(key, titles[key])));
      main.replaceChildren(this.head, curves, ...left, grid);
      this.follower = new Follower("run", `run=${encodeURIComponent(name)}`, (changed) => this.show(changed), go);
    }

    fill(key, content) {
      this.parts[key].hidden = !content;
      if (content) this.parts[key + "In"].replaceChildren(...content);
    }

    show(changed) {
      const s = this.follower.sections, { charts } = this.follower;
      const has = (...names) => names.some((name) => changed.has(name));
      if (has("verdict", "status", "summary")) {
        const verdict = node("p", "", "verdict");
        verdict.append(View.dot(s.verdict.mark), s.verdict.text);
        this.head.replaceChildren(node("h1", s.name), verdict, View.tiles(s.status, s.summary));
      }
      if (has("read")) {
        this.some.hidden = s.read === null;
        this.some.textContent = s.read === null ? "" : `A long run: for now the curves have some of its steps. ${View.share(s.read)} of its records are read.`;
      }
      if (has("charts")) { this.none.hidden = charts.length > 0; this.board.show(charts); }
      if (has("workers", "status")) this.fill("workers", View.workers(s.workers, s.status.state));
      if (has("events")) this.fill("events", [View.happened(s.events)]);
      if (has("audit", "summary")) {
        const hash = s.summary && s.summary.parameters_sha256;
        this.fill("audit", [node("p", s.audit.text, s.audit.exact === false ? "warn" : ""), ...(hash ? [node("p", "sha256 of the parameters", "note"), node("code", hash, "hash")] : [])]);
      }
      if (has("checkpoints")) this.fill("checkpoints", s.checkpoints.length ? View.checkpoints(s.checkpoints, s.saved) : null);
      if (has("participants")) this.fill("participants", s.participants ? View.participants(s.participants) : null);
      if (has("logs")) {
        const open = [...main.querySelectorAll("details[data-of]")];
        this.fill("logs", s.logs.length ? View.logs(s.logs, open.length ? new Set(open.filter((each) => each.open).map((each) => each.dataset.of)) : null) : null);
      }
      if (has("next")) this.fill("next", s.next.map(View.copied));
      if (has("settings")) {
        const box = node("details", "");
        box.append(node("summary", `${s.settings.length} settings of the job`), View.table(["setting", "value"], s.settings.map(([key, value]) => [key, node("code", value)])));
        this.fill("settings", [box]);
      }
    }

    get stream() { return this.follower.stream; }

    close() { this.stream.end(); this.board.close(); }
  }

  // The trials of a search: how the best grew, and each key against the metric.
  class SearchPage {
    constructor(name) {
      document.title = `${name} · instep`;
      where.replaceChildren(node("span", "/"), node("span", name));
      this.head = node("div", "", "head");
      const curves = View.section("Best so far, and each key");
      this.board = new Charts.Board(curves, [name], ["trial"]);
      this.none = curves.appendChild(node("p", "No trial has its result yet.", "note"));
      this.trials = node("div", "");
      this.nextIn = node("div", "");
      main.replaceChildren(this.head, curves, View.section("Trials", this.trials), View.section("Next commands", this.nextIn));
      this.follower = new Follower("search", `search=${encodeURIComponent(name)}`, () => this.show(), go);
    }

    show() {
      const s = this.follower.sections;
      const { search, trials } = s, verdict = node("p", "", "verdict");
      verdict.append(View.dot(s.verdict.mark), s.verdict.text);
      this.head.replaceChildren(node("h1", search.name), verdict);
      const charts = View.chartsOfSearch(search, trials);
      this.none.hidden = charts.length > 0;
      this.board.show(charts);
      const best = [...s.top].filter((run) => trials.some((trial) => trial.run === run)), compare = node("a", `Compare the best ${best.length}`);
      compare.href = address("compare", best);
      this.trials.replaceChildren(...(best.length > 1 ? [compare] : []), View.trials(search, trials, (run) => address("run", [run])));
      this.nextIn.replaceChildren(...s.next.map(View.copied));
    }

    get stream() { return this.follower.stream; }

    close() { this.stream.end(); this.board.close(); }
  }

  class PoolPage {
    constructor() {
      document.title = "pool · instep";
      where.replaceChildren(node("span", "/"), node("span", "pool"));
      this.follower = new Follower("pool", "pool", () => this.show(), go);
    }

    show() {
      const s = this.follower.sections;
      const head = node("div", "", "head"), verdict = node("p", "", "verdict");
      verdict.append(View.dot(s.verdict.mark), s.verdict.text);
      head.append(node("h1", "Pool"), verdict);
      const none = node("p", "No job has been submitted. instep submit JOB gives the pool one.", "note");
      const jobs = s.jobs.length ? View.jobs(s.jobs, (run) => address("run", [run])) : none;
      main.replaceChildren(head, View.section("Shares", View.shares(s.shares, s.pool.cores)), ...(s.hosts.length ? [View.section("Hosts", View.hosts(s.hosts))] : []), View.section("Jobs", jobs), View.section("Next commands", ...s.next.map(View.copied)));
    }

    get stream() { return this.follower.stream; }

    close() { this.stream.end(); }
  }

  class ListPage {
    constructor() {
      this.store = new Store();
      this.rows = new Map();
      this.picked = new Set();
      document.title = "runs · instep";
      where.replaceChildren(node("span", "/"), node("span", "runs"));
      this.filter = Object.assign(node("input", ""), { type: "search", placeholder: "name, state, or a condition such as accuracy>0.9" });
      this.filter.setAttribute("aria-label", "Filter runs");
      this.metric = node("select", "");
      this.metric.setAttribute("aria-label", "Metric of which the best is shown");
      this.compare = Object.assign(node("button", "Compare"), { type: "button", className: "main" });
      this.all = Object.assign(node("button", "Select all"), { type: "button" });
      const bar = node("div", "", "toolbar");
      bar.append(this.filter, this.metric, this.all, this.compare);
      this.table = node("table", "", "runs");
      const scroll = node("div", "", "scroll");
      scroll.append(this.table);
      this.note = node("p", "", "note");
      this.more = Object.assign(node("button", "More"), { type: "button", hidden: true });
      this.most = ROWS;
      this.beside = node("div", "");
      main.replaceChildren(this.beside, View.section("Runs", bar, this.note, scroll, this.more));
      this.order = { key: "began", down: true };
      this.heads();
      this.filter.addEventListener("input", () => this.sort());
      this.metric.addEventListener("change", () => { for (const each of this.rows.values()) each.drawn = null; this.sort(); });
      const further = () => { this.most += ROWS; this.sort(); };
      this.more.addEventListener("click", further);
      this.end = new IntersectionObserver((seen) => { if (seen.some((each) => each.isIntersecting)) further(); });
      this.end.observe(this.more);
      this.all.addEventListener("click", () => this.pickAll());
      this.compare.addEventListener("click", () => { location.hash = address("compare", [...this.picked]); });
      this.stream = new Stream("", (message) => { this.store.take(message); this.update(); }, () => {});
    }

    heads() {
      const heads = [["", ""], ["name", "run"], ["state", "state"], ["part", "progress"], ["best", "best"], ["samples_per_s", "samples/s"], ["workers", "workers"], ["seconds", "took"], ["began", "began"]];
      const row = this.table.createTHead().insertRow();
      for (const [key, text] of heads) {
        const cell = node("th", "");
        cell.scope = "col";
        if (key) {
          const button = Object.assign(node("button", text), { type: "button" });
          button.addEventListener("click", () => { this.order = { key, down: this.order.key === key ? !this.order.down : key !== "name" }; this.sort(); });
          cell.append(button);
          cell.dataset.key = key;
        } else cell.append(node("span", "select", "unseen"));
        row.append(cell);
      }
      this.body = this.table.createTBody();
    }

    // Best of the chosen metric, as `instep list --best`: the least of `loss`, the most of others, or as `:min` says.
    best(data) {
      const [metric, least] = /^(.*):min$/.exec(this.metric.value)?.slice(1).concat(true) || [this.metric.value, this.metric.value === "loss"];
      const of = data.best && data.best[metric];
      return of ? of[least ? "least" : "most"] : null;
    }

    value(data, key) {
      if (key === "part") return data.steps ? data.step / data.steps : data.step;
      if (key === "best") return (this.best(data) || [null])[0];
      return data[key];
    }

    update() {
      const all = Object.entries(this.store.sections).filter(([name]) => name.startsWith("row ")).map(([, row]) => row);
      const metrics = [...new Set(all.flatMap((row) => Object.keys(row.best || {})))].slice(0, 500);
      const choices = metrics.flatMap((name) => (name === "loss" ? [name] : [name, `${name}:min`]));
      if (this.metric.options.length !== choices.length) {
        const was = this.metric.value;
        this.metric.replaceChildren(...choices.map((name) => new Option(`best ${name}`, name)));
        this.metric.value = choices.includes(was) ? was : metrics.find((name) => name !== "loss") || metrics[0] || "";
      }
      this.others(this.store.sections);
      const names = new Set(all.map((row) => row.name));
      for (const name of this.rows.keys()) if (!names.has(name)) { this.rows.delete(name); this.picked.delete(name); }
      for (const row of all) {
        const known = this.rows.get(row.name);
        if (known) known.data = row;
        else this.rows.set(row.name, { data: row, drawn: null, line: null, box: null });
      }
      const about = this.store.sections.about;
      if (about && about.single && all.length === 1 && !this.jumped && location.hash === "#/") { this.jumped = true; location.replace(address("run", [all[0].name])); return; }
      this.sort();
    }

    // Searches and the pool, where there are any.
    others({ searches, pool }) {
      if (this.searches === searches && this.pool === pool) return;
      Object.assign(this, { searches, pool });
      const shown = [];
      if (pool) {
        const anchor = node("a", "Pool"), line = node("p", "");
        anchor.href = address("pool", []);
        const jobs = Object.entries(pool.jobs || {}).map(([state, count]) => `${View.count(count)} ${state}`).join(", ") || "no jobs";
        line.append(anchor, pool.error ? `: ${pool.error}` : `: ${pool.held} of ${pool.cores} cores busy; ${jobs}${pool.scheduled ? "" : "; no scheduler"}`);
        shown.push(View.section("Pool", line));
      }
      if (searches && searches.length) shown.push(View.section("Searches", View.searches(searches, (name) => address("search", [name]))));
      this.beside.replaceChildren(...shown);
    }

    // Makes the elements of a row, when it is first to be seen, and where its figures have changed.
    draw(each) {
      const row = each.drawn = each.data;
      if (!each.line) {
        each.line = document.createElement("tr");
        each.box = Object.assign(document.createElement("input"), { type: "checkbox", checked: this.picked.has(row.name) });
        each.box.addEventListener("change", () => { this.picked[each.box.checked ? "add" : "delete"](row.name); this.buttons(); });
      }
      const { line, box } = each;
      box.setAttribute("aria-label", `select ${row.name}`);
      const anchor = node("a", row.name);
      anchor.href = address("run", [row.name]);
      const cell = (content, className) => { const made = node("td", "", className || ""); made.append(content); return made; };
      if (row.error) {
        const why = cell(row.error, "warn");
        why.colSpan = 7;
        line.replaceChildren(cell(box), cell(row.name, "name"), why);
      } else {
        const best = this.best(row), shown = node("span", best ? number(best[0]) : "–");
        if (best) shown.append(node("span", ` at ${View.count(best[1])}`, "at-step"));
        const mark = { completed: "good", running: "live", failed: "bad" }[row.state] || "calm";
        const how = node("span", "", "state"), steps = node("div", "", "steps");
        how.append(View.dot(mark), row.state);
        steps.append(View.progress(row.step, row.state === "completed" ? row.step : row.steps), node("span", row.steps ? `${View.count(row.step)} / ${View.count(row.steps)}` : View.count(row.step)));
        line.replaceChildren(cell(box), cell(anchor, "name"), cell(how), cell(steps), cell(shown, "num"), cell(View.count(row.samples_per_s), "num"), cell(View.count(row.workers), "num"), cell(seconds(row.seconds), "num"), cell(row.began ? new Date(row.began * 1000).toLocaleString("sv-SE").slice(0, 16) : "–", "num"));
      }
    }

    // Conditions are those of `instep list --where`, on what a row has.
    passes(data) {
      const text = this.filter.value.trim(), parts = /^([\w./:-]+)\s*(>=|<=|!=|=|>|<)\s*(.+)$/.exec(text);
      if (!parts) return `${data.name} ${data.state || "unread"}`.toLowerCase().includes(text.toLowerCase());
      const [, key, sign, written] = parts, value = (data.validation || {})[key] ?? data[key], wanted = Number(written);
      if (value === undefined) return false;
      const same = typeof value === "number" && !Number.isNaN(wanted) ? value === wanted : String(value) === written.replace(/^(["'])(.*)\1$/, "$2");
      if (sign === "=" || sign === "!=") return same === (sign === "=");
      return typeof value === "number" && { ">": value > wanted, "<": value < wanted, ">=": value >= wanted, "<=": value <= wanted }[sign];
    }

    // Why no run passes: a condition on something that rows do not have.
    unknown() {
      const key = /^([\w./:-]+)\s*(>=|<=|!=|=|>|<)/.exec(this.filter.value.trim())?.[1];
      const has = (data) => data[key] !== undefined || (data.validation || {})[key] !== undefined;
      if (!key || [...this.rows.values()].some((each) => has(each.data))) return "";
      return `. No row has ${key}; by settings, instep list --where "${this.filter.value.trim()}" chooses.`;
    }

    sort() {
      const { key, down } = this.order, sign = down ? -1 : 1;
      const shown = [...this.rows.values()].filter((each) => this.passes(each.data));
      shown.sort((a, b) => {
        const x = this.value(a.data, key), y = this.value(b.data, key);
        if ((x ?? null) === null || (y ?? null) === null) return ((x ?? null) === null) - ((y ?? null) === null);
        return sign * (typeof x === "string" ? x.localeCompare(y, "en", { numeric: true }) : x - y);
      });
      this.shown = shown.map((each) => each.data.name);
      const seen = shown.slice(0, this.most);
      for (const each of seen) if (each.drawn !== each.data) this.draw(each);
      const lines = seen.map((each) => each.line);
      this.more.hidden = shown.length <= seen.length;
      if (lines.length !== this.body.children.length || lines.some((line, at) => this.body.children[at] !== line)) this.body.replaceChildren(...lines);
      for (const head of this.table.tHead.rows[0].cells) {
        if (head.dataset.key === key) head.setAttribute("aria-sort", down ? "descending" : "ascending"); else head.removeAttribute("aria-sort");
      }
      this.note.textContent = this.rows.size === 0 ? "No run yet. `instep run JOB` makes one." : `${View.count(shown.length)} of ${View.count(this.rows.size)} runs${this.unknown()}`;
      this.buttons();
    }

    pickAll() {
      const on = this.shown.slice(0, 250), every = on.every((name) => this.picked.has(name));
      for (const name of on) {
        const { box } = this.rows.get(name);
        if (box) box.checked = !every;
        this.picked[every ? "delete" : "add"](name);
      }
      this.buttons();
    }

    buttons() {
      this.compare.disabled = this.picked.size < 2 || this.picked.size > 250;
      this.compare.textContent = this.picked.size > 1 ? `Compare ${this.picked.size}` : "Compare";
    }

    close() { this.stream.end(); this.end.disconnect(); }
  }

  class ComparePage {
    constructor(names) {
      document.title = "compare · instep";
      where.replaceChildren(node("span", "/"), node("span", `compare ${names.length} runs`));
      this.names = names;
      this.top = node("div", "", "head");
      this.top.append(node("h1", "Compare"));
      main.replaceChildren(this.top, node("p", "Reading the runs …", "note"));
      this.load();
    }

    async load() {
      const query = this.names.map((name) => `run=${encodeURIComponent(name)}`).join("&");
      const answer = await fetch(`/api/compare?${query}`).catch(() => null);
      if (this.closed) return;
      if (!answer || !answer.ok) {
        const why = { ...WORDS, 404: "None of these runs is here.", 400: "Choose 1 to 250 runs." }[answer ? answer.status : 0];
        main.replaceChildren(this.top, node("p", why || "These runs cannot be compared.", "cause"));
        return;
      }
      say("");
      const { runs, charts, settings, hashes, unread } = await answer.json();
      const curves = View.section("Curves");
      this.board = new Charts.Board(curves, runs);
      const heads = runs.slice(0, 12);
      const rows = settings.map((row) => row.slice(0, 13).map((cell, at) => (at ? node("code", cell) : cell)));
      const differ = View.section("Settings that differ", rows.length ? View.table(["setting", ...heads], rows) : node("p", "None: all runs were given the same job.", "note"));
      const wrong = unread.map(({ name, error }) => node("p", `${name}: ${error}`, "warn"));
      main.replaceChildren(this.top, ...wrong, curves, differ, View.section("Hashes", ...View.hashes(runs, hashes)));
      this.board.show(charts);
    }

    close() { this.closed = true; if (this.board) this.board.close(); }
  }

  // A name in the address; one that was cut within a character stays as it is, and is no run.
  const decode = (text) => {
    try { return decodeURIComponent(text); } catch { return text; }
  };

  const go = () => {
    const [, kind, ...names] = location.hash.split("/"), decoded = names.map(decode);
    if (page) page.close();
    page = kind === "pool" ? new PoolPage() : kind === "search" && decoded.length ? new SearchPage(decoded.join("/")) : kind === "run" && decoded.length ? new RunPage(decoded.join("/")) : kind === "compare" && decoded.length ? new ComparePage(decoded) : new ListPage();
  };

  // Buys a session with the token of a link, also where the link is opened in a page that is open.
  const enter = async () => {
    const token = location.hash.slice(1);
    if (token && !token.startsWith("/")) {
      history.replaceState(null, "", "#/");
      await fetch("/session", { method: "POST", headers: { "content-type": "application/json" }, body: JSON.stringify({ token }) }).catch(() => null);
    } else if (!token) history.replaceState(null, "", "#/");
    go();
  };

  const start = () => {
    addEventListener("hashchange", enter);
    document.addEventListener("visibilitychange", () => { if (page && page.stream) { if (document.hidden) page.stream.close(); else page.stream.open(); } });
    enter();
  };
  start();
})();
