"use strict";
// One matrix as a heat map on a canvas, with its numbers in the cells where they fit, in a readout
// under it, and as a table on demand. `page` (page.js) holds the tokens and the selected row.

const number = (x, digits) => {
  if (x === -Infinity) return "−∞";
  const text = Math.abs(x).toFixed(digits ?? (Math.abs(x) >= 100 ? 0 : Math.abs(x) >= 10 ? 1 : 2));
  return (x < 0 && Number(text) !== 0 ? "−" : "") + text;
};
const percent = (x) => (x > 0 && x < 0.005 ? "<1" : Math.round(100 * x)) + " %";

function element(tag, attributes = {}, ...children) {
  const node = document.createElement(tag);
  for (const [key, value] of Object.entries(attributes))
    key in node && key !== "list" ? (node[key] = value) : node.setAttribute(key, value);
  node.append(...children); // strings become text, never markup
  return node;
}

// Whether the mouse itself went there: when the page scrolls under a resting mouse, browsers report
// a move too, and a choice made with the keyboard would be lost.
let lastPlace = "";
function moved(event) {
  const place = `${event.screenX} ${event.screenY}`, is = event.pointerType === "mouse" && place !== lastPlace;
  lastPlace = place;
  return is;
}

const palette = {
  read() {
    const style = getComputedStyle(document.documentElement);
    const rgb = (name) => style.getPropertyValue(name).trim().match(/\w\w/g).map((h) => parseInt(h, 16));
    this.weight = ["--weight-0", "--weight-1", "--weight-2", "--weight-3"].map(rgb);
    this.signed = ["--below-2", "--below-1", "--zero", "--above-1", "--above-2"].map(rgb);
    this.ink = style.getPropertyValue("--ink").trim();
    this.soft = style.getPropertyValue("--soft").trim();
    this.accent = style.getPropertyValue("--accent").trim();
    this.mark = style.getPropertyValue("--mark").trim();
    this.hatch = style.getPropertyValue("--hatch").trim();
  },
  along(stops, t) {
    const at = Math.min(Math.max(t, 0), 1) * (stops.length - 1);
    const n = Math.min(Math.floor(at), stops.length - 2);
    return stops[n].map((c, i) => Math.round(c + (stops[n + 1][i] - c) * (at - n)));
  },
  // The root spreads small weights apart: 0.25 is half way up. Signed values go by their own size.
  rgb: (kind, x, limit) =>
    kind === "weight" ? palette.along(palette.weight, Math.sqrt(x / limit))
      : kind === "keep" ? palette.weight[x ? 2 : 0]
        : palette.along(palette.signed, 0.5 + x / limit / 2),
  css: (rgb) => `rgb(${rgb.join(" ")})`,
  on: ([r, g, b]) => (0.299 * r + 0.587 * g + 0.114 * b > 140 ? "#16130f" : "#ffffff"),
};

class Heat {
  // kind: "weight" (0 … 1), "signed" or "keep"; square: tokens on both axes;
  // heads: the columns' blocks, one a head;  cut: {of} where only the first columns are held.
  constructor(figure, page) {
    Object.assign(this, { figure, page, id: figure.dataset.matrix, visible: false, base: null });
    this.button = element("button", { type: "button", className: "quiet", textContent: "Numbers" });
    this.button.setAttribute("aria-pressed", "false");
    this.button.onclick = () => this.toggleTable();
    const caption = figure.querySelector("figcaption");
    this.title = element("span", {}, ...caption.childNodes);
    caption.replaceChildren(this.title, this.button);
    this.canvas = element("canvas", { tabIndex: 0 });
    this.canvas.setAttribute("role", "img");
    this.box = element("div", { className: "canvas-box" }, this.canvas);
    this.legend = element("div", { className: "legend" });
    this.readout = element("p", { className: "readout" });
    this.readout.setAttribute("role", "status");
    figure.append(this.box, this.legend, this.readout);
    const point = (event) => this.point(event);
    this.canvas.addEventListener("pointermove", (event) => moved(event) && point(event));
    this.canvas.addEventListener("pointerdown", point);
    this.canvas.addEventListener("keydown", (event) => this.key(event));
    new IntersectionObserver(([entry]) => {
      this.visible = entry.isIntersecting;
      if (this.visible) this.draw();
    }, { rootMargin: "300px" }).observe(figure);
  }

