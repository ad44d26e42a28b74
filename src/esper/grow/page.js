"use strict";
// Draws the page from the data in it. Names are only ever set as text, never parsed as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const STAGES = { TRAINING: "behind the host", BLENDING: "blending", HOLDING: "holding", FOSSILIZED: "committed" };
const OPS = {
  GERMINATE: "Germinate", ADVANCE: "Advance", SET_ALPHA_TARGET: "Change weight", PRUNE: "Prune", FOSSILIZE: "Commit",
};
const FATES = { kept: "kept", pruned: "pruned", uncommitted: "not committed", rolled_back: "rolled back" };
const BLENDS = { ADD: "+", MULTIPLY: "×", GATE: "σ" };

// ---- numbers as text
const count = (n) => Math.round(n).toLocaleString("en");
const short = (n) => {
  const [size, unit] = n >= 1e9 ? [1e9, "G"] : n >= 1e6 ? [1e6, "M"] : n >= 1e4 ? [1e3, "k"] : [1, ""];
  return unit ? `${+(n / size).toPrecision(3)}\u00a0${unit}` : count(n);
};
const minus = (text) => text.replace("-", "−").replaceAll(" ", "\u00a0");
const isShare = data.metric.isShare;
const metric = (v) => v === null || v === undefined ? "–" : minus(isShare ? `${(100 * v).toFixed(1)}%` : String(+v.toPrecision(4)));
const signed = (v) => minus((v >= 0 ? "+" : "") + (isShare ? (100 * v).toFixed(1) : String(+v.toPrecision(3))));
const told = (text) => text.replaceAll("+-", "±");
const gain = (v, e) => signed(v) + (e === null || e === undefined ? "" : ` ± ${isShare ? (100 * e).toFixed(1) : +e.toPrecision(2)}`) + (isShare ? " points" : "");
const share = (part, whole) => minus(`${part >= 0 ? "+" : ""}${Math.round((100 * part) / Math.max(1, whole))}%`);
const metricTitle = /valid|^val/i.test(data.metric.name) ? data.metric.name : `validation ${data.metric.name}`;
const capital = (text) => text[0].toUpperCase() + text.slice(1);
const seedName = (seed) => `${seed.blueprint} at ${seed.site}`;

// ---- elements
function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(key, value);
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) => fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const line = (x1, y1, x2, y2, attributes) => svg("line", { x1, y1, x2, y2, ...attributes });
const label = (x, y, text, attributes = {}) => svg("text", { x, y, ...attributes }, String(text));

/** The sign of an operation, drawn around (0, 0): the same on the curve, in the table and the legend. */
function sign(op) {
  const ring = { fill: "var(--card)", stroke: "var(--grown)", "stroke-width": 2 };
  switch (op) {
    case "GERMINATE": return svg("path", { d: "M0 -6.5 L6 4.5 H-6 Z", ...ring, "stroke-linejoin": "round" });
    case "FOSSILIZE": return svg("circle", { r: 5.5, fill: "var(--grown)", stroke: "var(--card)", "stroke-width": 1.5 });
    case "PRUNE": return svg("path", { d: "M-4.5 -4.5 L4.5 4.5 M4.5 -4.5 L-4.5 4.5", stroke: "var(--danger)", "stroke-width": 2.5, "stroke-linecap": "round" });
    default: return svg("path", { d: "M0 -5 L5 0 L0 5 L-5 0 Z", ...ring, stroke: "var(--BLENDING)" });
  }
}
const boxedSign = (op) => el("span", { class: "mark" }, svg("svg", { width: 16, height: 16, viewBox: "-8 -8 16 16" }, sign(op)));

// ---- the head of the page
function drawHead() {
  $("model").textContent = data.model;
  const [opening, ...rest] = told(data.summary).split(": ");
  const verdict = $("verdict");
  if (rest.length) verdict.replaceChildren(el("strong", {}, opening), `: ${rest.join(": ")}`);
  verdict.classList.toggle("helped", opening === "Growing helped");
  verdict.classList.toggle("harmed", opening === "Growing did not help");
  $("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const isDark = root.dataset.theme ? root.dataset.theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
    root.dataset.theme = isDark ? "light" : "dark";
  });
}

