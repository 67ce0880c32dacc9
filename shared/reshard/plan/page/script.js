"use strict";
// Draws the plan that stands as JSON in the page. Regions are [offset, shape] in global elements.

const plan = JSON.parse(document.getElementById("drawing").textContent);
const SVG = "http://www.w3.org/2000/svg";
const everyRank = [...new Set([...plan.sources, ...plan.destinations].map(([rank]) => rank))].sort((a, b) => a - b);
const position = new Map(everyRank.map((rank, i) => [rank, i]));

// ---- Small helpers -------------------------------------------------------------------------

function add(parent, tag, attributes = {}, text = null) {
  const svg = tag === "svg" || parent.namespaceURI === SVG;
  const element = svg ? document.createElementNS(SVG, tag) : document.createElement(tag);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== null) element.textContent = text;
  parent.append(element);
  return element;
}

function amount(bytes) {
  if (bytes < 10240) return `${bytes} B`;
  let value = bytes;
  for (const unit of ["KiB", "MiB", "GiB", "TiB", "PiB"]) {
    value /= 1024;
    if (value < 1024 || unit === "PiB") return `${value.toPrecision(3)} ${unit}`;
  }
}

const product = (numbers) => numbers.reduce((a, b) => a * b, 1);
const slices = (offset, shape) => `[${offset.map((o, d) => `${o}:${o + shape[d]}`).join(", ")}]`;
const plural = (n, one) => `${n} ${one}${n === 1 ? "" : "s"}`;

function rankList(ranks) {
  if (ranks.length === 1) return `rank ${ranks[0]}`;
  const shown = ranks.slice(0, 12).join(", ");
  return `ranks ${shown}${ranks.length > 12 ? ` and ${ranks.length - 12} more` : ""}`;
}

function common(offset, shape, otherOffset, otherShape) {
  const from = offset.map((o, d) => Math.max(o, otherOffset[d]));
  const size = offset.map((o, d) => Math.min(o + shape[d], otherOffset[d] + otherShape[d]) - from[d]);
  return size.every((n) => n > 0) ? [from, size] : null;
}

// ---- Colours: one a rank, a ramp along each side -------------------------------------------

// Where no rank is on both sides, sources are cold and destinations warm.
const apart = plan.sources.every(([rank]) => !plan.destinations.some(([other]) => other === rank));
const ramps = apart ? [[plan.sources, 195, 320], [plan.destinations, 15, 150]] : [[everyRank.map((rank) => [rank]), 0, 330]];
const tones = new Map();
for (const [loads, from, to] of ramps) {
  const count = loads.length;
  // Neighbours differ in lightness where hues run out.
  loads.forEach(([rank], i) => tones.set(rank, [
    from + ((to - from) * (i + (count === 1 ? 0.3 : 0))) / Math.max(count - 1, 1), 62, count > 6 && i % 2 ? 48 : 62,
  ]));
}

function colour(rank) {
  const [hue, saturation, lightness] = tones.get(rank);
  return `hsl(${hue.toFixed(1)} ${saturation}% ${lightness}%)`;
}

const inkOn = (rank) => (tones.get(rank)[2] > 52 ? "#14161a" : "#fff");

const patterns = new Map();
const patternHome = add(add(document.body, "svg", { width: 0, height: 0, style: "position:absolute" }), "defs");

function fillOf(owners, tileWidth, tileHeight) {
  // Several owners: stripes of their colours. In a narrow tile they run across it, wide enough to
  // be told apart, where slanted ones would be cut to slivers.
  if (owners.length === 1) return colour(owners[0]);
  const narrow = Math.min(tileWidth, tileHeight) < 18 && Math.max(tileWidth, tileHeight) > 60;
  const angle = !narrow ? 45 : tileWidth > tileHeight ? 0 : 90;
  const key = `${angle}:${owners.join("-")}`;
  if (!patterns.has(key)) {
    const width = owners.length > 16 ? 4 : narrow ? 20 : 8;
    const id = `owners${patterns.size}`;
    const pattern = add(patternHome, "pattern", {
      id, width: width * owners.length, height: 8, patternUnits: "userSpaceOnUse", patternTransform: `rotate(${angle})`,
    });
    owners.forEach((rank, i) => add(pattern, "rect", { x: i * width, width: width + 0.5, height: 8, fill: colour(rank) }));
    patterns.set(key, `url(#${id})`);
  }
  return patterns.get(key);
}