  set(spec) {
    Object.assign(this, { heads: null, cut: null, words: null }, spec);
    const finite = Array.from(this.m.data).filter(Number.isFinite);
    this.limit = this.kind === "signed" ? Math.max(...magnitudes(finite), 1e-9)
      : Math.max(1, ...magnitudes(finite));
    this.base = null;
    if (this.table) this.fillTable();
    this.drawLegend();
    this.draw();
  }

  short(value) {
    if (this.kind === "keep") return number(value, 0);
    if (this.s.w >= 30) return number(value);
    if (this.kind === "weight") return value >= 0.995 ? "1" : number(value, 2).replace("0.", ".");
    return number(value, Math.abs(value) < 9.95 ? 1 : 0);
  }

  size() {
    const { rows, cols } = this.m;
    const room = this.room;
    const gutter = Math.min(92, Math.max(58, room * 0.16));
    if (this.square) {
      const cell = Math.max(10, Math.min(46, Math.floor((room - gutter - 2) / cols)));
      return { gutter, top: gutter - 8, w: cell, h: cell };
    }
    const h = Math.max(10, Math.min(room < 420 ? 15 : 22, Math.floor(560 / rows)));
    const w = Math.min(46, (room - gutter - 2) / cols);
    return { gutter, top: 18, w, h };
  }

  draw() {
    if (!this.m || !this.room || this.table) return;
    const { rows, cols } = this.m;
    const s = (this.s = this.size());
    const ratio = window.devicePixelRatio || 1;
    const width = Math.ceil(s.gutter + cols * s.w + 2), height = Math.ceil(s.top + rows * s.h + 2);
    Object.assign(this.canvas.style, { width: width + "px", height: height + "px" });
    this.tell();
    if (!this.visible) return; // its place is kept, so that nothing moves when it is drawn
    if (!this.base || this.base.width !== Math.round(width * ratio)) {
      this.base = element("canvas", { width: Math.round(width * ratio), height: Math.round(height * ratio) });
      this.paint(this.base.getContext("2d"), ratio);
    }
    Object.assign(this.canvas, { width: this.base.width, height: this.base.height });
    const c = this.canvas.getContext("2d");
    c.drawImage(this.base, 0, 0);
    c.scale(ratio, ratio);
    this.overlay(c);
  }

  paint(c, ratio) {
    const { m: { rows, cols, data }, s, page } = this;
    c.scale(ratio, ratio);
    const x = (j) => s.gutter + j * s.w, y = (i) => s.top + i * s.h;
    const gap = s.w >= 14 ? 1 : 0;
    c.textBaseline = "middle";
    for (let i = 0; i < rows; i++)
      for (let j = 0; j < cols; j++) {
        const value = data[i * cols + j];
        if (value === -Infinity) { this.hatch(c, x(j), y(i)); continue; }
        const rgb = palette.rgb(this.kind, value, this.limit);
        c.fillStyle = palette.css(rgb);
        c.fillRect(x(j), y(i), s.w - gap + (gap ? 0 : 0.5), s.h - gap + (gap ? 0 : 0.5));
        // Small cells hold ".07" but not "−1.83"; a weight that rounds to 0 says more when left out.
        if (s.w >= (this.kind === "signed" ? 24 : 21) && s.h >= 15 && (value >= 0.005 || this.kind !== "weight")) {
          c.fillStyle = palette.on(rgb);
          c.font = (s.w >= 30 ? "11px " : "9px ") + FONT;
          c.textAlign = "center";
          c.fillText(this.short(value), x(j) + s.w / 2, y(i) + s.h / 2 + 0.5);
        }
      }
    c.font = `${Math.min(12, Math.max(9, s.h - 2))}px ${FONT}`;
    c.fillStyle = palette.soft;
    c.textAlign = "right";
    for (let i = 0; i < rows; i++) c.fillText(fit(c, page.labels[i], s.gutter - 8), s.gutter - 5, y(i) + s.h / 2);
    c.textAlign = "left";
    if (this.square) {
      for (let j = 0; j < cols; j++) {
        c.save();
        c.translate(x(j) + s.w / 2, s.top - 5);
        c.rotate(-Math.PI / 2);
        c.fillText(fit(c, page.labels[j], s.top - 8), 0, 0);
        c.restore();
      }
      return;
    }
    c.font = "10px " + FONT;
    if (this.heads) {
      const wide = cols / this.heads;
      for (let h = 0; h < this.heads; h++) {
        c.fillStyle = palette.soft;
        if (wide * s.w >= 16) c.fillText((wide * s.w >= 52 ? "head " : "") + h, x(h * wide) + 2, 9);
        if (h) { c.fillStyle = palette.ink; c.fillRect(x(h * wide) - 0.5, s.top - 4, 1, rows * s.h + 4); }
      }
    } else {
      const last = cols - 1;
      c.fillText("0", x(0), 9);
      c.textAlign = "right";
      c.fillText(this.cut ? `${last} … (first ${cols} of ${this.cut} dimensions)` : `dimension ${last}`, x(cols), 9);
    }
  }

