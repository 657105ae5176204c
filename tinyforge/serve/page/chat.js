// The chat: conversations, messages, and the actions of the buttons.
import { Problem, apiKey, chat, models, score } from "./api.js";
import { Attention, mark, showPasses, showToken, tokenText } from "./inside.js";
import { DEFAULTS, Talk, saveSettings, settings, talks } from "./store.js";
import { element, icon, markdown } from "./text.js";

const $ = (id) => document.getElementById(id);
const log = $("log"), draft = $("draft"), form = $("sampling");
const options = settings(), attention = new Attention();
const seen = new WeakMap();  // the inside of each reply, {tokens, stats, sent} or {fault}; kept while the page is open
let talk = new Talk(), model = null, about = {}, running = null, scoring = null, editing = null, looked = null, said = null;

// First questions: for the model that tells stories, and for those that know the built-in world.
const STORIES = ["Tell me a story about a dog named Max.", "Tell me a story about a girl who lost her ball.", "Who are you?"];
const WORLD = ["How much is 13 plus 2?", "Which day is next after Sunday?", "What is the opposite of cold?"];

// --- the list of conversations

function drawList() {
  const all = talks();
  $("conversations").replaceChildren(...all.map((one) => {
    const open = element("button", { type: "button", className: "open", textContent: one.title, title: one.title });
    if (one.id === talk.id) open.setAttribute("aria-current", "true");
    open.addEventListener("click", () => { enter(one); narrow("history", false); });
    const remove = element("button", { type: "button", className: "remove", textContent: "Delete", attributes: { "aria-label": `Delete ${one.title}` } });
    remove.addEventListener("click", () => {
      if (!confirm(`Delete \u201c${one.title}\u201d? This cannot be undone.`)) return;
      one.forget();
      if (one.id === talk.id) enter(new Talk()); else drawList();
      $("new").focus();
    });
    return element("li", { className: one.id === talk.id ? "now" : "" }, open, remove);
  }));
}

function enter(other) {
  stop();
  talk = other;
  editing = looked = null;
  if (!talk.nodes.size) talk.system = options.system;
  form.system.value = talk.system;
  problem(null);
  $("room").textContent = "";
  try { talk.nodes.size ? sessionStorage.setItem("tinyforge-now", talk.id) : sessionStorage.removeItem("tinyforge-now"); } catch { /* the newest is opened */ }
  draw();
  log.scrollTop = log.scrollHeight;
}

function keep() {
  const gone = talk.save();
  try { sessionStorage.setItem("tinyforge-now", talk.id); } catch { /* the newest is opened */ }
  if (gone > 0) problem(`The browser's storage is full: ${gone} of the oldest conversations were removed.`);
  if (gone < 0) problem("The browser stores no more: this conversation will be lost when the page is closed.");
  drawList();
}

// --- messages

function draw() {
  const path = talk.path();
  $("title").textContent = talk.title;
  $("welcome").hidden = path.length > 0;
  $("messages").replaceChildren(...path.map((node) => message(node)));
  if (!path.length) welcome();
  drawList();
  drawInside();
}

function welcome() {
  const base = about.chat === false;
  $("welcome").replaceChildren(element("h2", { textContent: base ? "Begin a text, and the model continues it" : "Ask the model something" }),
    element("p", { textContent: base ? "This is a base model: it was trained to continue text, not to answer." : `It runs ${about.local ? "in" : "on"} this ${about.local ? "browser" : "server"}, and what you write is sent nowhere else. Conversations are stored in this browser.` }),
    ...(about.template === "alpaca" ? [element("div", { className: "tries" }, ...(model.id === "storyteller" ? STORIES : WORLD).map((text) => {
      const button = element("button", { type: "button", textContent: text });
      button.addEventListener("click", () => ask(text));
      return button;
    }))] : []));
}

function message(node) {
  const mine = node.role === "user", item = element("li", { className: `message ${node.role}`, id: `m-${node.id}` });
  if (editing === node.id) { item.append(editor(node)); return item; }
  const text = element("div", { className: "text" });
  item.append(element("div", { className: "who", textContent: mine ? "You" : model?.id || "Model" }), text);
  fill(node, text);
  if (running?.node === node) { item.classList.add("busy"); item.setAttribute("aria-busy", "true"); return item; }
  if (node.note) item.append(element("p", { className: "note", textContent: node.note }));
  item.append(actions(node, mine));
  return item;
}

