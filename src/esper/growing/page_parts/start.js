document.documentElement.dataset.theme = remembered() ?? "";
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
if (!data.after && data.steps.length) setTimeout(() => location.reload(), 5000); // the run is not over
