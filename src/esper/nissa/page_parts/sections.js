// ---- the head of the page
function drawHead() {
  $("model").textContent = data.model;
  const [opening, ...rest] = plusMinus(data.summary).split(": ");
  const verdict = $("verdict");
  if (rest.length) verdict.replaceChildren(el("strong", {}, opening), `: ${rest.join(": ")}`);
  verdict.classList.toggle("helped", opening === "Growing helped");
  verdict.classList.toggle("harmed", opening === "Growing did not help");
  if (!data.after && data.now) {
    const minutes = Math.floor((Date.now() / 1000 - data.time) / 60);
    const isOld = minutes > 1 ? ` Written ${minutes} minutes ago: the run may have been stopped.` : "";
    $("now").textContent = `Now: ${data.now}.${isOld}`;
    $("now").hidden = false;
  }
  $("theme").addEventListener("click", () => {
    const root = document.documentElement;
    const isDark = root.dataset.theme
      ? root.dataset.theme === "dark"
      : matchMedia("(prefers-color-scheme: dark)").matches;
    remember("theme", (root.dataset.theme = isDark ? "light" : "dark"));
  });
}

function tile(title, big, ...rest) {
  return el("div", { class: "tile" }, el("h3", {}, title), el("p", { class: "big" }, big), ...rest);
}

/** Whether the ungrown network was returned: then the tiles show it. */
const isUngrown = !data.trials.length && data.verdict !== null && data.verdict.returned === "ungrown";

/** A cost: what the host had, what has grown, and how much of the budget that is. */
function costTile(title, key) {
  const before = data.before[key],
    now = isUngrown ? before : data.after ? data.after[key] : lastStep(key),
    limit = data.budget[key];
  const full = Math.max(limit ?? 0, now, before, 1),
    part = (n, color) => el("i", { style: `width:${(100 * n) / full}%;background:${color}` });
  const budget = limit === null ? `budget ${data.facts.budget ?? "none"}` : `budget ${short(limit)}`;
  return tile(
    title,
    short(now),
    el(
      "div",
      { class: "meter" },
      part(before, "var(--host)"),
      part(Math.max(0, now - before), "var(--grown)"),
    ),
    el(
      "p",
      {},
      isUngrown
        ? `the ungrown network was returned; ${budget}`
        : `${short(before)} before, ${share(now - before, before)}; ${budget}`,
    ),
  );
}
const lastStep = (key) =>
  data.steps.length ? data.steps[data.steps.length - 1][{ params: 2, macs: 3 }[key]] : data.before[key];

function drawTiles() {
  const verdict = data.verdict,
    values = data.steps.map((s) => s[1]).filter((v) => v !== null);
  const kept = data.seeds.filter((s) => s.fate === "kept").length;
  const best = values.length ? Math.max(...values) : null;
  $("tiles").append(
    verdict
      ? tile(
          capital(metricTitle),
          metric(verdict[verdict.returned]),
          el(
            "p",
            {},
            `${metric(verdict.ungrown)} ungrown, ${gain(verdict.grown - verdict.ungrown, verdict.difference_error)}`,
          ),
        )
      : tile(capital(metricTitle), metric(best), el("p", {}, "best so far")),
    costTile("Parameters", "params"),
    costTile("Multiply-adds", "macs"),
    tile(
      "Seeds kept",
      `${isUngrown ? 0 : kept} of ${data.seeds.length}`,
      el("p", {}, isUngrown ? "none is in the network returned" : data.seeds.length ? seedTally() : "nothing was grown"),
    ),
  );
}

function seedTally() {
  const parts = Object.entries(FATES)
    .slice(1)
    .map(([fate, word]) => [data.seeds.filter((s) => s.fate === fate).length, word]);
  const words = parts.filter(([n]) => n).map(([n, word]) => `${n} ${word}`);
  return words.join(", ") || "all that germinated";
}

// ---- the seeds, one card each
function drawSeeds() {
  const isGone = (seed) => seed.fate !== null && seed.fate !== "kept";
  const gone = data.seeds.filter(isGone);
  $("seeds").replaceChildren(...data.seeds.filter((seed) => !isGone(seed)).map(seedCard));
  const summary = el("summary", {}, `${gone.length} removed seed${gone.length === 1 ? "" : "s"}`);
  if (gone.length)
    $("seeds").after(el("details", {}, summary, el("div", { class: "cards" }, gone.map(seedCard))));
  if (!data.seeds.length) $("seeds").append(el("p", { class: "empty" }, "No seed germinated in this run."));
}

