"use strict";
// gpt/attention_steps.py once more, for the page's switches. tests/tools/test_explore.py compares
// every number with the Python ladder's. A matrix is {rows, cols, data}, data row after row.

function matrix(rows, cols, data = new Float64Array(rows * cols)) {
  return { rows, cols, data };
}

function unpack(base64, rows, cols) {
  const text = atob(base64), bytes = new Uint8Array(text.length);
  for (let n = 0; n < bytes.length; n++) bytes[n] = text.charCodeAt(n);
  return matrix(rows, cols, new Float32Array(bytes.buffer)); // little-endian, as every browser is
}

function columns(m, first, count) {
  const out = matrix(m.rows, count);
  for (let i = 0; i < m.rows; i++)
    for (let c = 0; c < count; c++) out.data[i * count + c] = m.data[i * m.cols + first + c];
  return out;
}

function add(a, b) {
  const out = matrix(a.rows, a.cols);
  for (let n = 0; n < out.data.length; n++) out.data[n] = a.data[n] + b.data[n];
  return out;
}

function times(a, b) {
  const out = matrix(a.rows, b.cols);
  for (let i = 0; i < a.rows; i++)
    for (let k = 0; k < a.cols; k++) {
      const factor = a.data[i * a.cols + k];
      for (let j = 0; j < b.cols; j++) out.data[i * b.cols + j] += factor * b.data[k * b.cols + j];
    }
  return out;
}

function timesTransposed(a, b) {
  const out = matrix(a.rows, b.rows);
  for (let i = 0; i < a.rows; i++)
    for (let j = 0; j < b.rows; j++) {
      let sum = 0;
      for (let k = 0; k < a.cols; k++) sum += a.data[i * a.cols + k] * b.data[j * b.cols + k];
      out.data[i * b.rows + j] = sum;
    }
  return out;
}

function scaled(scores, dK, on = true) {
  const out = matrix(scores.rows, scores.cols);
  const divisor = on ? Math.sqrt(dK) : 1;
  for (let n = 0; n < out.data.length; n++) out.data[n] = scores.data[n] / divisor;
  return out;
}

function causalMask(scores, on = true) {
  const out = matrix(scores.rows, scores.cols, Float64Array.from(scores.data));
  if (on)
    for (let i = 0; i < out.rows; i++)
      for (let j = i + 1; j < out.cols; j++) out.data[i * out.cols + j] = -Infinity;
  return out;
}

function softmaxRows(scores) {
  const out = matrix(scores.rows, scores.cols);
  for (let i = 0; i < scores.rows; i++) {
    const row = scores.data.subarray(i * scores.cols, (i + 1) * scores.cols);
    const largest = Math.max(...row);
    let sum = 0;
    for (let j = 0; j < row.length; j++) sum += out.data[i * out.cols + j] = Math.exp(row[j] - largest);
    for (let j = 0; j < row.length; j++) out.data[i * out.cols + j] /= sum;
  }
  return out;
}

function keepMask(T, p, seed, layer, head) {
  const mixed = (h, key) => {
    h = ((h ^ key) + 0x9e3779b9) >>> 0;
    h = Math.imul(h ^ (h >>> 16), 0x7feb352d) >>> 0;
    h = Math.imul(h ^ (h >>> 15), 0x846ca68b) >>> 0;
    return (h ^ (h >>> 16)) >>> 0;
  };
  const start = mixed(mixed(mixed(0, seed), layer), head);
  const threshold = Math.trunc(p * 2 ** 32);
  const out = matrix(T, T);
  for (let i = 0; i < T; i++)
    for (let j = 0; j < T; j++)
      out.data[i * T + j] = mixed(mixed(start, i), j) >= threshold ? 1 : 0;
  return out;
}

function attentionDropout(weights, keep, p, training) {
  if (!training) return weights;
  const out = matrix(weights.rows, weights.cols);
  for (let n = 0; n < out.data.length; n++) out.data[n] = (weights.data[n] * keep.data[n]) / (1 - p);
  return out;
}

// One head from its queries, keys and values, under the page's switches (steps 5 to 8).
function singleHead(q, k, v, layer, head, s) {
  const T = q.rows;
  const scores = timesTransposed(q, k);
  const divided = scaled(scores, q.cols, s.scaling);
  const open = softmaxRows(divided);
  const masked = causalMask(divided, s.mask);
  const weights = softmaxRows(masked);
  const keep = keepMask(T, s.p, s.seed, layer, head);
  const dropped = attentionDropout(weights, keep, s.p, s.dropout);
  return {
    scores, divided, open, masked, weights, keep, dropped,
    openContext: times(open, v), maskedContext: times(weights, v), context: times(dropped, v),
  };
}

// What people ask of a head, from its weights as trained. null: the text is too short to say.
//   first, previous: mean weight on the first token, on the token before, over rows i >= 2 (in
//     row 1 the two are one token);
//   induction: where token i stood earlier at j, the weight on what followed it there, j + 1;
//   entropy: in bits, mean over rows i >= 1;  distance: sum of weight * (i - j), mean likewise.
function headFigures(weights, ids) {
  const T = weights.rows;
  const w = (i, j) => weights.data[i * T + j];
  const mean = (list) => (list.length ? list.reduce((a, b) => a + b, 0) / list.length : null);
  const first = [], previous = [], induction = [], entropy = [], distance = [];
  for (let i = 1; i < T; i++) {
    let bits = 0, back = 0, followed = 0, seen = false;
    for (let j = 0; j <= i; j++) {
      if (w(i, j) > 0) bits -= w(i, j) * Math.log2(w(i, j));
      back += w(i, j) * (i - j);
      if (j + 1 < i && ids[j] === ids[i]) { seen = true; followed += w(i, j + 1); }
    }
    entropy.push(bits);
    distance.push(back);
    if (seen) induction.push(followed);
    if (i >= 2) { first.push(w(i, 0)); previous.push(w(i, i - 1)); }
  }
  const figures = {
    entropy: mean(entropy), distance: mean(distance),
    first: mean(first), previous: mean(previous), induction: mean(induction),
  };
  const kinds = ["previous", "first", "induction"].filter((k) => figures[k] !== null && figures[k] >= 0.4);
  figures.kind = kinds.sort((a, b) => figures[b] - figures[a])[0] ?? null;
  return figures;
}
