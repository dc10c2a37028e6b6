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