function seedCard(seed) {
  const latest = seed.gains[seed.gains.length - 1];
  const life = seed.life.map(([stage, start, end]) =>
    `${STAGES[stage] ?? stage.toLowerCase()} ${start}\u2060–\u2060${end}`.replaceAll(" ", "\u00a0"),
  );
  const facts = [
    ["if switched off", latest ? `${gain(-latest[1], latest[2])} (step ${latest[0]})` : "never measured"],
    ["parameters", `+${count(seed.params)} (${share(seed.params, data.before.params)})`],
    ["multiply-adds", `+${short(seed.macs)} (${share(seed.macs, data.before.macs)})`],
    ["blend", `${seed.style.toLowerCase()}, weight ${+seed.alphas[seed.alphas.length - 1][1].toFixed(2)}`],
    ["life", life.join(", ") || `germinated at step ${seed.born}`],
  ];
  const fate = seed.fate ? FATES[seed.fate] : "alive";
  const why = seed.fate
    ? `${capital(fate)} at step ${seed.fateStep}${seed.why ? `: ${plusMinus(seed.why)}` : ""}.`
    : "Still in the network when this page was written.";
  return el(
    "article",
    { class: "card", id: `seed-${seed.seed}` },
    el("h3", {}, seed.blueprint, el("span", { class: `pill ${seed.fate ?? ""}` }, fate)),
    el("p", { class: "where" }, "at ", el("code", {}, seed.site)),
    gainChart(seed),
    el(
      "dl",
      {},
      facts.flatMap(([k, v]) => [el("dt", {}, k), el("dd", {}, v)]),
    ),
    el("p", { class: "why" }, why),
  );
}

/** Gain over the steps with its standard error, against zero. */
function gainChart(seed) {
  const width = 264,
    height = 68,
    right = width - 34;
  if (!seed.gains.length) return null;
  const ends = seed.gains.flatMap(([, g, e]) => [g - (e ?? 0), g + (e ?? 0)]),
    low = Math.min(0, ...ends),
    high = Math.max(0, ...ends);
  const first = seed.gains[0][0],
    span = seed.gains[seed.gains.length - 1][0] - first || 1;
  const x = (t) => 4 + ((t - first) / span) * (right - 10),
    y = (v) => height - 6 - ((v - low) / (high - low || 1)) * (height - 12);
  const canvas = svg(
    "svg",
    {
      width: "100%",
      viewBox: `0 0 ${width} ${height}`,
      role: "img",
      "aria-label": `loss without ${seedName(seed)} over its life`,
    },
    line(0, y(0), right, y(0), { stroke: "var(--faint)", "stroke-dasharray": "2 3" }),
    ...[low, 0, high]
      .filter((v) => v === 0 || Math.abs(y(v) - y(0)) > 14)
      .map((v) =>
        label(width, y(v) + 4, v === 0 ? "0" : signed(v), { "text-anchor": "end", style: "font-size:11px" }),
      ),
    svg("path", {
      d: pathOf(seed.gains, x, y),
      fill: "none",
      stroke: "var(--grown)",
      "stroke-width": seed.gains.length > 40 ? 1.25 : 2,
    }),
  );
  const known = seed.gains.filter((g) => g[2] !== null),
    isDense = seed.gains.length > 40;
  if (isDense && known.length) {
    const edge = (sign) => known.map(([t, g, e]) => `${x(t).toFixed(1)} ${y(g + sign * e).toFixed(1)}`);
    canvas.prepend(
      svg("path", {
        d: `M${[...edge(1), ...edge(-1).reverse()].join("L")}Z`,
        fill: "var(--grown)",
        opacity: 0.2,
      }),
    );
    return canvas;
  }
  for (const [t, g, e] of known)
    canvas.append(
      line(x(t), y(g - e), x(t), y(g + e), { stroke: "var(--grown)", opacity: 0.45, "stroke-width": 1.5 }),
    );
  for (const [t, g, e] of seed.gains)
    canvas.append(
      svg(
        "circle",
        { cx: x(t), cy: y(g), r: 2.5, fill: "var(--grown)" },
        svg("title", {}, `step ${t}: ${gain(g, e)}`),
      ),
    );
  return canvas;
}

