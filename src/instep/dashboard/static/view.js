// The parts of the pages, as elements made of plain data. Whatever a run is called or says is set
// as text. Nothing here asks the server.
"use strict";
const View = (() => {
  const { node, number, seconds, short } = Charts;
  const PARTS = ["load", "forward", "backward", "wait", "wire", "update", "save"];
  const count = (v) => (v === null || v === undefined ? "–" : Math.round(v).toLocaleString("en-US"));
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
    add("workers", count(summary ? summary.workers : Object.keys(status.workers).length));
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

  const dot = (mark) => node("span", { good: "●", bad: "✖", live: "▶", calm: "◐" }[mark] || "●", `dot ${mark}`);

  return { section, table, copied, tiles, progress, workers, happened, logs, participants, checkpoints, dot, count, share };
})();
