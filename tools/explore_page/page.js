"use strict";
// State, what follows from it, and the parts of the page that are no heat map.

const data = JSON.parse(document.getElementById("data").textContent);
const { n_layer: L, n_head: H, n_embd: C } = data.config;
const D = C / H, T = data.tokens.length;
const SHOWN = 32; // dimensions drawn of a matrix that is C wide
const wide = matchMedia("(min-width: 1080px)");
const LETTER = { previous: "P", first: "F", induction: "I" };

const t = unpack(data.token, T, C), p = unpack(data.position, T, C), sum = add(t, p);
const shapes = { x: [T, data.n_out], q: [T, C], k: [T, C], v: [T, C], shared: [T, C],
  w_o: [C, data.n_out], b_o: [1, data.n_out] };
const unpacked = data.layers.map(() => ({})); // when first asked for: at opening q and k will do
const layer = (l, name) => (unpacked[l][name] ??= unpack(data.layers[l][name], ...shapes[name]));
const asTrained = { positions: true, scaling: true, mask: true, dropout: false };
const headOf = (m, h) => columns(m, h * D, D);

const trained = data.layers.map((_, l) => Array.from({ length: H }, (_, h) => {
  const scores = causalMask(scaled(timesTransposed(headOf(layer(l, "q"), h), headOf(layer(l, "k"), h)), D));
  const weights = softmaxRows(scores);
  return { weights, ...headFigures(weights, data.ids) };
}));

function tellingHead() {
  let best = [0, 0], most = -1;
  trained.forEach((heads, l) => heads.forEach((f, h) => {
    const score = Math.max(f.previous ?? 0, f.induction ?? 0);
    if (score > most) { most = score; best = [l, h]; }
  }));
  return best;
}

const [openLayer, openHead] = data.layer === null && data.head === null ? tellingHead()
  : [data.layer ?? 0, data.head ?? 0];
// The row that says most at a glance: its largest weight on a token that is neither first nor itself.
function tellingRow(weights) {
  let row = T - 1, most = 0;
  for (let i = Math.max(2, T >> 1); i < T; i++) // in the first rows there is little to choose from
    for (let j = 1; j < i; j++)
      if (weights.data[i * T + j] > most) { most = weights.data[i * T + j]; row = i; }
  return row;
}

const page = {
  labels: data.tokens,
  state: { ...asTrained, p: data.p, seed: 1, layer: openLayer, head: openHead,
    row: tellingRow(trained[openLayer][openHead].weights), column: null, matrix: null },
  matrices: {}, // by id, what the page shows now: {rows, cols, data}
  trained,
  quoted: (i) => `“${data.tokens[i]}” (${i})`,
  select(row, column, matrix) {
    const s = this.state;
    if (s.row === row && s.column === column && s.matrix === matrix) return;
    Object.assign(s, { row, column, matrix });
    showSelection();
  },
};
window.page = page;

// --- numbers -------------------------------------------------------------------------------

function compute() {
  const s = page.state;
  const [x, q, k, v, shared, w_o, b_o] = Object.keys(shapes).map((name) => layer(s.layer, name));
  const X = s.positions ? sum : t;
  const plain = timesTransposed(X, X), plainWeights = softmaxRows(plain);
  const plainContext = times(plainWeights, X), projected = headOf(shared, s.head);
  const heads = Array.from({ length: H }, (_, h) => singleHead(headOf(q, h), headOf(k, h), headOf(v, h), s.layer, h, s));
  const one = heads[s.head];
  const side = matrix(T, C);
  heads.forEach((head, h) => {
    for (let i = 0; i < T; i++) side.data.set(head.context.data.subarray(i * D, (i + 1) * D), i * C + h * D);
  });
  const out = times(side, w_o);
  for (let n = 0; n < out.data.length; n++) out.data[n] += b_o.data[n % data.n_out];
  const shown = Math.min(SHOWN, C), first = (m) => columns(m, 0, shown);
  const square = (kind, m) => ({ kind, m, square: true });
  const vectors = (m, of = null) => ({ kind: "signed", m, square: false, cut: of && of > m.cols ? of : null });
  return {
    heads, plain, plainWeights, plainContext, scores3: timesTransposed(projected, projected), one, out, X,
    v: headOf(v, s.head),
    specs: {
      "1-token": vectors(first(t), C), "1-position": vectors(first(p), C), "1-x": vectors(first(sum), C),
      "2-scores": square("signed", plain), "2-weights": square("weight", plainWeights),
      "2-context": vectors(first(plainContext), C),
      "3-projected": vectors(projected), "3-scores": square("signed", timesTransposed(projected, projected)),
      "4-x": vectors(x, C), "4-q": vectors(headOf(q, s.head)), "4-k": vectors(headOf(k, s.head)),
      "4-v": vectors(headOf(v, s.head)), "4-scores": square("signed", one.scores),
      "5-scores": square("signed", one.divided), "5-weights": square("weight", one.open),
      "6-v": vectors(headOf(v, s.head)), "6-context": vectors(one.openContext),
      "7-scores": square("signed", one.masked), "7-weights": square("weight", one.weights),
      "7-context": vectors(one.maskedContext),
      "8-keep": { ...square("keep", one.keep), words: (value) => (value ? "kept" : "dropped") },
      "8-weights": square("weight", one.dropped), "8-context": vectors(one.context),
      "9-heads": { ...vectors(side), heads: H }, "9-out": vectors(out, C),
    },
  };
}

