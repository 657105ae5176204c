// The model, in a thread of its own: loads the weights, and answers the requests of api.js.
import { Decoder } from "./decoder.js";
import { gpuDecoder } from "./gpu.js";
import { choose, logProbabilities, uniforms } from "./sampling.js";
import { Tokenizer, encodeConversation } from "./tokenizer.js";

const CACHE = `tinyforge-weights ${new URL("./", location.href).pathname}`;
const PIECE = 16;  // tokens of a prompt between two looks at whether the request was stopped
const stopped = new Set();
let manifest = null, gpu = "", ready = null, tokenizer = null, queue = Promise.resolve();
let decoder = null, script = null, held = [];  // `decoder` is on the GPU where there is one; `script` is the one in JavaScript

class Fault extends Error {
  constructor(message, code = null) { super(message); this.code = code; }
}

// --- loading

/* One part of the weights, from the browser's cache where it is there. */
async function part({ file, bytes }, cache, heard) {
  const kept = await cache?.match(file);
  let answer = kept;
  if (!answer) {
    try { answer = await fetch(file); } catch { throw new Fault(`The weights could not be loaded: ${file} does not arrive. Check the connection and try again.`); }
    if (!answer.ok) throw new Fault(`The weights could not be loaded: the server answered ${answer.status} for ${file}. Publish the folder again.`);
  }
  const data = new Uint8Array(bytes), reader = answer.body.getReader();
  for (let at = 0; ;) {
    let found;
    try { found = await reader.read(); } catch { throw new Fault(`The connection broke while ${file} was loading. Try again.`); }
    if (found.done) {
      if (at !== bytes) {
        await cache?.delete(file);
        throw new Fault(`${file} has ${at} bytes, expected ${bytes}. Try again; if it stays so, publish the folder again.`);
      }
      break;
    }
    if (at + found.value.length > bytes) throw new Fault(`${file} has more than the expected ${bytes} bytes. Publish the folder again.`);
    data.set(found.value, at);
    at += found.value.length;
    heard(found.value.length);
  }
  if (cache && !kept) await cache.put(file, new Response(data)).catch(() => {});  // no room: it is loaded again next time
  return data;
}

async function load() {
  const cache = await self.caches?.open(CACHE).catch(() => null), total = manifest.parts.reduce((sum, one) => sum + one.bytes, 0);
  let loaded = 0, at = 0, all;
  const heard = (bytes) => postMessage({ progress: { loaded: loaded += bytes, total } });
  heard(0);
  try { all = new Uint8Array(total); } catch { throw new Fault(`This browser has no room for the model's ${Math.round(total / 1e6)} MB. Close other tabs, or use another device.`); }
  for (const one of manifest.parts) {
    all.set(await part(one, cache, heard), at);
    at += one.bytes;
  }
  const current = new Set(manifest.parts.map(({ file }) => new URL(file, location.href).href));
  for (const request of await cache?.keys() || []) if (!current.has(request.url)) cache.delete(request);
  const answer = await fetch("tokenizer.json").catch(() => null);
  if (!answer?.ok) throw new Fault("The tokenizer could not be loaded. Check the connection and try again.");
  tokenizer = new Tokenizer(await answer.json(), manifest.pattern);
  const floats = (at, count) => new Float32Array(all.buffer, at, count);
  const tensors = Object.fromEntries(Object.entries(manifest.tensors).map(([name, { at, shape: [outer, inner], scales }]) => [name,
    scales === undefined ? floats(at, outer * (inner ?? 1)) : { codes: new Int8Array(all.buffer, at, outer * inner), words: new Int32Array(all.buffer, at, outer * inner / 4), scales: floats(scales, outer), outer, inner }]));
  tensors.head ??= tensors.embedding;
  script = new Decoder(manifest.shape, tensors);
  const { decoder: found, reason } = gpu === "off" ? {} : await gpuDecoder(manifest.shape, tensors, gpu === "software");
  use(found ?? script, reason && `${reason} The model runs in JavaScript.`);
}