// ---- Tip and selection -------------------------------------------------------------------------

const tip = document.getElementById("tip");

function showTip(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  const box = tip.getBoundingClientRect();
  const left = Math.min(event.clientX + 14, innerWidth - box.width - 8);
  const below = event.clientY + 16 + box.height < innerHeight;
  tip.style.left = `${Math.max(8, left)}px`;
  tip.style.top = `${below ? event.clientY + 16 : Math.max(8, event.clientY - box.height - 10)}px`;
}

function explain(element, text, enter = () => {}, leave = () => {}) {
  element.addEventListener("mousemove", (event) => showTip(event, typeof text === "function" ? text() : text));
  element.addEventListener("mouseenter", enter);
  element.addEventListener("mouseleave", () => { tip.hidden = true; leave(); });
}

let chosen = null;

function fade() {
  // Elements say which ranks they belong to; those of other ranks step back.
  for (const element of document.querySelectorAll("[data-ranks]")) {
    const mine = chosen === null || element.dataset.ranks.split(",").includes(String(chosen));
    element.classList.toggle("faded", !mine);
  }
  for (const chip of document.querySelectorAll(".chip")) {
    chip.setAttribute("aria-pressed", String(Number(chip.dataset.rank) === chosen));
  }
}

function choose(rank) {
  chosen = chosen === rank ? null : rank;
  history.replaceState(null, "", chosen === null ? location.pathname + location.search : `#rank=${chosen}`);
  fade();
}

// ---- Header --------------------------------------------------------------------------------

function fact(value, text, kind = "") {
  const card = add(document.getElementById("facts"), "div", { class: `fact ${kind}` });
  add(card, "b", {}, value);
  add(card, "span", {}, text);
}

function header() {
  document.getElementById("summary").textContent = plan.summary;
  document.getElementById("digest").textContent = `digest ${plan.digest}`;
  const exact = plan.redundancy === "1.000";
  fact(plan.redundancy, exact ? "redundancy: every element received once" : "redundancy: bytes received / needed", exact ? "good" : "bad");
  for (const [side, loads, word] of [["received", plan.destinations, "receiver"], ["sent", plan.sources, "sender"]]) {
    const most = Math.max(0, ...loads.map(([, bytes]) => bytes));
    const ratio = plan.bounds[side] ? most / plan.bounds[side] : 1;
    fact(amount(most), `busiest ${word}: ${ratio.toFixed(3)} × the least possible`, ratio <= 1.01 ? "good" : "");
  }
  if (plan.kept) fact(amount(plan.kept), "kept in place by ranks on both sides");
  const bar = document.getElementById("ranks");
  if (plan.sources.length + plan.destinations.length > 40) bar.classList.add("many");
  for (const [word, loads] of [["sources", plan.sources], ["destinations", plan.destinations]]) {
    const chips = add(bar, "div", { class: "chips" });
    add(chips, "span", { class: "side" }, word);
    for (const [rank] of loads) {
      const chip = add(chips, "button", {
        class: "chip", "data-rank": rank, "aria-pressed": "false", title: `show rank ${rank} only`,
        style: `background:${colour(rank)};color:${inkOn(rank)}`,
      }, rank);
      chip.addEventListener("click", () => choose(rank));
    }
  }
}

// ---- Bytes per rank -------------------------------------------------------------------------

