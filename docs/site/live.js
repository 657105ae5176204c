/* The course's tenth lesson, computed in the page: temperature and nucleus of the lesson's four logits, or of what the
   storyteller expects after a text. Without this script, or from disk, the lesson keeps its picture alone. */
(async () => {
  const place = document.getElementById("live");
  if (!place || !location.protocol.startsWith("http")) return;
  const folder = new URL("../talk/", location.href), SHOWN = 12;
  const { logProbabilities } = await import(new URL("sampling.js", folder));
  const make = (name, given = {}, ...inside) => { const found = Object.assign(document.createElement(name), given); found.append(...inside); return found; };
  const slider = (id, text, min, max, value) => {
    const input = make("input", { type: "range", id, min, max, step: 0.05, value }), shown = make("output", { htmlFor: id });
    input.addEventListener("input", draw);
    return { input, shown, row: make("label", {}, text, input, shown) };
  };
  const temperature = slider("live-temperature", "Temperature τ", 0.1, 2, 1), nucleus = slider("live-nucleus", "Nucleus P", 0.05, 1, 0.75);
  const text = make("input", { type: "text", id: "live-text", value: "Once upon a time there was a", autocomplete: "off" }), ask = make("button", { className: "md-button", textContent: "Ask the storyteller (16 MB)" });
  const said = make("p", { role: "status" }), body = make("tbody"), source = make("caption");
  const head = make("tr", {}, ...["token", "probability", "after the cut"].map((name) => make("th", { scope: "col", textContent: name })));
  const form = make("form", {}, make("label", {}, "Text so far", text), ask);
  place.append(temperature.row, nucleus.row, make("table", {}, source, make("thead", {}, head), body), form, said);
  let logits = [0.5, 0.3, 0.15, 0.05].map(Math.log), names = ["first", "second", "third", "fourth"], worker = null, asked = null;
  source.textContent = "The four logits of this lesson";

  function draw() {
    const tau = Number(temperature.input.value), most = Number(nucleus.input.value);
    temperature.shown.value = tau.toFixed(2);
    nucleus.shown.value = most.toFixed(2);
    const p = logProbabilities(Float64Array.from(logits, (z) => z / tau)).map(Math.exp), order = [...p.keys()].sort((a, b) => p[b] - p[a]);
    let sum = 0, kept = 0;
    while (kept < order.length && sum < most * (1 - 1e-12)) sum += p[order[kept++]];
    body.replaceChildren(...order.slice(0, SHOWN).map((id, i) => {
      const bar = make("td", { textContent: (i < kept ? p[id] / sum : 0).toFixed(3) });
      bar.style.setProperty("--share", i < kept ? p[id] / sum : 0);
      return make("tr", { className: i < kept ? "kept" : "" }, make("th", { scope: "row" }, make("code", { textContent: names[id] })), make("td", { textContent: p[id].toFixed(3) }), bar);
    }));
    place.dataset.kept = kept;
    if (kept > SHOWN) said.textContent = `${kept} tokens are kept; the first ${SHOWN} are shown.`;
    else if (!asked) said.textContent = "";
  }

  const fail = (message) => { asked = null; ask.disabled = false; said.textContent = message; };
  async function start() {
    const answer = await fetch(new URL("model.json", folder)).catch(() => null);
    if (!answer?.ok) return fail("The model's files do not arrive. Check the connection and ask again.");
    worker = new Worker(new URL("worker.js", folder), { type: "module" });
    worker.addEventListener("error", () => { worker = null; fail("The model's thread does not start: this browser may be too old. Update it, or use another."); });
    worker.addEventListener("message", ({ data }) => {
      if (data.progress) said.textContent = `Loading: ${(data.progress.loaded / 1e6).toFixed(1)} of ${(data.progress.total / 1e6).toFixed(1)} MB`;
      if (data.fault) return fail(data.fault.message);
      if (!data.result) return;
      ({ logits, names } = data.result);
      source.textContent = `What the storyteller expects after “${asked}”`;
      fail("");
      draw();
    });
    worker.postMessage({ manifest: await answer.json(), gpu: "" });
  }

  form.addEventListener("submit", async (event) => {
    event.preventDefault();
    if (asked) return;
    if (!text.value) return fail("Type a text first.");
    asked = text.value;
    ask.disabled = true;
    if (!worker) await start();
    worker?.postMessage({ id: 0, kind: "next", request: { text: asked } });
  });
  draw();
  place.hidden = false;
})();
