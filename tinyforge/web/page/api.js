// What the chat page asks of a server, answered by the model in this browser: the same names as the server's api.js.
import { element } from "./text.js";

export class Problem extends Error {
  constructor(message, { code = null } = {}) {
    super(message);
    Object.assign(this, { code, status: 0, retryAfter: null });
  }
}

export const apiKey = { get: () => "", set() {} };

const worker = new Worker("worker.js", { type: "module" }), waiting = new Map();
const bar = element("progress", { max: 1, value: 0, attributes: { "aria-labelledby": "loading-said" } });
const said = element("span", { id: "loading-said", attributes: { role: "status" } }), count = element("span", { attributes: { "aria-hidden": "true" } });
const loading = element("div", { className: "loading", hidden: true }, said, count, bar);
let manifest = null, calls = 0, label = "";
document.getElementById("composer").before(loading);

worker.addEventListener("message", ({ data }) => {
  if (data.progress) {
    const { loaded, total } = data.progress, mega = (bytes) => (bytes / 1e6).toFixed(1);
    if (loading.hidden || bar.hidden) note("Loading the model", true);
    bar.value = loaded / total;
    count.textContent = `${mega(loaded)} of ${mega(total)} MB`;
  } else if (data.ready) {
    note(data.ready.note);
    label = data.ready.label;
    name();
    document.documentElement.dataset.loaded = label;
  } else waiting.get(data.id)?.(data);
});
worker.addEventListener("error", (event) => {
  event.preventDefault();
  for (const tell of waiting.values()) tell({ fault: { message: "The model's thread does not start: this browser may be too old. Update it, or use another.", known: true } });
});

/* A line above the message box, with the bar or without; none for "". */
function note(text, progress = false) {
  loading.hidden = !text;
  count.hidden = bar.hidden = !progress;
  said.textContent = text;
}

/* Where the model runs, after its name. */
function name() {
  const line = document.getElementById("model"), where = ` \u00b7 ${label}`;
  if (!label || line.textContent.endsWith(where) || !line.textContent.startsWith(manifest.name)) return;
  line.textContent = line.textContent.replace(/ \u00b7 (WebGPU|JavaScript)$/, "") + where;
}

/* Ask the worker; yields chunks, and returns the result. Throws a Problem, or an AbortError where `signal` stops it. */
async function* call(kind, request, signal) {
  const id = calls++, events = [];
  let wake = null, over = false;
  const stop = () => { if (!over) worker.postMessage({ stop: id }); wake?.(); };
  waiting.set(id, (event) => { events.push(event); wake?.(); });
  signal?.addEventListener("abort", stop);
  try {
    if (signal?.aborted) throw new DOMException("stopped", "AbortError");
    worker.postMessage({ id, kind, request });
    for (;;) {
      while (!events.length && !signal?.aborted) await new Promise((done) => { wake = done; });
      if (signal?.aborted) throw new DOMException("stopped", "AbortError");
      const { chunk, fault, result } = events.shift();
      over = !chunk;
      if (fault && !label) note("");
      if (fault) throw new Problem(fault.known ? fault.message : `The page failed: ${fault.message}`, fault);
      if (over) return result;
      yield chunk;
    }
  } finally {
    waiting.delete(id);
    signal?.removeEventListener("abort", stop);
    stop();
  }
}

async function result(kind, request, signal) {
  for (const asked = call(kind, request, signal); ;) {
    const { done, value } = await asked.next();
    if (done) return value;
  }
}

export const chat = (request, signal) => call("chat", request, signal);
export const score = (request, signal) => result("score", request, signal);
export const attention = (request, signal) => result("attention", request, signal);

/* The one model. Its weights begin to load; requests wait for them. */
export async function models() {
  const answer = await fetch("model.json").catch(() => null);
  if (!answer?.ok) throw new Problem("The page's files do not arrive. Check the connection and try again.");
  manifest = await answer.json();
  worker.postMessage({ manifest, gpu: new URLSearchParams(location.search).get("webgpu") || "" });
  result("load").catch((error) => note(error.message));
  new MutationObserver(name).observe(document.getElementById("model"), { childList: true });
  return [{ id: manifest.name, tinyforge: manifest.about }];
}

/* The page's files from the browser's cache; without it the page works, with the network only. A new version that has
   come since the last visit takes over now. */
const store = navigator.serviceWorker;
store?.register("sw.js").then(({ waiting }) => {
  if (!waiting || !store.controller) return;
  store.addEventListener("controllerchange", () => location.reload(), { once: true });
  waiting.postMessage("take over");
}).catch(() => {});