function use(chosen, note = "") {
  decoder = chosen;
  postMessage({ ready: { label: decoder.label, note } });
}

// --- text

/* A token as the page shows it. */
const shown = (id) => ({ id, text: new TextDecoder().decode(tokenizer.tokens[id]), bytes: [...tokenizer.tokens[id]] });

/* A token with what the model expected in its place. */
function inside(id, logits, top) {
  const logs = logProbabilities(logits), best = [];
  logs.forEach((p, i) => {
    if (i === id || (best.length === top && p <= logs[best[top - 1]])) return;
    const place = best.findIndex((other) => logs[other] < p);
    best.splice(place < 0 ? best.length : place, 0, i);
    best.length = Math.min(best.length, top);
  });
  return { ...shown(id), logprob: logs[id], probability: Math.exp(logs[id]), runners_up: best.map((i) => ({ ...shown(i), probability: Math.exp(logs[i]) })), head: 0, refused: null };
}

/* Text of tokens: never half a character, and nothing from a stop string on. */
class TextStream {
  constructor(stops) { Object.assign(this, { stops, held: "", stopped: false, decoder: new TextDecoder() }); }
  push(id) { return this.take(this.decoder.decode(tokenizer.tokens[id], { stream: true }), false); }
  finish() { return this.take(this.decoder.decode(), true); }
  take(text, last) {
    if (this.stopped) return "";
    this.held += text;
    const found = Math.min(...this.stops.map((stop) => this.held.indexOf(stop)).filter((at) => at >= 0));
    this.stopped = found < Infinity;
    let sure = this.stopped ? found : this.held.length;
    if (!this.stopped && !last)
      for (const stop of this.stops)
        for (let n = Math.min(stop.length - 1, this.held.length); n > 0; n--) if (this.held.endsWith(stop.slice(0, n))) sure = Math.min(sure, this.held.length - n);
    const out = this.held.slice(0, sure);
    this.held = this.held.slice(sure);
    return out;
  }
}

// --- requests

/* Let messages arrive: without it no request could be stopped. */
const channel = new MessageChannel();
const breathe = () => new Promise((done) => { channel.port1.onmessage = done; channel.port2.postMessage(0); });
const check = async (id) => { await breathe(); if (stopped.has(id)) throw new Fault("stopped", "stopped"); };

/* Append to the text; returns the logits after it if they are wanted. Where the GPU is lost, JavaScript takes over. */
async function append(tokens, wanted = false) {
  let logits;
  try { logits = await decoder.append(tokens, wanted); } catch (error) {
    if (decoder === script) throw error;
    use(script, "The GPU was lost: the model goes on in JavaScript.");
    script.rewind(0);
    await script.append(held);
    logits = await script.append(tokens, wanted);
  }
  held.push(...tokens);
  return logits;
}

/* Make the cache hold `ids`; returns the logits after the last one, and how many were there. */
async function read(ids, id) {
  let same = 0;
  while (same < held.length && same < ids.length - 1 && held[same] === ids[same]) same++;
  decoder.rewind(same);
  held.length = same;
  while (ids.length - held.length > PIECE) {
    await check(id);
    await append(ids.slice(held.length, held.length + PIECE));
  }
  return { logits: await append(ids.slice(held.length), true), reused: same };
}

function checkRoom(count, most) {
  if (count > most) throw new Fault(`The conversation takes ${count} tokens; the model's context is ${manifest.shape.context}, part of which is for the reply.`, "context_length_exceeded");
}