  hatch(c, x, y) {
    const { w, h } = this.s;
    c.strokeStyle = palette.hatch;
    c.lineWidth = 1;
    c.beginPath();
    c.moveTo(x + 1, y + h - 2);
    c.lineTo(x + w - 2, y + 1);
    c.stroke();
    if (w >= 34) {
      c.fillStyle = palette.soft;
      c.font = "10px " + FONT;
      c.textAlign = "left";
      c.fillText("−∞", x + 3, y + 8);
    }
  }

  overlay(c) {
    const { m: { rows, cols }, s, page: { state } } = this;
    const ring = (i, j, colour, wide = 1) => {
      for (const [style, line] of [["rgb(255 255 255 / 0.9)", wide + 2], [colour, wide]]) {
        c.strokeStyle = style;
        c.lineWidth = line;
        c.strokeRect(s.gutter + j * s.w - 0.5, s.top + i * s.h - 0.5, Math.max(s.w, 3), s.h);
      }
    };
    const i = state.row;
    if (i >= rows) return;
    c.strokeStyle = palette.accent;
    c.lineWidth = 1.5;
    c.strokeRect(s.gutter - 1, s.top + i * s.h - 1, cols * s.w + 1, s.h + 1);
    c.fillStyle = palette.accent;
    c.fillRect(s.gutter - 4, s.top + i * s.h, 3, s.h);
    if (this.heads) {
      const wide = (cols / this.heads) * s.w;
      c.strokeRect(s.gutter + state.head * wide, s.top - 2, wide, rows * s.h + 3);
    }
    if (state.matrix !== this.id || state.column === null || state.column >= cols) return;
    if (this.square && state.column !== i) ring(state.column, i, palette.mark, 2);
    ring(i, state.column, palette.accent, 2);
  }

  // What stands under the map: the pointed cell and, where both axes are tokens, its mirror.
  tell() {
    const { m: { rows, cols, data }, page: { state, quoted } } = this;
    const at = (i, j) => (this.words ? this.words(data[i * cols + j]) : number(data[i * cols + j], 4));
    const i = Math.min(state.row, rows - 1), j = state.column;
    const here = state.matrix === this.id && j !== null && j < cols;
    let text = this.square ? "Point at a cell for its number and its mirror." : "Point at a cell for its number.";
    if (here && this.square) {
      text = `${quoted(i)} looks at ${quoted(j)}: ${at(i, j)}`;
      if (i !== j) text += ` · mirror, ${quoted(j)} at ${quoted(i)}: ${at(j, i)}`;
    } else if (here) {
      const wide = cols / (this.heads ?? 1);
      const place = this.heads ? `head ${Math.floor(j / wide)}, dimension ${j % wide}` : `dimension ${j}`;
      text = `${quoted(i)}, ${place}: ${at(i, j)}`;
    }
    if (this.readout.textContent !== text) this.readout.textContent = text;
    this.canvas.setAttribute("aria-label",
      `${this.title.textContent}, ${rows} by ${cols}. ` +
      "Arrow keys move from cell to cell; the button Numbers gives a table.");
  }

