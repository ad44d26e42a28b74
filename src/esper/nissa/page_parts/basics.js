"use strict";
// Draws the page from the data in it. Names are only ever set as text, never parsed as markup.
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
// the chosen theme, and the focus while the page reloads; a browser may refuse to store them
const remember = (key, value) => {
  try {
    localStorage.setItem(`esper-${key}`, value);
  } catch {}
};
const remembered = (key) => {
  try {
    return localStorage.getItem(`esper-${key}`);
  } catch {
    return null;
  }
};
const STAGES = {
  TRAINING: "in shadow training",
  BLENDING: "blending",
  HOLDING: "holding",
  FOSSILIZED: "committed",
};
const OPS = {
  GERMINATE: "Germinate",
  ADVANCE: "Advance",
  SET_ALPHA_TARGET: "Change weight",
  PRUNE: "Prune",
  FOSSILIZE: "Commit",
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
const metric = (v) =>
  v === null || v === undefined
    ? "–"
    : minus(isShare ? `${(100 * v).toFixed(1)}%` : String(+v.toPrecision(4)));
const signed = (v) =>
  minus((v >= 0 ? "+" : "") + (isShare ? (100 * v).toFixed(1) : String(+v.toPrecision(3))));
const plusMinus = (text) => text.replaceAll("+-", "±");
const gain = (v, e) =>
  signed(v) +
  (e === null || e === undefined ? "" : ` ± ${isShare ? (100 * e).toFixed(1) : +e.toPrecision(3)}`) +
  (isShare ? " points" : "");
const share = (part, whole) =>
  minus(`${part >= 0 ? "+" : ""}${Math.round((100 * part) / Math.max(1, whole))}%`);
const metricTitle = /valid|^val/i.test(data.metric.name)
  ? data.metric.name
  : `validation ${data.metric.name}`;
const capital = (text) => text[0].toUpperCase() + text.slice(1);
const seedName = (seed) => `${seed.blueprint} at ${seed.site}`;

// ---- elements
function fill(node, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) if (value !== null) node.setAttribute(key, value);
  node.append(...children.flat().filter((child) => child !== null && child !== undefined));
  return node;
}
const el = (tag, attributes = {}, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes = {}, ...children) =>
  fill(document.createElementNS("http://www.w3.org/2000/svg", tag), attributes, children);
const line = (x1, y1, x2, y2, attributes) => svg("line", { x1, y1, x2, y2, ...attributes });
const label = (x, y, text, attributes = {}) => svg("text", { x, y, ...attributes }, String(text));

/** A link to a card, of HTML or SVG by `make`; a folded card is opened first. */
function cardLink(make, id, attributes, ...children) {
  const link = make("a", { href: `#${id}`, ...attributes }, ...children);
  link.addEventListener?.("click", () => {
    const fold = document.getElementById(id)?.closest("details");
    if (fold) fold.open = true;
  });
  return link;
}

/** The sign of an operation, drawn around (0, 0): the same on the curve, in the table and the legend. */
function sign(op) {
  const ring = { fill: "var(--card)", stroke: "var(--grown)", "stroke-width": 2 };
  switch (op) {
    case "GERMINATE":
      return svg("path", { d: "M0 -6.5 L6 4.5 H-6 Z", ...ring, "stroke-linejoin": "round" });
    case "FOSSILIZE":
      return svg("circle", { r: 5.5, fill: "var(--grown)", stroke: "var(--card)", "stroke-width": 1.5 });
    case "PRUNE":
      return svg("path", {
        d: "M-4.5 -4.5 L4.5 4.5 M4.5 -4.5 L-4.5 4.5",
        stroke: "var(--danger)",
        "stroke-width": 2.5,
        "stroke-linecap": "round",
      });
    default:
      return svg("path", { d: "M0 -5 L5 0 L0 5 L-5 0 Z", ...ring, stroke: "var(--BLENDING)" });
  }
}
const boxedSign = (op) =>
  el("span", { class: "mark" }, svg("svg", { width: 16, height: 16, viewBox: "-8 -8 16 16" }, sign(op)));
