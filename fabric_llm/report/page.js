"use strict";
// Draws the figures of `#page-data` with plotly: runs by colour, sets by dash (with one run: sets by colour as well).
(() => {
  const data = JSON.parse(document.getElementById("page-data").textContent);
  const root = document.documentElement;
  const DASHES = ["solid", "dash", "dot", "dashdot", "longdash", "longdashdot"];
  const KIND_COLORS = {
    resumed: "c0", moved: "c5", spike: "c1", skipped: "c1", rewound: "c3", forgetting: "c4", stopped: "c6", killed: "c4", failed: "c4", stage: "c2",
  };
  const MOST_EVENT_LINES = 40, MOST_POINTS_WITH_MARKERS = 60;
  const isTouch = matchMedia("(pointer: coarse)").matches;
  const wantsDark = matchMedia("(prefers-color-scheme: dark)");
  const hidden = new Set();
  const PRINTED = { autosize: false, width: 640, height: 250 };  // pixels; a page of A4 or Letter holds 640 between its margins
  let axis = "x", prints = false;

  const color = (name) => getComputedStyle(root).getPropertyValue("--" + name).trim();
  // plotly reads some tags in text; what comes from runs has none.
  const plain = (text) => String(text).replace(/&/g, "&amp;").replace(/</g, "&lt;").replace(/>/g, "&gt;");
  const several = data.runs.length > 1;
  const axisTitle = () => (axis === "x" ? data.axes.x : data.axes.t);

  function traceOf(line) {
    const lineColor = color("c" + (several ? line.run : line.dash) % 8);
    const isBudget = line.style === "budget", isRaw = line.style === "raw", isTrend = line.style === "trend";
    const isDiscarded = line.style === "discarded", hasMarkers = isDiscarded || line.style === "points";
    const name = [several ? data.runs[line.run] : "", line.set, isBudget || isDiscarded ? line.style : ""].filter(Boolean).join(" · ");
    return {
      type: "scatter", x: line[axis], y: line.y, name: plain(name), text: isBudget ? [...line.y.slice(1).fill(""), "budget " + line.y.at(-1)] : undefined,
      mode: isBudget ? "lines+text" : hasMarkers && line.y.length <= MOST_POINTS_WITH_MARKERS || line.y.length === 1 ? "lines+markers" : "lines",
      textposition: 2 * line[axis].at(-1) > range()[1] ? "top left" : "top right", textfont: { color: lineColor },
      line: {
        color: lineColor, width: isBudget || isRaw || isDiscarded ? 1 : isTrend ? 2.2 : 2,
        dash: isBudget ? "dot" : DASHES[line.dash % DASHES.length], shape: isBudget || line.style === "steps" ? "hv" : "linear",
      },
      marker: { size: isDiscarded ? 3 : 5, color: lineColor }, opacity: isRaw ? 0.38 : isDiscarded ? 0.55 : isBudget ? 0.85 : 1,
      hovertemplate: "%{y:.5~g}<extra>%{fullData.name}</extra>", hoverinfo: isTrend ? "skip" : undefined,
      visible: !hidden.has(line.run),
    };
  }

  function range() {
    const ends = data.charts.flatMap((chart) => chart.lines.flatMap((line) => [line[axis][0], line[axis].at(-1)]));
    const known = [...ends, ...data.events.map((e) => e[axis])].filter((value) => value !== null && value !== undefined);
    if (!known.length) return [0, 1];
    const low = Math.min(...known), high = Math.max(...known), from = low > 0.3 * high && low < high ? low : 0;
    const span = high - from || 1;
    return [from - 0.01 * span, high + 0.02 * span];
  }

  function yAxisOf(chart) {
    const values = (chart.lines || []).filter((line) => line.style !== "discarded").flatMap((line) => line.y).filter((value) => value !== null);
    let low = Infinity, high = -Infinity;
    for (const value of values) { low = Math.min(low, value); high = Math.max(high, value); }
    if (chart.log || chart.strip) return {};
    const room = (high - low) / 2 || 1;  // for what was discarded, such as a spike
    return { autorangeoptions: { clipmin: low - room, clipmax: high + room }, ...(high >= 1000 && high < 1e7 ? { tickformat: "," } : {}) };
  }

  function layoutOf(chart) {
    const muted = color("muted"), grid = color("grid");
    const lines = data.events.filter((e) => e.kind in KIND_COLORS && !hidden.has(e.run)).slice(0, MOST_EVENT_LINES);
    const both = { gridcolor: grid, linecolor: color("line"), zerolinecolor: color("muted"), zerolinewidth: 1, automargin: true,
      tickfont: { color: muted, size: 12 } };
    return {
      ...(prints ? PRINTED : { autosize: true }),
      margin: { l: 48, r: 10, t: 6, b: 40 }, showlegend: false, paper_bgcolor: "rgba(0,0,0,0)", plot_bgcolor: "rgba(0,0,0,0)",
      font: { family: getComputedStyle(document.body).fontFamily, color: color("ink"), size: 12 },
      hovermode: chart.strip ? "closest" : "x unified", dragmode: isTouch ? false : "zoom",
      hoverlabel: { bgcolor: color("surface"), bordercolor: color("line"), font: { color: color("ink"), size: 12 }, namelength: -1 },
      xaxis: { ...both, zeroline: false, title: { text: axisTitle(), font: { color: muted, size: 12 }, standoff: 8 },
        fixedrange: isTouch, nticks: 7, exponentformat: "SI", separatethousands: true, range: range() },
      yaxis: { ...both, zeroline: chart.name === "forgotten", type: chart.log ? "log" : "linear", fixedrange: isTouch, nticks: 6,
        rangemode: chart.name === "lr" ? "tozero" : "normal", exponentformat: "power", ...yAxisOf(chart) },
      shapes: chart.strip ? [] : lines.map((e) => ({
        type: "line", x0: e[axis], x1: e[axis], y0: 0, y1: 1, yref: "paper", opacity: 0.7,
        line: { color: color(KIND_COLORS[e.kind]), width: 1, dash: "dot" },
      })),
    };
  }

  const config = { displaylogo: false, responsive: true, displayModeBar: false };

  function drawStrip() {
    const place = document.querySelector("#chart-events .plot");
    if (!place) return;
    const shown = data.events.filter((e) => !hidden.has(e.run));
    const kinds = Object.keys(data.kinds).filter((kind) => data.events.some((e) => e.kind === kind)).reverse();
    const traces = data.runs.map((name, run) => {
      const own = shown.filter((e) => e.run === run);
      return {
        type: "scatter", mode: "markers", name: plain(name), x: own.map((e) => e[axis]), y: own.map((e) => data.kinds[e.kind]),
        text: own.map((e) => plain((several ? name + ": " : "") + e.words)),
        cliponaxis: false,
        hovertemplate: "%{y}, " + axisTitle().toLowerCase() + " %{x:,}<br>%{text}<extra></extra>",
        marker: { size: Math.max(7, 11 + (several ? 4 : 0) - 4 * run), symbol: several ? ["circle", "square", "diamond", "triangle-up"][run % 4] : "circle", color: several
          ? color("c" + run % 8) : own.map((e) => color(KIND_COLORS[e.kind] || "c7")) },
      };
    });
    place.style.height = 5.2 + 1.75 * kinds.length + "rem";
    const layout = layoutOf({ strip: true });
    layout.yaxis = { ...layout.yaxis, type: "category", categoryorder: "array", categoryarray: kinds.map((k) => data.kinds[k]),
      range: [-0.6, kinds.length - 0.4], nticks: 0 };
    Plotly.react(place, traces, layout, config);
  }

  function draw() {
    for (const chart of data.charts) {
      const place = document.querySelector("#chart-" + CSS.escape(chart.name) + " .plot");
      if (place) Plotly.react(place, chart.lines.map(traceOf), layoutOf(chart), config);
    }
    drawStrip();
  }

  // ------------------------------------------------------------------------- light and dark

  const button = document.getElementById("theme");
  const stored = { get: () => { try { return localStorage.getItem("theme"); } catch { return null; } },
    set: (value) => { try { localStorage.setItem("theme", value); } catch { /* a file that may keep nothing */ } } };
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : wantsDark.matches);
  function showTheme() {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", "Switch to " + (isDark() ? "light" : "dark") + " colours");
    draw();
  }
  button.removeAttribute("aria-pressed");
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    stored.set(root.dataset.theme);
    showTheme();
  });
  wantsDark.addEventListener("change", showTheme);
  if (["light", "dark"].includes(stored.get())) root.dataset.theme = stored.get();

  // ------------------------------------------------------------------------- steps or tokens, runs, print

  for (const input of document.querySelectorAll("input[name=axis]")) {
    input.addEventListener("change", () => { axis = input.value; draw(); });
  }
  for (const one of document.querySelectorAll("button.run")) {
    one.addEventListener("click", () => {
      const run = Number(one.dataset.run), shows = one.getAttribute("aria-pressed") === "true";
      one.setAttribute("aria-pressed", String(!shows));
      shows ? hidden.add(run) : hidden.delete(run);
      draw();
    });
  }
  for (const details of document.querySelectorAll("details.more")) {
    details.addEventListener("toggle", () => details.querySelectorAll(".plot").forEach((place) => Plotly.Plots.resize(place)));
  }
  let before;
  addEventListener("beforeprint", () => { before = root.dataset.theme; root.dataset.theme = "light"; prints = true; draw(); });
  addEventListener("afterprint", () => {
    prints = false;
    if (before) root.dataset.theme = before; else delete root.dataset.theme;
    draw();
  });

  showTheme();
  root.dataset.drawn = "true";
})();