// ---- every decision
function drawDecisions() {
  $("waits").textContent =
    data.events.length || data.waits
      ? `${data.events.length} decisions changed something; the controller waited ${data.waits} times.`
      : "";
  if (!data.events.length && !data.rollbacks.length)
    return $("decisions").append(el("p", { class: "empty" }, "Nothing was changed in this run."));
  const columns = ["Step", "Decision", "Where", "Cost", "Why", "Effect"];
  const head = el(
    "thead",
    {},
    el(
      "tr",
      {},
      columns.map((name) => el("th", { scope: "col", class: name === "Cost" ? "number" : null }, name)),
    ),
  );
  const cell = (i, ...content) =>
    el("td", { "data-label": columns[i], class: i === 3 ? "number" : null }, ...content);
  const decided = data.events.map((event) => [
    event.step,
    el(
      "tr",
      {},
      cell(0, count(event.step)),
      cell(
        1,
        el("span", {}, boxedSign(event.op), OPS[event.op] ?? event.op, el("small", {}, details(event))),
      ),
      cell(2, event.site === null ? "" : siteLink(event)),
      cell(3, event.params ? `+${count(event.params)}` : ""),
      cell(4, el("span", {}, plusMinus(event.reason), alternatives(event))),
      cell(5, outcome(event)),
    ),
  ]);
  const restored = data.rollbacks.map(([step, to, reason]) => [
    step,
    el(
      "tr",
      {},
      cell(0, count(step)),
      cell(1, el("span", {}, "Rolled back", el("small", {}, `to step ${count(to)}`))),
      cell(2, ""),
      cell(3, ""),
      cell(4, plusMinus(reason)),
      cell(5, ""),
    ),
  ]);
  // a rollback comes before the decision of its step
  const rows = [...restored, ...decided].sort((a, b) => a[0] - b[0]).map((entry) => entry[1]);
  $("decisions").append(el("table", {}, head, el("tbody", {}, rows)));
}

const DETAILS = {
  blueprint: (v) => v,
  style: (v) => v.toLowerCase(),
  alpha_target: (v) => `weight ${v}`,
  tempo: (v) => `over ${v} steps`,
  alpha_speed: (v) => (v ? `over ${v} steps` : "at once"),
  alpha_curve: (v) => v.toLowerCase(),
};
const details = (event) =>
  Object.entries(event.details)
    .map(([k, v]) => (DETAILS[k] ?? ((w) => `${k} ${w}`))(v))
    .join(", ");
const alternatives = (event) => {
  const words = Object.entries(event.legal).map(([op, n]) =>
    op === "WAIT" ? "wait" : `${(OPS[op] ?? op).toLowerCase()} at ${n} site${n === 1 ? "" : "s"}`,
  );
  return words.length
    ? el("details", {}, el("summary", {}, "legal"), el("small", {}, words.join(", ")))
    : null;
};
/** The site, with a link to the seed's card. */
function siteLink(event) {
  const code = el("code", {}, event.site);
  return event.seed ? cardLink(el, `seed-${event.seed}`, {}, code) : code;
}
function outcome(event) {
  if (event.before === null || event.next === null) return "";
  const seed = data.seeds.find((s) => s.seed === event.seed);
  const then =
    event.op === "GERMINATE" && seed && seed.fate ? `; ${FATES[seed.fate]} at step ${seed.fateStep}` : "";
  return `${metric(event.before)} to ${metric(event.next)} at the next step${then}`;
}

function drawFacts() {
  const limits = Object.entries(data.budget).filter(([, limit]) => limit !== null);
  const budget = limits.map(([name, limit]) => `${short(limit)} ${name}`).join(", ") || "none";
  const facts = { controller: data.controller, budget, ...data.facts, ...data.written };
  $("facts").append(...Object.entries(facts).map(([k, v]) => el("span", {}, `${k} `, el("b", {}, v))));
}