// --- drawing -------------------------------------------------------------------------------

const $ = (selector) => document.querySelector(selector);
const $$ = (selector) => [...document.querySelectorAll(selector)];
const heats = {};

function showAll() {
  const s = page.state, result = compute();
  page.result = result;
  for (const heat of Object.values(heats)) heat.room = heat.figure.clientWidth; // all, before any changes
  for (const [id, spec] of Object.entries(result.specs)) {
    page.matrices[id] = spec.m;
    heats[id].set(spec);
  }
  $("#layer").value = s.layer;
  $("#head").value = s.head;
  for (const node of $$("[data-switch]")) node.setAttribute("aria-checked", String(s[node.dataset.switch]));
  for (const node of $$("[data-number]")) if (document.activeElement !== node) node.value = s[node.dataset.number];
  const changed = Object.keys(asTrained).filter((key) => s[key] !== asTrained[key]);
  const named = { positions: "no positions", scaling: "unscaled", mask: "no mask", dropout: "dropout" };
  $("#shown").textContent = `Layer ${s.layer} · head ${s.head} · ` +
    (changed.length ? changed.map((key) => named[key]).join(", ") : data.untrained ? "untrained" : "as trained");
  $("#reset").textContent = data.untrained ? "As at the start" : "As trained";
  $("#reset").disabled = changed.length === 0;
  showNotes(result);
  showFigures();
  drawMaps($("#layer-maps"), [result.heads.map((head) => head.dropped)], s.layer);
  for (const node of $$("#all-maps button, #layer-maps button"))
    node.setAttribute("aria-current", String(+node.dataset.layer === s.layer && +node.dataset.head === s.head));
  showSelection();
}

function showSelection() {
  for (const heat of Object.values(heats)) if (heat.visible) heat.draw();
  for (const strip of $$("[data-strip]")) showStrip(strip);
}

// The text with each token shaded by what the selected token takes from it.
function buildStrip(strip) {
  const words = element("div", { className: "words" });
  words.setAttribute("role", "listbox");
  words.setAttribute("aria-label", "Tokens of the text; the chosen one looks at the others");
  data.tokens.forEach((token, i) => {
    const word = element("span", { className: "word", textContent: token });
    word.setAttribute("role", "option");
    word.addEventListener("pointermove", (event) => moved(event) && page.select(i, null, null));
    word.addEventListener("click", () => page.select(i, null, null));
    word.addEventListener("keydown", (event) => {
      const to = { ArrowLeft: i - 1, ArrowRight: i + 1, Home: 0, End: T - 1 }[event.key];
      if (to === undefined || to < 0 || to >= T) return;
      event.preventDefault();
      page.select(to, null, null);
      words.children[to].focus();
    });
    words.append(word);
  });
  if ("arcs" in strip.dataset) {
    const arcs = document.createElementNS("http://www.w3.org/2000/svg", "svg");
    arcs.setAttribute("aria-hidden", "true");
    strip.append(arcs);
  }
  strip.append(words, element("p", { className: "takes" }));
}

function showStrip(strip) {
  const i = page.state.row, m = page.matrices[strip.dataset.strip];
  const row = m.data.subarray(i * T, (i + 1) * T), words = [...strip.querySelector(".words").children];
  words.forEach((word, j) => {
    const rgb = palette.rgb("weight", Math.min(row[j], 1), 1);
    Object.assign(word.style, { background: palette.css(rgb), color: palette.on(rgb) });
    word.setAttribute("aria-selected", String(i === j));
    word.tabIndex = i === j ? 0 : -1;
    word.title = `${data.tokens[j]}: ${percent(row[j])}`;
  });
  const most = [...row.keys()].sort((a, b) => row[b] - row[a]).slice(0, 3).filter((j) => row[j] > 0);
  const parts = most.map((j) => `${percent(row[j])} from ${j === i ? "itself" : page.quoted(j)}`);
  const rest = row.reduce((a, b) => a + b, 0) - most.reduce((a, j) => a + row[j], 0);
  const where = strip.classList.contains("large") ? `Layer ${page.state.layer}, head ${page.state.head}: ` : "";
  strip.querySelector(".takes").textContent = where + (parts.length
    ? `${page.quoted(i)} takes ${parts.join(", ")}` + (rest > 0.005 ? `, ${percent(rest)} from the others.` : ".")
    : `${page.quoted(i)} takes nothing: all its weights were dropped.`);
  if ("arcs" in strip.dataset) drawArcs(strip, words, row, i);
}

