// ---- an adaptation: the plans that were tried, as bars and as cards
const isRunning = (trial) => trial.seconds === null;
const stateOf = (trial) => (trial.kept ? "kept" : isRunning(trial) && !data.after ? "running now" : "tried");
const planId = (trial) => `plan-${data.trials.indexOf(trial)}`;
const planName = (trial) => (trial === data.trials[0] ? "as it is" : trial.plan);

function drawAdaptation() {
  const [asIs, ...others] = data.trials,
    done = others.filter((t) => !isRunning(t)),
    kept = data.trials.find((t) => t.kept),
    best = kept ?? data.trials.reduce((a, b) => ((b.metric ?? -1) > (a.metric ?? -1) ? b : a));
  $("kicker").textContent = "Adaptation";
  $("how").textContent = "What was tried";
  $("howHint").textContent = "Accuracy on held-out rows, in the order of the tries; the mark is the model as it is. A bar leads to its card.";
  $("cards").textContent = "The plans";
  $("cardsHint").textContent =
    "Each plan is trained on the other rows. Few held-out rows say little: differences of one or two rows are chance.";
  $("networks").hidden = $("list").hidden = true;
  $("time").removeAttribute("tabindex"); // the bars have the focus
  $("time").setAttribute("aria-label", "Accuracy of each plan");
  const proposed = done.filter((t) => t.proposer.startsWith("proposal")).length;
  const seconds = data.trials.reduce((sum, t) => sum + (t.seconds ?? 0), 0);
  $("tiles").append(
    tile(
      "Held-out accuracy",
      metric(best.metric),
      el("p", {}, `${metric(asIs.metric)} as it is, ${gain(best.metric - asIs.metric)}${kept ? "" : "; best so far"}`),
    ),
    costTile("Parameters", "params"),
    tile("Plans tried", done.length, el("p", {}, `${done.length - proposed} usual rules, ${proposed} proposed`)),
    tile("Training", duration(seconds), el("p", {}, "all plans together")),
  );
  $("seeds").replaceChildren(...data.trials.map(planCard));
}

const duration = (s) => (s < 100 ? `${+s.toPrecision(2)}\u00a0s` : `${Math.round(s / 60)}\u00a0min`);

function planCard(trial) {
  const facts = isRunning(trial)
    ? []
    : [
        ["accuracy", metric(trial.metric)],
        ["loss", trial.loss === null ? "not a number" : +trial.loss.toPrecision(3)],
        ["parameters trained", count(trial.trained)],
        ["of them added", count(trial.params)],
        ["time", duration(trial.seconds)],
      ];
  if (trial.trained !== 0) facts.push(["learning rate", trial.rate]);
  return el(
    "article",
    { class: "card", id: planId(trial) },
    el("h3", {}, planName(trial), el("span", { class: `pill ${trial.kept ? "kept" : ""}` }, stateOf(trial))),
    el("p", { class: "where" }, trial.proposer),
    el(
      "dl",
      {},
      facts.flatMap(([k, v]) => [el("dt", {}, k), el("dd", {}, String(v))]),
    ),
  );
}

function drawPlans() {
  const box = $("time"),
    narrow = box.clientWidth < 560,
    width = box.clientWidth - (narrow ? 18 : 30),
    right = width - 64,
    lane = 44,
    height = lane * data.trials.length + 4;
  const canvas = svg("svg", { width, height, viewBox: `0 0 ${width} ${height}` });
  const asIs = data.trials[0].metric ?? 0;
  data.trials.forEach((trial, i) => {
    const y = i * lane + 18,
      share = trial.metric ?? 0,
      text = isRunning(trial) ? stateOf(trial) : metric(trial.metric);
    const link = cardLink(svg, planId(trial), { "aria-label": `the card of ${planName(trial)}: ${text}` });
    link.append(
      svg("rect", { x: 0, y: y - 18, width, height: lane, fill: "transparent" }), // easier to hit
      label(0, y - 4, `${planName(trial)}${i ? `, learning rate ${trial.rate}` : ""}`, trial.kept ? { class: "strong" } : {}),
      svg("rect", { x: 0.5, y, width: right, height: 14, rx: 3, fill: "none", stroke: "var(--line)", "stroke-dasharray": isRunning(trial) ? "4 3" : null }),
      isRunning(trial) ? "" : svg("rect", { x: 0, y, width: Math.max(1, right * share), height: 14, rx: 3, fill: trial.kept ? "var(--grown)" : "var(--twin)" }),
      line(right * asIs, y - 1, right * asIs, y + 15, { stroke: "var(--ink)", "stroke-dasharray": "3 2" }),
      label(right + 10, y + 11.5, isRunning(trial) ? "now" : text, trial.kept ? { class: "strong" } : {}),
    );
    canvas.append(link);
  });
  box.replaceChildren(canvas);
}
