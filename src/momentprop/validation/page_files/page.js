"use strict";
// Everything from the report reaches the page as text, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const main = document.querySelector("main");
  document.documentElement.classList.add("scripted");

  // ---------------------------------------------------------------------------------------------- tabs
  const tabs = [...document.querySelectorAll("[role=tab]")];
  const select = (tab, focus) => {
    for (const other of tabs) {
      const chosen = other === tab;
      other.setAttribute("aria-selected", String(chosen));
      other.tabIndex = chosen ? 0 : -1;
      document.getElementById(other.getAttribute("aria-controls")).hidden = !chosen;
    }
    if (focus) tab.focus();
  };
  tabs.forEach((tab, i) => {
    tab.addEventListener("click", () => select(tab, false));
    tab.addEventListener("keydown", (event) => {
      const step = { ArrowRight: i + 1, ArrowLeft: i - 1, Home: 0, End: tabs.length - 1 }[event.key];
      if (step === undefined) return;
      event.preventDefault();
      select(tabs[(step + tabs.length) % tabs.length], true);
    });
  });
  if (tabs.length) select(tabs.find((t) => "#" + t.getAttribute("aria-controls") === location.hash) || tabs[0]);

  // ------------------------------------------------------------------------------------ sortable tables
  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        const up = head.getAttribute("aria-sort") === "descending";
        for (const other of table.tHead.rows[0].cells) other.removeAttribute("aria-sort");
        head.setAttribute("aria-sort", up ? "ascending" : "descending");
        const key = (row) => row.cells[column].dataset.value ?? row.cells[column].textContent;
        const compare = (a, b) => {
          const [x, y] = [Number(key(a)), Number(key(b))];
          if (key(a) !== "" && key(b) !== "" && !Number.isNaN(x) && !Number.isNaN(y)) return x - y;
          return key(a).localeCompare(key(b));
        };
        const rows = [...table.tBodies[0].rows].sort((a, b) => (up ? 1 : -1) * compare(a, b));
        table.tBodies[0].append(...rows);
      });
    });
  }

  // -------------------------------------------------------------------------------------------- charts
  const shown = (v) => (v == null ? "" : Math.abs(v) >= 1e-3 && Math.abs(v) < 1e4 || v === 0
    ? String(Number(v.toPrecision(3))) : v.toExponential(1));
  const colour = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const built = [];

  const build = (place, chart) => {
    place.textContent = "";
    const holder = document.createElement("div");
    const at = document.createElement("div");
    const legend = document.createElement("div");
    at.className = "at";
    legend.className = "legend";
    place.append(holder, at, legend);
    const tables = chart.series.map((s) => [s.x, s.y]);
    const joined = chart.shared
      ? [chart.series[0].x, ...chart.series.map((s) => s.y)]
      : uPlot.join(tables);
    const front = colour("--soft"), grid = colour("--grid");
    const axis = (label, more) => ({
      label, stroke: front, grid: { stroke: grid, width: 1 }, ticks: { stroke: grid, width: 1 },
      values: (u, splits) => splits.map((v) => (v == null ? "" : shown(v))), ...more,
    });
    const series = chart.series.map((s, i) => {
      const stroke = colour("--c" + (s.colour ?? i % 6));
      const base = { label: s.name, stroke, width: 2, spanGaps: true, show: place.off?.[i] !== true };
      if (s.dash) return { ...base, width: 1.5, dash: [6, 5], points: { show: false } };
      if (s.dots) return { ...base, paths: () => null, points: { show: true, size: 4, width: 0, fill: stroke } };
      return { ...base, points: { show: s.y.length < 40, size: 6, fill: stroke } };
    });
    const outputs = [];
    const width = Math.min(main.clientWidth - 32, 720);
    const plot = new uPlot({
      width, height: Math.max(240, Math.min(360, width * 0.6)),
      scales: { x: { time: false, distr: chart.log ? 3 : 1 }, y: { distr: chart.log ? 3 : 1,
        ...(chart.range ? { range: chart.range } : {}) } },
      legend: { show: false },
      cursor: { drag: { x: false, y: false } },
      axes: [axis(chart.x, { size: 34, labelSize: 20, ...(chart.whole ? { incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500] } : {}) }),
        axis(chart.y, { size: 58, labelSize: 22 })],
      series: [{}, ...series],
      hooks: {
        setCursor: [(u) => {
          const i = u.cursor.idx;
          const x = i == null ? null : u.data[0][i];
          at.textContent = x == null ? "" : (chart.names ? chart.names[x] ?? "" : `${chart.x}: ${shown(x)}`);
          outputs.forEach((out, k) => {
            const v = i == null ? null : u.data[k + 1][i];
            out.textContent = v == null ? "" : " " + shown(v);
          });
        }],
      },
    }, joined, holder);
    chart.series.forEach((s, i) => {
      const button = document.createElement("button");
      const swatch = document.createElement("i");
      const value = document.createElement("output");
      button.type = "button";
      if (s.dash) {
        swatch.className = "dashed";
        swatch.style.borderColor = series[i].stroke;
      } else swatch.style.background = series[i].stroke;
      button.append(swatch, s.name, value);
      button.setAttribute("aria-pressed", String(series[i].show));
      outputs.push(value);
      button.addEventListener("click", () => {
        const on = button.getAttribute("aria-pressed") !== "true";
        button.setAttribute("aria-pressed", String(on));
        (place.off ??= {})[i] = !on;
        plot.setSeries(i + 1, { show: on });
      });
      legend.append(button);
    });
    return plot;
  };

  const draw = () => {
    for (const plot of built.splice(0)) plot.destroy();
    for (const place of document.querySelectorAll(".chart")) {
      const chart = data.charts[place.dataset.chart];
      if (chart && chart.series.length) built.push(build(place, chart));
    }
  };
  draw();
  let width = main.clientWidth;
  addEventListener("resize", () => {
    if (main.clientWidth !== width) { width = main.clientWidth; draw(); }
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  matchMedia("print").addEventListener("change", draw);
})();
