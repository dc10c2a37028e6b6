// Zoom by dragging, by the wheel and by keys, and a crosshair, shared by the charts of a section.
function zoomView(chart, range) {
  const [startValue, endValue] = range;
  chart.applying = true;
  chart.view.dispatchAction({ type: "dataZoom", dataZoomIndex: 0, startValue, endValue });
  chart.applying = false;
}

function fullRange(chart) {
  const { min, max } = chart.view.getOption().xAxis[0];
  return [min, max];
}

function setRange(chart, range) {
  const group = groupOf(chart.id);
  group.range = range;
  for (const id of group.ids) {
    const other = drawn.get(id);
    if (other) zoomView(other, range ?? fullRange(other));
  }
  const bar = chart.element.closest("section")?.querySelector(".reset-zoom");
  if (bar) bar.hidden = ![...groups.values()].some((one) => one.range && one.ids.some((id) => bar.closest("section").contains(document.getElementById(id))));
}

function resetSection(section) {
  for (const group of groups.values()) {
    const first = group.ids.map((id) => drawn.get(id)).find((chart) => chart && section.contains(chart.element));
    if (first) setRange(first, null);
  }
}

function addZoom(chart) {
  const { element, view } = chart;
  chart.crosshair = make("div", { class: "crosshair" });
  chart.brush = make("div", { class: "brush" });
  element.append(chart.crosshair, chart.brush);
  view.on("datazoom", () => {
    if (chart.applying) return;
    const { startValue, endValue } = view.getOption().dataZoom[0];
    setRange(chart, [startValue, endValue]);
  });
  element.addEventListener("mousemove", (event) => showCrosshairs(chart, place(chart, event)), true);
  element.addEventListener("mouseleave", () => showCrosshairs(chart, null));
  element.addEventListener("dblclick", () => setRange(chart, null));
  element.addEventListener("keydown", (event) => onKey(chart, event));
  element.addEventListener("blur", () => view.dispatchAction({ type: "hideTip" }));
  addBrush(chart);
}

function place(chart, event) {
  const box = chart.element.getBoundingClientRect();
  chart.pointer = [event.clientX - box.left, event.clientY - box.top];
  return chart.pointer;
}

function stepAt(chart, pixel) {
  return chart.view.convertFromPixel({ xAxisIndex: 0 }, pixel);
}

function showCrosshairs(chart, pixel) {
  const step = pixel && stepAt(chart, pixel[0]);
  for (const id of groupOf(chart.id).ids) {
    const other = drawn.get(id);
    if (!other || other === chart) continue;
    const left = step === null || step === undefined ? NaN : other.view.convertToPixel({ xAxisIndex: 0 }, step);
    other.crosshair.style.display = left >= 0 && left <= other.element.clientWidth ? "block" : "none";
    other.crosshair.style.left = `${left}px`;
  }
}

function addBrush(chart) {
  let start = null;
  chart.element.addEventListener("pointerdown", (event) => {
    if (event.pointerType !== "mouse" || event.button !== 0 || event.shiftKey) return;
    start = place(chart, event)[0];
  });
  window.addEventListener("pointermove", (event) => {
    if (start === null) return;
    const now = place(chart, event)[0];
    chart.brush.style.display = Math.abs(now - start) > 4 ? "block" : "none";
    chart.brush.style.left = `${Math.min(start, now)}px`;
    chart.brush.style.width = `${Math.abs(now - start)}px`;
  });
  window.addEventListener("pointerup", (event) => {
    if (start === null) return;
    const ends = [start, place(chart, event)[0]].sort((a, b) => a - b);
    start = null;
    chart.brush.style.display = "none";
    if (ends[1] - ends[0] > 4) setRange(chart, ends.map((pixel) => stepAt(chart, pixel)));
  });
}

function onKey(chart, event) {
  const current = groupOf(chart.id).range ?? fullRange(chart);
  const middle = chart.step !== null && chart.step >= current[0] && chart.step <= current[1] ? chart.step : (current[0] + current[1]) / 2;
  const around = (factor) => [middle - (middle - current[0]) * factor, middle + (current[1] - middle) * factor];
  const actions = {
    ArrowLeft: () => move(chart, 0, -1),
    ArrowRight: () => move(chart, 0, 1),
    ...(chart.spec.kind === "heatmap" ? { ArrowUp: () => move(chart, -1, 0), ArrowDown: () => move(chart, 1, 0) } : {}),
    "+": () => setRange(chart, around(0.5)),
    "=": () => setRange(chart, around(0.5)),
    "-": () => setRange(chart, clamp(around(2), fullRange(chart))),
    0: () => setRange(chart, null),
    Escape: () => setRange(chart, null),
  };
  if (!actions[event.key] || event.ctrlKey || event.metaKey || event.altKey) return;
  event.preventDefault();
  actions[event.key]();
}

function clamp(range, full) {
  return [Math.max(range[0], full[0]), Math.min(range[1], full[1])];
}

function move(chart, rows, columns) {
  if (chart.spec.kind === "heatmap") moveCell(chart, rows, columns); else moveStep(chart, columns);
}

function moveCell(chart, rows, columns) {
  const map = chart.spec.heatmap;
  const [row, column] = chart.cell ?? [0, -columns];
  chart.cell = [Math.min(map.layers.length - 1, Math.max(0, row + rows)), Math.min(map.columns - 1, Math.max(0, column + columns))];
  const [x, y] = chart.view.convertToPixel({ gridIndex: 0 }, [map.first + chart.cell[1] * map.width, chart.cell[0]]);
  chart.pointer = [x, y];
  chart.view.dispatchAction({ type: "showTip", x, y });
  announce(cellText(map, ...chart.cell));
}

// Moves the tooltip to the next or the previous step of the line with the most points.
function moveStep(chart, by) {
  const lines = chart.spec.lines.map((line) => seriesOf(line.key).steps);
  const steps = lines.reduce((most, one) => (one.length > most.length ? one : most));
  const index = chart.step === null ? (by > 0 ? 0 : steps.length - 1) : Math.min(steps.length - 1, Math.max(0, nearest(steps, chart.step) + by));
  const step = steps[index];
  const x = chart.view.convertToPixel({ xAxisIndex: 0 }, step);
  chart.view.dispatchAction({ type: "showTip", x, y: chart.element.clientHeight / 2 });
  chart.step = step;
  const said = valuesAt(chart, step).map(({ line, value }) => `${line.label} ${format(value, chart.spec.unit)}`);
  announce(`${chart.spec.x} ${step}: ${said.join(", ")}`);
}