function bars(parent, title, loads, bound) {
  const [width, height, left, top, bottom] = [540, 150, 4, 20, 18];
  const figure = add(parent, "figure", { class: "picture", style: "margin:0" });
  const most = Math.max(bound, 1, ...loads.map(([, bytes]) => bytes));
  const caption = add(figure, "figcaption", { class: "spread" });
  add(caption, "b", {}, title);
  if (bound) add(caption, "span", {}, `┄ least possible maximum: ${amount(bound)}`);
  const svg = add(figure, "svg", { viewBox: `0 0 ${width} ${top + height + bottom}`, width: "100%" });
  const step = (width - 2 * left) / Math.max(loads.length, 1);
  const y = (bytes) => top + height - (bytes / most) * height;
  loads.forEach(([rank, bytes], i) => {
    const gap = Math.min(step * 0.15, 8);
    const thick = Math.min(step - gap, 90);
    const x = left + i * step + (step - thick) / 2;
    const bar = add(svg, "rect", {
      class: "bar", x, y: y(bytes), width: thick, height: Math.max(y(0) - y(bytes), 0), fill: colour(rank), rx: 2,
      "data-ranks": rank,
    });
    explain(bar, `rank ${rank} ${title}: ${amount(bytes)}${bound ? `\n${((100 * bytes) / bound).toFixed(1)} % of the bound` : ""}`);
    bar.addEventListener("click", () => choose(rank));
    if (step > 34 && loads.length <= 12) {
      add(svg, "text", { x: x + thick / 2, y: y(bytes) - 5, "text-anchor": "middle" }, amount(bytes));
    }
    if (step > 14 || i % 8 === 0) {
      add(svg, "text", { class: "quiet", x: x + thick / 2, y: top + height + 14, "text-anchor": "middle" }, rank);
    }
  });
  add(svg, "line", { class: "axis", x1: 0, x2: width, y1: y(0), y2: y(0) });
  if (bound) {
    const line = add(svg, "line", { class: "bound", x1: 0, x2: width, y1: y(bound), y2: y(bound) });
    explain(line, `no plan can do with less than ${amount(bound)} for the busiest rank`);
  }
}

// ---- Flows ---------------------------------------------------------------------------------

const flowText = (source, destination, bytes) =>
  source === destination ? `rank ${source} keeps ${amount(bytes)}` : `rank ${source} → rank ${destination}: ${amount(bytes)}`;

function ribbons(parent) {
  const width = 760;
  const height = Math.min(720, Math.max(200, 26 * Math.max(plan.sources.length, plan.destinations.length)));
  const svg = add(parent, "svg", { viewBox: `0 0 ${width} ${height}`, width: "100%", style: `max-width:${width}px;margin:auto` });
  const total = plan.flows.reduce((sum, [, , bytes]) => sum + bytes, 0) || 1;
  const column = (loads, side) => {
    const gap = Math.min(8, height / (4 * Math.max(loads.length, 1)));
    const scale = (height - gap * (loads.length - 1)) / total;
    const starts = new Map();
    let at = 0;
    for (const [rank] of loads) {
      const bytes = plan.flows.reduce((sum, flow) => sum + (flow[side] === rank ? flow[2] : 0), 0);
      starts.set(rank, { at, bytes, next: at, scale });
      at += bytes * scale + gap;
    }
    return starts;
  };
  const [from, to] = [column(plan.sources, 0), column(plan.destinations, 1)];
  const [x0, x1] = [70, width - 70];
  const layer = add(svg, "g");
  for (const [source, destination, bytes] of plan.flows) {
    const [a, b] = [from.get(source), to.get(destination)];
    const [ya, yb] = [a.next, b.next];
    const [ha, hb] = [bytes * a.scale, bytes * b.scale];
    a.next += ha;
    b.next += hb;
    const middle = (x0 + x1) / 2;
    const ribbon = add(layer, "path", {
      class: "flow", fill: colour(source), "data-ranks": `${source},${destination}`,
      d: `M${x0} ${ya} C${middle} ${ya} ${middle} ${yb} ${x1} ${yb} v${hb} C${middle} ${yb + hb} ${middle} ${ya + ha} ${x0} ${ya + ha} z`,
    });
    explain(ribbon, flowText(source, destination, bytes));
  }
  for (const [nodes, x, anchor, dx, word] of [[from, x0 - 10, "end", -6, "holds for"], [to, x1, "start", 16, "needs from"]]) {
    for (const [rank, node] of nodes) {
      const tall = Math.max(node.bytes * node.scale, 1);
      const box = add(svg, "rect", { class: "bar", x, y: node.at, width: 10, height: tall, fill: colour(rank), rx: 2, "data-ranks": rank });
      explain(box, `rank ${rank}: ${amount(node.bytes)}, its own overlap included`);
      box.addEventListener("click", () => choose(rank));
      if (tall > 9) add(svg, "text", { x: x + dx, y: node.at + tall / 2 + 4, "text-anchor": anchor }, `rank ${rank}`);
    }
  }
}

