// The curve of tokens per second, and the map of a cache's blocks. Colours are classes of the style sheet.

const SVG = "http://www.w3.org/2000/svg";
const SPAN_S = 120; // of the curve
const GAP_S = 5; // without figures for longer, the curve is broken
const MAX_CELLS = 1200;
export const KINDS = {
  used: "held by requests that are not paused",
  cached: "free, and kept for prompts that begin alike",
  paused: "held by requests that are paused",
  free: "free and empty",
};

function shape(name, attributes, text = "") {
  const made = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
  made.textContent = text;
  return made;
}

function sized(svg, height) {
  const width = svg.clientWidth || 400;
  svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
  svg.setAttribute("height", height);
  return width;
}

function roundAbove(value) {
  // The next number that is easy to read, and its half too.
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 1.5, 2, 3, 4, 5, 6, 8, 10].map((step) => step * power).find((step) => step >= value * 0.999);
}

// points: [{time, rate}], oldest first; times in seconds.
export function drawCurve(svg, points) {
  const width = sized(svg, 132);
  const [left, right, top, bottom] = [38, width - 2, 8, 108];
  const now = points.at(-1).time;
  const most = Math.max(...points.map((point) => point.rate));
  const scale = roundAbove(Math.max(1, most));
  const x = (time) => right - ((now - time) / SPAN_S) * (right - left);
  const y = (rate) => bottom - (rate / scale) * (bottom - top);
  const parts = [];
  for (const rate of [0, scale / 2, scale]) {
    parts.push(shape("line", { class: "grid", x1: left, x2: right, y1: y(rate), y2: y(rate) }));
    const label = rate.toLocaleString("en", { maximumFractionDigits: 1 });
    parts.push(shape("text", { x: left - 6, y: y(rate) + 4, "text-anchor": "end" }, label));
  }
  const marks = [[SPAN_S, "2 min ago", "start"], [SPAN_S / 2, "1 min", "middle"], [0, "now", "end"]];
  for (const [ago, label, anchor] of marks) {
    parts.push(shape("text", { x: x(now - ago), y: bottom + 18, "text-anchor": anchor }, label));
  }
  for (const run of runs(points)) {
    const line = run.map((point) => `${x(point.time).toFixed(1)} ${y(point.rate).toFixed(1)}`).join("L");
    const [from, to] = [x(run[0].time).toFixed(1), x(run.at(-1).time).toFixed(1)];
    parts.push(shape("path", { class: "area", d: `M${from} ${bottom}L${line}L${to} ${bottom}Z` }));
    parts.push(shape("path", { class: "curve", d: `M${line}` }));
  }
  svg.replaceChildren(...parts);
  const words = `now ${points.at(-1).rate.toFixed(1)}, at most ${most.toFixed(1)}`;
  svg.setAttribute("aria-label", `Tokens per second over the last two minutes: ${words}`);
}

function runs(points) {
  const all = [];
  points.forEach((point, i) => {
    if (i === 0 || point.time - points[i - 1].time > GAP_S) all.push([]);
    all.at(-1).push(point);
  });
  return all;
}

export const withinSpan = (points) => points.filter((point) => points.at(-1).time - point.time <= SPAN_S);

// Draws `blocks` (kind -> how many) and returns how many of them a cell is.
function drawBlocks(svg, blocks) {
  const kinds = Object.keys(KINDS);
  const total = kinds.reduce((sum, kind) => sum + blocks[kind], 0);
  const each = Math.max(1, Math.ceil(total / MAX_CELLS));
  const counts = kinds.map((kind) => Math.ceil(blocks[kind] / each));
  const cells = counts.reduce((sum, count) => sum + count, 0);
  const width = svg.clientWidth || 400;
  const side = Math.max(5, Math.min(14, Math.floor(Math.sqrt((width * 160) / Math.max(1, cells)))));
  const columns = Math.max(1, Math.floor(width / side));
  sized(svg, Math.max(1, Math.ceil(cells / columns)) * side);
  let place = 0;
  const paths = kinds.map((kind, i) => {
    let path = "";
    for (let count = counts[i]; count; count -= 1, place += 1) {
      const [x, y] = [(place % columns) * side, Math.floor(place / columns) * side];
      path += `M${x} ${y}h${side - 1}v${side - 1}h${1 - side}z`;
    }
    return shape("path", { class: `cells ${kind}`, d: path, "data-kind": kind });
  });
  svg.replaceChildren(...paths);
  return each;
}

export class Replica {
  // A replica's figures, its map and the map's legend, whose entries say what they are when pointed at or focused.
  constructor(name) {
    this.name = name;
    this.kind = ""; // of the blocks that are explained
    this.node = document.createElement("div");
    this.node.className = "replica";
    this.title = this.node.appendChild(document.createElement("h3"));
    this.line = this.node.appendChild(document.createElement("p"));
    this.map = this.node.appendChild(shape("svg", { role: "img", class: "map" }));
    this.entries = this.node.appendChild(document.createElement("div"));
    this.entries.className = "legend";
    this.note = this.node.appendChild(document.createElement("p"));
    this.note.className = "explanation";
    for (const kind of Object.keys(KINDS)) {
      const entry = document.createElement("button");
      entry.type = "button";
      entry.dataset.kind = kind;
      const swatch = document.createElement("span");
      swatch.className = `swatch ${kind}`;
      entry.append(swatch, kind, document.createElement("span"));
      this.entries.append(entry);
    }
    for (const [begin, end] of [["pointerover", "pointerout"], ["focusin", "focusout"]]) {
      this.node.addEventListener(begin, (event) => this.explain(event.target.closest("[data-kind]")?.dataset.kind));
      this.node.addEventListener(end, () => this.explain(document.activeElement?.closest(".replica button")?.dataset.kind));
    }
  }

  show(status) {
    this.blocks = status.blocks;
    this.title.textContent = `${status.name}: ${status.state}`;
    this.line.textContent =
      `${status.running} running, ${status.paused} paused, ${status.waiting} waiting, room for ${status.capacity}; ` +
      `weights version ${status.weight_version}`;
    this.each = drawBlocks(this.map, status.blocks);
    for (const entry of this.entries.children) {
      entry.lastChild.textContent = status.blocks[entry.dataset.kind].toLocaleString();
    }
    const counts = Object.keys(KINDS).map((kind) => `${status.blocks[kind]} ${kind}`);
    this.map.setAttribute("aria-label", `Blocks of the cache: ${counts.join(", ")}`);
    this.explain(this.kind);
  }

  explain(kind = "") {
    this.kind = kind;
    this.map.dataset.kind = kind;
    const total = Object.values(this.blocks).reduce((sum, count) => sum + count, 0);
    const cell = this.each === 1 ? "1 block" : `${this.each} blocks`;
    let words = `One cell is ${cell} of the cache: keys and values of consecutive tokens. Point at a colour to see what it is.`;
    if (kind) {
      const share = ((100 * this.blocks[kind]) / Math.max(1, total)).toFixed(0);
      words = `${kind}: ${this.blocks[kind].toLocaleString()} of ${total.toLocaleString()} blocks (${share} %), ${KINDS[kind]}.`;
    }
    if (this.note.textContent !== words) this.note.textContent = words;
  }
}
