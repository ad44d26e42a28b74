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
