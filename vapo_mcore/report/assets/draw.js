// Draw elements, scales, axes and the tooltip. Text is inserted only as text nodes, so data cannot inject HTML.

const SVG = "http://www.w3.org/2000/svg";
const DASHES = ["", "6 4", "2 3", "9 3 2 3"];
const RUN_COLOURS = 6;
const MARGIN = { left: 52, right: 12, top: 8, bottom: 32 };
const HEIGHT = 208;

/** Create an HTML element with attributes and children; strings become text nodes. */
function el(name, attributes = {}, ...children) {
  return fill(document.createElement(name), attributes, children);
}

function svg(name, attributes = {}, ...children) {
  return fill(document.createElementNS(SVG, name), attributes, children);
}

function fill(element, attributes, children) {
  for (const [key, value] of Object.entries(attributes)) {
    if (key.startsWith("on")) element.addEventListener(key.slice(2), value);
    else if (value !== null && value !== undefined) element.setAttribute(key, value);
  }
  element.append(...children.filter((child) => child !== null && child !== undefined));
  return element;
}

/** Format a number with `digits` significant digits. */
function format(value, digits = 5) {
  if (value === null || value === undefined) return "undefined";
  const size = Math.abs(value);
  if (value === 0) return "0";
  if (size >= 1e6 || size < 1e-4)
    return value
      .toExponential(Math.min(digits, 4) - 1)
      .replace(/\.?0+e/, "e")
      .replace("e+", "e");
  const text = Number(value.toPrecision(digits));
  return Math.abs(text) >= 1e4 ? text.toLocaleString("en-US") : String(text);
}

function ticks(low, high, count) {
  const rough = (high - low) / count;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = power * [1, 2, 2.5, 5, 10].find((factor) => factor * power >= rough * 0.999);
  const found = [];
  for (let k = Math.ceil(low / step - 1e-9); k * step <= high + step * 1e-9; k++) found.push(Number((k * step).toPrecision(12)));
  return found;
}

function logTicks(low, high) {
  const decades = Math.log10(high / low);
  const factors = decades < 1.5 ? [1, 2, 5] : [1];
  const stride = Math.max(1, Math.ceil(decades / 5));
  const found = [];
  for (let power = Math.floor(Math.log10(low)); power <= Math.ceil(Math.log10(high)); power++) {
    if (power % stride) continue;
    for (const factor of factors) {
      const tick = Number((factor * 10 ** power).toPrecision(12));
      if (tick >= low * 0.999999 && tick <= high * 1.000001) found.push(tick);
    }
  }
  return found.length >= 2 ? found : [low, high];
}

/** Return the axis range for data from `low` to `high`, with a margin; a single number is centred. */
function domain(low, high, log) {
  if (log) {
    if (low === high) return [low / 2, high * 2];
    const room = (high / low) ** 0.04;
    return [low / room, high * room];
  }
  if (low === high) return low === 0 ? [-1, 1] : [low - Math.abs(low) * 0.1, high + Math.abs(high) * 0.1];
  const room = (high - low) * 0.05;
  const bottom = low >= 0 && low - room < 0 ? Math.max(0, low - room) : low - room;
  return [bottom, high <= 1 && high > 0.9 && low >= 0 ? Math.min(1.02, high + room) : high + room];
}