function fill(node, text) {
  const inside = seen.get(node);
  if (node.role === "user") text.textContent = node.content;
  else if (options.inside && inside?.tokens?.length) {
    const group = tokenText(inside.tokens, (place) => look(node, place));
    text.replaceChildren(group);
    if (looked?.node === node) mark(group, looked.place);
  } else text.replaceChildren(markdown(node.content));
}

function actions(node, mine) {
  const row = element("div", { className: "actions" }), siblings = talk.children(node.parent), place = siblings.indexOf(node);
  const button = (text, label, act, off = false, picture = "") => {
    const made = element("button", { type: "button", disabled: off, title: label, attributes: { "aria-label": label } }, ...(picture ? [icon(picture)] : []), element("span", { textContent: text }));
    made.addEventListener("click", act);
    row.append(made);
    return made;
  };
  if (siblings.length > 1) {
    const turn = (to) => { talk.choose(siblings[to]); keep(); draw(); document.querySelector(`#m-${siblings[to].id} .actions button:not(:disabled)`)?.focus(); };
    button("\u2039", "Earlier version", () => turn(place - 1), place === 0);
    row.append(element("span", { className: "branch", textContent: `${place + 1} / ${siblings.length}` }));
    button("\u203a", "Later version", () => turn(place + 1), place === siblings.length - 1);
  }
  const off = running !== null;
  if (mine) button("Edit", "Edit this message", () => { editing = node.id; draw(); $("messages").querySelector(".edit textarea").focus(); }, off, "edit");
  else button("Regenerate", "Regenerate this reply", () => reply(node.parent), off, "again");
  const copy = button("Copy", mine ? "Copy this message" : "Copy this reply", async () => {
    const label = copy.lastChild;
    try { await navigator.clipboard.writeText(node.content); label.textContent = "Copied"; } catch { label.textContent = "Not allowed"; }
    tell(label.textContent);
    setTimeout(() => { label.textContent = "Copy"; }, 1500);
  }, false, "copy");
  if (!mine && node.content && about.chat !== undefined) button("Look inside", "Look inside this reply", () => { looked = { node, place: -1 }; panel("inside", true); }, off, "inside");
  return row;
}

function editor(node) {
  const area = element("textarea", { value: node.content, attributes: { "aria-label": "Edit the message" } });
  const done = () => { editing = null; draw(); document.querySelector(`#m-${node.id} .actions button:last-of-type`)?.focus(); };
  const cancel = element("button", { type: "button", className: "quiet", textContent: "Cancel" }), send = element("button", { type: "button", className: "primary", textContent: "Send" });
  const submit = () => {
    if (!area.value.trim()) return;
    editing = null;
    const other = talk.add(node.parent, "user", area.value.trim());
    reply(other.id);
  };
  cancel.addEventListener("click", done);
  send.addEventListener("click", submit);
  area.addEventListener("keydown", (event) => {
    if (event.key === "Escape") { event.stopPropagation(); done(); }
    if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); submit(); }
  });
  return element("div", { className: "edit" }, area, element("div", {}, cancel, send));
}

// --- asking

function ask(text) {
  if (running || !text.trim()) return;
  const path = talk.path(), last = path[path.length - 1];
  const node = talk.add(last ? last.id : null, "user", text.trim());
  draft.value = "";
  grow();
  reply(node.id);
}

/* The conversation that ends with the node, in the protocol's form. */
function messagesTo(id) {
  const found = [];
  for (let node = talk.nodes.get(id); node; node = talk.nodes.get(node.parent)) found.unshift({ role: node.role, content: node.content });
  return found.filter((one) => one.content !== "");
}

const system = () => about.system_prompt !== false && talk.system.trim() ? [{ role: "system", content: talk.system.trim() }] : [];

function request(messages) {
  const asked = { model: model?.id, messages: [...system(), ...messages], temperature: options.temperature, top_p: options.top_p, top_k: options.top_k, min_p: options.min_p,
    repetition_penalty: options.repetition_penalty, stream_options: { include_usage: true }, reasoning_format: "none" };
  if (options.max_tokens !== null) asked.max_tokens = options.max_tokens;
  if (options.seed !== null) asked.seed = options.seed;
  const stops = options.stop.split("\n").filter(Boolean).slice(0, 4);
  if (stops.length) asked.stop = stops;
  const drafts = Math.min(options.drafts, about.most_drafts || 0);
  if (options.inside || drafts) asked.tinyforge = { look_inside: options.inside, top: 5, drafts };
  return asked;
}

