// Starts the page: charts when they come into view, switches, search, the table's charts, print.
function startLogSwitches() {
  for (const button of document.querySelectorAll(".log-switch")) {
    button.addEventListener("click", () => {
      const chart = draw(button.closest("figure").querySelector(".chart").id);
      chart.log = !chart.log;
      button.setAttribute("aria-pressed", `${chart.log}`);
      draw(chart.id);
    });
  }
}

function startResets() {
  for (const button of document.querySelectorAll(".reset-zoom")) button.addEventListener("click", () => resetSection(button.closest("section")));
}

function startSearch() {
  const input = document.getElementById("metric-search");
  if (!input) return;
  const rows = [...document.querySelectorAll("#metric-table tr.metric")];
  const show = () => {
    const words = input.value.toLowerCase().split(/\s+/).filter(Boolean);
    for (const row of rows) {
      const text = row.textContent.toLowerCase();
      row.hidden = !words.every((word) => text.includes(word));
    }
    for (const chart of document.querySelectorAll("#metric-table tr.metric-chart")) chart.hidden = chart.previousElementSibling.hidden;
    for (const body of document.querySelectorAll("#metric-table tbody")) body.hidden = ![...body.querySelectorAll("tr.metric")].some((row) => !row.hidden);
    document.getElementById("metric-count").textContent = `${rows.filter((row) => !row.hidden).length} of ${rows.length} metrics`;
  };
  input.addEventListener("input", show);
  show();
}

// A click on a metric's name draws it below its row, and a second one takes the chart away.
function startMetricCharts() {
  for (const button of document.querySelectorAll(".metric-name")) {
    button.addEventListener("click", () => {
      const row = button.closest("tr");
      const open = row.nextElementSibling?.classList.contains("metric-chart");
      button.setAttribute("aria-expanded", `${!open}`);
      if (open) closeMetricChart(row.nextElementSibling); else openMetricChart(row, button.dataset.metric);
    });
  }
}

function openMetricChart(row, name) {
  const id = `metric ${name}`;
  const lines = PAGE.metric_lines?.[name] ?? [{ key: name, label: name, color: 0, style: "line", spikes: [] }];
  PAGE.charts[id] = { kind: "lines", title: name, lines, unit: "number", log: "off", bounds: null, group: id, x: "step", heatmap: null };
  const chart = make("div", { class: "chart", id, tabindex: "0", role: "img", "aria-label": name });
  const drawnSeries = lines.map((line) => seriesOf(line.key));
  const thinned = drawnSeries.some(({ steps, logged }) => steps.length < logged);
  const caption = thinned ? make("p", { class: "caption" }, "A part of the values: the lowest and the highest of each interval of steps.") : "";
  const figure = make("figure", {}, chart, make("ul", { class: "legend" }), caption);
  const cell = make("td", { colspan: `${row.children.length}` }, figure);
  row.after(make("tr", { class: "metric-chart" }, cell));
  const group = groupOf(id);
  group.ids = [id];
  group.extent = [Math.min(...drawnSeries.map(({ steps }) => steps[0])), Math.max(...drawnSeries.map(({ steps }) => steps[steps.length - 1]))];
  addLegend(id);
  draw(id);
}

function closeMetricChart(row) {
  const id = row.querySelector(".chart").id;
  drawn.get(id).view.dispose();
  drawn.delete(id);
  row.remove();
}

function startCharts() {
  placeInGroups();
  for (const element of document.querySelectorAll(".chart")) addLegend(element.id);
  const seen = new IntersectionObserver((entries) => {
    for (const entry of entries.filter((one) => one.isIntersecting)) {
      seen.unobserve(entry.target);
      draw(entry.target.id);
    }
  }, { rootMargin: "300px" });
  for (const element of document.querySelectorAll(".chart")) seen.observe(element);
  let width = window.innerWidth;
  window.addEventListener("resize", () => {
    if (window.innerWidth === width) return;
    width = window.innerWidth;
    for (const chart of drawn.values()) chart.view.resize();
  });
}

function redraw() {
  for (const id of drawn.keys()) draw(id);
}

// Print shows pictures of all charts, in the light colours of the print style. They have a size of
// their own: in print layout a chart has none.
const PRINT_WIDTH = { wide: 880, normal: 430 };
let printing = false;
function preparePrint() {
  if (printing) return;
  printing = true;
  document.documentElement.classList.add("printing");
  for (const element of document.querySelectorAll(".chart")) {
    const height = { heatmap: parseInt(element.style.height, 10), stack: 260, lines: 220 }[PAGE.charts[element.id].kind];
    const width = element.closest("figure").classList.contains("wide") ? PRINT_WIDTH.wide : PRINT_WIDTH.normal;
    const chart = draw(element.id, { width, height });
    const picture = chart.view.getDataURL({ pixelRatio: 2, backgroundColor: "#ffffff" });
    element.append(make("img", { class: "print-image", alt: element.getAttribute("aria-label"), src: picture }));
  }
}

function endPrint() {
  if (!printing) return;
  printing = false;
  document.documentElement.classList.remove("printing");
  for (const picture of document.querySelectorAll(".print-image")) picture.remove();
  for (const chart of drawn.values()) chart.view.resize({ width: "auto", height: "auto" });
  redraw();
}

startCharts();
startLogSwitches();
startResets();
startSearch();
startMetricCharts();
startSamples();
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", redraw);
matchMedia("print").addEventListener("change", (event) => (event.matches ? preparePrint() : endPrint()));
window.addEventListener("beforeprint", preparePrint);
window.addEventListener("afterprint", endPrint);
performance.mark("page-ready");
document.documentElement.dataset.ready = "true";
