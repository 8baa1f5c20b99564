"use strict";
// Draws the page's plots from the data in it. Everything that is said stands in the HTML already.
(function () {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const recipes = data.rows.map((row) => row.recipe);
  const palette = ["#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#ee7733", "#009988", "#888888"];
  const dashes = ["solid", "dash", "dot"];
  const color = (name) => palette[recipes.indexOf(name) % palette.length];
  const dash = (name) => dashes[Math.floor(recipes.indexOf(name) / palette.length) % dashes.length];
  const shown = new Set(recipes);
  const narrow = () => window.innerWidth < 640;

  // -- theme ---------------------------------------------------------------------------------------------------
  const wish = window.matchMedia("(prefers-color-scheme: dark)");
  const paper = window.matchMedia("print");
  let chosen = null;
  function theme() {
    const dark = !paper.matches && (chosen === null ? wish.matches : chosen);
    document.documentElement.dataset.theme = dark ? "dark" : "light";
    byId("theme").textContent = dark ? "Light" : "Dark";
    byId("theme").setAttribute("aria-pressed", String(dark));
  }
  const css = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

  function layout(more) {
    const axis = { gridcolor: css("--line"), zerolinecolor: css("--line"), automargin: true };
    const base = {
      paper_bgcolor: css("--panel"), plot_bgcolor: css("--panel"), font: { color: css("--ink"), size: narrow() ? 11 : 13 },
      margin: { l: 52, r: 16, t: 16, b: 44 }, hovermode: "closest",
      legend: { orientation: "h", y: narrow() ? -0.32 : -0.2 }, height: narrow() ? 340 : 420,
    };
    const merged = Object.assign({}, base, more);
    for (const key of ["xaxis", "yaxis"]) merged[key] = Object.assign({}, axis, (more || {})[key]);
    return merged;
  }
  function draw(id, traces, more) {
    const plot = byId(id);
    if (!traces.length) {
      plot.style.minHeight = "0";
      plot.textContent = "";
      plot.hidden = true;
      return;
    }
    plot.hidden = false;
    Plotly.react(plot, traces, layout(more), { responsive: true, displayModeBar: false });
  }

  // -- loss ----------------------------------------------------------------------------------------------------
  function smooth(values) {
    const weight = Math.exp(-50 / Math.max(50, values.length));
    let mean = null;
    return values.map((v) => (mean = mean === null ? v : weight * mean + (1 - weight) * v));
  }
  function lossTraces() {
    const kind = byId("loss-kind").value, difference = byId("loss-view").value === "difference";
    const base = data.curves[data.baseline][kind];
    const at = new Map(base.steps.map((s, i) => [s, base.mean[i]]));
    const traces = [];
    for (const name of recipes) {
      if (!shown.has(name)) continue;
      const curve = data.curves[name][kind];
      const rel = (values) => values.map((v, i) => difference ? 100 * (v / at.get(curve.steps[i]) - 1) : v);
      const fix = kind === "step" ? smooth : (v) => v;
      if (data.seeds.length > 1 && !difference) {
        traces.push({ x: curve.steps.concat(curve.steps.slice().reverse()),
          y: fix(curve.high).concat(fix(curve.low).reverse()), fill: "toself", fillcolor: color(name) + "26",
          line: { width: 0 }, mode: "lines", hoverinfo: "skip", showlegend: false, legendgroup: name });
      }
      traces.push({ x: curve.steps, y: fix(rel(curve.mean)), name, legendgroup: name, mode: kind === "step" ? "lines" : "lines+markers",
        line: { color: color(name), dash: dash(name), width: name === data.baseline ? 3 : 2 } });
    }
    return traces;
  }
  function drawLoss() {
    const difference = byId("loss-view").value === "difference";
    draw("plot-loss", lossTraces(), { xaxis: { title: { text: "step" } },
      yaxis: { title: { text: difference ? "loss against " + data.baseline + ", %" : "loss" } } });
  }
  function recipeBoxes() {
    for (const name of recipes) {
      const label = document.createElement("label"), box = document.createElement("input");
      box.type = "checkbox";
      box.checked = true;
      box.dataset.recipe = name;
      box.style.accentColor = color(name);
      box.addEventListener("change", () => { box.checked ? shown.add(name) : shown.delete(name); drawLoss(); drawHistory(); });
      label.append(box, " " + name);
      byId("loss-recipes").append(label);
    }
  }

  // -- trade-off and memory ------------------------------------------------------------------------------------
  function drawTradeoff() {
    const rows = data.rows.filter((row) => row.rate && row.loss !== null);
    if (data.kind !== "compare" || rows.length < 2) { byId("tradeoff").hidden = true; return; }
    const ratio = (row) => row.vs_torch_fp32 || row.rate;
    const against = rows.some((row) => row.vs_torch_fp32) ? "times the speed of torch fp32" : data.unit + " a second";
    const traces = rows.map((row) => ({ x: [ratio(row)], y: [100 * (row.difference || 0)], name: row.recipe, mode: "markers+text",
      text: [row.recipe], textposition: "top center", showlegend: false, cliponaxis: false,
      error_y: row.spread === null ? undefined : { type: "data", array: [100 * row.spread], color: color(row.recipe) },
      hovertemplate: row.recipe + "<br>%{x:.2f} x, %{y:+.2f} %<br>" + (row.bytes_a_parameter || 0).toFixed(1) + " bytes a parameter<extra></extra>",
      marker: { color: color(row.recipe), size: 8 + 1.6 * (row.bytes_a_parameter || 8), opacity: 0.75,
        symbol: row.peer ? "diamond" : "circle", line: { color: css("--ink"), width: 1 } } }));
    const xs = rows.map(ratio), low = Math.min(...xs), high = Math.max(...xs), room = 0.14 * (high - low || 1);
    draw("plot-tradeoff", traces, { xaxis: { title: { text: against }, range: [low - room, high + room] },
      yaxis: { title: { text: "loss against " + data.baseline + ", %" } } });
  }
  function drawMemory() {
    const rows = data.rows.filter((row) => row.bytes);
    if (!rows.length) { byId("memory").hidden = true; return; }
    const total = (row) => row.bytes.weights + row.bytes.masters + row.bytes.gradients + row.bytes.states;
    const roles = ["weights", "masters", "gradients", "states"];
    draw("plot-memory", roles.map((role, i) => ({ type: "bar", name: role, marker: { color: palette[i] },
      x: rows.map((row) => row.recipe), y: rows.map((row) => row.bytes[role] / total(row) * row.bytes_a_parameter) })),
      { barmode: "stack", yaxis: { title: { text: "bytes a parameter" } } });
  }

  // -- layers --------------------------------------------------------------------------------------------------
  function fill(select, names) {
    const before = select.value;
    select.replaceChildren(...names.map((name) => new Option(name, name)));
    if (names.includes(before)) select.value = before;
  }
  let wanted = null;
  function worstOf(what) {
    let worst = [Object.keys(data.heat)[0], null], most = 0;
    for (const [recipe, roles] of Object.entries(data.heat)) for (const [role, heat] of Object.entries(roles)) {
      const top = Math.max(...heat[what].flat().map((v) => v || 0));
      if (top > most) [worst, most] = [[recipe, role], top];
    }
    return worst;
  }
  function drawHeat() {
    const found = Object.keys(data.heat);
    if (!found.length) { byId("layers").hidden = true; return; }
    if (!byId("heat-recipe").value) [byId("heat-recipe").value, wanted] = worstOf("flushed");
    const recipe = byId("heat-recipe").value;
    fill(byId("heat-role"), Object.keys(data.heat[recipe]));
    if (wanted) [byId("heat-role").value, wanted] = [wanted, null];
    const role = byId("heat-role").value, what = byId("heat-what").value;
    const heat = data.heat[recipe][role], share = what === "flushed" || what === "saturated";
    const z = heat[what], flat = z.flat().filter((v) => v !== null);
    const top = Math.max(...flat, share ? 0.01 : -Infinity);
    const name = (m) => narrow() && m.length > 18 ? "…" + m.slice(-17) : m;
    draw("plot-layers", [{ type: "heatmap", x: heat.steps, y: heat.modules.map(name), customdata: heat.modules.map((m) => heat.steps.map(() => m)), z,
      xgap: 1, ygap: 1, zmin: share ? 0 : undefined, zmax: share ? top : undefined,
      colorscale: share ? "Viridis" : "Cividis", hovertemplate: "%{customdata}<br>step %{x}: %{z}<extra></extra>",
      colorbar: { thickness: 12, tickfont: { color: css("--ink") } } }],
      { height: Math.max(narrow() ? 320 : 380, 90 + 19 * heat.modules.length), yaxis: { autorange: "reversed", type: "category" }, xaxis: { title: { text: "step" } } });
    let worst = null;
    z.forEach((row, i) => row.forEach((v, j) => { if (v !== null && (!worst || v > worst.v)) worst = { v, m: heat.modules[i], s: heat.steps[j] }; }));
    byId("heat-words").textContent = worst ? `Largest: ${worst.v}${share ? " %" : ""} in ${worst.m} at step ${worst.s} (${recipe}, ${role}).` : "Nothing was counted here.";
  }

  // -- history -------------------------------------------------------------------------------------------------
  function drawHistory() {
    const line = (key) => recipes.filter((name) => shown.has(name) && data.history[name].steps.length && data.history[name][key].some((v) => v !== null))
      .map((name) => ({ x: data.history[name].steps, y: data.history[name][key].map((v) => key === "loss_scale" && v ? Math.log2(v) : v), name, mode: "lines", line: { color: color(name), dash: dash(name), shape: key === "loss_scale" ? "hv" : "linear" } }));
    draw("plot-norm", line("grad_norm"), { xaxis: { title: { text: "step" } }, yaxis: { title: { text: "gradient norm" }, rangemode: "tozero" } });
    const scaled = line("loss_scale").filter((trace) => new Set(trace.y).size > 1 || trace.y[0] !== 0);
    draw("plot-scale", scaled, { xaxis: { title: { text: "step" } }, yaxis: { title: { text: "loss scale, log2" } } });
    const skipped = recipes.flatMap((name) => data.history[name].skipped.map((s) => `${name} skipped step ${s.step} (${s.reason})`));
    const words = [scaled.length ? "" : "No recipe here scales the loss.", skipped.length ? skipped.slice(0, 12).join("; ") + (skipped.length > 12 ? `; and ${skipped.length - 12} more` : "") + "." : "No step was skipped."];
    byId("skipped-words").textContent = words.join(" ").trim();
  }

  function drawAll() { drawLoss(); drawTradeoff(); drawMemory(); drawHeat(); drawHistory(); }
  theme();
  recipeBoxes();
  fill(byId("heat-recipe"), Object.keys(data.heat));
  byId("heat-recipe").value = "";  // drawHeat picks the one with most to see
  for (const id of ["loss-kind", "loss-view"]) byId(id).addEventListener("change", drawLoss);
  for (const id of ["heat-recipe", "heat-role", "heat-what"]) byId(id).addEventListener("change", drawHeat);
  byId("theme").addEventListener("click", () => { chosen = document.documentElement.dataset.theme !== "dark"; theme(); drawAll(); });
  for (const query of [wish, paper]) query.addEventListener("change", () => { theme(); drawAll(); });
  window.addEventListener("beforeprint", () => document.querySelectorAll("#plan details").forEach((d) => { d.open = true; }));
  let width = window.innerWidth;
  window.addEventListener("resize", () => { if (Math.abs(window.innerWidth - width) > 40) { width = window.innerWidth; drawAll(); } });
  drawAll();
  document.body.dataset.drawn = "yes";
})();
