// Draws the curves of the report. It knows only the data in the page:
// charts -> lines -> x (step, samples, seconds, bytes), mean, low, high. No names of
// runs or metrics ever become markup: text is set as text.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const space = { left: 52, right: 12, top: 10, bottom: 26 };
  const chosen = { x: "step", y: "auto" };

  const svg = (name, attributes, parent) => {
    const node = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const key in attributes) node.setAttribute(key, attributes[key]);
    return parent ? parent.appendChild(node) : node;
  };

  const html = (name, text, parent, className) => {
    const node = document.createElement(name);
    node.textContent = text;
    if (className) node.className = className;
    return parent.appendChild(node);
  };

  const number = (v) => {
    if (v === null) return "not a number";
    const size = Math.abs(v);
    if (size >= 1e4) return Math.round(v).toLocaleString("en-US");
    return size !== 0 && size < 1e-3 ? v.toExponential(2) : String(+v.toPrecision(4));
  };

  const tick = (v, axis) => {
    if (axis === "seconds") {
      if (v < 60) return +v.toFixed(2) + " s";
      const hours = Math.floor(v / 3600), minutes = Math.floor((v % 3600) / 60);
      const rest = Math.round(v % 60);
      return hours ? `${hours}h${String(minutes).padStart(2, "0")}m`
        : `${minutes}m${String(rest).padStart(2, "0")}s`;
    }
    const of = axis === "bytes" ? "B" : "";
    for (const [unit, sign] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (Math.abs(v) >= unit) return +(v / unit).toFixed(2) + sign + of;
    return String(+v.toPrecision(6)) + of;
  };

  const ticks = (low, high, count, steps) => {
    const rough = (high - low) / count, power = 10 ** Math.floor(Math.log10(rough));
    const step = (steps || [1, 2, 2.5, 5, 10]).map((m) => m * power).find((s) => s >= rough) || power * 10;
    const found = [];
    for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) found.push(v);
    return found;
  };

  const logTicks = (low, high) => {
    const span = high - low, found = [];
    const leading = span > 2 ? [1] : span > 0.7 ? [1, 2, 5] : [1, 1.2, 1.5, 2, 3, 4, 5, 6, 7, 8, 9];
    for (let p = Math.floor(low); p <= high; p++)
      for (const m of leading) {
        const v = p + Math.log10(m);
        if (v >= low && v <= high) found.push(v);
      }
    return found;
  };

  // What stands beside the axis of a chart, and the room for the longest of it.
  const across = (box, log) => (log ? logTicks(box.y0, box.y1) : ticks(box.y0, box.y1, 4));
  const beside = (v, log) => number(log ? 10 ** v : Math.abs(v) < 1e-12 ? 0 : v);
  const room = (box, log) =>
    Math.max(52, 14 + 7 * Math.max(...across(box, log).map((v) => beside(v, log).length)));

  const label = (line, several) => (several ? data.runs[line.run] + " " : "") + line.kind;

  const extent = (chart, log) => {
    let x0 = Infinity, x1 = -Infinity, y0 = Infinity, y1 = -Infinity;
    for (const line of chart.lines) {
      for (const v of line[chosen.x]) if (v !== null) { x0 = Math.min(x0, v); x1 = Math.max(x1, v); }
      for (const values of [line.low || line.mean, line.high || line.mean])
        for (const v of values)
          if (v !== null && (!log || v > 0)) { y0 = Math.min(y0, v); y1 = Math.max(y1, v); }
    }
    if (!(x0 < Infinity)) { x0 = 0; x1 = 1; }
    if (!(y0 < Infinity)) { y0 = log ? 1 : 0; y1 = log ? 10 : 1; }
    x0 = Math.min(0, x0);
    if (log) { y0 = Math.log10(y0); y1 = Math.log10(y1); }
    else if (y0 > 0 && y0 < (y1 - y0) * 0.6) y0 = 0;
    const room = (y1 - y0) * 0.05 || Math.abs(y1) * 0.05 || 0.5;
    return { x0, x1: x1 > x0 ? x1 : x0 + 1, y0: y0 === 0 && !log ? 0 : y0 - room, y1: y1 + room };
  };

  // The pieces of a line between its gaps, each a list of indices.
  const pieces = (values) => {
    const found = [];
    let open = null;
    values.forEach((v, i) => {
      if (v === null) open = null;
      else if (open) open.push(i);
      else found.push((open = [i]));
    });
    return found;
  };

  const drawLine = (line, scale, parent) => {
    const group = svg("g", { class: "r" + (line.run % 8) }, parent);
    const x = (i) => scale.x(line[chosen.x][i]).toFixed(1);
    const at = (values) => (i) => x(i) + "," + scale.y(values[i]).toFixed(1);
    for (const piece of pieces(line.mean)) {
      if (line.low) {
        const there = piece.map(at(line.high)), back = piece.map(at(line.low)).reverse();
        svg("path", { class: "band", d: "M" + there.concat(back).join("L") + "Z" }, group);
      }
      svg("path", { class: "line " + line.kind, d: "M" + piece.map(at(line.mean)).join("L") }, group);
      if ((line.kind === "validation" && line.mean.length <= 60) || piece.length === 1)
        for (const i of piece)
          svg("circle", { class: "point", r: 2.6, cx: x(i), cy: scale.y(line.mean[i]).toFixed(1) }, group);
    }
  };

  const drawAxes = (box, scale, width, height, log, root) => {
    const bottom = height - space.bottom;
    for (const v of across(box, log)) {
      const y = scale.raw(v);
      svg("line", { class: "grid", x1: space.left, x2: width - space.right, y1: y, y2: y }, root);
      const text = svg("text", { x: space.left - 8, y: y + 4, "text-anchor": "end" }, root);
      text.textContent = beside(v, log);
    }
    const units = chosen.x === "seconds" && box.x1 > 90 ? [1, 1.2, 1.5, 2, 3, 6, 10] : null;
    for (const v of ticks(box.x0, box.x1, Math.max(2, Math.min(7, width / 110)), units)) {
      if (chosen.x !== "seconds" && !Number.isInteger(v)) continue;
      const text = svg("text", { x: scale.x(v), y: bottom + 18, "text-anchor": "middle" }, root);
      text.textContent = tick(v, chosen.x);
    }
  };

  const nearest = (values, wanted) => {
    let low = 0, high = values.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < wanted) low = middle + 1; else high = middle;
    }
    return low > 0 && wanted - values[low - 1] < values[low] - wanted ? low - 1 : low;
  };

  // The caption is legend and read-out in one: the values under the pointer, or the last ones.
  const caption = (node, chart, wanted) => {
    node.textContent = "";
    html("b", chart.title, node);
    const several = data.runs.length > 1, smooth = chart.lines.some((line) => line.kind === "smoothed");
    for (const line of chart.lines) {
      const at = wanted === null ? line.mean.length - 1 : nearest(line[chosen.x], wanted);
      const item = html("span", "", node);
      html("i", "", item, `r${line.run % 8} ${line.kind}${smooth && line.kind === "training" ? " pale" : ""}`);
      item.append(`${label(line, several)} ${number(line.mean[at])}`);
      if (wanted !== null && line.low && line.low[at] !== null)
        item.append(` (${number(line.low[at])} to ${number(line.high[at])})`);
    }
    const shown = wanted === null ? "last values" : chosen.x === "seconds" || chosen.x === "bytes" ? tick(wanted, chosen.x)
      : `${chosen.x} ${Math.round(wanted).toLocaleString("en-US")}`;
    html("span", shown, node, "at");
  };

  const draw = (figure) => {
    const chart = data.charts[+figure.dataset.chart], log = chosen.y === "log" || (chosen.y === "auto" && chart.log);
    const width = figure.clientWidth, height = width > 700 ? 300 : 210;
    const box = extent(chart, log);
    const left = space.left = room(box, log);  // of this chart; the next one has another
    const raw = (v) => {
      const share = (v - box.y0) / (box.y1 - box.y0);
      return height - space.bottom - share * (height - space.top - space.bottom);
    };
    const bottom = height - space.bottom;
    const scale = {
      x: (v) => left + ((v - box.x0) / (box.x1 - box.x0)) * (width - left - space.right),
      raw,
      y: (v) => (log ? (v > 0 ? Math.min(raw(Math.log10(v)), bottom) : bottom) : raw(v)),
    };
    figure.textContent = "";
    const words = html("figcaption", "", figure);
    const root = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "img" }, figure);
    root.setAttribute("aria-label", `${chart.title} by ${chosen.x}`);
    drawAxes(box, scale, width, height, log, root);
    const smooth = chart.lines.some((line) => line.kind === "smoothed");
    const lines = svg("g", smooth ? { class: "smooth" } : {}, root);
    for (const line of chart.lines) drawLine(line, scale, lines);
    caption(words, chart, null);
    follow(root, words, chart, box, scale, bottom, width);
  };

  const follow = (root, words, chart, box, scale, bottom, width, left = space.left) => {
    const hair = svg("line", { class: "hair", y1: space.top, y2: bottom, visibility: "hidden" }, root);
    const inner = width - left - space.right;
    root.addEventListener("pointermove", (event) => {
      const pixel = event.clientX - root.getBoundingClientRect().left - left;
      const aimed = box.x0 + (Math.max(0, Math.min(inner, pixel)) / inner) * (box.x1 - box.x0);
      const axis = chart.lines[0][chosen.x], wanted = axis[nearest(axis, aimed)];
      hair.setAttribute("x1", scale.x(wanted));
      hair.setAttribute("x2", scale.x(wanted));
      hair.setAttribute("visibility", "visible");
      caption(words, chart, wanted);
    });
    root.addEventListener("pointerleave", () => {
      hair.setAttribute("visibility", "hidden");
      caption(words, chart, null);
    });
  };

  const figures = [...document.querySelectorAll("[data-chart]")];
  const drawAll = () => figures.forEach(draw);
  for (const input of document.querySelectorAll(".switches input"))
    input.addEventListener("change", () => { chosen[input.name] = input.value; drawAll(); });
  for (const button of document.querySelectorAll("button"))
    button.addEventListener("click", () => {
      getSelection().selectAllChildren(button.previousElementSibling);
      document.execCommand("copy");
      button.textContent = "copied";
      setTimeout(() => { button.textContent = "copy"; }, 1500);
    });
  let width = 0;
  new ResizeObserver(() => {
    if (figures.length && figures[0].clientWidth !== width) { width = figures[0].clientWidth; drawAll(); }
  }).observe(document.body);
  addEventListener("beforeprint", drawAll);
})();