function matrix(parent) {
  const [rows, columns] = [plan.sources.map(([r]) => r), plan.destinations.map(([r]) => r)];
  const size = Math.max(7, Math.min(34, Math.floor(900 / columns.length), Math.floor(700 / rows.length)));
  const [left, top] = [44, 34];
  const svg = add(parent, "svg", {
    viewBox: `0 0 ${left + columns.length * size + 4} ${top + rows.length * size + 4}`,
    style: `width:${left + columns.length * size + 4}px;margin:auto`,
  });
  const most = Math.max(1, ...plan.flows.map(([, , bytes]) => bytes));
  const at = [new Map(rows.map((r, i) => [r, i])), new Map(columns.map((r, i) => [r, i]))];
  add(svg, "text", { class: "quiet", x: left, y: 10 }, "destination rank →");
  add(svg, "text", { class: "quiet", x: 0, y: 10 }, "source");
  for (const [ranks, place] of [
    [rows, (i) => ({ x: left - 6, y: top + (i + 0.5) * size + 4, "text-anchor": "end" })],
    [columns, (i) => ({ x: left + (i + 0.5) * size, y: top - 6, "text-anchor": "middle" })],
  ]) {
    const every = Math.ceil((ranks === rows ? 13 : 9 * String(ranks[ranks.length - 1]).length) / size);
    ranks.forEach((rank, i) => { if (i % every === 0) add(svg, "text", { class: "quiet", ...place(i) }, rank); });
  }
  for (const [source, destination, bytes] of plan.flows) {
    const cell = add(svg, "rect", {
      class: "cell", x: left + at[1].get(destination) * size, y: top + at[0].get(source) * size, width: size - 1, height: size - 1,
      fill: source === destination ? "var(--quiet)" : colour(source), "fill-opacity": 0.2 + 0.8 * (bytes / most), "data-ranks": `${source},${destination}`,
    });
    explain(cell, flowText(source, destination, bytes));
  }
  add(svg, "rect", { class: "frame", x: left, y: top, width: columns.length * size, height: rows.length * size });
}

function flows() {
  const section = document.getElementById("flows");
  const parent = section.querySelector(".picture");
  if (!plan.flows.length) { parent.textContent = "Nothing to move."; return; }
  const views = { ribbons, matrix };
  let current = plan.flows.length <= 256 ? "ribbons" : "matrix";
  const button = add(section.querySelector("h2"), "button", { class: "switch" });
  const draw = () => {
    parent.replaceChildren();
    views[current](parent);
    button.textContent = current === "ribbons" ? "as a matrix" : "as ribbons";
    fade();
  };
  button.addEventListener("click", () => { current = current === "ribbons" ? "matrix" : "ribbons"; draw(); });
  draw();
}

// ---- Tensors -------------------------------------------------------------------------------

// A tensor of any number of dims on paper: the last drawn dim runs to the right, the others are
// nested downwards. Dims that no tile cuts are left out where more than two are to be drawn.
class Paper {
  constructor(tensor) {
    const scalar = tensor.shape.length === 0;
    this.shape = scalar ? [1] : tensor.shape;
    this.edges = this.shape.map((n) => new Set([0, n]));
    const boxes = [...tensor.held.map((t) => t.slice(1)), ...tensor.needed.map((t) => t.slice(1)), ...tensor.ops.map((op) => op.slice(4))];
    for (const [offset, shape] of boxes) {
      offset.forEach((o, d) => this.edges[d].add(o).add(o + shape[d]));
    }
    this.edges = this.edges.map((set) => [...set].sort((a, b) => a - b));
    let drawn = this.shape.map((_, d) => d);
    if (drawn.length > 2) {
      const whole = drawn.filter((d) => this.edges[d].length <= 2);
      while (drawn.length > 2 && whole.length) { const d = whole.shift(); drawn = drawn.filter((k) => k !== d); }
    }
    this.across = drawn[drawn.length - 1];
    this.down = drawn.slice(0, -1);
    const [rows, columns] = [product(this.down.map((d) => this.shape[d])), this.shape[this.across]];
    this.width = 430;
    this.height = this.down.length ? Math.max(90, Math.min(400, (this.width * rows) / Math.max(columns, 1))) : 56;
    if (this.height === 400) this.width = Math.max(150, Math.min(430, (400 * columns) / Math.max(rows, 1)));
    const left = this.shape.map((_, d) => d).filter((d) => !drawn.includes(d));
    this.note = scalar ? "a scalar" : left.length ? `dim${left.length > 1 ? "s" : ""} ${left.join(", ")} not cut, not drawn` : "";
    this.scalar = scalar;
  }