function tile(title, big, ...rest) {
  return el("div", { class: "tile" }, el("h3", {}, title), el("p", { class: "big" }, big), ...rest);
}

/** A cost: what the host had, what has grown, and how much of the budget that is. */
function costTile(title, key) {
  const before = data.before[key], now = data.after ? data.after[key] : lastStep(key), limit = data.budget[key];
  const full = Math.max(limit ?? 0, now, before, 1), part = (n, color) => el("i", { style: `width:${(100 * n) / full}%;background:${color}` });
  const budget = limit === null ? "no budget set" : `budget ${short(limit)}`;
  return tile(title, short(now),
    el("div", { class: "meter" }, part(before, "var(--host)"), part(Math.max(0, now - before), "var(--grown)")),
    el("p", {}, `${short(before)} before, ${share(now - before, before)}; ${budget}`));
}
const lastStep = (key) => data.steps.length ? data.steps[data.steps.length - 1][{ params: 2, macs: 3 }[key]] : data.before[key];

function drawTiles() {
  const verdict = data.verdict, values = data.steps.map((s) => s[1]).filter((v) => v !== null);
  const kept = data.seeds.filter((s) => s.fate === "kept").length;
  const best = values.length ? (data.higherIsBetter ? Math.max : Math.min)(...values) : null;
  $("tiles").append(
    verdict
      ? tile(capital(metricTitle), metric(verdict[verdict.returned]),
          el("p", {}, `${metric(verdict.ungrown)} ungrown, ${gain(verdict.grown - verdict.ungrown, verdict.error)}`))
      : tile(capital(metricTitle), metric(best), el("p", {}, "the best so far")),
    costTile("Parameters", "params"),
    costTile("Multiply-adds", "macs"),
    tile("Seeds kept", `${kept} of ${data.seeds.length}`,
      el("p", {}, data.seeds.length ? seedTally() : "nothing was grown")));
}

function seedTally() {
  const parts = Object.entries(FATES).slice(1).map(([fate, word]) => [data.seeds.filter((s) => s.fate === fate).length, word]);
  const words = parts.filter(([n]) => n).map(([n, word]) => `${n} ${word}`);
  return words.join(", ") || "every one that germinated";
}

// ---- the run over time: metric, parameters and seeds on one axis of steps
function niceTicks(low, high, wanted) {
  const raw = (high - low) / wanted || 1, size = 10 ** Math.floor(Math.log10(raw));
  const step = size * [1, 2, 5, 10].find((m) => m * size >= raw);
  const ticks = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-6; v += step) ticks.push(+v.toPrecision(12));
  return ticks;
}

function pathOf(points, x, y) {
  let d = "", open = false;
  for (const [t, v] of points) {
    if (v === null) { open = false; continue; }
    d += `${open ? "L" : "M"}${x(t).toFixed(1)} ${y(v).toFixed(1)}`;
    open = true;
  }
  return d;
}

function drawTime() {
  const box = $("time"), width = box.clientWidth - (box.clientWidth < 560 ? 18 : 30);
  if (!data.steps.length) return box.replaceChildren(el("p", { class: "empty" }, "No step was recorded."));
  const narrow = width < 560, left = 50, right = width - (narrow ? 12 : 74);
  const first = data.steps[0][0], last = Math.max(data.steps[data.steps.length - 1][0], first + 1);
  const x = (t) => left + ((t - first) / (last - first)) * (right - left);
  const top = 30, metricHeight = narrow ? 170 : 230, paramsTop = top + metricHeight + 58, paramsHeight = narrow ? 64 : 84;
  const lanesTop = paramsTop + paramsHeight + 62, laneHeight = 36;
  const height = (data.seeds.length ? lanesTop + data.seeds.length * laneHeight : paramsTop + paramsHeight + 34) + 4;
  const canvas = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
  const frame = { x, left, right, narrow, first, last };
  const y = drawMetric(canvas, frame, top, metricHeight);
  drawParams(canvas, frame, paramsTop, paramsHeight);
  data.seeds.forEach((seed, i) => drawLane(canvas, frame, seed, lanesTop + i * laneHeight));
  if (data.seeds.length) canvas.append(label(left, lanesTop - 20, "Seeds", { class: "title" }), label(left + 46, lanesTop - 20, narrow ? "fill: weight in the blend" : "the fill is their weight in the blend"));
  box.replaceChildren(canvas);
  followPointer(box, canvas, frame, y, height);
}

