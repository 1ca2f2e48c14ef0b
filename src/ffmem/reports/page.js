// Draw every chart as SVG, whose colours the style sheet sets.
for (const place of document.querySelectorAll(".chart")) {
  const spec = JSON.parse(document.getElementById(place.id + "-spec").textContent);
  const names = spec.layer[0].encoding.color.scale.domain;
  const wide = Math.max(...names.map((name) => name.length)) > 17;
  spec.background = "transparent";
  spec.config = {
    font: "system-ui, sans-serif",
    view: { stroke: null },
    axis: { labelFontSize: 12, titleFontSize: 12, titleFontWeight: "normal" },
    legend: { labelFontSize: 12, columns: place.clientWidth < 420 && wide ? 1 : 2 },
    title: { fontSize: 13, anchor: "start" },
    autosize: { type: "fit-x", contains: "padding" },
  };
  vegaEmbed(place, spec, { mode: "vega-lite", renderer: "svg", actions: false })
    .then(() => { place.style.minHeight = "0"; })
    .catch((error) => { place.textContent = "This chart could not be drawn: " + error.message; });
}
