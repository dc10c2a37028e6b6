// A metric of every layer over the steps.
// The cells are one picture, a pixel each, that is stretched over the axes.
function heatmapOption(chart) {
  const map = chart.spec.heatmap;
  const option = baseOption(chart);
  const first = map.first - map.width / 2, end = map.first + map.width * (map.columns - 0.5);
  const picture = cellPicture(map);
  const values = floats(map.values);
  return {
    ...option,
    grid: { ...option.grid, bottom: 30 },
    yAxis: {
      type: "category", inverse: true, data: map.layers.map((layer) => `layer ${layer}`), ...axisStyle(), splitLine: { show: false }, axisLine: { show: false },
    },
    visualMap: {
      min: map.low, max: map.high === map.low ? map.low + 1 : map.high, calculable: false, orient: "horizontal", left: "center", bottom: 0, itemWidth: 10, itemHeight: 110, dimension: 2,
      seriesIndex: [1], inRange: { color: [color("low"), color("high")] }, show: map.high > map.low, text: [digits(map.high, 4), digits(map.low, 4)], textStyle: { color: color("soft"), fontSize: 11 },
    },
    series: [
      {
        type: "custom", clip: true, data: [[first, 0]], encode: { x: 0, y: 1 }, silent: true,
        renderItem: (_, api) => {
          const [left, top] = api.coord([first, 0]), [right, bottom] = api.coord([end, map.layers.length - 1]);
          const half = map.layers.length > 1 ? (bottom - top) / (map.layers.length - 1) / 2 : api.size([0, 1])[1] / 2;
          return { type: "image", style: { image: picture, x: left, y: top - half, width: right - left, height: bottom - top + 2 * half } };
        },
      },
      { type: "scatter", data: Array.from({ length: map.columns }, (_, i) => [map.first + i * map.width, 0, values[i]]), symbolSize: 0, silent: true },
    ],
    tooltip: { ...option.tooltip, axisPointer: { type: "cross", snap: false, label: { show: false }, crossStyle: { color: color("soft") } }, formatter: () => heatmapTip(chart) },
  };
}

function cellPicture(map) {
  const canvas = document.createElement("canvas");
  // Many pixels a cell, so that a browser that smooths pictures leaves sharp cells.
  const wide = Math.ceil(1600 / map.columns), tall = Math.ceil(800 / map.layers.length);
  canvas.width = map.columns * wide;
  canvas.height = map.layers.length * tall;
  const context = canvas.getContext("2d");
  const values = floats(map.values);
  const low = rgb(color("low")), high = rgb(color("high"));
  map.layers.forEach((_, row) => {
    for (let column = 0; column < map.columns; column++) {
      const value = values[row * map.columns + column];
      if (!Number.isFinite(value)) continue;
      const share = map.high > map.low ? (value - map.low) / (map.high - map.low) : 0;
      context.fillStyle = `rgb(${low.map((part, i) => Math.round(part + share * (high[i] - part))).join(",")})`;
      context.fillRect(column * wide, row * tall, wide, tall);
    }
  });
  return canvas;
}

function rgb(hex) {
  return [1, 3, 5].map((at) => parseInt(hex.slice(at, at + 2), 16));
}

function heatmapTip(chart) {
  const map = chart.spec.heatmap;
  const at = chart.pointer && chart.view.convertFromPixel({ gridIndex: 0 }, chart.pointer);
  if (!at) return "";
  const column = Math.min(map.columns - 1, Math.max(0, Math.round((at[0] - map.first) / map.width)));
  const row = Math.min(map.layers.length - 1, Math.max(0, Math.round(at[1])));
  chart.cell = [row, column];
  return make("div", { class: "tip" }, cellText(map, row, column));
}

function cellText(map, row, column) {
  const step = map.first + column * map.width;
  const steps = map.width > 1 ? `steps ${step} to ${step + map.width - 1}` : `step ${step}`;
  const value = floats(map.values)[row * map.columns + column];
  return `layer ${map.layers[row]}, ${steps}: ${Number.isFinite(value) ? digits(value, 5) : "not measured"}`;
}
