// ---- the network
function drawNetworks() {
  const after = data.after ?? { params: lastStep("params"), macs: lastStep("macs") };
  const isGrown = !data.verdict || data.verdict.returned === "grown";
  const stays = data.seeds.filter((s) => s.fate === "kept" || s.fate === null);
  const now = data.after ? "After" : "Now";
  $("network").replaceChildren(
    networkFigure("Before", data.before, []),
    networkFigure(isGrown ? now : `${now}, not returned`, after, stays),
  );
}

function networkFigure(title, cost, seeds) {
  return el(
    "figure",
    {},
    el(
      "figcaption",
      {},
      el("strong", {}, title),
      el("span", {}, `${short(cost.params)} parameters, ${short(cost.macs)} multiply-adds`),
    ),
    networkDiagram(seeds),
  );
}

/** The blocks from top to bottom; a seed branches off after its site and joins again. */
function networkDiagram(seeds) {
  const width = 420,
    box = 230,
    middle = box / 2;
  let y = 16;
  const canvas = svg("svg", {
    width: "100%",
    role: "img",
    "aria-label": `the network, with ${seeds.length} seeds`,
  });
  canvas.append(label(middle, y - 4, "input", { "text-anchor": "middle" }));
  for (const row of collapsed()) {
    canvas.append(line(middle, y, middle, y + 16, { stroke: "var(--faint)" }));
    y += 16;
    if (typeof row === "number") {
      canvas.append(label(middle, y + 13, `${row} more`, { "text-anchor": "middle" }));
      y += 20;
      continue;
    }
    canvas.append(
      svg("rect", {
        x: 0.5,
        y,
        width: box - 1,
        height: 40,
        rx: 8,
        fill: "var(--paper)",
        stroke: "var(--line)",
      }),
      label(12, y + 17, ending(row.name || "the model", 28), { class: "strong" }),
      label(12, y + 32, `${clipped(row.kind, 18)}  ${row.shape.join(" × ")}`),
    );
    y += 40;
    for (const seed of seeds.filter((s) => place(s) === row.name))
      y = drawBranch(canvas, seed, y, middle, box, width);
  }
  canvas.append(
    line(middle, y, middle, y + 16, { stroke: "var(--faint)" }),
    label(middle, y + 30, "output", { "text-anchor": "middle" }),
  );
  canvas.setAttribute("viewBox", `0 0 ${width} ${y + 36}`);
  return canvas;
}

function drawBranch(canvas, seed, y, middle, box, width) {
  const bottom = y + 66,
    right = box + 16,
    side = (right + width) / 2;
  canvas.append(
    line(middle, y, middle, bottom, { stroke: "var(--faint)" }),
    svg("path", {
      d: `M${middle} ${y + 8}H${side}V${y + 16}M${side} ${y + 48}V${y + 56}H${middle}`,
      fill: "none",
      stroke: "var(--grown)",
      "stroke-width": 2,
    }),
    svg("rect", { x: right, y: y + 14, width: width - right - 1, height: 34, rx: 8, fill: "var(--grown)" }),
    label(side, y + 28, clipped(seed.blueprint, 24), {
      "text-anchor": "middle",
      style: "fill:var(--card);font-weight:600",
    }),
    label(side, y + 42, `+${short(seed.params)} parameters`, {
      "text-anchor": "middle",
      style: "fill:var(--card);font-size:11px",
    }),
    svg("circle", {
      cx: middle,
      cy: y + 56,
      r: 9,
      fill: "var(--card)",
      stroke: "var(--grown)",
      "stroke-width": 2,
    }),
    label(middle, y + 60.5, BLENDS[seed.style] ?? "+", { "text-anchor": "middle", class: "strong" }),
  );
  return bottom;
}

/** The block of a seed: its site, or the first layer of its pair. */
const place = (seed) => seed.site.split("->")[0];

/** The blocks to draw; in a large network, runs of blocks without a seed become a count. */
function collapsed() {
  const sites = new Set(data.seeds.map(place)),
    blocks = data.before.blocks;
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
const clipped = (text, size) => (text.length <= size ? text : `${text.slice(0, size - 1)}…`);
// of a path, the end tells most
const ending = (text, size) => (text.length <= size ? text : `…${text.slice(1 - size)}`);