function stepAxis(canvas, { x, left, right, first, last, narrow }, y) {
  canvas.append(line(left, y, right, y, { class: "axis" }));
  for (const t of niceTicks(first, last, narrow ? 4 : 8)) {
    if (Number.isInteger(t)) canvas.append(label(x(t), y + 17, count(t), { "text-anchor": "middle" }));
  }
}

function drawMetric(canvas, frame, top, height) {
  const { x, left, right, narrow } = frame;
  const grown = data.steps.map((s) => [s[0], s[1]]);
  const settled = (points) => points.slice(points.length < 60 ? 0 : Math.floor(points.length / 12));  // the first steps of a long run would flatten the rest
  const values = [...settled(grown), ...settled(data.twin)].map((p) => p[1]).filter((v) => v !== null);
  const low = values.length ? Math.min(...values) : 0, high = values.length ? Math.max(...values) : 1, pad = (high - low || 1) * 0.06;
  const scale = (v) => top + height - ((v - low + pad) / (high - low + 2 * pad)) * height;
  const y = (v) => Math.min(top + height, Math.max(top, scale(v)));  // signs of what is off the scale stand at its edge
  canvas.append(label(left, 12, capital(metricTitle), { class: "title" }));
  for (const v of niceTicks(low - pad, high + pad, 4)) {
    canvas.append(line(left, y(v), right, y(v), { class: "axis" }),
      label(left - 8, y(v) + 4, isShare ? `${Math.round(100 * v)}%` : v, { "text-anchor": "end" }));
  }
  stepAxis(canvas, frame, top + height);
  if (!narrow) canvas.append(label(right + 18, top + height + 17, "step"));
  for (const [step, to] of data.rollbacks) {
    canvas.append(svg("rect", { x: x(to), y: top, width: Math.max(1, x(step) - x(to)), height, fill: "var(--danger)", opacity: 0.09 }),
      line(x(step), top, x(step), top + height, { stroke: "var(--danger)", "stroke-dasharray": "3 3" }),
      label(x(step) + (x(step) > right - 80 ? -5 : 5), data.higherIsBetter ? top + height - 8 : top + 12, "rolled back",
        { "text-anchor": x(step) > right - 80 ? "end" : "start", style: "fill:var(--danger)" }));
  }
  const stroke = { fill: "none", "stroke-linejoin": "round" };
  canvas.append(svg("clipPath", { id: "panel" }, svg("rect", { x: left - 2, y: top, width: right - left + 4, height })),
    svg("g", { "clip-path": "url(#panel)" },
      svg("path", { d: pathOf(data.twin, x, scale), stroke: "var(--twin)", "stroke-width": 1.75, ...stroke }),
      svg("path", { d: pathOf(grown, x, scale), stroke: "var(--grown)", "stroke-width": 2.5, ...stroke })));
  if (!narrow) nameCurves(canvas, grown, y, right);
  for (const event of data.events) if (event.before !== null) {
    canvas.append(svg("g", { transform: `translate(${x(event.step)} ${y(event.before)})` }, sign(event.op)));
  }
  return y;
}

/** Names at the ends of the two curves, kept apart where the curves meet. */
function nameCurves(canvas, grown, y, right) {
  const end = (points) => { const known = points.filter((p) => p[1] !== null); return known.length ? y(known[known.length - 1][1]) : null; };
  let mine = end(grown), other = end(data.twin);
  if (mine !== null && other !== null && Math.abs(mine - other) < 15) {
    const middle = (mine + other) / 2, up = mine <= other ? -7.5 : 7.5;
    [mine, other] = [middle + up, middle - up];
  }
  if (mine !== null) canvas.append(label(right + 10, mine + 4, "grown", { class: "strong", style: "fill:var(--grown)" }));
  if (other !== null) canvas.append(label(right + 10, other + 4, "ungrown"));
}