/** Create a chart's svg with axes, and its two scales. `labels`: x-axis labels instead of numbers, [[position, text], ...]. */
function frame(holder, xs, ys, { log = false, xLabel = "", labels = null, height = HEIGHT } = {}) {
  const width = Math.max(220, Math.floor(holder.clientWidth || 380));
  const root = svg("svg", { class: "plot", viewBox: `0 0 ${width} ${height}`, height, role: "img" });
  const right = width - MARGIN.right;
  const bottom = height - MARGIN.bottom;
  const x = (value) => MARGIN.left + ((value - xs[0]) / (xs[1] - xs[0] || 1)) * (right - MARGIN.left);
  const part = (value) => (log ? Math.log(value / ys[0]) / Math.log(ys[1] / ys[0]) : (value - ys[0]) / (ys[1] - ys[0]));
  const y = (value) => bottom - part(value) * (bottom - MARGIN.top);
  for (const tick of log ? logTicks(...ys) : ticks(ys[0], ys[1], 5)) {
    root.append(svg("line", { class: "gridline", x1: MARGIN.left, x2: right, y1: y(tick), y2: y(tick) }));
    root.append(svg("text", { class: "ytick", x: MARGIN.left - 6, y: y(tick) + 4, "text-anchor": "end" }, format(tick, 4)));
  }
  const whole =
    labels ??
    ticks(xs[0], xs[1], 6)
      .filter((tick) => Number.isInteger(tick))
      .map((tick) => [tick, format(tick)]);
  for (const [place, text] of whole) {
    const middle = Math.min(x(place), width - 3 - 3.2 * text.length); // keep the last label inside the chart
    root.append(svg("line", { class: "axis", x1: x(place), x2: x(place), y1: bottom, y2: bottom + 3 }));
    root.append(svg("text", { class: "xtick", "data-x": x(place), x: middle, y: bottom + 15, "text-anchor": "middle" }, text));
  }
  root.append(svg("line", { class: "axis", x1: MARGIN.left, x2: right, y1: bottom, y2: bottom }));
  root.append(svg("text", { x: (MARGIN.left + right) / 2, y: height - 3, "text-anchor": "middle" }, xLabel));
  return { root, x, y, left: MARGIN.left, right, top: MARGIN.top, bottom, width };
}

/** Return the svg path through the points, rounded to a tenth of a pixel; null breaks the line. */
function path(points) {
  let text = "";
  let pen = false;
  for (const point of points) {
    if (point === null) {
      pen = false;
      continue;
    }
    text += `${pen ? "L" : "M"}${point[0].toFixed(1)} ${point[1].toFixed(1)}`;
    pen = true;
  }
  return text;
}

/** Return the points without neighbours, which a line does not show. */
function lonely(points) {
  return points.filter((point, k) => point !== null && (points[k - 1] ?? null) === null && (points[k + 1] ?? null) === null);
}

/** Return the path of the band between lows and highs, one closed shape per stretch without gaps. */
function bandPath(lows, highs) {
  let text = "";
  let from = 0;
  const flush = (end) => {
    if (end - from > 1) text += path([...highs.slice(from, end), ...lows.slice(from, end).toReversed()]) + "Z";
  };
  for (let k = 0; k <= lows.length; k++) {
    if (k === lows.length || lows[k] === null) {
      flush(k);
      from = k + 1;
    }
  }
  return text;
}

/** Return the bias-corrected exponential moving average; gaps remain gaps. `span` 0 returns the values unchanged. */
function smoothed(values, span) {
  if (!span) return values;
  const keep = 1 - 1 / span;
  let total = 0;
  let weight = 0;
  return values.map((value) => {
    if (value === null) return null;
    total = keep * total + value;
    weight = keep * weight + 1;
    return total / weight;
  });
}

const tip = () => document.getElementById("tip");

/** Show the tooltip beside the pointer: a title and lines [[text, value, colour?], ...]. */
function showTip(event, title, lines) {
  const rows = lines.map(([text, value, colour]) => {
    const left = el("span", {}, colour ? el("span", { class: "dot", style: `background:${colour}` }) : null, text);
    return el("div", { class: "row" }, left, el("span", {}, value));
  });
  tip().replaceChildren(el("b", {}, title), ...rows);
  tip().hidden = false;
  const box = tip().getBoundingClientRect();
  const beside = event.clientX + 16 + box.width > innerWidth ? event.clientX - box.width - 14 : event.clientX + 16;
  tip().style.left = `${Math.max(4, beside)}px`;
  tip().style.top = `${Math.max(4, Math.min(event.clientY + 14, innerHeight - box.height - 6))}px`;
}

function hideTip() {
  tip().hidden = true;
}

const runColour = (number) => `var(--run-${number % RUN_COLOURS})`;

/** Create a short sample of a curve for legends. */
function swatch(colour, dash) {
  return svg(
    "svg",
    { viewBox: "0 0 22 8" },
    svg("path", { d: "M0 4H22", stroke: colour, "stroke-width": 2, "stroke-dasharray": dash, fill: "none" }),
  );
}
