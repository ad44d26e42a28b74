// ---- the run over time: metric, parameters and seeds on one axis of steps
function niceTicks(low, high, wanted) {
  const raw = (high - low) / wanted || 1,
    size = 10 ** Math.floor(Math.log10(raw));
  const step = size * [1, 2, 2.5, 5, 10].find((m) => m * size >= raw);
  const ticks = [];
  for (let v = Math.ceil(low / step) * step; v <= high + step * 1e-6; v += step)
    ticks.push(+v.toPrecision(12));
  return ticks;
}

function pathOf(points, x, y) {
  let d = "",
    open = false;
  for (const [t, v] of points) {
    if (v === null) {
      open = false;
      continue;
    }
    d += `${open ? "L" : "M"}${x(t).toFixed(1)} ${y(v).toFixed(1)}`;
    open = true;
  }
  return d;
}

function drawTime() {
  const box = $("time"),
    width = box.clientWidth - (box.clientWidth < 560 ? 18 : 30);
  if (!data.steps.length) return box.replaceChildren(el("p", { class: "empty" }, "No step was recorded."));
  const narrow = width < 560,
    left = 50,
    right = width - (narrow ? 12 : 74);
  const first = data.steps[0][0],
    last = Math.max(data.steps[data.steps.length - 1][0], first + 1);
  const x = (t) => left + ((t - first) / (last - first)) * (right - left);
  const top = 30,
    metricHeight = narrow ? 170 : 230,
    paramsTop = top + metricHeight + 58,
    paramsHeight = narrow ? 64 : 84;
  const lanesTop = paramsTop + paramsHeight + 62,
    laneHeight = 36;
  const height =
    (data.seeds.length ? lanesTop + data.seeds.length * laneHeight : paramsTop + paramsHeight + 34) + 4;
  const canvas = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
  const frame = { x, left, right, narrow, first, last };
  const y = drawMetric(canvas, frame, top, metricHeight);
  drawParams(canvas, frame, paramsTop, paramsHeight);
  data.seeds.forEach((seed, i) => drawLane(canvas, frame, seed, lanesTop + i * laneHeight));
  if (data.seeds.length)
    canvas.append(
      label(left, lanesTop - 20, "Seeds", { class: "title" }),
      label(
        left + 46,
        lanesTop - 20,
        narrow ? "fill: weight in the blend" : "the fill is their weight in the blend",
      ),
    );
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
  // the first steps of a long run would flatten the rest
  const settled = (points) => points.slice(points.length < 60 ? 0 : Math.floor(points.length / 12));
  const values = [...settled(grown), ...settled(data.twin)].map((p) => p[1]).filter((v) => v !== null);
  const low = values.length ? Math.min(...values) : 0,
    high = values.length ? Math.max(...values) : 1,
    pad = (high - low || 1) * 0.06;
  const scale = (v) => top + height - ((v - low + pad) / (high - low + 2 * pad)) * height;
  // signs of what is off the scale stand at its edge
  const y = (v) => Math.min(top + height, Math.max(top, scale(v)));
  canvas.append(label(left, 12, capital(metricTitle), { class: "title" }));
  for (const v of niceTicks(low - pad, high + pad, 4)) {
    canvas.append(
      line(left, y(v), right, y(v), { class: "axis" }),
      label(left - 8, y(v) + 4, isShare ? `${Math.round(100 * v)}%` : v, { "text-anchor": "end" }),
    );
  }
  stepAxis(canvas, frame, top + height);
  if (!narrow) canvas.append(label(right + 18, top + height + 17, "step"));
  for (const [step, to] of data.rollbacks) {
    canvas.append(
      svg("rect", {
        x: x(to),
        y: top,
        width: Math.max(1, x(step) - x(to)),
        height,
        fill: "var(--danger)",
        opacity: 0.09,
      }),
      line(x(step), top, x(step), top + height, { stroke: "var(--danger)", "stroke-dasharray": "3 3" }),
      label(
        x(step) + (x(step) > right - 80 ? -5 : 5),
        top + height - 8,
        "rolled back",
        { "text-anchor": x(step) > right - 80 ? "end" : "start", style: "fill:var(--danger)" },
      ),
    );
  }
  const stroke = { fill: "none", "stroke-linejoin": "round" };
  canvas.append(
    svg("clipPath", { id: "panel" }, svg("rect", { x: left - 2, y: top, width: right - left + 4, height })),
    svg(
      "g",
      { "clip-path": "url(#panel)" },
      svg("path", { d: pathOf(data.twin, x, scale), stroke: "var(--twin)", "stroke-width": 1.75, ...stroke }),
      svg("path", { d: pathOf(grown, x, scale), stroke: "var(--grown)", "stroke-width": 2.5, ...stroke }),
    ),
  );
  if (!narrow) nameCurves(canvas, grown, y, right);
  for (const event of data.events)
    if (event.before !== null) {
      canvas.append(
        svg("g", { transform: `translate(${x(event.step)} ${y(event.before)})` }, sign(event.op)),
      );
    }
  return y;
}

