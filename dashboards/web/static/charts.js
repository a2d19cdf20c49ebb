"use strict";
/* Draws every figure of the page with Plotly, in the colours of the reader's scheme, and again when that changes. */
(() => {
  const config = { displayModeBar: false, responsive: true, doubleClick: false, showTips: false };
  const dark = window.matchMedia("(prefers-color-scheme: dark)");

  /* A copy of `node` in which each "var(--name)" is that custom property's value. */
  function coloured(node, style) {
    if (typeof node === "string") {
      const name = /^var\((--[a-z-]+)\)$/.exec(node);
      return name ? style.getPropertyValue(name[1]).trim() : node;
    }
    if (Array.isArray(node)) return node.map((each) => coloured(each, style));
    if (node && typeof node === "object") {
      return Object.fromEntries(Object.entries(node).map(([key, value]) => [key, coloured(value, style)]));
    }
    return node;
  }

  function draw() {
    const style = getComputedStyle(document.documentElement);
    for (const plot of document.querySelectorAll("[data-figure]")) {
      const figure = JSON.parse(document.getElementById(plot.dataset.figure).textContent);
      Plotly.react(plot, coloured(figure.data, style), coloured(figure.layout, style), config);
    }
  }

  draw();
  dark.addEventListener("change", draw);
})();
