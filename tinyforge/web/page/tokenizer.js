// Byte-level BPE: the JavaScript of tinyforge/tokenizers/bpe.py, for the tokenizer.json that it writes.

/* How GPT-2's files spell a byte: a printable byte as itself, the n-th other one as U+0100 + n. */
const PRINTABLE = [...Array(0x7f - 0x21).keys()].map((i) => i + 0x21).concat([...Array(0xad - 0xa1).keys()].map((i) => i + 0xa1), [...Array(0x100 - 0xae).keys()].map((i) => i + 0xae));
const GPT2_ORDER = [...PRINTABLE, ...[...Array(256).keys()].filter((byte) => !PRINTABLE.includes(byte))];
const SPELT = new Map(GPT2_ORDER.map((byte, i) => [i < PRINTABLE.length ? byte : 256 + i - PRINTABLE.length, byte]));
const utf8 = new TextEncoder();
const escaped = (text) => text.replace(/[.*+?^${}()|[\]\\/-]/g, "\\$&");
/* Bytes as a string of one character each, to look them up. */
const key = (bytes) => String.fromCharCode(...bytes);

export class Tokenizer {
  /* content: of tokenizer.json. pattern: its regular expression for pieces, in JavaScript's syntax. */
  constructor(content, pattern) {
    this.pieces = new RegExp(pattern, "gu");
    this.nfc = Boolean(content.nfc);
    this.cache = new Map();
    const merges = content.merges;
    if (content.format === "tinyforge-bpe") {
      const order = content.byte_order === "gpt2" ? GPT2_ORDER : [...Array(256).keys()];
      this.tokens = order.map((byte) => Uint8Array.of(byte));
      for (const [left, right] of merges) this.tokens.push(joined(this.tokens[left], this.tokens[right]));
      this.specials = Object.fromEntries(content.specials.map((text, i) => [text, this.tokens.length + i]));
      this.made = merges.map((_, rank) => 256 + rank);
      this.byteIds = [...Array(256).keys()].map((byte) => order.indexOf(byte));
    } else {
      this.tokens = content.tokens.map((spelt) => Uint8Array.from([...spelt].map((c) => SPELT.get(c.codePointAt(0)))));
      this.specials = content.specials;
      this.userDefined = content.user_defined;
      const special = new Set([...Object.values(this.specials), ...Object.values(this.userDefined || {})]), ids = new Map();
      this.tokens.forEach((bytes, id) => { if (bytes.length && !special.has(id)) ids.set(key(bytes), id); });
      for (const id of Object.values(this.userDefined || {})) if (!ids.has(key(this.tokens[id]))) ids.set(key(this.tokens[id]), id);
      this.made = merges.map(([left, right]) => ids.get(key(joined(this.tokens[left], this.tokens[right]))));
      this.byteIds = [...Array(256).keys()].map((byte) => ids.get(String.fromCharCode(byte)) ?? -1);
      if (content.ignore_merges) this.whole = ids;
    }
    for (const [text, id] of Object.entries(this.specials)) this.tokens[id] = utf8.encode(text);
    this.size = this.tokens.length;
    // A pair of ids is one number: both are below 2^26.
    this.ranks = new Map(merges.map(([left, right], rank) => [left * 2 ** 26 + right, rank]));
    if (this.userDefined && Object.keys(this.userDefined).length)
      this.split = new RegExp(`(${Object.keys(this.userDefined).sort((a, b) => b.length - a.length).map(escaped).join("|")})`, "u");
  }

  /* The ids of a text. Text that spells a special token stays text. */
  encode(text) {
    const parts = this.split ? text.split(this.split) : [text];
    return parts.flatMap((part, i) => i % 2 ? [this.userDefined[part]] : this.encodePlain(part));
  }

  encodePlain(text) {
    const ids = [];
    for (const piece of (this.nfc ? text.normalize("NFC") : text).match(this.pieces) || []) {
      let found = this.cache.get(piece);
      if (!found) {
        if (this.cache.size > 50_000) this.cache.clear();
        this.cache.set(piece, found = this.merge(utf8.encode(piece)));
      }
      for (const id of found) ids.push(id);
    }
    return ids;
  }

  /* The pair of lowest rank is merged first, the leftmost of equals, by a heap of pairs over a linked list: a long run
     without a space stays cheap. */
  merge(bytes) {
    const whole = bytes.length < 200 ? this.whole?.get(key(bytes)) : undefined;
    if (whole !== undefined) return [whole];
    const ids = [...bytes].map((byte) => this.byteIds[byte]).filter((id) => id >= 0), end = ids.length;
    const next = ids.map((_, i) => i + 1), before = ids.map((_, i) => i - 1), heap = [];
    const rank = (left) => left >= 0 && next[left] < end ? this.ranks.get(ids[left] * 2 ** 26 + ids[next[left]]) : undefined;
    const offer = (left) => { const found = rank(left); if (found !== undefined) push(heap, found * 2 ** 26 + left); };
    for (let i = 0; i < end - 1; i++) offer(i);
    while (heap.length) {
      const top = pop(heap), left = top % 2 ** 26, found = Math.floor(top / 2 ** 26);
      if (ids[left] < 0 || rank(left) !== found) continue;  // another merge has taken one of the two
      const right = next[left];
      ids[left] = this.made[found];
      ids[right] = -1;
      next[left] = next[right];
      if (next[right] < end) before[next[right]] = left;
      offer(left);
      offer(before[left]);
    }
    return ids.filter((id) => id >= 0);
  }
}

function joined(a, b) {
  const found = new Uint8Array(a.length + b.length);
  found.set(a);
  found.set(b, a.length);
  return found;
}

function push(heap, value) {
  let at = heap.push(value) - 1;
  for (let up; at && heap[up = (at - 1) >> 1] > value; at = up) heap[at] = heap[up];
  heap[at] = value;
}

function pop(heap) {
  const top = heap[0], last = heap.pop();
  if (!heap.length) return top;
  let at = 0;
  for (let down; (down = 2 * at + 1) < heap.length; at = down) {
    if (down + 1 < heap.length && heap[down + 1] < heap[down]) down++;
    if (heap[down] >= last) break;
    heap[at] = heap[down];
  }
  heap[at] = last;
  return top;
}

/* The ids of a conversation: `template` has the fixed parts between messages, each a text or the id of a special token,
   as tinyforge/web writes them. A last user message is followed by the beginning of a reply. */
export function encodeConversation(tokenizer, template, messages) {
  const clean = (text) => template.strips ? text.trim() : text, parts = [...template.start];
  const system = messages[0]?.role === "system" ? messages[0] : null, turns = system ? messages.slice(1) : messages;
  if (system) parts.push(...template.system[0], clean(system.content), ...template.system[1]);
  else parts.push(...template.open);
  turns.forEach(({ role, content }, i) => {
    if (role === "user") parts.push(clean(content), ...template.asked);
    else parts.push({ text: clean(content) }, ...(i + 1 < turns.length ? template.answered : []));
  });
  // Neighbouring texts are one text; a reply is encoded alone, so that a prompt is a prefix of it and its reply.
  const ids = [];
  let text = "";
  const flush = () => { if (text) ids.push(...tokenizer.encode(text)); text = ""; };
  for (const part of parts) {
    if (typeof part === "string") { text += part; continue; }
    flush();
    if (typeof part === "number") ids.push(part);
    else ids.push(...tokenizer.encode(part.text));
  }
  flush();
  return ids;
}