function drawArcs(strip, words, row, i) {
  const svg = strip.querySelector("svg"), box = strip.getBoundingClientRect();
  if (!box.width || box.bottom < -200 || box.top > innerHeight + 200) return;
  svg.setAttribute("width", box.width);
  svg.setAttribute("height", box.height);
  const place = (word) => {
    const r = word.getBoundingClientRect();
    return { x: r.left + r.width / 2 - box.left, top: r.top - box.top, bottom: r.bottom - box.top };
  };
  const from = place(words[i]), paths = [];
  row.forEach((weight, j) => {
    if (j === i || weight < 0.02) return;
    const to = place(words[j]);
    const apart = Math.abs(from.x - to.x);
    const path = document.createElementNS("http://www.w3.org/2000/svg", "path");
    const rise = Math.min(30, 8 + apart * 0.12);
    path.setAttribute("d", Math.abs(from.top - to.top) < 4
      ? `M${from.x} ${from.top} C${from.x} ${from.top - rise} ${to.x} ${to.top - rise} ${to.x} ${to.top}`
      : from.top > to.top
        ? `M${from.x} ${from.top} C${from.x} ${from.top - 26} ${to.x} ${to.bottom + 26} ${to.x} ${to.bottom}`
        : `M${from.x} ${from.bottom} C${from.x} ${from.bottom + 26} ${to.x} ${to.top - 26} ${to.x} ${to.top}`);
    path.style.strokeWidth = 1 + 5 * Math.min(weight, 1);
    path.style.opacity = 0.25 + 0.75 * Math.min(weight, 1);
    paths.push(path);
  });
  svg.replaceChildren(...paths);
}

// Small multiples. The buttons are built once; their pictures are drawn again when asked.
function buildMaps(box, list) {
  box.style.setProperty("--columns", H);
  list.forEach((heads, row) => {
    if (list.length > 1) box.append(element("span", { className: "row-name", textContent: `layer ${row}` }));
    heads.forEach((_, h) => {
      const map = element("button", { type: "button" }, element("canvas", { width: T, height: T }),
        element("small", {}));
      map.dataset.head = h;
      map.onclick = () => {
        Object.assign(page.state, { layer: +map.dataset.layer, head: h });
        showAll();
        if (list.length > 1) $("#step-4").scrollIntoView();
      };
      map.onkeydown = (event) => {
        const step = { ArrowLeft: -1, ArrowRight: 1, ArrowUp: -H, ArrowDown: H }[event.key];
        const maps = [...box.querySelectorAll("button")], to = maps[maps.indexOf(map) + step];
        if (step === undefined || !to) return;
        event.preventDefault();
        to.focus();
      };
      box.append(map);
    });
  });
  box.addEventListener("focusin", (event) => {
    for (const map of box.querySelectorAll("button")) map.tabIndex = map === event.target ? 0 : -1;
  });
  box.querySelectorAll("button").forEach((map, n) => (map.tabIndex = n ? -1 : 0));
}

function drawMaps(box, list, firstLayer) {
  const maps = box.querySelectorAll("button");
  const shades = Array.from({ length: 256 }, (_, n) => [...palette.rgb("weight", n / 255, 1), 255]);
  list.forEach((heads, row) => heads.forEach((weights, h) => {
    const map = maps[row * H + h], l = firstLayer + row, figures = trained[l][h];
    map.dataset.layer = l;
    const pixels = new ImageData(T, T);
    weights.data.forEach((w, n) => pixels.data.set(shades[Math.round(255 * Math.min(w, 1))], 4 * n));
    map.querySelector("canvas").getContext("2d").putImageData(pixels, 0, 0);
    const letter = LETTER[figures.kind] ?? "";
    map.querySelector("small").textContent = list.length > 1 ? letter : `${h} ${letter}`;
    const kind = { previous: "a previous-token", first: "a first-token", induction: "an induction" }[figures.kind];
    map.title = `Layer ${l}, head ${h}` + (kind ? `: looks like ${kind} head, ${number(figures[figures.kind])}` : "");
    map.setAttribute("aria-label", map.title);
  }));
}

