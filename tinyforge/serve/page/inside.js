// The panel with what the model computed: a token's candidates, draft heads, attention.
import { attention } from "./api.js";
import { element, percent, visible } from "./text.js";

const $ = (id) => document.getElementById(id);
const LEAST_SHADE = 0.05, MOST_SHADE = 0.42, MOST_BITS = 5;

/* By the token's surprise, -log2 p. */
const shade = (p) => LEAST_SHADE + (MOST_SHADE - LEAST_SHADE) * Math.min(1, -Math.log2(Math.max(p, 1e-9)) / MOST_BITS);

/* A reply as tokens, shaded by how unlikely each was. One of them is in the tab order; the arrow keys move along. */
export function tokenText(tokens, choose) {
  const group = element("div", { className: "tokens", attributes: { role: "group", "aria-label": "Tokens of the reply; the arrow keys move between them" } });
  tokens.forEach((token, place) => {
    const shown = token.text.includes("\n") ? token.text.replace(/\n/g, "\u21b5\n") : token.text || `#${token.id}`;
    const made = element("span", { className: `tok${token.head ? " drafted" : ""}${token.text.endsWith("\n") ? " ends" : ""}`, textContent: shown, tabIndex: place ? -1 : 0,
      attributes: { role: "button", "aria-pressed": "false", "aria-label": `${visible(token)}, ${percent(token.probability)}${token.head ? `, from draft head ${token.head}` : ""}` } });
    made.style.setProperty("--shade", shade(token.probability).toFixed(3));
    made.addEventListener("click", () => choose(place));
    group.append(made);
  });
  group.addEventListener("keydown", (event) => {
    const all = [...group.children], now = all.indexOf(document.activeElement);
    const to = { ArrowRight: now + 1, ArrowDown: now + 1, ArrowLeft: now - 1, ArrowUp: now - 1, Home: 0, End: all.length - 1 }[event.key];
    if (now < 0) return;
    if (event.key === "Enter" || event.key === " ") { event.preventDefault(); choose(now); } else if (all[to]) { event.preventDefault(); all[to].focus(); choose(to); }
  });
  return group;
}

export function mark(group, place) {
  [...group.children].forEach((made, i) => { made.setAttribute("aria-pressed", String(i === place)); made.tabIndex = i === Math.max(0, place) ? 0 : -1; });
}

export function showToken(token, place, count) {
  const rows = [{ ...token, it: true }, ...(token.runners_up || [])].sort((a, b) => b.probability - a.probability);
  const from = token.head ? ["Came from ", element("b", { textContent: `draft head ${token.head}` }), ", and head 0 agreed."] : ["Came from head 0."];
  if (token.refused) from.push(` Draft head ${token.refused.head} had proposed \u201c${visible(token.refused)}\u201d, which was refused.`);
  $("token").hidden = false;
  $("token").replaceChildren(element("h3", { textContent: `Token ${place + 1} of ${count}` }),
    element("p", { className: "chosen" }, element("b", { textContent: visible(token) }), element("span", { textContent: `id ${token.id}, ${percent(token.probability)}` })),
    ...rows.map((row) => {
      const made = element("div", { className: row.it ? "cand it" : "cand" }, element("code", { textContent: visible(row) }), element("i"), element("span", { textContent: percent(row.probability) }));
      made.style.setProperty("--part", row.probability);
      return made;
    }),
    element("p", { className: "from" }, ...from));
}

export function showPasses(found) {
  $("passes").hidden = !found;
  if (!found) return;
  const facts = [["Prompt", `${found.prompt_tokens} tokens${found.cached_tokens ? `, ${found.cached_tokens} of them cached` : ""}`],
    ["Reply", `${found.tokens} ${found.tokens === 1 ? "token" : "tokens"} in ${found.passes} ${found.passes === 1 ? "pass" : "passes"}`]];
  if (found.seconds_to_first !== null) facts.push(["First token", `${Math.round(1000 * found.seconds_to_first)} ms`]);
  if (found.tokens_per_second !== null) facts.push(["Speed", `${Math.round(found.tokens_per_second).toLocaleString("en")} tokens/s`]);
  const drafted = (found.drafted || []).map((n, k) => [k + 1, n, (found.accepted || [])[k] || 0]).filter(([, n]) => n > 0);
  const bars = drafted.map(([head, n, taken]) => {
    const made = element("div", { className: "cand it" }, element("span", { textContent: `Head ${head}` }), element("i"), element("span", { textContent: `${taken} of ${n}` }));
    made.style.setProperty("--part", taken / n);
    return made;
  });
  $("passes").replaceChildren(element("h3", { textContent: "This reply" }), element("dl", { className: "facts" }, ...facts.flatMap(([name, value]) => [element("dt", { textContent: name }), element("dd", { textContent: value })])),
    ...(bars.length ? [element("div", { className: "drafts" }, element("h3", { textContent: "Drafts accepted" }), ...bars)] : []));
}

/* The heat map: row t is the query token, column s the key token. */
export class Attention {
  constructor() {
    Object.assign(this, { able: false, layers: 0, heads: [], asked: null, found: null, at: null, cancel: null });
    $("layer").addEventListener("change", () => { this.fillHeads(); this.load(); });
    $("head").addEventListener("change", () => this.load());
    $("heat").addEventListener("pointermove", (event) => {
      if (!this.found) return;
      const box = $("heat").getBoundingClientRect(), n = this.found.tokens.length;
      this.point(Math.floor((event.clientY - box.top) / box.height * n), Math.floor((event.clientX - box.left) / box.width * n));
    });
    $("heat").addEventListener("keydown", (event) => {
      const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
      if (!step || !this.found) return;
      event.preventDefault();
      const [t, s] = this.at || [this.found.tokens.length - 1, 0];
      this.point(t + step[0], s + step[1]);
    });
  }