function drawParams(canvas, frame, top, height) {
  const { x, left, right, narrow } = frame, steps = data.steps, limit = data.budget.params;
  const most = Math.max(...steps.map((s) => s[2]), data.before.params), showsLimit = limit !== null && limit < 2 * most;
  const high = (showsLimit ? Math.max(limit, most) : most) * 1.12 || 1, y = (v) => top + height - (v / high) * height, base = y(0);
  let d = `M${x(steps[0][0])} ${base}`;  // what a step reports is what was trained up to it
  for (const s of steps) d += `V${y(s[2]).toFixed(1)}H${x(s[0]).toFixed(1)}`;
  canvas.append(label(left, top - 14, "Parameters", { class: "title" }));
  for (const v of niceTicks(0, high, 2)) canvas.append(line(left, y(v), right, y(v), { class: "axis" }), label(left - 8, y(v) + 4, short(v), { "text-anchor": "end" }));
  canvas.append(svg("path", { d: `${d}V${base}Z`, fill: "var(--grown)", opacity: 0.75 }),
    svg("rect", { x: left, y: y(data.before.params), width: right - left, height: base - y(data.before.params), fill: "var(--host)" }));
  if (!narrow) canvas.append(label(right + 10, (y(data.before.params) + base) / 2 + 4, "host"));
  if (showsLimit) {
    canvas.append(line(left, y(limit), right, y(limit), { stroke: "var(--ink)", "stroke-dasharray": "5 4" }),
      narrow ? label(right, y(limit) - 5, "budget", { "text-anchor": "end" }) : label(right + 10, y(limit) + 4, "budget"));
  }
  stepAxis(canvas, frame, base);
}

function drawLane(canvas, { x, left, right }, seed, top) {
  const bar = 12, y = top + 8, alphas = seed.alphas;
  const at = (t) => {
    const next = alphas.findIndex((p) => p[0] >= t);
    if (next <= 0) return next === 0 ? alphas[0][1] : (alphas.length ? alphas[alphas.length - 1][1] : 0);
    const [t0, a0] = alphas[next - 1], [t1, a1] = alphas[next];
    return a0 + ((a1 - a0) * (t - t0)) / (t1 - t0);
  };
  for (const [stage, start, end] of seed.life) {
    const color = `var(--${stage})`, inner = alphas.filter((p) => p[0] > start && p[0] < end);
    const outline = [[start, at(start)], ...inner, [end, at(end)]].map(([t, a]) => `L${x(t).toFixed(1)} ${(y + bar - a * bar).toFixed(1)}`);
    canvas.append(svg("rect", { x: x(start), y, width: Math.max(1.5, x(end) - x(start)), height: bar, fill: color, opacity: 0.28 }),
      svg("path", { d: `M${x(start)} ${y + bar}${outline.join("")}L${x(end)} ${y + bar}Z`, fill: color }));
  }
  const born = x(seed.born), room = Math.floor((right - left) / 6.6) - seed.blueprint.length - 3;
  const name = `${seed.blueprint} · ${ending(seed.site, room)}`;
  const flip = born + 6.6 * name.length > right;
  const finish = seed.life.length ? x(seed.life[seed.life.length - 1][2]) : born;
  canvas.append(label(flip ? right : born, top + 2, name, { "text-anchor": flip ? "end" : "start" }));
  if (seed.fate && seed.fate !== "kept") canvas.append(svg("g", { transform: `translate(${finish} ${y + bar / 2})` }, sign("PRUNE")));
  if (seed.fate === "kept") canvas.append(svg("g", { transform: `translate(${x(seed.fateStep)} ${y + bar / 2})` }, sign("FOSSILIZE")));
}

