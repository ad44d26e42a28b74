document.documentElement.dataset.theme = remembered("theme") ?? "";
const isAdaptation = data.trials.length > 0;
drawHead();
if (isAdaptation) drawAdaptation();
else {
  drawTiles();
  drawLegend();
  drawSeeds();
  drawNetworks();
  drawDecisions();
}
drawFacts();
let drawnWidth = 0;
new ResizeObserver(() => {
  const width = $("time").clientWidth;
  if (width > 100 && width !== drawnWidth) isAdaptation ? drawPlans() : drawTime();
  if (!drawnWidth && remembered("focus")) document.querySelector(remembered("focus"))?.focus({ preventScroll: true });
  if (!drawnWidth) remember("focus", "");
  drawnWidth = width;
}).observe($("time"));

/** Load the page of a run that is not over again; what has the focus keeps it. */
function reload() {
  const node = document.activeElement,
    href = node.getAttribute("href");
  remember("focus", href ? `a[href=${JSON.stringify(href)}]` : node.id ? `#${node.id}` : "");
  location.reload();
}
if (!data.after && (data.steps.length || isAdaptation)) setTimeout(reload, 5000);