/** Names at the ends of the two curves, kept apart where the curves meet. */
function nameCurves(canvas, grown, y, right) {
  const end = (points) => {
    const known = points.filter((p) => p[1] !== null);
    return known.length ? y(known[known.length - 1][1]) : null;
  };
  let mine = end(grown),
    other = end(data.twin);
  if (mine !== null && other !== null && Math.abs(mine - other) < 15) {
    const middle = (mine + other) / 2,
      up = mine <= other ? -7.5 : 7.5;
    [mine, other] = [middle + up, middle - up];
  }
  if (mine !== null)
    canvas.append(label(right + 10, mine + 4, "grown", { class: "strong", style: "fill:var(--grown)" }));
  if (other !== null) canvas.append(label(right + 10, other + 4, "ungrown"));
}

function drawParams(canvas, frame, top, height) {
  const { x, left, right, narrow } = frame,
    steps = data.steps,
    limit = data.budget.params;
  const most = Math.max(...steps.map((s) => s[2]), data.before.params),
    showsLimit = limit !== null && limit < 2 * most;
  const high = (showsLimit ? Math.max(limit, most) : most) * 1.12 || 1,
    y = (v) => top + height - (v / high) * height,
    base = y(0);
  let d = `M${x(steps[0][0])} ${base}`; // what a step reports is what was trained up to it
  for (const s of steps) d += `V${y(s[2]).toFixed(1)}H${x(s[0]).toFixed(1)}`;
  canvas.append(label(left, top - 14, "Parameters", { class: "title" }));
  for (const v of niceTicks(0, high, 2))
    canvas.append(
      line(left, y(v), right, y(v), { class: "axis" }),
      label(left - 8, y(v) + 4, short(v), { "text-anchor": "end" }),
    );
  canvas.append(
    svg("path", { d: `${d}V${base}Z`, fill: "var(--grown)", opacity: 0.75 }),
    svg("rect", {
      x: left,
      y: y(data.before.params),
      width: right - left,
      height: base - y(data.before.params),
      fill: "var(--host)",
    }),
  );
  if (!narrow) canvas.append(label(right + 10, (y(data.before.params) + base) / 2 + 4, "host"));
  if (showsLimit) {
    canvas.append(
      line(left, y(limit), right, y(limit), { stroke: "var(--ink)", "stroke-dasharray": "5 4" }),
      narrow
        ? label(right, y(limit) - 5, "budget", { "text-anchor": "end" })
        : label(right + 10, y(limit) + 4, "budget"),
    );
  }
  stepAxis(canvas, frame, base);
}

function drawLane(chart, { x, left, right }, seed, top) {
  const canvas = cardLink(svg, `seed-${seed.seed}`, { "aria-label": `the card of ${seedName(seed)}` });
  chart.append(canvas);
  const bar = 12,
    y = top + 8,
    alphas = seed.alphas;
  const at = (t) => {
    const next = alphas.findIndex((p) => p[0] >= t);
    if (next <= 0) return next === 0 ? alphas[0][1] : alphas.length ? alphas[alphas.length - 1][1] : 0;
    const [t0, a0] = alphas[next - 1],
      [t1, a1] = alphas[next];
    return a0 + ((a1 - a0) * (t - t0)) / (t1 - t0);
  };
  for (const [stage, start, end] of seed.life) {
    const color = `var(--${stage})`,
      inner = alphas.filter((p) => p[0] > start && p[0] < end);
    const outline = [[start, at(start)], ...inner, [end, at(end)]].map(
      ([t, a]) => `L${x(t).toFixed(1)} ${(y + bar - a * bar).toFixed(1)}`,
    );
    canvas.append(
      svg("rect", {
        x: x(start),
        y,
        width: Math.max(1.5, x(end) - x(start)),
        height: bar,
        fill: color,
        opacity: 0.28,
      }),
      svg("path", { d: `M${x(start)} ${y + bar}${outline.join("")}L${x(end)} ${y + bar}Z`, fill: color }),
    );
  }
  const born = x(seed.born),
    room = Math.floor((right - left) / 6.6) - seed.blueprint.length - 3;
  const name = `${seed.blueprint} · ${ending(seed.site, room)}`;
  const flip = born + 6.6 * name.length > right;
  const finish = seed.life.length ? x(seed.life[seed.life.length - 1][2]) : born;
  canvas.append(label(flip ? right : born, top + 2, name, { "text-anchor": flip ? "end" : "start" }));
  if (seed.fate && seed.fate !== "kept")
    canvas.append(svg("g", { transform: `translate(${finish} ${y + bar / 2})` }, sign("PRUNE")));
  if (seed.fate === "kept")
    canvas.append(
      svg("g", { transform: `translate(${x(seed.fateStep)} ${y + bar / 2})` }, sign("FOSSILIZE")),
    );
}