  model(about) {
    this.able = Boolean(about?.attention) && about.layers > 0;
    this.layers = this.able ? about.layers : 0;
    this.heads = this.able ? Array.from({ length: about.layers }, (_, i) => Array.isArray(about.heads) ? about.heads[i] : about.heads) : [];
    this.most = about?.attention_tokens;
    $("layer").replaceChildren(...this.heads.map((_, i) => element("option", { value: i, textContent: i })));
    $("layer").value = Math.max(0, this.layers - 1);
    this.fillHeads();
  }

  fillHeads() {
    const before = $("head").value, count = this.heads[$("layer").value] || 0;
    $("head").replaceChildren(...Array.from({ length: count }, (_, i) => element("option", { value: i, textContent: i })));
    if (Number(before) < count) $("head").value = before || 0;
  }

  /* messages: the conversation, the reply included; ids: of the reply, to find its rows. */
  show(messages, ids) {
    this.asked = messages && { messages, ids };
    this.found = null;
    this.load();
  }

  async load() {
    this.cancel?.abort();
    $("attention").hidden = !this.able || !this.asked;
    if (!this.able || !this.asked) return;
    this.cancel = new AbortController();
    $("attention-note").textContent = "Computing";
    try {
      this.found = await attention({ messages: this.asked.messages, layer: Number($("layer").value), head: Number($("head").value) }, this.cancel.signal);
    } catch (error) {
      if (error.name === "AbortError") return;
      this.found = null;
      $("heat").hidden = true;
      $("heat-said").textContent = "";
      $("attention-note").textContent = error.message;
      return;
    }
    const all = this.found.tokens.map((token) => token.id), ids = this.asked.ids || [];
    this.first = -1;
    for (let i = all.length - ids.length; ids.length && i >= 0 && this.first < 0; i--) if (ids.every((id, k) => all[i + k] === id)) this.first = i;
    $("attention-note").textContent = this.first < 0 ? "" : "The bar on the left marks the rows of the reply.";
    this.ticks();
    this.at = null;
    this.draw();
    if (this.place !== undefined) this.token(this.place);
  }

  /* The names of some rows and columns, and a bar where the rows of the reply are. */
  ticks() {
    const { tokens } = this.found, n = tokens.length, step = Math.ceil(n / 14), place = (i) => `${100 * (i + 0.5) / n}%`;
    for (const [name, side] of [["rows", "top"], ["columns", "left"]]) {
      const made = [];
      for (let i = 0; i < n; i += step) made.push(element("span", { textContent: visible(tokens[i]).slice(0, 8) }));
      made.forEach((tick, k) => tick.style.setProperty(side, place(k * step)));
      $(name).replaceChildren(...made);
    }
    if (this.first < 0) return;
    const bar = element("i");
    bar.style.setProperty("top", `${100 * this.first / n}%`);
    bar.style.setProperty("height", `${100 * (this.asked.ids?.length || 0) / n}%`);
    $("rows").append(bar);
  }

  draw() {
    if (!this.found) return;
    const canvas = $("heat"), { weights } = this.found, n = weights.length, cell = Math.max(2, Math.floor(656 / n));
    const style = getComputedStyle(document.documentElement), hex = (name) => style.getPropertyValue(name).trim().match(/[0-9a-f]{2}/gi).map((h) => parseInt(h, 16));
    const [low, high] = [hex("--sunk"), hex("--accent")];
    canvas.hidden = false;
    canvas.width = canvas.height = n * cell;
    const pen = canvas.getContext("2d");
    weights.forEach((row, t) => row.forEach((weight, s) => {
      const share = Math.sqrt(Math.min(1, Math.max(0, weight)));  // so that small weights are visible
      pen.fillStyle = this.found.causal && s > t ? style.getPropertyValue("--card") : `rgb(${low.map((v, i) => Math.round(v + (high[i] - v) * share)).join(" ")})`;
      pen.fillRect(s * cell, t * cell, cell, cell);
    }));
    if (this.at) {
      pen.strokeStyle = style.getPropertyValue("--ink");
      pen.lineWidth = Math.max(1, cell / 6);
      pen.strokeRect(0, this.at[0] * cell, n * cell, cell);
      if (this.at[1] !== null) pen.strokeRect(this.at[1] * cell, this.at[0] * cell, cell, cell);
    }
    canvas.setAttribute("aria-label", `Attention of layer ${this.found.layer}, head ${this.found.head}, over ${n} tokens; the arrow keys move between cells`);
  }

  point(t, s) {
    const n = this.found.tokens.length, within = (i) => Math.min(n - 1, Math.max(0, i));
    [t, s] = [within(t), within(s)];
    this.at = [t, this.found.causal ? Math.min(t, s) : s];
    this.draw();
    const name = (i) => `\u201c${visible(this.found.tokens[i])}\u201d`;
    $("heat-said").textContent = `${name(t)} (${t}) gives ${percent(this.found.weights[t][this.at[1]])} of its attention to ${name(this.at[1])} (${this.at[1]}).`;
  }

  /* The row of the token before the reply's token number `place`, which predicted it. */
  token(place) {
    this.place = place;
    if (!this.found || this.first < 1) return;
    const t = this.first + place - 1, row = this.found.weights[t];
    const best = row.map((weight, s) => [weight, s]).sort((a, b) => b[0] - a[0]).slice(0, 3);
    this.at = [t, null];
    this.draw();
    $("heat-said").textContent = `When this token was chosen, the head attended to ${best.map(([weight, s]) => `\u201c${visible(this.found.tokens[s])}\u201d ${percent(weight)}`).join(", ")}.`;
  }
}