async function chat(request, id, say) {
  const { context, vocab } = manifest.shape, ids = encodeConversation(tokenizer, manifest.template, request.messages);
  const limit = request.max_tokens ?? Infinity, extra = request.tinyforge || {}, began = performance.now();
  checkRoom(ids.length, context - Math.min(limit, Math.floor(context / 4)));
  const draw = uniforms(request.seed ?? crypto.getRandomValues(new Uint32Array(1))[0]), ends = new Set(manifest.template.ends);
  const stream = new TextStream(request.stop || []), most = Math.min(limit, context - ids.length), text = ids.slice();
  let { logits, reused } = await read(ids, id), first = null, made = 0, finish = "length";
  while (made < most) {
    const token = choose(logits.subarray(0, Math.min(vocab, tokenizer.size)), request, text, draw);
    first ??= performance.now();
    if (ends.has(token)) { finish = "stop"; break; }
    made++;
    text.push(token);
    const content = stream.push(token);
    say({ choices: [{ delta: { content }, ...(extra.look_inside ? { tinyforge: { tokens: [inside(token, logits, extra.top)] } } : {}) }], token });
    if (stream.stopped) { finish = "stop"; break; }
    await check(id);
    if (made < most) logits = await append([token], true);
  }
  const now = performance.now();
  say({ choices: [{ delta: { content: stream.finish() }, finish_reason: finish }], usage: { prompt_tokens: ids.length, completion_tokens: made },
    tinyforge: { prompt_tokens: ids.length, cached_tokens: reused, tokens: made, passes: made, drafted: [], accepted: [],
      seconds_to_first: first === null ? null : (first - began) / 1000, tokens_per_second: made > 1 ? 1000 * (made - 1) / (now - first) : null } });
}

/* The tokens of the last message, a reply that is there. */
async function score(request, id) {
  const { vocab, context } = manifest.shape, before = encodeConversation(tokenizer, manifest.template, request.messages.slice(0, -1));
  const ids = encodeConversation(tokenizer, manifest.template, request.messages), count = ids.length - before.length;
  checkRoom(ids.length, context);
  const found = [], { logits } = await read(ids.slice(0, before.length), id);
  for (let i = 0, last = logits; i < count; i++) {
    found.push(inside(ids[before.length + i], last.subarray(0, vocab), request.tinyforge.top));
    if (i + 1 === count) break;
    await check(id);
    last = await append([ids[before.length + i]], true);
  }
  return found;
}

/* The attention weights of one head, a row for each token. */
async function attention({ messages, layer, head }, id) {
  const ids = encodeConversation(tokenizer, manifest.template, messages), most = manifest.about.attention_tokens, weights = [];
  if (ids.length > most) throw new Fault(`The conversation takes ${ids.length} tokens; attention is drawn for ${most} at most.`);
  script.rewind(0);
  if (script === decoder) held = [];
  for (let at = 0; at < ids.length; at += PIECE) {
    await check(id);
    await script.append(ids.slice(at, at + PIECE), false, { layer, head, weights });
    if (script === decoder) held = ids.slice(0, at + PIECE);
  }
  return { layer, head, causal: true, tokens: ids.map(shown), weights: weights.map((row) => [...row, ...Array(ids.length - row.length).fill(0)]) };
}

/* The logits of the token after a text, outside a conversation, and every token's text: for a lesson of the course. */
async function next({ text }, id) {
  const ids = tokenizer.encode(text), { vocab, context } = manifest.shape;
  checkRoom(ids.length, context);
  const { logits } = await read(ids, id);
  return { logits: Array.from(logits.subarray(0, Math.min(vocab, tokenizer.size))), names: tokenizer.tokens.map((_, token) => shown(token).text) };
}

const KINDS = { chat, score, attention, next };

async function answer({ id, kind, request }) {
  const say = (chunk) => postMessage({ id, chunk });
  try {
    await (ready ??= load());
    if (stopped.has(id)) throw new Fault("stopped", "stopped");
    postMessage({ id, result: kind === "load" ? null : await KINDS[kind](request, id, say) });
  } catch (error) {
    if (!decoder) ready = null;  // the next request loads again
    postMessage({ id, fault: { message: error.message, code: error.code ?? null, known: error instanceof Fault } });
  }
  stopped.delete(id);
}

addEventListener("message", ({ data }) => {
  if (data.manifest) ({ manifest, gpu } = data);
  else if (data.stop !== undefined) stopped.add(data.stop);
  else queue = queue.then(() => answer(data));  // one after the other: there is one cache of keys and values
});