function drawLegend() {
  const seen = new Set(data.seeds.flatMap((s) => s.life.map((span) => span[0])));
  const ops = new Set(data.events.map((e) => e.op));
  const curve = (color, name) => el("span", {}, el("b", { style: `background:var(--${color})` }), name);
  $("legend").append(
    curve("grown", "grown"),
    data.twin.length ? curve("twin", "ungrown") : "",
    ...Object.keys(OPS)
      .filter((op) => ops.has(op))
      .map((op) => el("span", {}, boxedSign(op), OPS[op])),
    ...Object.keys(STAGES)
      .filter((stage) => seen.has(stage))
      .map((stage) => el("span", {}, el("b", { style: `background:var(--${stage})` }), STAGES[stage])),
  );
}

// ---- reading the chart step by step
function followPointer(box, canvas, { x, left, right, first, last }, y, height) {
  const rule = line(0, 20, 0, height - 4, {
    stroke: "var(--faint)",
    "pointer-events": "none",
    visibility: "hidden",
  });
  const dot = svg("circle", {
    r: 4,
    fill: "var(--grown)",
    stroke: "var(--card)",
    "stroke-width": 2,
    visibility: "hidden",
  });
  canvas.append(rule, dot);
  let current = null;
  const show = (index) => {
    current = Math.min(Math.max(index, 0), data.steps.length - 1);
    const step = data.steps[current],
      at = x(step[0]);
    rule.setAttribute("x1", at);
    rule.setAttribute("x2", at);
    rule.setAttribute("visibility", "visible");
    dot.setAttribute("visibility", step[1] === null ? "hidden" : "visible");
    if (step[1] !== null) {
      dot.setAttribute("cx", at);
      dot.setAttribute("cy", y(step[1]));
    }
    const content = readStep(current),
      tip = $("tip"),
      place = canvas.getBoundingClientRect();
    tip.replaceChildren(...content);
    tip.hidden = false;
    $("reading").textContent = tip.innerText.replace(/\s+/g, " ");
    const room = tip.offsetWidth + 18,
      page = place.left + scrollX + at;
    const fitsRight = at + room < place.width || page - room < 8;
    const furthest = document.documentElement.clientWidth - tip.offsetWidth - 8;
    tip.style.left = `${Math.max(8, Math.min(fitsRight ? page + 16 : page - room, furthest))}px`;
    tip.style.top = `${place.top + scrollY + 34}px`;
  };
  const hide = () => {
    current = null;
    $("tip").hidden = true;
    for (const n of [rule, dot]) n.setAttribute("visibility", "hidden");
  };
  const nearest = (event) => {
    const t =
      first +
      ((event.clientX - canvas.getBoundingClientRect().left - left) / (right - left)) * (last - first);
    let best = 0;
    data.steps.forEach((s, i) => {
      if (Math.abs(s[0] - t) < Math.abs(data.steps[best][0] - t)) best = i;
    });
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
  const [step, value, params, , loss, optimizerSteps] = data.steps[index],
    twin = data.twin.find((p) => p[0] === step);
  const rows = [[data.metric.name, metric(value)]];
  if (twin) rows.push(["ungrown", metric(twin[1])]);
  rows.push(["parameters", count(params)]);
  if (loss !== null) rows.push(["training loss", +loss.toPrecision(4)]);
  for (const seed of data.seeds) {
    const span = seed.life.find(([, start, end]) => start <= step && step < end) ?? null;
    if (span) rows.push([seedName(seed), STAGES[span[0]] ?? span[0].toLowerCase()]);
  }
  const happened = data.events
    .filter((e) => e.step === step)
    .map((e) =>
      el(
        "p",
        {},
        el("strong", {}, OPS[e.op] ?? e.op),
        e.site ? ` ${eventSeed(e)} at ${e.site}` : "",
        `: ${plusMinus(e.reason)}`,
      ),
    );
  const undone = data.rollbacks
    .filter((r) => r[0] === step)
    .map((r) => el("p", {}, el("strong", {}, "Rolled back"), ` to step ${r[1]}: ${plusMinus(r[2])}`));
  const title =
    `Step ${count(step)}` + (optimizerSteps === null ? "" : `, ${count(optimizerSteps)} optimiser steps`);
  return [
    el("h4", {}, title),
    el(
      "dl",
      {},
      rows.flatMap(([k, v]) => [el("dt", {}, k), el("dd", {}, String(v))]),
    ),
    ...happened,
    ...undone,
  ];
}
const eventSeed = (event) => data.seeds.find((s) => s.seed === event.seed)?.blueprint ?? "";