  point(event) {
    const r = this.canvas.getBoundingClientRect(), { m, s } = this;
    const j = Math.floor((event.clientX - r.left - s.gutter) / s.w);
    const i = Math.floor((event.clientY - r.top - s.top) / s.h);
    if (i >= 0 && i < m.rows && j < m.cols) this.page.select(i, j < 0 ? null : j, this.id);
    else if (i < 0 && this.square && j >= 0 && j < m.cols) this.page.select(j, null, this.id);
  }

  key(event) {
    const moves = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] };
    const move = moves[event.key];
    if (!move) return;
    event.preventDefault();
    const { state } = this.page, { rows, cols } = this.m;
    const column = state.matrix === this.id && state.column !== null ? state.column + move[1] : 0;
    const clamp = (x, n) => Math.min(Math.max(x, 0), n - 1);
    this.page.select(clamp(state.row + move[0], rows), clamp(column, cols), this.id);
  }

  drawLegend() {
    if (this.kind === "keep") return void this.legend.replaceChildren("filled: kept (1) · empty: dropped (0)");
    const ends = this.kind === "weight" ? ["0", number(this.limit)] : [number(-this.limit), number(this.limit)];
    const stops = Array.from({ length: 13 }, (_, n) => {
      const t = n / 12;
      const value = this.kind === "weight" ? t * t * this.limit : (2 * t - 1) * this.limit;
      return palette.css(palette.rgb(this.kind, value, this.limit));
    });
    const bar = element("span", { className: "bar" });
    bar.style.background = `linear-gradient(to right, ${stops.join(", ")})`;
    const middle = this.kind === "weight" ? number(this.limit / 4) : "0";
    bar.append(element("i", { textContent: middle }));
    this.legend.replaceChildren(ends[0], bar, ends[1]);
  }

  toggleTable() {
    if (this.table) {
      this.table.remove();
      this.table = null;
    } else {
      this.table = element("div", { className: "scroll numbers", tabIndex: 0 });
      this.box.after(this.table);
      this.fillTable();
    }
    this.box.hidden = this.table !== null;
    this.button.setAttribute("aria-pressed", String(this.table !== null));
    this.draw();
  }

  // Of a matrix with the heads side by side, the chosen head's columns: all would be thousands.
  fillTable() {
    const { rows, cols, data } = this.m;
    const wide = this.heads ? cols / this.heads : cols;
    const first = this.heads ? this.page.state.head * wide : 0;
    const head = element("tr", {}, element("th"));
    for (let j = first; j < first + wide; j++)
      head.append(element("th", { scope: "col", textContent: this.square ? this.page.labels[j] : j }));
    const table = element("table", {}, element("thead", {}, head));
    for (let i = 0; i < rows; i++) {
      const row = element("tr", {}, element("th", { scope: "row", textContent: this.page.labels[i] }));
      for (let j = first; j < first + wide; j++) {
        const value = data[i * cols + j];
        const cell = element("td", { textContent: number(value, this.kind === "weight" ? 3 : undefined) });
        if (value !== -Infinity) {
          const rgb = palette.rgb(this.kind, value, this.limit);
          Object.assign(cell.style, { background: palette.css(rgb), color: palette.on(rgb) });
        }
        row.append(cell);
      }
      table.append(row);
    }
    this.table.replaceChildren(table);
  }
}

const FONT = "ui-sans-serif, system-ui, -apple-system, 'Segoe UI', sans-serif";
const magnitudes = (list) => [list.reduce((a, b) => Math.max(a, Math.abs(b)), 0)];

function fit(c, text, room) {
  if (c.measureText(text).width <= room) return text;
  let n = text.length;
  while (n > 1 && c.measureText(text.slice(0, n) + "…").width > room) n--;
  return text.slice(0, n) + "…";
}