function showFigures() {
  const s = page.state, cell = (x) => element("td", { textContent: x === null ? "–" : number(x) });
  const head = element("tr", {}, ...["Head", "Entropy", "Looks back", "First", "Previous", "Induction", "Looks like"]
    .map((name) => element("th", { scope: "col", textContent: name })));
  const rows = trained[s.layer].map((f, h) => {
    const row = element("tr", {}, element("th", { scope: "row", textContent: h }), cell(f.entropy),
      cell(f.distance), cell(f.first), cell(f.previous), cell(f.induction), element("td", { textContent: f.kind ?? "–" }));
    row.className = h === s.head ? "current" : "";
    return row;
  });
  $("#figures").replaceChildren(element("thead", {}, head), element("tbody", {}, ...rows));
}

// --- building ------------------------------------------------------------------------------

function buildSource(box) {
  for (const { name, code } of data.sources[box.dataset.source]) {
    const copy = element("button", { type: "button", className: "quiet", textContent: "Copy" });
    const pre = element("pre", { tabIndex: 0 }, ...colourCode(code));
    copy.onclick = async () => {
      try {
        await navigator.clipboard.writeText(code);
      } catch { // no clipboard for this page: select, and let the old command try
        getSelection().selectAllChildren(pre);
        document.execCommand("copy");
      }
      copy.textContent = "Copied";
      setTimeout(() => (copy.textContent = "Copy"), 1500);
    };
    const details = element("details", { className: "source", open: wide.matches },
      element("summary", {}, "The code: ", element("code", { textContent: name })), copy, pre);
    box.append(details);
  }
}

function colourCode(code) {
  const pattern = /("""[^]*?"""|#.*)|("[^"\n]*")|\b(def|return|for|in|if|not|import|from)\b/g;
  const parts = [];
  let done = 0;
  for (const found of code.matchAll(pattern)) {
    parts.push(code.slice(done, found.index));
    const kind = found[1] ? "says" : found[2] ? "text" : "key";
    parts.push(element("span", { className: kind, textContent: found[0] }));
    done = found.index + found[0].length;
  }
  return [...parts, code.slice(done)];
}

function listen() {
  for (const [id, count] of [["layer", L], ["head", H]]) {
    for (let n = 0; n < count; n++) $("#" + id).append(element("option", { value: n, textContent: n }));
    $("#" + id).onchange = (event) => { page.state[id] = +event.target.value; showAll(); };
  }
  for (const node of $$("[data-switch]"))
    node.onclick = () => { page.state[node.dataset.switch] = !page.state[node.dataset.switch]; showAll(); };
  for (const node of $$("[data-number]"))
    node.oninput = () => {
      const value = Number(node.value), whole = node.dataset.number === "seed";
      const good = node.value !== "" && value >= +node.min && value <= +node.max && (!whole || Number.isInteger(value));
      node.setAttribute("aria-invalid", String(!good));
      if (good) { page.state[node.dataset.number] = value; showAll(); }
    };
  $("#reset").onclick = () => { Object.assign(page.state, asTrained); showAll(); };
  const again = () => {
    palette.read();
    for (const heat of Object.values(heats)) heat.base = null;
    drawMaps($("#all-maps"), trained.map((heads) => heads.map((f) => f.weights)), 0);
    showAll();
  };
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", again);
  let width = innerWidth;
  addEventListener("resize", () => { if (innerWidth !== width) { width = innerWidth; again(); } });
  let waiting = false;
  addEventListener("scroll", () => { // arcs of a strip that has just come into view
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; for (const strip of $$("[data-arcs]")) showStrip(strip); });
  }, { passive: true });
  const openPanel = () => ($("#panel").open = wide.matches);
  wide.addEventListener("change", openPanel);
  openPanel();
  for (const link of $$("#panel a")) link.addEventListener("click", openPanel);
}

function start() {
  palette.read();
  $("#meta").textContent = `${data.name} · ${data.meta}`;
  $("#untrained").hidden = !data.untrained;
  document.title = "Attention, step by step: " + data.name;
  $$("[data-source]").forEach(buildSource);
  $$("[data-strip]").forEach(buildStrip);
  for (const figure of $$("[data-matrix]")) heats[figure.dataset.matrix] = new Heat(figure, page);
  buildMaps($("#layer-maps"), [trained[0]]);
  buildMaps($("#all-maps"), trained);
  drawMaps($("#all-maps"), trained.map((heads) => heads.map((f) => f.weights)), 0);
  listen();
  showAll();
  document.documentElement.dataset.ready = "yes";
  performance.mark("ready");
}

start();
