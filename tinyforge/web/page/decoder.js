// The decoder in plain JavaScript: NanoEuler and Llama with int8 weights, sums in double precision, stored in float32.
//
//     x += out(attention(rope(qkv(rmsnorm(x)))));   x += down(silu(gate(rmsnorm(x))) * up(rmsnorm(x)))

const ROWS = 4;  // positions of a prompt that share one reading of the weights

/* y[r] = s * (codes x[r]) + (add ? y[r] : 0) for `rows` rows, 1 or ROWS. x, y: rows of `inner` and `outer` numbers.
   words: the codes, four to a number, the first in its lowest byte. */
function multiply({ words, scales, outer, inner }, x, y, rows, add) {
  if (rows === 1) multiplyOne(words, scales, outer, inner, x, y, add);
  else multiplySome(words, scales, outer, inner, x, y, add);
}

/* Two rows of weights at a time: a number of x is converted once for both. */
function multiplyOne(words, scales, outer, inner, x, y, add) {
  const n = inner >> 2;
  for (let o = 0; o < outer; o += 2) {
    const two = o + 1 < outer, left = o * n, right = two ? left + n : left;
    let a = 0, b = 0, c = 0, d = 0, e = 0, f = 0, g = 0, h = 0;
    for (let j = 0, i = 0; j < n; j++, i += 4) {
      const p = words[left + j], q = words[right + j], x0 = x[i], x1 = x[i + 1], x2 = x[i + 2], x3 = x[i + 3];
      a += (p << 24 >> 24) * x0;
      b += (p << 16 >> 24) * x1;
      c += (p << 8 >> 24) * x2;
      d += (p >> 24) * x3;
      e += (q << 24 >> 24) * x0;
      f += (q << 16 >> 24) * x1;
      g += (q << 8 >> 24) * x2;
      h += (q >> 24) * x3;
    }
    const first = (a + b + (c + d)) * scales[o], second = (e + f + (g + h)) * scales[o + 1];
    y[o] = add ? y[o] + first : first;
    if (two) y[o + 1] = add ? y[o + 1] + second : second;
  }
}

function multiplySome(words, scales, outer, inner, x, y, add) {
  const n = inner >> 2, two = 2 * inner, three = 3 * inner;
  for (let o = 0, at = 0; o < outer; o++) {
    let a = 0, b = 0, c = 0, d = 0;
    for (let j = 0, i = 0; j < n; j++, at++, i += 4) {
      const p = words[at], w0 = p << 24 >> 24, w1 = p << 16 >> 24, w2 = p << 8 >> 24, w3 = p >> 24;
      a += w0 * x[i] + w1 * x[i + 1] + (w2 * x[i + 2] + w3 * x[i + 3]);
      b += w0 * x[inner + i] + w1 * x[inner + i + 1] + (w2 * x[inner + i + 2] + w3 * x[inner + i + 3]);
      c += w0 * x[two + i] + w1 * x[two + i + 1] + (w2 * x[two + i + 2] + w3 * x[two + i + 3]);
      d += w0 * x[three + i] + w1 * x[three + i + 1] + (w2 * x[three + i + 2] + w3 * x[three + i + 3]);
    }
    const s = scales[o], to = 2 * outer;
    y[o] = add ? y[o] + a * s : a * s;
    y[outer + o] = add ? y[outer + o] + b * s : b * s;
    y[to + o] = add ? y[to + o] + c * s : c * s;
    y[to + outer + o] = add ? y[to + outer + o] + d * s : d * s;
  }
}

export class Decoder {
  /* shape: of model.json. tensors: by name, {codes, words, scales, outer, inner}, words being the same bytes, or a Float32Array. */
  constructor(shape, tensors) {
    Object.assign(this, { shape, tensors, length: 0, label: "JavaScript" });
    const { dim, hidden, heads, kv_heads: kvHeads, head_dim: size, layers, context } = shape;
    const floats = (count) => new Float32Array(ROWS * count);
    this.x = floats(dim);
    this.h = floats(dim);
    this.qkv = floats((heads + 2 * kvHeads) * size);
    this.mixed = floats(heads * size);
    this.gateUp = floats(2 * hidden);
    this.hidden = floats(hidden);
    this.scores = new Float32Array(context);
    // (head, position, number): the positions of a head lie together.
    this.keys = Array.from({ length: layers }, () => new Float32Array(kvHeads * context * size));
    this.values = Array.from({ length: layers }, () => new Float32Array(kvHeads * context * size));
  }

  rewind(length) { this.length = Math.min(this.length, length); }

