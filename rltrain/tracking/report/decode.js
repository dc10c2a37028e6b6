// The page's data: series of float32 in base64, decoded when they are first drawn.
const PAGE = JSON.parse(document.getElementById("page-data").textContent);
const decoded = new Map();

function bytesOf(text) {
  const binary = atob(text);
  const bytes = new Uint8Array(binary.length);
  for (let i = 0; i < binary.length; i++) bytes[i] = binary.charCodeAt(i);
  return new DataView(bytes.buffer);
}

function stepsOf([first, text]) {
  if (first === null) return floats(text);
  const view = bytesOf(text);
  const steps = new Float64Array(view.byteLength / 2 + 1).fill(first);
  for (let i = 1; i < steps.length; i++) steps[i] = steps[i - 1] + view.getUint16(2 * (i - 1), true);
  return steps;
}

function floats(text) {
  const view = bytesOf(text);
  const values = new Float64Array(view.byteLength / 4);
  for (let i = 0; i < values.length; i++) values[i] = view.getFloat32(4 * i, true);
  return values;
}

// {steps, values, logged}: values are NaN where they were not finite; logged counts before thinning.
function seriesOf(key) {
  if (!decoded.has(key)) {
    const [steps, values, logged] = PAGE.series[key];
    if (!decoded.has(steps)) decoded.set(steps, stepsOf(PAGE.steps[steps]));
    decoded.set(key, { steps: decoded.get(steps), values: floats(values), logged });
  }
  return decoded.get(key);
}

// The index of the last step that is at or before `step`; -1 where all come after it.
function indexBefore(steps, step) {
  let low = 0, high = steps.length;
  while (low < high) {
    const middle = (low + high) >> 1;
    if (steps[middle] <= step) low = middle + 1; else high = middle;
  }
  return low - 1;
}

function nearest(steps, step) {
  const before = indexBefore(steps, step);
  if (before < 0) return 0;
  if (before + 1 < steps.length && steps[before + 1] - step < step - steps[before]) return before + 1;
  return before;
}

function digits(value, count) {
  const magnitude = Math.abs(value);
  if (value === 0) return "0";
  if (magnitude < 1e-3 || magnitude >= 1e7) return value.toExponential(Math.max(0, count - 2)).replace(/\.?0*e\+?/, "e");
  return Number(value.toPrecision(count)).toLocaleString("en-US", { maximumFractionDigits: 8 });
}

const UNITS = {
  number: (value, count) => digits(value, count),
  share: (value, count) => `${digits(100 * value, count)} %`,
  seconds: (value, count) => `${digits(value, count)} s`,
  GiB: (value, count) => `${digits(value, count)} GiB`,
  tokens: (value, count) => digits(value, count),
};

function format(value, unit, count = 4) {
  return Number.isFinite(value) ? UNITS[unit](value, count) : "not finite";
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

// An element with text and children. Text is never parsed as HTML.
function make(tag, attributes = {}, ...children) {
  const element = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function announce(text) {
  document.getElementById("announcement").textContent = text;
}