function drawLegend() {
  const seen = new Set(data.seeds.flatMap((s) => s.life.map((span) => span[0])));
  const ops = new Set(data.events.map((e) => e.op));
  $("legend").append(
    ...Object.keys(OPS).filter((op) => ops.has(op)).map((op) => el("span", {}, boxedSign(op), OPS[op])),
    ...Object.keys(STAGES).filter((stage) => seen.has(stage)).map((stage) => el("span", {}, el("b", { style: `background:var(--${stage})` }), STAGES[stage])));
}

// ---- reading the chart step by step
function followPointer(box, canvas, { x, left, right, first, last }, y, height) {
  const rule = line(0, 20, 0, height - 4, { stroke: "var(--faint)", "pointer-events": "none", visibility: "hidden" });
  const dot = svg("circle", { r: 4, fill: "var(--grown)", stroke: "var(--card)", "stroke-width": 2, visibility: "hidden" });
  canvas.append(rule, dot);
  let current = null;
  const show = (index) => {
    current = Math.min(Math.max(index, 0), data.steps.length - 1);
    const step = data.steps[current], at = x(step[0]);
    rule.setAttribute("x1", at); rule.setAttribute("x2", at); rule.setAttribute("visibility", "visible");
    dot.setAttribute("visibility", step[1] === null ? "hidden" : "visible");
    if (step[1] !== null) { dot.setAttribute("cx", at); dot.setAttribute("cy", y(step[1])); }
    const content = readStep(current), tip = $("tip"), place = canvas.getBoundingClientRect();
    tip.replaceChildren(...content);
    tip.hidden = false;
    $("reading").textContent = tip.innerText.replace(/\s+/g, " ");
    const room = tip.offsetWidth + 18, page = place.left + scrollX + at;
    const fitsRight = at + room < place.width || page - room < 8;
    tip.style.left = `${Math.max(8, Math.min(fitsRight ? page + 16 : page - room, document.documentElement.clientWidth - tip.offsetWidth - 8))}px`;
    tip.style.top = `${place.top + scrollY + 34}px`;
  };
  const hide = () => { current = null; $("tip").hidden = true; for (const n of [rule, dot]) n.setAttribute("visibility", "hidden"); };
  const nearest = (event) => {
    const t = first + ((event.clientX - canvas.getBoundingClientRect().left - left) / (right - left)) * (last - first);
    let best = 0;
    data.steps.forEach((s, i) => { if (Math.abs(s[0] - t) < Math.abs(data.steps[best][0] - t)) best = i; });
    return best;
  };
  box.onpointermove = box.onpointerdown = (event) => show(nearest(event));
  box.onpointerleave = hide;
  box.onblur = hide;
  box.onkeydown = (event) => {
    const moves = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10, Home: -Infinity, End: Infinity };
    if (event.key === "Escape") hide();
    if (!(event.key in moves)) return;
    event.preventDefault();
    show(current === null ? (moves[event.key] > 0 ? 0 : data.steps.length - 1) : current + moves[event.key]);
  };
}

function readStep(index) {
  const [step, value, params, , loss, optimizerSteps] = data.steps[index], twin = data.twin.find((p) => p[0] === step);
  const rows = [[data.metric.name, metric(value)]];
  if (twin) rows.push(["ungrown", metric(twin[1])]);
  rows.push(["parameters", count(params)]);
  if (loss !== null) rows.push(["training loss", +loss.toPrecision(4)]);
  for (const seed of data.seeds) {
    const span = seed.life.find(([, start, end]) => start <= step && step < end) ?? null;
    if (span) rows.push([seedName(seed), STAGES[span[0]] ?? span[0].toLowerCase()]);
  }
  const happened = data.events.filter((e) => e.step === step).map((e) => el("p", {}, el("strong", {}, OPS[e.op] ?? e.op), e.site ? ` ${eventSeed(e)} at ${e.site}` : "", e.reason ? `: ${told(e.reason)}` : ""));
  const undone = data.rollbacks.filter((r) => r[0] === step).map((r) => el("p", {}, el("strong", {}, "Rolled back"), ` to step ${r[1]}: ${told(r[2])}`));
  const title = `Step ${count(step)}` + (optimizerSteps === null ? "" : `, ${count(optimizerSteps)} optimiser steps`);
  return [el("h4", {}, title), el("dl", {}, rows.flatMap(([k, v]) => [el("dt", {}, k), el("dd", {}, String(v))])), ...happened, ...undone];
}
const eventSeed = (event) => data.seeds.find((s) => s.id === event.seed)?.blueprint ?? "";

