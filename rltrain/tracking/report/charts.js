// Draws the charts of the page with ECharts, each when it first comes into view.
const drawn = new Map(); // id of a chart -> {spec, view, log, hidden, figure, element}
const FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "DejaVu Sans", sans-serif';
const FEW_POINTS = 60;
const groups = new Map(); // name of a section and its axis -> {range, extent, ids}

function lineColor(line) {
  return line.style === "expected" ? color("expected") : color(`c${line.color % 12}`);
}

function groupOf(id) {
  const spec = PAGE.charts[id];
  const element = document.getElementById(id);
  const name = `${element.closest("section")?.id} ${spec.group}`;
  if (!groups.has(name)) groups.set(name, { range: null, extent: [Infinity, -Infinity], ids: [] });
  return groups.get(name);
}

// Charts that are zoomed together have the same horizontal axis.
function placeInGroups() {
  for (const [id, spec] of Object.entries(PAGE.charts)) {
    if (!document.getElementById(id)) continue;
    const group = groupOf(id);
    group.ids.push(id);
    const ends = spec.lines
      .filter((line) => line.style !== "expected")
      .map((line) => seriesOf(line.key).steps)
      .flatMap((steps) => [steps[0], steps[steps.length - 1]]);
    if (spec.heatmap) ends.push(spec.heatmap.first, spec.heatmap.first + spec.heatmap.width * (spec.heatmap.columns - 1));
    group.extent = [Math.min(group.extent[0], ...ends), Math.max(group.extent[1], ...ends)];
  }
}

function axisStyle() {
  return {
    axisLine: { onZero: false, lineStyle: { color: color("rule") } },
    axisTick: { show: false },
    axisLabel: { color: color("soft"), fontSize: 11, fontFamily: FONT, hideOverlap: true },
    splitLine: { lineStyle: { color: color("rule") } },
    nameTextStyle: { color: color("soft"), fontSize: 11, fontFamily: FONT },
  };
}

function baseOption(chart) {
  const group = groupOf(chart.spec.id ?? chart.element.id);
  const [low, high] = group.extent;
  const pad = chart.spec.kind === "stack" ? barWidth(chart.spec) / 2 : low === high ? 1 : 0;
  return {
    animation: false,
    textStyle: { fontFamily: FONT },
    grid: { left: 16, right: 16, top: 14, bottom: 4, containLabel: true },
    xAxis: {
      type: "value", min: low - pad, max: high + pad, minInterval: 1, ...axisStyle(),
      splitLine: { show: false },
      name: chart.spec.x, nameLocation: "start", nameGap: 6, nameTextStyle: { ...axisStyle().nameTextStyle, align: "right", verticalAlign: "top", padding: [7, 4, 0, 0] },
      axisLabel: { ...axisStyle().axisLabel, formatter: (x) => (Number.isInteger(x) ? `${x}` : ""), showMinLabel: pad === 0, showMaxLabel: pad === 0 },
      axisPointer: { lineStyle: { color: color("soft") }, label: { show: false } },
    },
    dataZoom: [{ type: "inside", xAxisIndex: 0, filterMode: isDense(chart.spec) ? "filter" : "none", zoomOnMouseWheel: "ctrl", moveOnMouseMove: "shift", moveOnMouseWheel: false, preventDefaultMouseMove: false }],
    legend: { show: false },
    tooltip: {
      trigger: "axis", confine: true, backgroundColor: color("card"), borderColor: color("rule"), padding: [7, 11],
      axisPointer: { type: "line", snap: true },
      formatter: (points) => tip(chart, points[0]?.axisValue),
    },
  };
}

// With many points the vertical axis follows the zoom. With few, a line would lose its ends.
function isDense(spec) {
  return spec.kind === "lines" && spec.lines.every((line) => seriesOf(line.key).steps.length > FEW_POINTS);
}

function barWidth(spec) {
  const steps = seriesOf(spec.lines[0].key).steps;
  let width = Infinity;
  for (let i = 1; i < steps.length; i++) width = Math.min(width, steps[i] - steps[i - 1]);
  return Number.isFinite(width) ? width : 1;
}

