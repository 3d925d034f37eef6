// Draws the curves of runs with uPlot, in the report and in the dashboard. It knows charts: title,
// log, lines; a line has x axes (step, samples, seconds, bytes, or others), mean, low and high. With
// `dots` a line is points alone; a chart with `dots` may have several at one x, and `labels` or `xlog`
// say what its x axis is. Names become text, never markup.
"use strict";
const Charts = (() => {
  const RUNS = 8, SMOOTHED = 60;

  const number = (v) => {
    if (v === null || v === undefined) return "–";
    const size = Math.abs(v);
    if (size >= 1e4) return Math.round(v).toLocaleString("en-US");
    return size !== 0 && size < 1e-3 ? v.toExponential(2) : String(+v.toPrecision(4));
  };

  const seconds = (v) => {
    if (v > 0 && v < 0.95) return Math.max(1, Math.round(1000 * v)) + " ms";
    if (v < 60) return +v.toFixed(v < 10 ? 1 : 0) + " s";
    const hours = Math.floor(v / 3600), minutes = Math.floor((v % 3600) / 60), rest = Math.floor(v % 60);
    return hours ? `${hours}h${String(minutes).padStart(2, "0")}m` : `${minutes}m${String(rest).padStart(2, "0")}s`;
  };

  const short = (v, unit = "") => {
    for (const [size, sign] of [[1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (Math.abs(v) >= size) return +(v / size).toFixed(2) + sign + unit;
    return +v.toPrecision(6) + unit;
  };

  const tick = (v, axis) => (axis === "seconds" ? seconds(v) : short(v, axis === "bytes" ? "B" : ""));

  // The exponential moving average over about a twentieth of the values; gaps stay gaps.
  const smoothed = (values) => {
    const keep = 1 - 2 / (values.length / 20 + 1);
    let total = 0, weight = 0;
    return values.map((v) => {
      if (v === null) return null;
      total = keep * total + v;
      weight = keep * weight + 1;
      return total / weight;
    });
  };

  const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const colour = (run) => style(`--run${run % RUNS}`);
  const faded = (text, share) => text + Math.round(share * 255).toString(16).padStart(2, "0");

  const dot = (line) => {
    const stroke = colour(line.run || 0);
    return { stroke, width: 0, paths: () => null, points: { show: true, size: 7, width: 1.5, fill: line.open ? style("--card") : stroke }, line };
  };

  // What is drawn of a line: uPlot's series, and their values. Bands lie between two of them.
  const seriesOf = (line, axis, log, smooth) => {
    const stroke = colour(line.run || 0), x = line[axis];
    const fit = (values) => (log ? values.map((v) => (v > 0 ? v : null)) : values);
    const found = [];
    if (line.dots) return { x, found: [[dot(line), fit(line.mean)]] };
    if (line.low) {
      const side = { stroke: "transparent", width: 0, points: { show: false }, band: faded(stroke, 0.18) };
      found.push([{ ...side, high: true }, fit(line.high)], [side, fit(line.low)]);
    }
    const few = line.mean.length <= 60 && line.kind === "validation";
    found.push([{
      stroke: smooth ? faded(stroke, 0.4) : stroke,
      width: smooth ? 1.2 : 1.8,
      dash: line.kind === "validation" ? [2, 4] : undefined,
      paths: line.holds ? uPlot.paths.stepped({ align: 1 }) : undefined,
      points: { show: few || line.mean.length < 2, size: 6, fill: style("--card") },
      line,
    }, fit(line.mean)]);
    if (smooth) found.push([{ stroke, width: 2.2, points: { show: false } }, fit(smooth)]);
    return { x, found };
  };

  const tablesOf = (chart, axis, log, smooth) => {
    const tables = [], series = [{}], bands = [];
    chart.lines.forEach((line, at) => {
      const { x, found } = seriesOf(line, axis, log, smooth[at]);
      tables.push([x, ...found.map(([, values]) => values)]);
      for (const [about] of found) {
        if (about.high) bands.push({ series: [series.length, series.length + 1], fill: about.band });
        series.push(about);
      }
    });
    // x has to rise: of points with one x, such as bytes that were not counted yet, the last counts
    const rising = tables.map(([x, ...rest]) => {
      const kept = x.map((v, i) => i).filter((i) => x[i] !== null && (i === x.length - 1 || x[i + 1] > x[i]));
      return [x, ...rest].map((values) => kept.map((i) => values[i]));
    });
    return { data: rising.length > 1 ? uPlot.join(rising) : rising[0], series, bands };
  };

  const dotsOf = (chart, axis, log) => {
    const dots = chart.lines.flatMap((line, of) => line[axis].map((x, at) => ({ x, of, y: line.mean[at] })));
    dots.sort((a, b) => a.x - b.x);
    const values = chart.lines.map((line, of) => dots.map((each) => (each.of === of && (!log || each.y > 0) ? each.y : null)));
    return { data: [dots.map((each) => each.x), ...values], series: [{}, ...chart.lines.map(dot)], bands: [] };
  };

  const nearest = (values, wanted) => {
    let low = 0, high = values.length - 1;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (values[middle] < wanted) low = middle + 1; else high = middle;
    }
    return low > 0 && wanted - values[low - 1] < values[low] - wanted ? low - 1 : low;
  };

  const node = (name, text, className) => {
    const made = document.createElement(name);
    made.textContent = text;
    if (className) made.className = className;
    return made;
  };

  // The x axis of a chart with dots has room beside them, and names where its values are choices.
  const around = (chart, low, high) => {
    if (!chart.dots) return low === high ? [low - 0.5, high + 0.5] : [low, high];
    if (chart.xlog) return low === high ? [low / 2, high * 2] : [low * (low / high) ** 0.03, high * (high / low) ** 0.03];
    const room = chart.labels || low === high ? 0.5 : (high - low) * 0.03;
    return [low - room, high + room];
  };
  const place = (chart, v) => (chart.labels ? (v % 1 ? "" : chart.labels[v] || "") : chart.whole && v % 1 ? "" : number(v));

  class View {
    constructor(figure, chosen, names) {
      Object.assign(this, { figure, chosen, names, plot: null, form: "" });
      this.caption = figure.appendChild(node("figcaption", ""));
      this.room = figure.appendChild(node("div", "", "plot"));
      figure.tabIndex = 0;
      figure.addEventListener("keydown", (event) => this.move(event));
      new ResizeObserver(() => this.fit()).observe(this.room);
    }

    fit() {
      const width = this.room.clientWidth;
      if (this.plot && width && width !== this.plot.width) this.plot.setSize({ width, height: this.height() });
    }

    height() { return this.room.clientWidth > 700 ? 300 : 210; }

    show(chart) {
      this.chart = chart;
      const axis = this.axis = chart.axis || this.chosen.x, log = this.chosen.y === "log" || (this.chosen.y === "auto" && chart.log);
      this.smooth = chart.lines.map((line) => (line.kind === "training" && line.mean.length >= SMOOTHED ? smoothed(line.mean) : null));
      const { data, series, bands } = chart.dots ? dotsOf(chart, axis, log) : tablesOf(chart, axis, log, this.smooth);
      const form = JSON.stringify([axis, log, chart.dots, chart.xlog, chart.labels, chart.lines.map((line) => [line.kind, line.run, !!line.low, line.mean.length >= SMOOTHED, line.mean.length <= 60])]);
      if (this.plot && form === this.form) {
        const { min, max } = this.plot.scales.x, [first, last] = this.ends;
        const zoomed = min > first + 1e-9 || max < last - 1e-9;
        this.plot.setData(data, !zoomed);
        if (zoomed) this.plot.redraw();
      } else {
        if (this.plot) this.plot.destroy();
        this.form = form;
        this.plot = this.make(data, series, bands, axis, log);
      }
      this.ends = [data[0][0], data[0][data[0].length - 1]];
      this.write(null);
    }

    make(data, series, bands, axis, log) {
      const { chart } = this;
      const quiet = style("--quiet"), rule = style("--rule");
      const font = "12px system-ui, sans-serif", grid = { stroke: rule, width: 1 };
      return new uPlot({
        width: this.room.clientWidth || 600,
        height: this.height(),
        legend: { show: false },
        cursor: { sync: { key: `instep-${chart.axis ? chart.title : axis}` }, y: false, points: { size: 6 } },
        scales: { x: { time: false, distr: chart.xlog ? 3 : 1, range: (u, low, high) => around(chart, low, high) }, y: { distr: log ? 3 : 1 } },
        axes: [
          { stroke: quiet, font, grid: { show: false }, ticks: { show: false }, size: 30, space: 70, values: (u, found) => found.map((v) => (v === null ? "" : chart.axis ? place(chart, v) : axis !== "seconds" && v % 1 ? "" : tick(v, axis))) },
          { stroke: quiet, font, grid: { ...grid, filter: (u, found) => (log && found.length > 12 ? found.map((v) => (/^1e/.test(v.toExponential()) ? v : null)) : found) }, ticks: { show: false }, size: (u, found) => 14 + 7 * Math.max(4, ...(found || []).map((v) => v.length)), space: 36, values: (u, found) => found.map((v) => (v === null ? "" : number(v))) },
        ],
        series, bands,
        hooks: {
          setCursor: [(u) => this.write(u.cursor.idx === null || u.cursor.idx === undefined ? null : u.data[0][u.cursor.idx])],
          draw: [() => { this.figure.dataset.drawn = this.chart.lines.map((line) => line[axis][line[axis].length - 1]).join(" "); }],
        },
      }, data, this.room);
    }

    move(event) {
      const by = { ArrowLeft: -1, ArrowRight: 1 }[event.key], u = this.plot;
      if (!by || !u || !u.data[0].length) return;
      const count = u.data[0].length, at = u.cursor.idx ?? (by > 0 ? -1 : count);
      const next = Math.max(0, Math.min(count - 1, at + by * Math.max(1, Math.round(count / 100))));
      u.setCursor({ left: u.valToPos(u.data[0][next], "x"), top: 10 });
      event.preventDefault();
    }

    // The caption is legend and read-out in one: the values under the pointer, or the last ones.
    write(wanted) {
      const { chart, axis } = this;
      const items = [node("b", chart.title)], words = [chart.title];
      chart.lines.slice(0, 12).forEach((line, index) => {
        const smooth = this.smooth[index];
        const at = wanted === null ? line.mean.length - 1 : nearest(line[axis], wanted);
        const item = node("span", ""), said = this.said(line, at, wanted);
        item.append(node("i", "", `r${(line.run || 0) % RUNS} ${line.kind}${smooth ? " pale" : ""}`), said);
        if (wanted !== null && line.low && line.low[at] !== null) item.append(` (${number(line.low[at])} to ${number(line.high[at])})`);
        items.push(item);
        words.push(said);
        if (smooth) {
          const mean = node("span", "");
          mean.append(node("i", "", `r${(line.run || 0) % RUNS}`), `smoothed ${number(smooth[at])}`);
          items.push(mean);
        }
      });
      if (chart.lines.length > 12) items.push(node("span", `and ${chart.lines.length - 12} more`));
      items.push(node("span", wanted === null ? (chart.dots ? "" : "last values") : chart.axis ? `${axis} ${place(chart, wanted)}` : axis === "seconds" || axis === "bytes" ? tick(wanted, axis) : `${axis} ${Math.round(wanted).toLocaleString("en-US")}`, "at"));
      this.caption.replaceChildren(...items);
      this.figure.setAttribute("aria-label", `Curve of ${words.join(", ")}`);
      this.figure.setAttribute("role", "group");
    }

    said(line, at, wanted) {
      if (line.dots && wanted === null) return `${line.mean.length} ${line.kind}`;
      const name = line.names ? line.names[at] : this.names.length > 1 ? this.names[line.run] : "";
      return `${name} ${line.kind} ${number(line.mean[at])}`.trim();
    }

    close() { if (this.plot) this.plot.destroy(); }
  }

  // All charts of a page, with the switches for their axes.
  class Board {
    constructor(root, names, axes = ["step", "samples", "seconds", "bytes"]) {
      this.chosen = { x: axes[0], y: "auto" };
      Object.assign(this, { names, views: [], charts: [] });
      const bar = root.appendChild(node("div", "", "switches"));
      if (axes.length > 1) bar.append(this.choice("x", axes));
      bar.append(this.choice("y", ["auto", "linear", "log"]));
      this.room = root.appendChild(node("div", "", "charts"));
      this.dark = matchMedia("(prefers-color-scheme: dark)");
      this.again = () => { for (const view of this.views) view.form = ""; this.show(this.charts); };
      this.dark.addEventListener("change", this.again);
    }

    choice(name, choices) {
      const field = node("fieldset", "");
      field.append(node("legend", `${name} axis`));
      for (const each of choices) {
        const label = node("label", ""), input = document.createElement("input");
        Object.assign(input, { type: "radio", name, value: each, checked: each === choices[0] });
        input.addEventListener("change", () => { this.chosen[name] = each; this.show(this.charts); });
        label.append(input, node("span", each));
        field.append(label);
      }
      return field;
    }

    show(charts) {
      this.charts = charts;
      while (this.views.length > charts.length) {
        const view = this.views.pop();
        view.close();
        view.figure.remove();
      }
      charts.forEach((chart, at) => {
        if (!this.views[at]) this.views.push(new View(this.room.appendChild(node("figure", "", "chart")), this.chosen, this.names));
        this.views[at].show(chart);
      });
    }

    close() {
      this.dark.removeEventListener("change", this.again);
      for (const view of this.views) view.close();
    }
  }

  return { Board, node, number, seconds, short, smoothed };
})();
