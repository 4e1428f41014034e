"use strict";
// Under each step, one sentence on what this text and these weights really show there.

function showNotes(r) {
  const s = page.state;
  const note = (id, text) => (document.querySelector(`[data-note="${id}"]`).textContent = text);
  const spread = (m) => {
    const list = Array.from(m.data).filter(Number.isFinite), mean = list.reduce((a, b) => a + b, 0) / list.length;
    return Math.sqrt(list.reduce((a, b) => a + (b - mean) ** 2, 0) / list.length);
  };
  const rowsOf = (m) => Array.from({ length: m.rows }, (_, i) => m.data.subarray(i * m.cols, (i + 1) * m.cols));
  const meanOf = (list) => list.reduce((a, b) => a + b, 0) / list.length;
  const asymmetry = (m) => {
    let most = 0;
    for (let i = 0; i < T; i++) for (let j = 0; j < i; j++) most = Math.max(most, Math.abs(m.data[i * T + j] - m.data[j * T + i]));
    return most;
  };
  const apart = (m, a, b) => {
    const rows = rowsOf(m);
    return Math.sqrt(rows[a].reduce((sum, x, c) => sum + (x - rows[b][c]) ** 2, 0));
  };
  const twin = repeatedToken();
  const largest = (m) => meanOf(rowsOf(m).map((row) => Math.max(...row)));
  const future = (m) => meanOf(rowsOf(m).map((row, i) => row.reduce((sum, w, j) => sum + (j > i ? w : 0), 0)));

  note("1", twin
    ? `Here ${page.quoted(twin[0])} and ${page.quoted(twin[1])} are one token: their rows of t are ${number(apart(t, ...twin))} apart, ` +
      `their rows of X ${number(apart(sum, ...twin))}.`
    : "No token stands twice in this text. With one that does, its rows of t are equal and its rows of X are not.");
  const own = rowsOf(r.plainWeights).filter((row, i) => row[i] >= Math.max(...row)).length;
  note("2", `In ${own} of ${T} rows the largest weight is the token's own. Largest difference between a score and its mirror: ` +
    `${number(asymmetry(r.plain), 4)}.` +
    (twin ? ` Contexts of the repeated ${page.quoted(twin[0])} and ${page.quoted(twin[1])}: ${number(apart(r.plainContext, ...twin))} apart` +
      (s.positions ? "." : ", for without positions they are one and the same row.") : ""));
  const least = Math.min(...rowsOf(r.scores3).map((row, i) => row[i]));
  note("3", `Largest difference between a score and its mirror: ${number(asymmetry(r.scores3), 4)}, smallest score of a token with ` +
    `itself: ${number(least)}. Whatever W is, the first is 0 and the second not below 0.`);
  note("4", `Largest difference between a score and its mirror: ${number(asymmetry(r.one.scores), 2)}. ` +
    `W_q, W_k and W_v of all ${H} head${H > 1 ? "s" : ""} of a layer: 3 · ${C} · ${C} = ${(3 * C * C).toLocaleString("en")} weights; ` +
    `this head's share are ${D} columns of each.`);
  const raw = r.one.scores, divided = scaled(raw, D);
  note("5", `Spread (standard deviation) of these scores: ${number(spread(raw))} before, ${number(spread(divided))} after dividing by ` +
    `√${D} = ${number(Math.sqrt(D))}. A row's largest weight is ${number(largest(softmaxRows(raw)))} on average unscaled, ` +
    `${number(largest(softmaxRows(divided)))} scaled` + (s.scaling ? "." : "; unscaled is what you see."));
  const inside = (() => {
    let count = 0;
    for (let c = 0; c < D; c++) {
      const column = rowsOf(r.v).map((row) => row[c]), low = Math.min(...column) - 1e-6, high = Math.max(...column) + 1e-6;
      for (const row of rowsOf(r.one.openContext)) if (row[c] >= low && row[c] <= high) count++;
    }
    return count;
  })();
  note("6", `${inside.toLocaleString("en")} of ${(T * D).toLocaleString("en")} numbers of the context lie between the smallest and the ` +
    "largest value of their dimension: it is a mean.");
  note("7", `Weight that an average row gives to later tokens: ${percent(future(r.one.open))} without the mask, ` +
    `${percent(future(r.one.weights))} as shown.` +
    (twin && s.mask ? ` Contexts of the repeated ${page.quoted(twin[0])} and ${page.quoted(twin[1])} are ` +
      `${number(apart(r.one.maskedContext, ...twin))} apart: they have different pasts.` : ""));
  const reach = s.mask ? (T * (T + 1)) / 2 : T * T;
  const kept = r.one.keep.data.reduce((sum, k, n) => sum + (s.mask && n % T > Math.floor(n / T) ? 0 : k), 0);
  const sums = rowsOf(r.one.dropped).map((row) => row.reduce((a, b) => a + b, 0));
  note("8", s.dropout
    ? `Kept ${kept} of ${reach} weights (p = ${s.p}, seed ${s.seed}). Rows now sum to between ${number(Math.min(...sums))} and ` +
      `${number(Math.max(...sums))}, and to 1 in the mean over many draws.`
    : "Dropout is off, as whenever the model is used: the weights pass unchanged. The keep mask is what a training step might draw.");
  note("9", `${H} head${H > 1 ? "s" : ""} of ${D}: 4 · ${C} · ${C} = ${(4 * C * C).toLocaleString("en")} weights with out_proj, as many as ` +
    `one head of ${C} would have. The framed columns are head ${s.head}'s: until out_proj no other column depends on it.`);
  const kinds = Object.keys(LETTER).map((k) => [k, page.trained.flat().filter((f) => f.kind === k).length]);
  note("overview", `Of ${L * H} heads, ` + kinds.map(([k, n]) => `${n} look like ${k === "induction" ? k : k + "-token"} heads`).join(", ") +
    " on this text.");
}

// The first two places of the first token that stands twice, or null.
function repeatedToken() {
  for (let i = 0; i < T; i++) {
    const again = data.ids.indexOf(data.ids[i], i + 1);
    if (again > 0) return [i, again];
  }
  return null;
}
