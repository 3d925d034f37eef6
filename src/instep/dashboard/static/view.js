// The parts of the pages, as elements made of plain data. Whatever a run is called or says is set
// as text. Nothing here asks the server.
"use strict";
const View = (() => {
  const { node, number, seconds, short } = Charts;
  const PARTS = ["load", "forward", "backward", "wait", "wire", "update", "save"];
  const grouped = new Intl.NumberFormat("en-US");
  const count = (v) => (v === null || v === undefined ? "–" : grouped.format(Math.round(v)));
  const share = (v) => (v === null || v === undefined ? "–" : `${Math.round(100 * v)} %`);
  const bytes = (v) => (v ? short(v, "B").replace("k", " k").replace("M", " M").replace("G", " G") : "–");

  const section = (title, ...content) => {
    const made = node("section", "");
    made.append(node("h2", title), ...content);
    return made;
  };

  const table = (heads, rows, right = []) => {
    const made = node("table", ""), head = made.createTHead().insertRow(), body = made.createTBody();
    heads.forEach((text, at) => { const cell = node("th", text, right.includes(at) ? "num" : ""); cell.scope = "col"; head.append(cell); });
    for (const row of rows) {
      const line = body.insertRow();
      row.forEach((cell, at) => { const made = line.insertCell(); made.append(cell); if (right.includes(at)) made.className = "num"; });
    }
    const scroll = node("div", "", "scroll");
    scroll.append(made);
    scroll.tabIndex = 0;
    scroll.setAttribute("role", "region");
    scroll.setAttribute("aria-label", heads.join(", "));
    return scroll;
  };

  const copied = (text) => {
    const row = node("div", "", "command"), button = node("button", "copy");
    button.type = "button";
    button.setAttribute("aria-label", `copy ${text}`);
    button.addEventListener("click", async () => {
      await navigator.clipboard.writeText(text);
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
    row.append(node("code", text), button);
    return row;
  };

  const tiles = (status, summary) => {
    const list = node("dl", "", "tiles");
    const add = (name, value) => { const cell = node("div", ""); cell.append(node("dt", name), node("dd", value)); list.append(cell); };
    add("step", status.steps ? `${count(status.step)} / ${count(status.steps)}` : count(status.step));
    add("training loss", number(summary ? summary.loss : status.training_loss));
    for (const [name, value] of Object.entries(status.validation || {}).slice(0, 3)) add(`validation ${name}`, number(value));
    add("samples per second", count(summary && summary.samples_per_second !== undefined ? summary.samples_per_second : status.samples_per_s));
    if (status.eta_s) add("time left", seconds(status.eta_s));
    if (summary) add("took", seconds(summary.seconds));
    add("workers", count(summary ? summary.workers : Object.values(status.workers).filter((state) => state !== "left").length));
    return list;
  };

  const progress = (done, of) => {
    const bar = node("div", "", "progress"), inner = node("i", "");
    const part = of ? Math.max(0, Math.min(1, done / of)) : 0;
    inner.style.width = `${100 * part}%`;
    bar.append(inner);
    bar.setAttribute("role", "img");
    bar.setAttribute("aria-label", of ? share(part) : `${count(done)} steps`);
    return bar;
  };

  const stack = (parts) => {
    const bar = node("div", "", "bar");
    bar.setAttribute("role", "img");
    const words = PARTS.filter((name) => parts && parts[name] >= 0.005).map((name) => `${name} ${share(parts[name])}`);
    bar.setAttribute("aria-label", words.join(", ") || "no parts of a step yet");
    bar.title = words.join(", ");
    PARTS.forEach((name, at) => {
      if (!parts || !(parts[name] > 0)) return;
      const piece = node("i", "", `c${at}`);
      piece.style.width = `${100 * parts[name]}%`;
      bar.append(piece);
    });
    return bar;
  };

  const workers = (rows, state) => {
    const list = node("div", "", "workers");
    list.setAttribute("role", "table");
    list.setAttribute("aria-label", "workers");
    const line = (cells, role, className) => {
      const row = node("div", "", className);
      row.setAttribute("role", "row");
      for (const cell of cells) { cell.setAttribute("role", role); row.append(cell); }
      list.append(row);
    };
    const heads = ["worker", "state", "share", "", "parts of a step", "waits", "samples/s"];
    line(heads.map((text, at) => node("span", text, `w${at}`)), "columnheader", "head");
    const most = Math.max(1e-9, ...rows.map((row) => row.share || 0));
    for (const row of rows) {
      const bad = /failed|exit|quiet|slow/.test(row.state);
      const named = node("span", row.name, "w0"), how = node("span", row.note && !row.rate && state === "running" && !row.share ? `${row.state}: ${row.note}` : row.state, bad ? "w1 warn" : "w1");
      const bar = node("span", "", "w3"), parts = node("span", "", "w4");
      bar.append(progress(row.share || 0, most));
      parts.append(stack(row.parts));
      line([named, how, node("span", share(row.share), "w2 num"), bar, parts, node("span", share(row.wait), "w5 num"), node("span", count(row.rate), "w6 num")], "cell", "row");
    }
    const legend = node("ul", "", "legend");
    PARTS.forEach((name, at) => { const item = node("li", ""); item.append(node("i", "", `c${at}`), name); legend.append(item); });
    return [list, legend];
  };

  const happened = (events) => {
    const list = node("ol", "", "events");
    for (const event of [...events].reverse()) {
      const item = node("li", "", event.kind);
      item.append(node("time", seconds(event.at)), node("span", event.text));
      list.append(item);
    }
    return list;
  };

  const logs = (all, open) => all.map(({ of, lines }, at) => {
    const box = node("details", ""), text = node("pre", lines.join("\n"));
    box.dataset.of = of;
    box.open = open ? open.has(of) : at === 0;
    text.tabIndex = 0;
    box.append(node("summary", of), text);
    return box;
  });

  // Of each kind of hash, whether runs have the same; then those of each run.
  const hashes = (runs, each) => {
    const kinds = [...new Set(each.flatMap(Object.keys))], told = [];
    if (!kinds.length) return [node("p", "None yet: a run has them from its first step on.", "note")];
    for (const kind of kinds) {
      const known = each.map((mine) => mine[kind]).filter(Boolean), different = new Set(known).size;
      const missing = known.length < runs.length ? `, ${count(runs.length - known.length)} without` : "";
      const same = different > 1 ? `${count(different)} different` : known.length > 1 ? "all the same" : "one";
      told.push(node("p", `${kind}: ${same}${missing}`));
    }
    const cell = (hash) => {
      const made = node("code", hash ? `${hash.slice(0, 16)}…` : "–");
      if (hash) made.title = hash;
      return made;
    };
    return [...told, table(["run", ...kinds.map((kind) => `sha256 of ${kind}`)], runs.map((run, at) => [run, ...kinds.map((kind) => cell(each[at][kind]))]))];
  };

  const participants = (each) => {
    const names = Object.keys(each.metrics), most = 100;
    const rows = each.samples.slice(0, most).map((samples, at) => [String(at), count(samples), count(each.epochs[at]), ...names.map((name) => number(each.metrics[name][at]))]);
    const shown = [table(["participant", "samples", "epochs", ...names], rows, [1, 2, ...names.map((_, at) => at + 3)])];
    if (each.samples.length > most) shown.push(node("p", `${count(each.samples.length - most)} more.`, "note"));
    return shown;
  };

  const checkpoints = (saved, all) => {
    const rows = [...saved].reverse().slice(0, 20).map((each) => [count(each.step), seconds(each.at), bytes(each.size_bytes), each.held_s === null ? "–" : seconds(each.held_s), each.path || ""]);
    const shown = [table(["step", "at", "size", "paused", "file"], rows, [0, 1, 2, 3])];
    if (all > rows.length) shown.push(node("p", `${count(all - rows.length)} earlier ones.`, "note"));
    return shown;
  };

  const linked = (text, href) => {
    const made = node("a", text);
    made.href = href;
    return made;
  };

  const marked = (state) => {
    const made = node("span", "", "state");
    made.append(dot({ completed: "good", running: "live", failed: "bad" }[state] || "calm"), state);
    return made;
  };

  const searches = (rows, link) => table(["search", "state", "trials", "metric", "best"], rows.map((row) => (row.error
    ? [linked(row.name, link(row.name)), node("span", row.error, "warn"), "", "", ""]
    : [linked(row.name, link(row.name)), marked(row.running ? "running" : row.told < row.of ? "unfinished" : "completed"), `${count(row.told)} / ${count(row.of)}`, row.metric, number(row.best)])), [2, 4]);

  const shown = (value) => (typeof value === "number" ? number(value) : String(value));

  const trials = (search, rows, link) => {
    const keys = Object.keys(search.keys), order = { running: 0, waiting: 1, completed: 2, pruned: 3, failed: 4 };
    const better = (a, b) => (search.upwards ? b.value - a.value : a.value - b.value);
    const sorted = [...rows].sort((a, b) => order[a.state] - order[b.state] || (a.value !== null && b.value !== null ? better(a, b) : 0));
    const lines = sorted.slice(0, 500).map((row) => {
      const name = node("span", "");
      name.append(linked(row.trial, link(row.run)), row.trial === search.best_trial ? " best" : "");
      const steps = row.of ? `${count(row.steps)} / ${count(row.of)}` : count(row.steps);
      return [name, marked(row.state), number(row.value), steps, row.seconds === null ? "–" : seconds(row.seconds), ...keys.map((key) => shown(row.values[key])), node("div", row.pruned || row.why || "", "why")];
    });
    const made = table(["trial", "state", search.metric, "steps", "took", ...keys.map((key) => key.split(".").pop()), "note"], lines, [2, 3, 4, ...keys.map((_, at) => at + 5)]);
    if (sorted.length > 500) made.append(node("p", `${count(sorted.length - 500)} more.`, "note"));
    return made;
  };

  // Whether values are above 0, and most lie at the foot of a linear axis, as those of a report.
  const isLog = (values) => {
    const sorted = [...values].sort((a, b) => a - b);
    return sorted.length > 0 && sorted[0] > 0 && sorted[sorted.length - 1] > 12 * sorted[sorted.length >> 1];
  };

  const chartsOfSearch = (search, rows) => {
    const told = rows.filter((row) => row.value !== null), log = isLog(told.map((row) => row.value));
    const done = told.filter((row) => row.state === "completed"), kinds = ["completed", "pruned"];
    const ordinal = (row) => Number(row.trial.split("-").pop());
    let best = null;
    const grown = done.map((row) => (best = best === null || (search.upwards ? row.value > best : row.value < best) ? row.value : best));
    const dots = (axis, x) => kinds.map((kind, run) => {
      const mine = told.filter((row) => row.state === kind && x(row) !== null).sort((a, b) => x(a) - x(b));
      return { kind, run, dots: true, open: kind === "pruned", [axis]: mine.map(x), mean: mine.map((row) => row.value), names: mine.map((row) => row.trial) };
    }).filter((line) => line.mean.length);
    if (!told.length) return [];
    const first = { title: search.metric, axis: "trial", whole: true, log, lines: dots("trial", ordinal) };
    if (done.length) first.lines.unshift({ kind: "best so far", run: 2, holds: true, trial: done.map(ordinal), mean: grown });
    return [first, ...Object.entries(search.keys).map(([key, { log: xlog, choices }]) => {
      const axis = key.split(".").pop(), x = (row) => (choices.length ? choices.indexOf(row.values[key]) : row.values[key]);
      return { title: key, axis, log, xlog, dots: true, labels: choices.length ? choices.map(String) : null, lines: dots(axis, x) };
    })];
  };

  const shares = (rows, cores) => {
    if (!rows.length) return node("p", "No job uses or wants cores.", "note");
    return table(["share", "cores", "has", "due", "", "weight", "limit", "used"], rows.map((row) => {
      const bar = node("div", "");
      bar.append(progress(row.held, cores));
      return [row.share, count(row.held), share(row.held / cores), share(row.due), bar, number(row.weight), row.limit === null ? "–" : count(row.limit), `${count(row.used_s)} core s`];
    }), [1, 2, 3, 5, 6, 7]);
  };

  const hosts = (rows) => table(["host", "state", "busy", "", "memory", "jobs"], rows.map((host) => {
    const bar = node("div", ""), since = host.out_of_reach_since;
    bar.append(progress(host.busy, host.cores));
    const state = since === null ? host.state : `${host.state} since ${new Date(since * 1000).toLocaleString("sv-SE")}`;
    const jobs = Object.entries(host.workers).map(([job, workers]) => `${job} ${count(workers)}`).join(", ");
    return [host.host, state, `${count(host.busy)} of ${count(host.cores)}`, bar, host.memory ? `${bytes(host.memory_used)} of ${bytes(host.memory)}` : "–", jobs || "–"];
  }), [2]);

  const jobs = (rows, link) => table(["job", "share", "state", "workers", "priority", "progress", "why, and until when"], rows.map((job) => {
    const name = node("span", ""), told = node("div", "", "why"), steps = node("div", "", "steps");
    name.append((job.step || job.held) && !(job.command || []).length ? linked(job.id, link(job.id)) : job.id);
    for (const [word, text] of job.told) told.append(node("div", word === "workers" ? `${word} ${text}` : word === "waits" || word === "why" ? text : `${word} ${text}`));
    steps.append(progress(job.step, job.steps), node("span", job.steps ? `${count(job.step)} / ${count(job.steps)}` : count(job.step)));
    return [name, job.share, marked(job.state), job.held ? `${count(job.held)} of ${count(job.at_most)}` : "–", count(job.priority), steps, told];
  }), [3, 4]);

  const dot = (mark) => node("span", { good: "●", bad: "✖", live: "▶", calm: "◐" }[mark] || "●", `dot ${mark}`);

  return { section, table, copied, tiles, progress, workers, happened, logs, hashes, participants, checkpoints, searches, trials, chartsOfSearch, shares, hosts, jobs, dot, count, share };
})();