// ---- the seeds, one card each
function drawSeeds() {
  $("seeds").replaceChildren(...data.seeds.map(seedCard));
  if (!data.seeds.length) $("seeds").append(el("p", { class: "empty" }, "No seed germinated in this run."));
}

function seedCard(seed) {
  const latest = seed.gains[seed.gains.length - 1];
  const life = seed.life.map(([stage, start, end]) => `${STAGES[stage] ?? stage.toLowerCase()} ${start}\u2060–\u2060${end}`.replaceAll(" ", "\u00a0"));
  const facts = [
    ["gain", latest ? `${gain(latest[1], latest[2])} (step ${latest[0]})` : "never measured"],
    ["parameters", `+${count(seed.params)} (${share(seed.params, data.before.params)})`],
    ["multiply-adds", `+${short(seed.macs)} (${share(seed.macs, data.before.macs)})`],
    ["blend", `${seed.style.toLowerCase()}, weight ${seed.alphas.length ? +seed.alphas[seed.alphas.length - 1][1].toFixed(2) : 0}`],
    ["life", life.join(", ") || `born at step ${seed.born}`],
  ];
  const fate = seed.fate ? FATES[seed.fate] : "alive";
  const why = seed.fate ? `${capital(fate)} at step ${seed.fateStep}${seed.why ? `: ${told(seed.why)}` : ""}.` : "Still in the network when this page was written.";
  return el("article", { class: "card" },
    el("h3", {}, seed.blueprint, el("span", { class: `pill ${seed.fate ?? ""}` }, fate)),
    el("p", { class: "where" }, "at ", el("code", {}, seed.site)),
    gainChart(seed),
    el("dl", {}, facts.flatMap(([k, v]) => [el("dt", {}, k), el("dd", {}, v)])),
    el("p", { class: "why" }, why));
}

