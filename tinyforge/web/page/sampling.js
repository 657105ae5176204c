// From logits to a token: the steps of tinyforge/infer/sampling.py, with another generator of random numbers.

/* A generator of numbers in [0, 1) from a seed (mulberry32). */
export function uniforms(seed) {
  let state = seed >>> 0;
  return () => {
    state = (state + 0x6d2b79f5) >>> 0;
    let x = Math.imul(state ^ (state >>> 15), state | 1);
    x ^= x + Math.imul(x ^ (x >>> 7), x | 61);
    return ((x ^ (x >>> 14)) >>> 0) / 4294967296;
  };
}

export function argmax(logits) {
  let best = 0;
  for (let i = 1; i < logits.length; i++) if (logits[i] > logits[best]) best = i;
  return best;
}

/* log softmax of all logits, in double precision. */
export function logProbabilities(logits) {
  const top = logits[argmax(logits)];
  let sum = 0;
  for (const z of logits) sum += Math.exp(z - top);
  const shift = top + Math.log(sum);
  return Float64Array.from(logits, (z) => z - shift);
}

/* options: temperature, top_k, top_p, min_p, repetition_penalty. seen: the ids of the text. draw: from `uniforms`. */
export function choose(logits, options, seen, draw) {
  const { temperature = 1, top_k = 0, top_p = 1, min_p = 0, repetition_penalty: penalty = 1 } = options;
  const z = Float64Array.from(logits);
  if (penalty !== 1) for (const id of new Set(seen)) z[id] = z[id] > 0 ? z[id] / penalty : z[id] * penalty;
  if (temperature === 0) return argmax(z);
  const top = z[argmax(z)];
  for (let i = 0; i < z.length; i++) z[i] = (z[i] - top) / temperature;
  // Each cut keeps the most likely tokens, so that together they are one threshold.
  let least = min_p > 0 ? Math.log(min_p) : -Infinity;
  const k = top_k > 0 && top_k < z.length ? top_k : z.length;
  if (k < z.length || top_p < 1) {
    const sorted = z.slice().sort().reverse().subarray(0, k);
    let last = k - 1;
    if (top_p < 1) {
      const total = sorted.reduce((sum, one) => sum + Math.exp(one), 0);
      let running = 0;
      last = sorted.findIndex((one) => (running += Math.exp(one)) >= top_p * total);
      if (last < 0) last = k - 1;
    }
    least = Math.max(least, sorted[last]);
  }
  let total = 0;
  for (let i = 0; i < z.length; i++) total += z[i] = z[i] >= least ? Math.exp(z[i]) : 0;
  let rest = draw() * total, found = 0;
  for (let i = 0; i < z.length; i++) {
    if (z[i] === 0) continue;
    found = i;
    if ((rest -= z[i]) < 0) break;
  }
  return found;
}