  // [x, y, width, height] of each rectangle of a region, in pixels.
  rectangles(offset, shape) {
    if (this.scalar) [offset, shape] = [[0], [1]];
    const n = this.shape[this.across] || 1;
    const [x, width] = [(offset[this.across] / n) * this.width, (shape[this.across] / n) * this.width];
    return this.strips(offset, shape, 0).map(([y, height]) => [x, y * this.height, width, height * this.height]);
  }

  strips(offset, shape, level) {
    if (level === this.down.length) return [[0, 1]];
    const d = this.down[level];
    const n = this.shape[d] || 1;
    const inner = this.strips(offset, shape, level + 1);
    const whole = inner.length === 1 && inner[0][1] === 1;
    if (whole) return [[offset[d] / n, shape[d] / n]];
    // Each part of this dim shows the inner dims once more.
    const found = [];
    for (let i = 0; i + 1 < this.edges[d].length; i++) {
      const [from, to] = [this.edges[d][i], this.edges[d][i + 1]];
      if (from < offset[d] || to > offset[d] + shape[d]) continue;
      for (const [y, height] of inner) found.push([(from + y * (to - from)) / n, (height * (to - from)) / n]);
    }
    return found;
  }

  grid(svg) {
    if (product(this.shape) === 0) return;
    // Few elements: show each.
    const n = this.shape[this.across];
    if (n <= 16) for (let i = 1; i < n; i++) this.line(svg, (i / n) * this.width, null);
    if (this.down.length === 1 && this.shape[this.down[0]] <= 16) {
      const m = this.shape[this.down[0]];
      for (let i = 1; i < m; i++) this.line(svg, null, (i / m) * this.height);
    }
  }

  line(svg, x, y) {
    add(svg, "line", { class: "grid", x1: x ?? 0, x2: x ?? this.width, y1: y ?? 0, y2: y ?? this.height });
  }
}

class Picture {
  constructor(parent, paper, tensor, side) {
    const figure = add(parent, "figure");
    const caption = add(figure, "figcaption");
    add(caption, "b", {}, side === "held" ? "source " : "destination ");
    caption.append(side === "held" ? tensor.source : tensor.destination);
    this.svg = add(figure, "svg", {
      viewBox: `-26 -18 ${paper.width + 30} ${paper.height + 22}`, style: `width:${paper.width + 30}px`,
    });
    this.paper = paper;
    this.axes();
    this.tiles = add(this.svg, "g");
    paper.grid(this.svg);
    this.labels = add(this.svg, "g");
    this.links = add(this.svg, "g");
    add(this.svg, "rect", { class: "frame", width: paper.width, height: paper.height });
  }

  axes() {
    const { paper } = this;
    if (paper.scalar) return;
    add(this.svg, "text", { class: "quiet", x: paper.width / 2, y: -6, "text-anchor": "middle" }, `dim ${paper.across} (${paper.shape[paper.across]})`);
    if (paper.down.length) {
      const label = paper.down.map((d) => `dim ${d} (${paper.shape[d]})`).join(" × ");
      add(this.svg, "text", { class: "quiet", transform: `translate(-8 ${paper.height / 2}) rotate(-90)`, "text-anchor": "middle" }, label);
    }
  }

  tile(owners, offset, shape, text, enter, leave) {
    const ranks = owners.join(",");
    const rectangles = this.paper.rectangles(offset, shape);
    for (const [x, y, width, height] of rectangles) {
      const thin = Math.min(width, height) < 5;
      const tile = add(this.tiles, "rect", {
        class: thin ? "tile thin" : "tile", x, y, width, height, fill: fillOf(owners, width, height), "data-ranks": ranks,
      });
      explain(tile, text, enter, leave);
      if (owners.length === 1) tile.addEventListener("click", () => choose(owners[0]));
    }
    const [x, y, width, height] = rectangles.reduce((best, r) => (r[2] * r[3] > best[2] * best[3] ? r : best), [0, 0, 0, 0]);
    const short = owners.length <= 3 ? owners.join(", ") : `${owners.length} ranks`;
    if (width > 7 * short.length + 4 && height > 13) {
      const halo = owners.length > 1 ? "paint-order:stroke;stroke:var(--card);stroke-width:5px;fill:var(--text)" : `fill:${inkOn(owners[0])}`;
      add(this.labels, "text", { class: "label", x: x + width / 2, y: y + height / 2 + 4, "text-anchor": "middle", style: halo, "data-ranks": ranks }, short);
    }
  }