function points(line, log) {
  const { steps, values } = seriesOf(line.key);
  return Array.from(steps, (step, i) => [step, Number.isFinite(values[i]) && (!log || values[i] > 0) ? values[i] : null]);
}

function lineSeries(chart) {
  const { spec, log } = chart;
  const drawnLines = spec.lines.map((line) => {
    const data = points(line, log);
    const marked = line.style === "points" || data.length <= 2;
    return {
      name: line.key, type: "line", data, sampling: "lttb", symbol: "circle", symbolSize: marked ? 6 : 5,
      showSymbol: data.length <= FEW_POINTS && (marked || data.length <= FEW_POINTS / 2) && line.style !== "expected",
      connectNulls: false, color: lineColor(line), z: line.style === "expected" ? 1 : line.style === "faint" ? 2 : 3,
      lineStyle: { width: line.style === "faint" ? 1.2 : line.style === "expected" ? 1.4 : 2, opacity: line.style === "faint" ? 0.4 : 1, type: line.style === "expected" ? "dashed" : "solid" },
      emphasis: { disabled: true },
      ...(line === spec.lines[0] ? { markLine: resumedMarks() } : {}),
    };
  });
  const spikes = spec.lines.filter((line) => line.spikes.length).map((line) => ({
    name: line.key, type: "scatter", symbol: "triangle", symbolSize: 10, symbolRotate: 180, symbolOffset: [0, -9], z: 5, data: line.spikes,
    itemStyle: { color: color("bad"), borderColor: color("card"), borderWidth: 1 }, tooltip: { show: false },
  }));
  return [...drawnLines, ...spikes];
}

function resumedMarks() {
  return {
    silent: true, symbol: "none", animation: false,
    lineStyle: { color: color("soft"), type: "dotted" },
    label: { formatter: "resumed", color: color("soft"), fontSize: 10 },
    data: (PAGE.resumed ?? []).map((step) => ({ xAxis: step })),
  };
}

// Limits of a linear axis: those of the chart; a share that reaches 1 ends there.
function limits(chart) {
  if (chart.log) return {};
  const { bounds, unit } = chart.spec;
  if (bounds) return { min: bounds[0], max: bounds[1], interval: (bounds[1] - bounds[0]) / 4 };
  return unit === "share" ? { max: (value) => (value.max <= 1 && value.max > 0.99 ? 1 : null) } : {};
}

function linesOption(chart) {
  const { spec, log } = chart;
  const option = baseOption(chart);
  return {
    ...option,
    yAxis: {
      type: log ? "log" : "value", scale: true, ...limits(chart), ...axisStyle(), splitNumber: 4,
      axisLine: { show: false },
      axisLabel: { ...axisStyle().axisLabel, formatter: (value) => format(value, spec.unit, 3) },
    },
    series: lineSeries(chart),
  };
}

function stackOption(chart) {
  const { spec } = chart;
  const width = barWidth(spec);
  const option = baseOption(chart);
  return {
    ...option,
    yAxis: { type: "value", ...axisStyle(), splitNumber: 4, axisLine: { show: false }, axisLabel: { ...axisStyle().axisLabel, formatter: (value) => format(value, spec.unit, 3) } },
    series: spec.lines.map((line) => ({
      name: line.key, type: "custom", color: lineColor(line), clip: true, data: stackedData(chart, line), encode: { x: 0, y: [1, 2] },
      renderItem: (_, api) => bar(api, width, lineColor(line)),
    })),
  };
}

// [step, from, to] of one phase, above the visible phases before it.
function stackedData(chart, line) {
  const { steps, values } = seriesOf(line.key);
  const below = chart.spec.lines.slice(0, chart.spec.lines.indexOf(line)).filter((other) => !chart.hidden.has(other.key));
  return Array.from(steps, (step, i) => {
    const base = below.reduce((sum, other) => sum + seriesOf(other.key).values[i], 0);
    return [step, base, base + values[i]];
  });
}