async function reply(parent) {
  if (running) return;
  problem(null);
  const owner = talk, node = talk.add(parent, "assistant");
  const mine = running = { node, cancel: new AbortController(), frame: 0 };
  looked = null;
  buttons();
  draw();
  log.scrollTop = log.scrollHeight;
  let messages = messagesTo(parent), left = 0;
  const inside = { tokens: [], stats: null, sent: null };
  seen.set(node, inside);
  let finish = null, fault = null, usage = null;
  for (;;) {
    try {
      for await (const chunk of chat(request(messages), mine.cancel.signal)) {
        const choice = chunk.choices?.[0];
        if (choice?.delta?.content) node.content += choice.delta.content;
        if (choice?.tinyforge?.tokens) inside.tokens.push(...choice.tinyforge.tokens);
        if (choice?.finish_reason) finish = choice.finish_reason;
        if (chunk.tinyforge) inside.stats = chunk.tinyforge;
        if (chunk.usage) usage = chunk.usage;
        if (!mine.frame) mine.frame = requestAnimationFrame(() => { mine.frame = 0; if (running === mine) refresh(node); });
      }
    } catch (error) {
      // When the context is full, the oldest turns are left out, as in the terminal's chat.
      if (error.code === "context_length_exceeded" && messages.length > 2 && !node.content) {
        messages = messages.slice(2);
        left += 2;
        continue;
      }
      fault = error;
    }
    break;
  }
  inside.sent = [...system(), ...messages];
  if (mine.frame) cancelAnimationFrame(mine.frame);
  if (running === mine) running = null;
  const stopped = fault?.name === "AbortError", notes = [];
  if (left) notes.push(`The ${left} oldest messages no longer fit the model's context and were left out.`);
  if (stopped) notes.push("Stopped.");
  else if (fault && node.content) notes.push(fault.message);
  else if (finish === "length") notes.push("The reply reached its maximum length; Settings can raise it, up to the model's context.");
  else if (!fault && !node.content) notes.push("The reply is empty: the model ended it immediately.");
  node.note = notes.join(" ");
  if (fault && !node.content) owner.remove(node);
  if (owner !== talk) { owner.save(); drawList(); buttons(); return; }
  keep();
  buttons();
  if (usage && about.context) $("room").textContent = `${usage.prompt_tokens + usage.completion_tokens} of ${about.context} tokens of context`;
  draw();
  if (fault && !stopped) trouble(fault, () => reply(parent));
  else if (options.inside && inside.tokens.length) { looked = { node, place: -1 }; drawInside(); }
  tell(stopped ? "Stopped" : fault ? "" : `Reply: ${node.content.slice(0, 600)}`);
}

function refresh(node) {
  const item = $(`m-${node.id}`), near = log.scrollHeight - log.scrollTop - log.clientHeight < 120;
  if (item) fill(node, item.querySelector(".text"));
  if (near) log.scrollTop = log.scrollHeight;
}

function stop() { running?.cancel.abort(); }

function buttons() {
  $("send").hidden = running !== null;
  $("stop").hidden = running === null;
  $("send").disabled = !draft.value.trim();
}

function trouble(fault, again) {
  const busy = fault.status === 429 ? `${fault.message.replace(/\.?$/, ".")}${fault.retryAfter ? ` Try again in ${fault.retryAfter} s.` : ""}` : fault instanceof Problem ? fault.message : `The page failed: ${fault.message}`;
  problem(busy, fault.status === 401 ? ["Enter a key", () => { panel("settings", true); form.key.focus(); }] : fault.code === "context_length_exceeded" ? ["New conversation", () => { enter(new Talk()); draft.focus(); }] : ["Try again", again]);
}

function problem(text, action) {
  $("problem").hidden = text === null;
  if (text === null) return $("problem").replaceChildren();
  const parts = [element("span", { textContent: text })];
  if (action) { const button = element("button", { type: "button", textContent: action[0] }); button.addEventListener("click", () => { problem(null); action[1](); }); parts.push(button); }
  $("problem").replaceChildren(...parts);
}