  link(source, offset, shape) {
    for (const [x, y, width, height] of this.paper.rectangles(offset, shape)) {
      const thin = Math.min(width, height) < 7;
      add(this.links, "rect", { class: thin ? "linked thin" : "linked", x, y, width, height, fill: colour(source) });
    }
  }

  clear() { this.links.replaceChildren(); this.tiles.classList.remove("faded"); this.labels.classList.remove("faded"); }
  recede() { this.tiles.classList.add("faded"); this.labels.classList.add("faded"); }
}

function drawTensor(tensor) {
  const card = add(document.getElementById("tensors"), "article", { class: "tensor" });
  const paper = new Paper(tensor);
  const alike = tensor.names.length - 1;
  add(card, "h3", {}, tensor.names[0]);
  const cast = tensor.source_dtype === tensor.wire_dtype ? tensor.wire_dtype : `${tensor.source_dtype} → ${tensor.wire_dtype}`;
  const about = add(card, "p", { class: "about" }, [`[${tensor.shape.join(", ")}]`, cast, paper.note].filter(Boolean).join(" · "));
  let shown = 0;
  if (alike) {
    about.append(` · and ${alike} alike: `);
    const select = add(about, "select", { "aria-label": "tensor" });
    tensor.names.forEach((name, i) => add(select, "option", { value: i }, name));
    select.addEventListener("change", () => { shown = Number(select.value); });
  }
  const pair = add(card, "div", { class: "pair" });
  const [source, destination] = [new Picture(pair, paper, tensor, "held"), new Picture(pair, paper, tensor, "needed")];
  const parts = (owners, side, offset, shape) => {
    // What of a tile moves: [sender, receivers, offset, shape].
    const found = [];
    for (const [from, to, first, last, o, s] of tensor.ops) {
      if (shown < first || shown >= last) continue;
      const mine = side === "held" ? owners.includes(from) : to.some((rank) => owners.includes(rank));
      const box = mine && common(offset, shape, o, s);
      if (box) found.push([from, to, ...box]);
    }
    return found;
  };
  const bytes = (shape) => product(shape) * tensor.element;
  for (const [picture, side, verb] of [[source, "held", "held by"], [destination, "needed", "needed by"]]) {
    for (const [owners, offset, shape] of tensor[side]) {
      let lines = null;
      const text = () => {
        if (lines === null) {
          const moves = parts(owners, side, offset, shape);
          lines = [`${slices(offset, shape)}  ${amount(bytes(shape))}`, `${verb} ${rankList(owners)}`];
          for (const [from, to, o, s] of moves.slice(0, 8)) {
            const kept = to.length === 1 && to[0] === from;
            const who = kept ? `rank ${from} keeps` : side === "held" ? `rank ${from} → ${rankList(to)}` : `from rank ${from}`;
            const some = side === "needed" && !kept && owners.some((rank) => !to.includes(rank));
            const whom = some ? ` for ${rankList(to)}` : "";
            lines.push(`${who}${whom}: ${slices(o, s)}`);
          }
          if (moves.length > 8) lines.push(`and ${plural(moves.length - 8, "part")} more`);
        }
        return lines.join("\n");
      };
      const enter = () => {
        lines = null;
        for (const each of [source, destination]) each.recede();
        for (const [from, , o, s] of parts(owners, side, offset, shape)) {
          source.link(from, o, s);
          destination.link(from, o, s);
        }
      };
      picture.tile(owners, offset, shape, text, enter, () => { source.clear(); destination.clear(); });
    }
  }
  if (product(tensor.shape) === 0) add(card, "p", { class: "about" }, "a tensor without elements: nothing moves");
}

// ---- All of it -----------------------------------------------------------------------------

header();
const loads = document.querySelector("#loads .pair");
bars(loads, "sends", plan.sources, plan.bounds.sent);
bars(loads, "receives", plan.destinations, plan.bounds.received);
flows();
plan.tensors.forEach(drawTensor);
const asked = /^#rank=(\d+)$/.exec(location.hash);
if (asked && position.has(Number(asked[1]))) choose(Number(asked[1]));
document.body.dataset.drawn = "yes";