  /* Append tokens; returns the logits after the last one if they are `wanted`, else null. watch: {layer, head, weights},
     to which a row of attention weights is added for each token. */
  async append(tokens, wanted = false, watch = null) {
    let rows = 0;
    for (let i = 0; i < tokens.length; i += rows) {
      rows = tokens.length - i >= ROWS ? ROWS : 1;
      this.pass(tokens.slice(i, i + rows), watch);
    }
    if (!wanted) return null;
    const { dim, vocab } = this.shape, logits = new Float32Array(vocab);
    multiply(this.tensors.head, this.normed(this.tensors.final_gain, rows).subarray((rows - 1) * dim), logits, 1, false);
    return logits;
  }

  /* h = rmsnorm(x) */
  normed(gain, rows) {
    const { dim, norm_eps: eps } = this.shape, { x, h } = this;
    for (let r = 0, at = 0; r < rows; r++, at += dim) {
      let squares = 0;
      for (let i = 0; i < dim; i++) squares += x[at + i] * x[at + i];
      const factor = 1 / Math.sqrt(squares / dim + eps);
      for (let i = 0; i < dim; i++) h[at + i] = x[at + i] * factor * gain[i];
    }
    return h;
  }

  pass(tokens, watch) {
    const { dim, hidden, layers } = this.shape, { tensors, x, gateUp } = this, rows = tokens.length;
    const { codes, scales } = tensors.embedding;
    tokens.forEach((id, r) => { for (let i = 0; i < dim; i++) x[r * dim + i] = codes[id * dim + i] * scales[id]; });
    for (let layer = 0; layer < layers; layer++) {
      const of = (name) => tensors[`${layer}.${name}`];
      multiply(of("qkv"), this.normed(of("gain1"), rows), this.qkv, rows, false);
      for (let r = 0; r < rows; r++) this.attend(layer, r, watch);
      multiply(of("out"), this.mixed, x, rows, true);
      multiply(of("gate_up"), this.normed(of("gain2"), rows), gateUp, rows, false);
      for (let r = 0; r < rows; r++)
        for (let i = 0, at = 2 * r * hidden; i < hidden; i++, at++) this.hidden[r * hidden + i] = gateUp[at] / (1 + Math.exp(-gateUp[at])) * gateUp[at + hidden];
      multiply(of("down"), this.hidden, x, rows, true);
    }
    this.length += rows;
  }

  /* Rotate queries and keys of row r, append keys and values to the cache, and attend to it. */
  attend(layer, r, watch) {
    const { heads, kv_heads: kvHeads, head_dim: size, context } = this.shape, { cos, sin } = this.tensors, { scores, mixed } = this;
    const half = size / 2, position = this.length + r, length = position + 1, group = heads / kvHeads;
    const qkv = this.qkv.subarray(r * (heads + 2 * kvHeads) * size, (r + 1) * (heads + 2 * kvHeads) * size), keys = this.keys[layer], values = this.values[layer];
    for (let head = 0; head < heads + kvHeads; head++)
      for (let i = 0, at = head * size, turn = position * half; i < half; i++, at++, turn++) {
        const a = qkv[at], b = qkv[at + half];
        qkv[at] = a * cos[turn] - b * sin[turn];
        qkv[at + half] = b * cos[turn] + a * sin[turn];
      }
    for (let head = 0; head < kvHeads; head++) {
      const from = (heads + head) * size, to = (head * context + position) * size;
      keys.set(qkv.subarray(from, from + size), to);
      values.set(qkv.subarray(from + kvHeads * size, from + (kvHeads + 1) * size), to);
    }
    const scale = 1 / Math.sqrt(size);
    for (let head = 0; head < heads; head++) {
      const base = Math.floor(head / group) * context * size, query = head * size;
      let top = -Infinity, sum = 0;
      for (let s = 0, at = base; s < length; s++) {
        let score = 0;
        for (let i = 0; i < size; i++, at++) score += qkv[query + i] * keys[at];
        scores[s] = score *= scale;
        if (score > top) top = score;
      }
      for (let s = 0; s < length; s++) sum += scores[s] = Math.exp(scores[s] - top);
      const out = mixed.subarray((r * heads + head) * size, (r * heads + head + 1) * size).fill(0);
      for (let s = 0, at = base; s < length; s++) {
        const weight = scores[s] / sum;
        for (let i = 0; i < size; i++, at++) out[i] += weight * values[at];
      }
      if (watch?.layer === layer && watch.head === head) watch.weights.push(Array.from(scores.subarray(0, length), (weight) => weight / sum));
    }
  }
}