/* For screen readers: once per reply, not per token. */
function tell(text) {
  clearTimeout(said);
  $("said").textContent = "";
  if (text) said = setTimeout(() => { $("said").textContent = text; }, 100);
}

// --- looking inside

function look(node, place) {
  looked = { node, place };
  const group = $(`m-${node.id}`)?.querySelector(".tokens");
  if (group) mark(group, place);
  drawInside();
}

/* Have the server score a reply that was made without looking inside, or before the page was reloaded. */
async function scoreReply(node) {
  if (running || scoring?.node === node) return;
  scoring?.cancel.abort();
  const mine = scoring = { node, cancel: new AbortController() };
  let messages = messagesTo(node.id), found = null;
  while (!found) {
    try {
      const tokens = await score({ model: model?.id, messages: [...system(), ...messages], tinyforge: { score: true, top: 5 } }, mine.cancel.signal);
      found = { tokens, stats: null, sent: [...system(), ...messages.slice(0, -1)] };
    } catch (error) {
      if (error.code === "context_length_exceeded" && messages.length > 3) messages = messages.slice(2);
      else found = { fault: error };
    }
  }
  if (scoring === mine) scoring = null;
  if (found.fault?.name === "AbortError") return;
  seen.set(node, found);
  if (!running) draw();
}

let attended = null;
function drawInside() {
  $("inside").hidden = !options.inside;
  $("inside-switch").setAttribute("aria-pressed", String(options.inside));
  if (!options.inside) return;
  const path = talk.path(), node = looked && path.includes(looked.node) ? looked.node : [...path].reverse().find((one) => one.role === "assistant" && one.content && one !== running?.node);
  const inside = node && seen.get(node), ready = Boolean(inside?.tokens?.length);
  $("inside-hint").hidden = ready;
  $("inside-hint").textContent = !node ? "Send a message: each token of the reply is shaded by how unlikely it was. Choose one to see its alternatives."
    : inside?.fault ? `This reply cannot be shown as tokens: ${inside.fault.message}` : "Computing how likely each token of the reply was.";
  if (node && model && !inside?.fault && !ready && node !== running?.node) scoreReply(node);
  $("token").hidden = true;
  showPasses(inside?.stats || null);
  if (!ready) { attended = null; attention.place = undefined; attention.show(null); return; }
  if (looked && looked.place >= 0) showToken(inside.tokens[looked.place], looked.place, inside.tokens.length);
  else { $("token").hidden = false; $("token").replaceChildren(element("p", { className: "soft", textContent: "Choose a token of the reply. The stronger its shade, the less likely it was; underlined tokens came from a draft head." })); }
  attention.place = looked && looked.place >= 0 ? looked.place : undefined;
  if (attended !== node && inside.sent) { attended = node; attention.show([...inside.sent, { role: "assistant", content: node.content }], inside.tokens.map((token) => token.id)); } else if (attention.place !== undefined) attention.token(attention.place);
}

// --- panels, theme, settings

function panel(name, open) {
  if (name === "inside") { options.inside = open; saveSettings(options); if (open && innerWidth <= 1180) panel("settings", false); draw(); return; }
  $("settings").hidden = !open;
  $("settings-switch").setAttribute("aria-expanded", String(open));
  if (open && innerWidth <= 1180 && options.inside) panel("inside", false);
  if (open) $("settings").querySelector("textarea").focus();
}

function narrow(name, open) {
  $(name).classList.toggle("open", open);
  document.querySelector(`[data-open="${name}"]`).setAttribute("aria-expanded", String(open));
  if (open) $("new").focus();
}

const THEMES = ["auto", "light", "dark"], dark = matchMedia("(prefers-color-scheme: dark)");
function theme() {
  document.documentElement.dataset.theme = options.theme === "dark" || (options.theme !== "light" && dark.matches) ? "dark" : "light";
  $("theme").lastElementChild.textContent = `Theme: ${options.theme}`;
  attention.draw();
}

function fillForm() {
  for (const name of ["temperature", "top_p", "min_p", "top_k", "max_tokens", "repetition_penalty", "seed", "drafts", "stop"]) {
    form[name].value = options[name] ?? "";
    const output = form[name].parentElement.querySelector("output");
    if (output) output.textContent = Number(form[name].value).toFixed(2);
  }
  form.system.value = talk.system;
  form.key.value = apiKey.get();
}