function bar(api, width, fill) {
  const [left, top] = api.coord([api.value(0) - width / 2, api.value(2)]);
  const [right, bottom] = api.coord([api.value(0) + width / 2, api.value(1)]);
  const gap = Math.min(2, 0.2 * (right - left));
  return { type: "rect", shape: { x: left + gap / 2, y: top, width: right - left - gap, height: bottom - top }, style: { fill } };
}

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

function optionOf(chart) {
  return { lines: linesOption, stack: stackOption, heatmap: heatmapOption }[chart.spec.kind](chart);
}

// Draws a chart, or draws it again in the colours and state of now; `size` is that of a picture.
function draw(id, size) {
  const element = document.getElementById(id);
  const spec = PAGE.charts[id];
  if (!drawn.has(id)) {
    const view = echarts.init(element, null, { renderer: "canvas", ...size });
    const figure = element.closest("figure");
    const chart = { id, spec, view, element, figure, log: spec.log === "on", hidden: new Set(), step: null, pointer: null };
    drawn.set(id, chart);
    addZoom(chart);
  }
  const chart = drawn.get(id);
  if (size) chart.view.resize(size);
  chart.view.setOption(optionOf(chart), { notMerge: true });
  for (const key of chart.hidden) chart.view.dispatchAction({ type: "legendUnSelect", name: key });
  const { range } = groupOf(id);
  if (range) zoomView(chart, range);
  return chart;
}

// A legend is there before its chart is drawn, so that nothing moves when the chart comes into view.
function addLegend(id) {
  const spec = PAGE.charts[id];
  const figure = document.getElementById(id).closest("figure");
  for (const line of spec.kind === "heatmap" ? [] : legendLines(spec)) {
    const { values } = seriesOf(line.key);
    const swatch = make("i", { class: line.style === "expected" ? "swatch dashed" : `swatch c${line.color % 12} ${line.style}` });
    const button = make("button", { type: "button", "aria-pressed": "true", title: "show or hide" }, swatch, line.label);
    if (spec.kind === "lines" && line.style !== "expected" && line.style !== "faint") button.append(make("b", {}, format(values[values.length - 1], spec.unit)));
    button.addEventListener("click", () => toggle(draw(id), line, button));
    figure.querySelector(".legend").append(make("li", {}, button));
  }
}

// The seeds of an expected curve are one entry.
function legendLines(spec) {
  return spec.lines.filter((line, i) => line.style !== "expected" || spec.lines.findIndex((other) => other.label === line.label) === i);
}

function toggle(chart, line, button) {
  const shown = button.getAttribute("aria-pressed") === "false";
  button.setAttribute("aria-pressed", `${shown}`);
  for (const { key } of chart.spec.lines.filter((other) => other.label === line.label)) {
    if (shown) chart.hidden.delete(key); else chart.hidden.add(key);
  }
  draw(chart.id);
}

// The values of every line at a step: of that step, or the last before it.
function valuesAt(chart, step) {
  return chart.spec.lines.filter((line) => !chart.hidden.has(line.key)).flatMap((line) => {
    const { steps, values } = seriesOf(line.key);
    const index = indexBefore(steps, step);
    return index < 0 ? [] : [{ line, step: steps[index], value: values[index] }];
  });
}

function nearestStep(chart, step) {
  let best = null;
  for (const line of chart.spec.lines) {
    const { steps } = seriesOf(line.key);
    const candidate = steps[nearest(steps, step)];
    if (best === null || Math.abs(candidate - step) < Math.abs(best - step)) best = candidate;
  }
  return best;
}

function tip(chart, axisValue) {
  if (axisValue === undefined) return "";
  const step = nearestStep(chart, axisValue);
  chart.step = step;
  const rows = valuesAt(chart, step).map(({ line, step: measured, value }) => {
    const swatch = make("i", { class: "swatch" });
    swatch.style.background = lineColor(line);
    const late = measured === step ? "" : ` (${chart.spec.x} ${digits(measured, 6)})`;
    return make("tr", late ? { class: "stale" } : {}, make("td", {}, swatch, line.label), make("td", { class: "figure" }, `${format(value, chart.spec.unit, 5)}${late}`));
  });
  return make("div", { class: "tip" }, make("table", {}, make("caption", {}, `${chart.spec.x} ${digits(step, 7)}`), ...rows));
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