/** Gain over the steps with its standard error, against zero. */
function gainChart(seed) {
  const width = 264, height = 68, right = width - 34;
  if (!seed.gains.length) return null;
  const ends = seed.gains.flatMap(([, g, e]) => [g - (e ?? 0), g + (e ?? 0)]), low = Math.min(0, ...ends), high = Math.max(0, ...ends);
  const first = seed.gains[0][0], span = seed.gains[seed.gains.length - 1][0] - first || 1;
  const x = (t) => 4 + ((t - first) / span) * (right - 10), y = (v) => height - 6 - ((v - low) / (high - low || 1)) * (height - 12);
  const canvas = svg("svg", { width: "100%", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": `gain of ${seedName(seed)} over its life` },
    line(0, y(0), right, y(0), { stroke: "var(--faint)", "stroke-dasharray": "2 3" }),
    ...[low, 0, high].filter((v) => v === 0 || Math.abs(y(v) - y(0)) > 14).map((v) => label(width, y(v) + 4, v === 0 ? "0" : signed(v), { "text-anchor": "end", style: "font-size:11px" })),
    svg("path", { d: pathOf(seed.gains, x, y), fill: "none", stroke: "var(--grown)", "stroke-width": seed.gains.length > 40 ? 1.25 : 2 }));
  const known = seed.gains.filter((g) => g[2] !== null), isDense = seed.gains.length > 40;
  if (isDense && known.length) {
    const edge = (sign) => known.map(([t, g, e]) => `${x(t).toFixed(1)} ${y(g + sign * e).toFixed(1)}`);
    canvas.prepend(svg("path", { d: `M${[...edge(1), ...edge(-1).reverse()].join("L")}Z`, fill: "var(--grown)", opacity: 0.2 }));
    return canvas;
  }
  for (const [t, g, e] of known) canvas.append(line(x(t), y(g - e), x(t), y(g + e), { stroke: "var(--grown)", opacity: 0.45, "stroke-width": 1.5 }));
  for (const [t, g, e] of seed.gains) canvas.append(svg("circle", { cx: x(t), cy: y(g), r: 2.5, fill: "var(--grown)" }, svg("title", {}, `step ${t}: ${gain(g, e)}`)));
  return canvas;
}

// ---- the network
function drawNetworks() {
  const after = data.after ?? { params: lastStep("params"), macs: lastStep("macs") };
  const isGrown = !data.verdict || data.verdict.returned === "grown";
  const stays = data.seeds.filter((s) => s.fate === "kept" || s.fate === null);
  const now = data.after ? "After" : "Now";
  $("network").replaceChildren(
    networkFigure("Before", data.before, []),
    networkFigure(isGrown ? now : `${now}, not returned`, after, stays));
}

function networkFigure(title, cost, seeds) {
  return el("figure", {},
    el("figcaption", {}, el("strong", {}, title), el("span", {}, `${short(cost.params)} parameters, ${short(cost.macs)} multiply-adds`)),
    networkDiagram(seeds));
}

/** The blocks from top to bottom; a seed branches off after its site and joins again. */
function networkDiagram(seeds) {
  const width = 420, box = 230, middle = box / 2;
  let y = 16;
  const canvas = svg("svg", { width: "100%", role: "img", "aria-label": `the network, with ${seeds.length} seeds` });
  canvas.append(label(middle, y - 4, "input", { "text-anchor": "middle" }));
  for (const row of collapsed()) {
    canvas.append(line(middle, y, middle, y + 16, { stroke: "var(--faint)" }));
    y += 16;
    if (typeof row === "number") {
      canvas.append(label(middle, y + 13, `${row} more`, { "text-anchor": "middle" }));
      y += 20;
      continue;
    }
    canvas.append(svg("rect", { x: 0.5, y, width: box - 1, height: 40, rx: 8, fill: "var(--paper)", stroke: "var(--line)" }),
      label(12, y + 17, ending(row.name || "the model", 28), { class: "strong" }),
      label(12, y + 32, `${clipped(row.kind, 18)}  ${row.shape.join(" × ")}`));
    y += 40;
    for (const seed of seeds.filter((s) => s.site === row.name)) y = drawBranch(canvas, seed, y, middle, box, width);
  }
  canvas.append(line(middle, y, middle, y + 16, { stroke: "var(--faint)" }), label(middle, y + 30, "output", { "text-anchor": "middle" }));
  canvas.setAttribute("viewBox", `0 0 ${width} ${y + 36}`);
  return canvas;
}

function drawBranch(canvas, seed, y, middle, box, width) {
  const bottom = y + 66, right = box + 16;
  canvas.append(line(middle, y, middle, bottom, { stroke: "var(--faint)" }),
    svg("path", { d: `M${middle} ${y + 8}H${(right + width) / 2}V${y + 16}M${(right + width) / 2} ${y + 48}V${y + 56}H${middle}`, fill: "none", stroke: "var(--grown)", "stroke-width": 2 }),
    svg("rect", { x: right, y: y + 14, width: width - right - 1, height: 34, rx: 8, fill: "var(--grown)" }),
    label((right + width) / 2, y + 28, clipped(seed.blueprint, 24), { "text-anchor": "middle", style: "fill:var(--card);font-weight:600" }),
    label((right + width) / 2, y + 42, `+${short(seed.params)} parameters`, { "text-anchor": "middle", style: "fill:var(--card);font-size:11px" }),
    svg("circle", { cx: middle, cy: y + 56, r: 9, fill: "var(--card)", stroke: "var(--grown)", "stroke-width": 2 }),
    label(middle, y + 60.5, BLENDS[seed.style] ?? "+", { "text-anchor": "middle", class: "strong" }));
  return bottom;
}

/** The blocks to draw; in a large network, runs of blocks without a seed become a count. */
function collapsed() {
  const sites = new Set(data.seeds.map((s) => s.site)), blocks = data.blocks;
  if (blocks.length <= 12) return blocks;
  const shown = blocks.map((b, i) => sites.has(b.name) || i === 0 || i === blocks.length - 1);
  const rows = [];
  blocks.forEach((block, i) => {
    if (shown[i]) rows.push(block);
    else if (typeof rows[rows.length - 1] === "number") rows[rows.length - 1] += 1;
    else rows.push(1);
  });
  return rows;
}
const clipped = (text, size) => text.length <= size ? text : `${text.slice(0, size - 1)}…`;
const ending = (text, size) => text.length <= size ? text : `…${text.slice(1 - size)}`;  // of a path, the end tells most

// ---- every decision
function drawDecisions() {
  $("waits").textContent = data.events.length || data.waits ? `${data.events.length} decisions changed something; ${data.waits} times the controller waited.` : "";
  if (!data.events.length) return $("decisions").append(el("p", { class: "empty" }, "Nothing was changed in this run."));
  const columns = ["Step", "Decision", "Where", "Cost", "Why", "What came of it"];
  const head = el("thead", {}, el("tr", {}, columns.map((name) => el("th", { scope: "col", class: name === "Cost" ? "number" : null }, name))));
  const cell = (i, ...content) => el("td", { "data-label": columns[i], class: i === 3 ? "number" : null }, ...content);
  const rows = data.events.map((event) => el("tr", {},
    cell(0, count(event.step)),
    cell(1, el("span", {}, boxedSign(event.op), OPS[event.op] ?? event.op, el("small", {}, details(event)))),
    cell(2, event.site === null ? "" : el("code", {}, event.site)),
    cell(3, event.params ? `+${count(event.params)}` : ""),
    cell(4, el("span", {}, told(event.reason) || evidence(event), el("small", {}, alternatives(event)))),
    cell(5, outcome(event))));
  $("decisions").append(el("table", {}, head, el("tbody", {}, rows)));
}

const DETAILS = {
  blueprint: (v) => v, style: (v) => v.toLowerCase(), alpha_target: (v) => `weight ${v}`,
  tempo: (v) => `over ${v} steps`, alpha_speed: (v) => (v ? `over ${v} steps` : "at once"), alpha_curve: (v) => v.toLowerCase(),
};
const details = (event) => Object.entries(event.details).map(([k, v]) => (DETAILS[k] ?? ((w) => `${k} ${w}`))(v)).join(", ");
const alternatives = (event) => {
  const words = Object.entries(event.legal).map(([op, n]) => op === "WAIT" ? "wait" : `${(OPS[op] ?? op).toLowerCase()} at ${n} site${n === 1 ? "" : "s"}`);
  return words.length ? `legal: ${words.join(", ")}` : "";
};
/** What was known of a seed when it was decided on, for a controller that gives no reason. */
function evidence(event) {
  const gains = data.seeds.find((s) => s.id === event.seed)?.gains.filter((g) => g[0] <= event.step) ?? [];
  return gains.length ? `its gain was ${gain(...gains[gains.length - 1].slice(1))}` : "";
}
function outcome(event) {
  if (event.before === null || event.next === null) return "";
  const seed = data.seeds.find((s) => s.id === event.seed);
  const then = event.op === "GERMINATE" && seed && seed.fate ? `; ${FATES[seed.fate]} at step ${seed.fateStep}` : "";
  return `${metric(event.before)} to ${metric(event.next)} at the next step${then}`;
}

function drawFacts() {
  const facts = { controller: data.controller, ...data.facts };
  $("facts").append(...Object.entries(facts).map(([k, v]) => el("span", {}, `${k} `, el("b", {}, v))));
}

drawHead();
drawTiles();
drawLegend();
drawSeeds();
drawNetworks();
drawDecisions();
drawFacts();
let drawnWidth = 0;
new ResizeObserver(() => {
  const width = $("time").clientWidth;
  if (width > 100 && width !== drawnWidth) drawTime();
  drawnWidth = width;
}).observe($("time"));