function readForm(event) {
  const input = event.target, name = input.name;
  if (name === "key") { apiKey.set(input.value.trim()); if (event.type === "change") connect(); return; }
  if (name === "system") { talk.system = options.system = input.value; if (talk.nodes.size) talk.save(); }
  else if (name === "stop") options.stop = input.value;
  else if (!input.checkValidity()) return;
  else options[name] = input.value === "" ? DEFAULTS[name] : Number(input.value);
  const output = input.parentElement.querySelector("output");
  if (output) output.textContent = Number(input.value).toFixed(2);
  saveSettings(options);
}

async function connect() {
  try {
    model = (await models())[0];
  } catch (error) {
    $("model").textContent = "not connected";
    trouble(error, connect);
    return;
  }
  problem(null);
  about = model?.tinyforge || {};
  Object.assign(DEFAULTS, about.sampling);
  Object.assign(options, settings());
  const facts = [about.parameters && `${about.parameters.toLocaleString("en")} parameters`, about.context && `context ${about.context.toLocaleString("en")}`].filter(Boolean);
  $("model").textContent = [model?.id, ...facts].filter(Boolean).join(" \u00b7 ");
  form.drafts.max = about.most_drafts || 0;
  $("drafts-field").hidden = !about.most_drafts;
  form.key.parentElement.hidden = Boolean(about.local);
  if (about.limits?.max_tokens) { form.max_tokens.max = about.limits.max_tokens; if (options.max_tokens > about.limits.max_tokens) options.max_tokens = null; }
  fillForm();
  form.system.disabled = about.system_prompt === false;
  $("system-note").hidden = about.system_prompt !== false;
  attention.model(about);
  draw();
}

// --- events

function grow() {
  draft.style.height = "auto";
  draft.style.height = `${draft.scrollHeight}px`;
  buttons();
}

draft.addEventListener("input", grow);
draft.addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) { event.preventDefault(); ask(draft.value); }
});
$("composer").addEventListener("submit", (event) => { event.preventDefault(); ask(draft.value); });
$("stop").addEventListener("click", () => { stop(); draft.focus(); });
$("new").addEventListener("click", () => { enter(new Talk()); narrow("history", false); draft.focus(); });
$("inside-switch").addEventListener("click", () => panel("inside", !options.inside));
$("inside-close").addEventListener("click", () => { panel("inside", false); $("inside-switch").focus(); });
$("settings-switch").addEventListener("click", () => panel("settings", $("settings").hidden));
$("settings-close").addEventListener("click", () => { panel("settings", false); $("settings-switch").focus(); });
$("theme").addEventListener("click", () => { options.theme = THEMES[(THEMES.indexOf(options.theme) + 1) % 3]; saveSettings(options); theme(); });
dark.addEventListener("change", theme);
document.querySelector("[data-open]").addEventListener("click", () => narrow("history", true));
document.querySelector("[data-close]").addEventListener("click", () => { narrow("history", false); document.querySelector("[data-open]").focus(); });
form.addEventListener("input", readForm);
form.addEventListener("change", readForm);
form.addEventListener("submit", (event) => event.preventDefault());
$("defaults").addEventListener("click", () => { Object.assign(options, DEFAULTS, { theme: options.theme, inside: options.inside }); talk.system = ""; if (talk.nodes.size) talk.save(); saveSettings(options); fillForm(); });
document.addEventListener("keydown", (event) => {
  if (event.key !== "Escape") return;
  if (running) stop();
  else if ($("history").classList.contains("open")) { narrow("history", false); document.querySelector("[data-open]").focus(); }
  else if (!$("settings").hidden) { panel("settings", false); $("settings-switch").focus(); }
});
addEventListener("storage", (event) => { if (event.key?.startsWith("tinyforge-talk-")) drawList(); });

theme();
try { const now = sessionStorage.getItem("tinyforge-now"), found = now && talks().find((one) => one.id === now); if (found) talk = found; else talk.system = options.system; } catch { talk.system = options.system; }
fillForm();
draw();
log.scrollTop = log.scrollHeight;
buttons();
await connect();
document.documentElement.dataset.ready = "true";
