// Draws the results explorer from the JSON in its page: filters, and one small plot per quantity of a spike.
(() => {
  const COLOURS = 8, WIDTH = 300, HEIGHT = 150, LEFT = 46, RIGHT = 10, TOP = 12, BOTTOM = 30;
  const FILTERS = ["spike", "arm", "seed", "commit"];
  const SVG = "http://www.w3.org/2000/svg";

  function make(parent, name, attributes = {}, text = "") {
    const html = ["figure", "figcaption", "h3", "p", "a", "details", "summary", "table", "tr", "th", "td", "ul", "li",
                  "span", "option", "div"].includes(name);
    const node = html ? document.createElement(name) : document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
    node.textContent = text;
    parent.append(node);
    return node;
  }

  const unique = values => [...new Set(values)].sort((a, b) => String(a).localeCompare(String(b), "en", {numeric: true}));

  function shown(value) {
    if (value === null) return "–";
    const size = Math.abs(value);
    return size && (size < 0.001 || size >= 1e5) ? value.toExponential(1) : String(+value.toPrecision(3));
  }

  function choices(runs) {
    return {
      spike: unique(runs.map(run => run.spike)),
      arm: unique(runs.flatMap(run => run.series.map(series => series.arm))),
      seed: unique(runs.flatMap(run => run.seeds)),
      commit: unique(runs.map(run => run.commit)),
    };
  }

  // the series that pass the filters, by spike and quantity
  function chosen(runs, wanted) {
    const panels = new Map();
    for (const run of runs) {
      if (wanted.spike && run.spike !== wanted.spike) continue;
      if (wanted.commit && run.commit !== wanted.commit) continue;
      if (wanted.seed && !run.seeds.includes(wanted.seed)) continue;
      for (const series of run.series) {
        if (wanted.arm && series.arm !== wanted.arm) continue;
        const key = `${run.spike} ${series.quantity} ${series.axis}`;
        if (!panels.has(key)) panels.set(key, {run, quantity: series.quantity, axis: series.axis, lines: []});
        const kept = series.x.map((x, i) => [x, series.y[i]])
          .filter(([x]) => !wanted.seed || series.axis !== "seed" || String(x) === wanted.seed);
        const name = series.arm === "whole run" ? run.run : `${series.arm} · ${run.run}`;
        panels.get(key).lines.push({name, points: kept});
      }
    }
    return [...panels.values()];
  }

  function scale(low, high, from, to) {
    const span = high - low || 1;
    return value => from + (to - from) * (value - low) / span;
  }

  function plot(figure, panel) {
    const points = panel.lines.flatMap(line => line.points).filter(([, y]) => y !== null);
    const xs = points.map(([x]) => x), ys = points.map(([, y]) => y);
    const low = Math.min(...ys), high = Math.max(...ys);
    const bounds = {x: [Math.min(...xs), Math.max(...xs)], y: [low > 0 && low < 0.7 * high ? 0 : low, high]};
    const title = `${panel.quantity} against ${panel.axis}`;
    const svg = make(figure, "svg", {viewBox: `0 0 ${WIDTH} ${HEIGHT}`, role: "img", "aria-label": `${title}, ${panel.lines.length} lines`});
    if (!points.length) { make(svg, "text", {x: LEFT, y: HEIGHT / 2}, "no numbers"); return; }
    const x = scale(...bounds.x, LEFT + 6, WIDTH - RIGHT - 6), y = scale(...bounds.y, HEIGHT - BOTTOM, TOP);
    for (const value of bounds.y) {
      make(svg, "line", {class: "grid", x1: LEFT, x2: WIDTH - RIGHT, y1: y(value), y2: y(value)});
      make(svg, "text", {class: "ytick", x: LEFT - 5, y: y(value) + 4}, shown(value));
    }
    for (const value of new Set(bounds.x)) make(svg, "text", {class: "xtick", x: x(value), y: HEIGHT - BOTTOM + 14}, shown(value));
    make(svg, "text", {class: "xlabel", x: (LEFT + WIDTH - RIGHT) / 2, y: HEIGHT - 4}, panel.axis);
    panel.lines.forEach((line, number) => {
      const kept = line.points.filter(([, value]) => value !== null);
      const group = make(svg, "g", {class: `s${number % COLOURS}`});
      make(group, "title", {}, line.name);
      if (kept.length > 1) make(group, "polyline", {points: kept.map(([a, b]) => `${x(a).toFixed(1)},${y(b).toFixed(1)}`).join(" "),
        "stroke-dasharray": number < COLOURS ? "none" : "4 3"});
      if (kept.length <= 40) kept.forEach(([a, b]) => make(group, "circle", {cx: x(a).toFixed(1), cy: y(b).toFixed(1), r: 2.6}));
    });
  }

  function numbers(figure, panel) {
    const details = make(figure, "details");
    make(details, "summary", {}, "numbers");
    const table = make(make(details, "div", {class: "ex-scroll", tabindex: "0", role: "region", "aria-label": `numbers of ${panel.quantity}`}), "table");
    for (const line of panel.lines) {
      const row = make(table, "tr");
      make(row, "th", {scope: "row"}, line.name);
      line.points.forEach(([, value]) => make(row, "td", {}, shown(value)));
    }
  }

  function draw(root, runs, wanted) {
    const target = root.querySelector(".ex-panels"), panels = chosen(runs, wanted);
    target.replaceChildren();
    let spike = null, grid = null;
    for (const panel of panels) {
      if (panel.run.spike !== spike) {
        spike = panel.run.spike;
        make(target, "h3", {}, `${panel.run.number} ${panel.run.question}`);
        const list = make(target, "ul", {class: "ex-runs"});
        for (const run of runs.filter(run => run.spike === spike && (!wanted.commit || run.commit === wanted.commit)
                                             && (!wanted.seed || run.seeds.includes(wanted.seed)))) {
          const item = make(list, "li");
          if (run.page) make(item, "a", {href: `${root.dataset.base}${run.page}.html`}, run.run);
          else make(item, "span", {}, run.run);
          item.append(`: ${run.verdict}, commit ${run.commit}, ${run.started}, seeds ${run.seeds.join(", ")}`);
        }
        grid = make(target, "div", {class: "ex-grid"});
      }
      const figure = make(grid, "figure");
      make(figure, "figcaption", {}, panel.quantity);
      plot(figure, panel);
      const legend = make(figure, "ul", {class: "ex-legend"});
      panel.lines.forEach((line, number) => make(legend, "li", {class: `s${number % COLOURS}`}, line.name));
      numbers(figure, panel);
    }
    const lines = panels.reduce((sum, panel) => sum + panel.lines.length, 0);
    const count = (number, word) => `${number} ${word}${number === 1 ? "" : "s"}`;
    root.querySelector(".ex-count").textContent = lines
      ? `${lines} series of ${count(new Set(panels.map(panel => panel.run.spike)).size, "spike")} in ${count(panels.length, "plot")}`
      : "No series fits this choice; “show all” starts again.";
  }

  function begin(root) {
    const runs = JSON.parse(root.querySelector(".ex-data").textContent), form = root.querySelector("form");
    root.dataset.base = document.documentElement.dataset.content_root || "../";
    const all = choices(runs), asked = new URLSearchParams(location.search);
    for (const name of FILTERS) {
      for (const value of all[name]) make(form.elements[name], "option", {value}, value);
      if (all[name].includes(asked.get(name))) form.elements[name].value = asked.get(name);
    }
    const wanted = () => Object.fromEntries(FILTERS.map(name => [name, form.elements[name].value]));
    const update = () => {
      const now = wanted(), query = new URLSearchParams(Object.entries(now).filter(([, value]) => value)).toString();
      try { history.replaceState(null, "", location.pathname + (query ? `?${query}` : "")); }
      catch (refused) { console.debug("the address cannot hold the filters here", refused); }
      draw(root, runs, now);
    };
    form.addEventListener("change", update);
    form.addEventListener("reset", () => setTimeout(update));
    draw(root, runs, wanted());
  }

  document.addEventListener("DOMContentLoaded", () => document.querySelectorAll(".explorer").forEach(begin));
})();
