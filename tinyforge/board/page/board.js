"use strict";
(() => {
  const { Chart, element, svg, short, duration, ramp } = Plot;
  const $ = (id) => document.getElementById(id);
  const COLOURS = 8, SECONDS = 2, DASHES = [null, "7 3", "2 3"];
  const AXES = { step: "step", seconds: "time", flop: "FLOP" };
  // In this order, the first one large; all others follow, by name.
  const ORDER = ["bits_per_byte", "loss", "lr", "grad_norm", "tokens_per_second", "peak_memory_mib", "gpu_memory_mib", "perplexity", "exact_match"];
  const TITLES = { bits_per_byte: "Bits per byte", loss: "Loss", lr: "Learning rate", grad_norm: "Gradient norm, before clipping", tokens_per_second: "Throughput",
    peak_memory_mib: "Peak memory", gpu_memory_mib: "Memory on the GPU", exact_match: "Exact match" };
  const UNITS = { loss: "nats", peak_memory_mib: "MiB", gpu_memory_mib: "MiB" };
  const PER_SECOND = "_per_second";  // of what a run reads: tokens, images
  const STEADY = new Set(["lr", "peak_memory_mib", "gpu_memory_mib"]);  // never smoothed

  const embedded = $("exported") ? JSON.parse($("exported").textContent) : null;
  const state = { runs: [], texts: {}, chosen: null, curves: new Map(), seen: new Map(), charts: new Map(), zoom: null, samples: {}, ledger: null, ledgerText: "" };

  // --- the source of the data: the server, or this file

  const source = embedded ? {
    runs: async () => embedded,
    curves: async (run, keys, smoothKeys, smooth) => embedded.curves.filter((c) => c.run === run.name &&
      (c.smooth === 0 ? keys.includes(c.key) : c.smooth === smooth && smoothKeys.includes(c.key))),
    samples: async (run) => embedded.samples[run.name] || [],
    text: async (name) => embedded.printed[name] || "",
    ledger: async () => embedded.ledger,
  } : {
    runs: () => ask("/api/runs"),
    curves: async (run, keys, smoothKeys, smooth, part) => {
      const query = new URLSearchParams([["run", run.name], ...keys.map((k) => ["key", k]), ...smoothKeys.map((k) => ["smooth_key", k]),
        ["smooth", smooth], ["points", Math.min(1600, Math.max(400, 2 * $("charts").clientWidth))], ...part]);
      return (await ask(`/api/curves?${query}`)).curves;
    },
    samples: async (run) => (await ask(`/api/samples?${new URLSearchParams([["run", run.name]])}`)).samples[run.name] || [],
    text: async (name) => (await ask(`/api/texts?${new URLSearchParams([["name", name]])}`)).texts[name] || "",
    ledger: async () => (await ask("/api/ledger")).ledger,
  };

  async function ask(path) {
    const answer = await fetch(path);
    if (!answer.ok) throw new Error((await answer.json().catch(() => ({}))).error || `HTTP ${answer.status}`);
    return answer.json();
  }

  const memory = {
    get(name) { try { return JSON.parse(localStorage.getItem(`tinyforge-board-${name}`)); } catch { return null; } },
    set(name, value) { try { localStorage.setItem(`tinyforge-board-${name}`, JSON.stringify(value)); } catch { /* a browser that keeps nothing */ } },
  };

  // --- what to show

  const form = $("controls");
  const view = () => ({ axis: form.axis.value, smooth: Number(form.smooth.value), log: form.log.checked });
  const colour = (run) => `var(--r${run.place % COLOURS})`;
  const dash = (run) => DASHES[Math.floor(run.place / COLOURS) % DASHES.length];
  const chosen = () => state.runs.filter((run) => state.chosen.has(run.name));
  const common = (key) => key.endsWith(PER_SECOND) ? `tokens${PER_SECOND}` : key;
  const unitOf = (key) => key.endsWith(PER_SECOND) ? `${key.slice(0, -PER_SECOND.length)}/s` : UNITS[key] || "";
  const readBy = (run) => String(run.about.unit || "tokens");
  const read = (runs) => [...new Set(runs.map(readBy))].sort().join(" or ") || "tokens";
  const axisName = (axis) => axis === "tokens" ? read(chosen()) : AXES[axis];
  const keyOf = (text) => TITLES[common(text)] || text.replace(/_/g, " ").replace(/^./, (c) => c.toUpperCase());
  const number = (value) => typeof value === "number" && Number.isFinite(value);

  // One chart per figure, with training and held-out values: bits_per_byte and val_bits_per_byte_web.
  function groups(runs) {
    const found = new Map(), plain = new Set(runs.flatMap((run) => run.keys));
    for (const key of plain) {
      if (key.startsWith("grad_norm.")) continue;
      const stripped = key.replace(/^val_/, "");
      const owner = key.startsWith("val_") && [...plain, stripped].filter((k) => !k.startsWith("val_") && (stripped === k || stripped.startsWith(k + "_"))).sort((a, b) => b.length - a.length)[0] || stripped;
      found.set(owner, [...(found.get(owner) || []), key]);
    }
    const rank = (key) => ORDER.includes(common(key)) ? ORDER.indexOf(common(key)) : ORDER.length;
    return [...found].sort(([a], [b]) => rank(a) - rank(b) || a.localeCompare(b));
  }

  async function load() {
    const now = view(), jobs = [];
    for (const run of chosen()) {
      const flop = run.about.flop_per_token || 0;
      const part = state.zoom ? [["over", now.axis === "flop" ? "tokens" : now.axis], ["from", state.zoom[0] / (now.axis === "flop" ? flop || 1 : 1)], ["to", state.zoom[1] / (now.axis === "flop" ? flop || 1 : 1)]] : [];
      const asked = JSON.stringify([run.version, now.smooth, part, run.keys.length]);
      if (state.seen.get(run.name) === asked) continue;
      const smoothKeys = now.smooth ? run.keys.filter((k) => !STEADY.has(k) && !k.startsWith("val_") && !k.startsWith("grad_norm.")) : [];
      jobs.push(source.curves(run, run.keys, smoothKeys, now.smooth, part).then((curves) => {
        state.seen.set(run.name, asked);
        state.curves.set(run.name, curves);
      }));
    }
    await Promise.all(jobs);
    return jobs.length > 0;
  }

  // --- drawing

  function xs(curve, run, axis) {
    if (axis !== "flop") return curve[axis];
    return curve.tokens.map((t) => t === null ? null : t * (run.about.flop_per_token || NaN));
  }

  function draw() {
    const now = view(), runs = chosen(), wanted = groups(runs);
    $("read").textContent = read(runs).replace(/^./, (c) => c.toUpperCase());
    $("empty").hidden = runs.length > 0;
    $("curves").hidden = runs.length === 0;
    $("empty").textContent = state.runs.length ? "No run is selected." : "No runs here yet. Start one with: python recipes/pretrain.py";
    for (const [name, chart] of state.charts) if (!wanted.some(([key]) => key === name)) { chart.figure.remove(); state.charts.delete(name); }
    wanted.forEach(([name, keys], place) => {
      let chart = state.charts.get(name);
      if (!chart || chart.wide !== (place === 0)) {
        chart?.figure.remove();
        chart = new Chart(keyOf(name), unitOf(name), place === 0, { zoom, tip, axis: () => axisName(view().axis), legend });
        state.charts.set(name, chart);
      }
      if ($("charts").children[place] !== chart.figure) $("charts").insertBefore(chart.figure, $("charts").children[place] || null);
      const curves = [];
      for (const run of runs) for (const key of keys) {
        const held = key.startsWith("val_");
        const plain = held || (state.curves.get(run.name) || []).some((c) => c.key === key && c.smooth === 0 && c.count < 60); // not smoothed
        const found = (state.curves.get(run.name) || []).filter((c) => c.key === key && (c.smooth === 0 || c.smooth === now.smooth));
        const smooth = !plain && found.find((c) => c.smooth > 0);
        for (const curve of found) {
          if (curve.smooth > 0 && plain) continue;
          const x = [], y = [], all = xs(curve, run, now.axis);
          all.forEach((v, i) => { if (number(v) && number(curve.value[i])) { x.push(v); y.push(curve.value[i]); } });
          const kind = held ? "held" : curve.smooth > 0 || !smooth ? "smooth" : "raw";
          const label = `${run.name}${held ? `, held out${key === `val_${name}` ? "" : " " + key.replace(`val_${name}_`, "")}` : ""}`;
          curves.push({ name: run.name, label, colour: colour(run), dash: held ? null : dash(run), kind, x, y });
        }
      }
      const order = { raw: 0, smooth: 1, held: 2 };
      chart.draw(curves.sort((a, b) => order[a.kind] - order[b.kind]), { ...now, from: state.zoom ? state.zoom[0] : null, to: state.zoom ? state.zoom[1] : null });
    });
    drawLayers(runs);
    drawCompare(runs);
    drawPlans(runs);
  }

  const sample = (kind) => svg("svg", { viewBox: "0 0 22 8", "aria-hidden": "true" }, svg("path", { d: "M1 4H21", class: `curve ${kind}`, stroke: "currentColor" }));
  function legend() {
    return [["smooth", view().smooth ? "training, smoothed" : "training"], ["held", "held out"]].map(([kind, text]) => element("span", { className: "key" }, sample(kind), text));
  }

  function zoom(from, to) {
    state.zoom = from === null ? null : [from, to];
    update();
  }

  function tip(title, rows, left, top) {
    const box = $("tip");
    box.hidden = title === null;
    if (title === null) return;
    box.replaceChildren(element("b", { textContent: title }), ...rows.slice(0, 14).map(([c, label, value]) =>
      element("span", { colour: c }, element("i"), element("span", { textContent: label, className: "name" }), element("em", { textContent: value }))));
    const { width, height } = box.getBoundingClientRect();
    box.style.left = `${left + 16 + width > innerWidth ? Math.max(4, left - width - 14) : left + 16}px`;
    box.style.top = `${Math.max(4, Math.min(top + 14, innerHeight - height - 8))}px`;
  }

  function choice(select, runs) {
    const before = select.value;
    const names = runs.map((run) => run.name);
    if (JSON.stringify(names) !== select.dataset.names) {
      select.replaceChildren(...names.map((name) => element("option", { value: name, textContent: name })));
      select.dataset.names = JSON.stringify(names);
      if (names.includes(before)) select.value = before;
    }
    return runs.find((run) => run.name === select.value);
  }

  // Rows are layers, columns evaluations; the colour is the norm's logarithm.
  function drawLayers(runs) {
    const able = runs.filter((run) => run.keys.some((k) => k.startsWith("grad_norm.")));
    $("layers").hidden = able.length === 0;
    if (!able.length) return;
    const run = choice($("layers-run"), able);
    const curves = (state.curves.get(run.name) || []).filter((c) => c.key.startsWith("grad_norm.") && c.smooth === 0);
    const place = (key) => { const parts = key.split("."), last = Number(parts[parts.length - 1]); return parts[1] === "embedding" ? -1 : Number.isInteger(last) ? last : 1e6; };
    curves.sort((a, b) => place(a.key) - place(b.key) || a.key.localeCompare(b.key));
    const steps = [...new Set(curves.flatMap((c) => c.step))].sort((a, b) => a - b);
    const logs = curves.flatMap((c) => c.value).filter((v) => v > 0).map(Math.log10);
    if (!logs.length) return $("layers-map").replaceChildren("Nothing here yet.");
    let low = Infinity, high = -Infinity;
    for (const v of logs) { low = Math.min(low, v); high = Math.max(high, v); }
    const colours = ramp(), at = new Map(steps.map((s, i) => [s, i]));
    const canvas = element("canvas", { className: "heat", width: Math.max(1, steps.length) * 8, height: curves.length * 8, role: "img",
      ariaLabel: `Gradient norms of ${curves.length} layers at ${steps.length} evaluations, from ${short(10 ** low)} to ${short(10 ** high)}` });
    const tall = Math.max(10, Math.min(22, 360 / curves.length));
    canvas.style.height = `${curves.length * tall}px`;
    canvas.style.imageRendering = "pixelated";
    const draw = canvas.getContext("2d");
    curves.forEach((c, row) => c.step.forEach((s, i) => {
      if (!(c.value[i] > 0)) return;
      draw.fillStyle = colours((Math.log10(c.value[i]) - low) / (high - low || 1));
      draw.fillRect(at.get(s) * 8, row * 8, 8, 8);
    }));
    canvas.addEventListener("pointermove", (e) => {
      const box = canvas.getBoundingClientRect();
      const c = curves[Math.min(curves.length - 1, Math.floor((e.clientY - box.top) / box.height * curves.length))];
      const s = steps[Math.min(steps.length - 1, Math.floor((e.clientX - box.left) / box.width * steps.length))];
      const i = c ? c.step.indexOf(s) : -1;
      if (i >= 0) tip(`step ${s.toLocaleString("en")}`, [[colour(run), c.key.slice(10), short(c.value[i])]], e.clientX, e.clientY);
    });
    canvas.addEventListener("pointerleave", () => tip(null));
    const names = element("div", { className: "heat-names" }, ...curves.map((c, i) => element("span", { textContent: tall >= 12 || i % 2 === 0 ? c.key.slice(10) : "" })));
    const bar = element("canvas", { width: 64, height: 1 });
    for (let i = 0; i < 64; i++) { const d = bar.getContext("2d"); d.fillStyle = colours(i / 63); d.fillRect(i, 0, 1, 1); }
    $("layers-map").replaceChildren(element("div", { className: "heat-frame" }, names, canvas,
      element("div", { className: "heat-foot" }, element("span", { textContent: `step ${steps[0].toLocaleString("en")}` }),
        element("span", { className: "ramp" }, short(10 ** low), bar, short(10 ** high)), element("span", { textContent: steps[steps.length - 1].toLocaleString("en") }))));
  }

  async function drawSamples() {
    const able = chosen().filter((run) => run.samples > 0);
    $("samples").hidden = able.length === 0;
    if (!able.length) return;
    const run = choice($("samples-run"), able);
    const stamp = `${run.name} ${run.samples} ${run.last.step}`;
    if ($("samples-list").dataset.stamp === stamp) return;
    const found = await source.samples(run);
    $("samples-list").dataset.stamp = stamp;
    $("samples-list").replaceChildren(...found.slice(-200).reverse().map((s) => element("li", {},
      element("h3", {}, `Step ${s.step.toLocaleString("en")}`, ...(s.tokens ? [element("small", { textContent: `${short(s.tokens)} ${readBy(run)}` })] : [])),
      element("pre", { textContent: s.text.replace(/^ {2}/gm, "") }))));
  }

  // The runs' cards and logs: one at a time, fetched when it has changed.
  async function drawTexts() {
    const names = Object.keys(state.texts);
    $("texts").hidden = names.length === 0;
    if (!names.length) return;
    const { name } = choice($("texts-name"), names.map((n) => ({ name: n })));
    const stamp = `${name} ${state.texts[name]}`;
    if ($("texts-body").dataset.stamp === stamp) return;
    const text = await source.text(name);
    $("texts-body").dataset.stamp = stamp;
    $("texts-body").replaceChildren(...(name.endsWith(": card") ? markdown(text) : [element("pre", { textContent: text })]));
  }

  // The Markdown of cards: headings, tables, indented code, paragraphs. Text only becomes text nodes.
  function markdown(text) {
    const found = [], code = (line) => line.split("`").map((part, i) => i % 2 ? element("code", { textContent: part }) : part);
    const cells = (row) => row.replace(/^\| ?| ?\|$/g, "").split("|").map((cell) => cell.trim());
    for (const block of text.replace(/^---\n[^]*?\n---\n/, "").split(/\n(?:[ \t]*\n)+/)) {
      const lines = block.split("\n").filter((line) => line.trim()), heading = /^(#+) (.*)/.exec(lines[0] || "");
      if (heading) { found.push(element(heading[1].length > 1 ? "h4" : "h3", {}, ...code(heading[2]))); lines.shift(); }
      if (!lines.length) continue;
      if (lines.length > 1 && lines.every((line) => line.startsWith("|"))) {
        const made = element("table"), rows = lines.filter((_, i) => i !== 1).map(cells);
        table(made, rows[0], rows.slice(1));
        found.push(element("div", { className: "scroll" }, made));
      } else if (lines.every((line) => line.startsWith("    "))) found.push(element("pre", { textContent: lines.map((line) => line.slice(4)).join("\n") }));
      else found.push(element("p", {}, ...code(lines.join(" "))));
    }
    return found;
  }

  function table(target, head, rows) {
    target.replaceChildren(element("thead", {}, element("tr", {}, ...head.map((h) => element("th", { scope: "col", textContent: h })))),
      element("tbody", {}, ...rows.map(([name, ...cells]) => element("tr", {}, element("th", { scope: "row", textContent: name }),
        ...cells.map((cell) => element("td", { textContent: cell, className: cells.length > 1 && new Set(cells).size > 1 && rows.marked?.has(name) ? "differs" : "" }))))));
  }

  function drawCompare(runs) {
    $("compare").hidden = runs.length === 0;
    if (!runs.length) return;
    const few = runs.slice(0, 12), rows = [];
    const add = (name, value) => { const cells = few.map((run) => { try { return value(run) ?? ""; } catch { return ""; } }); if (cells.some((c) => c !== "")) rows.push([name, ...cells.map(String)]); };
    const best = (run, key) => { const c = (state.curves.get(run.name) || []).find((x) => x.key === key && x.smooth === 0); return c && c.value.length ? short(Math.min(...c.value)) : ""; };
    add("model", (r) => r.about.model);
    add("recipe", (r) => r.about.kind);
    add("parameters", (r) => r.about.parameters?.toLocaleString("en"));
    add("step", (r) => r.last.step?.toLocaleString("en"));
    add(read(few), (r) => number(r.last.tokens) ? short(r.last.tokens) : "");
    add("time", (r) => number(r.last.seconds) ? duration(r.last.seconds) : "");
    add("FLOP", (r) => r.about.flop_per_token && r.last.tokens ? short(r.about.flop_per_token * r.last.tokens) : "");
    for (const key of new Set(few.flatMap((r) => r.keys.filter((k) => k.startsWith("val_"))))) {
      add(`${key.replace("val_", "held out, ").replace(/_/g, " ")}, last`, (r) => number(r.last[key]) ? short(r.last[key]) : "");
      if (!state.zoom && /loss|bits|perplexity/.test(key)) add(`${key.replace("val_", "held out, ").replace(/_/g, " ")}, best`, (r) => best(r, key));
    }
    for (const key of new Set(few.flatMap((r) => Object.keys(r.scores).filter((k) => k !== "step" && !k.endsWith(" +-")))))
      add(key, (r) => number(r.scores[key]) ? short(r.scores[key]) + (number(r.scores[`${key} +-`]) ? ` \u00b1 ${short(r.scores[`${key} +-`])}` : "") : "");
    add("memory, peak", (r) => number(r.last.peak_memory_mib) ? `${short(r.last.peak_memory_mib)} MiB` : "");
    add("machine", (r) => r.about.machine);
    rows.marked = new Set();
    const text = (value) => Array.isArray(value) ? value.join(" ") : value === null || value === undefined ? "" : String(value);
    const names = [...new Set(few.flatMap((r) => [...Object.keys(r.about.settings || {}), ...Object.keys(r.about.config || {}).map((k) => `config.${k}`)]))];
    const of = (r, name) => name.startsWith("config.") ? (r.about.config || {})[name.slice(7)] : (r.about.settings || {})[name];
    for (const name of names) {
      if (["out", "resume"].includes(name)) continue;
      const cells = few.map((r) => text(of(r, name))), said = few.filter((r) => r.about.settings).map((r) => text(of(r, name)));
      if (said.length === 1 ? cells[0] !== "" && !name.startsWith("config.") : new Set(said).size > 1) { rows.push([name, ...cells]); if (said.length > 1) rows.marked.add(name); }
    }
    table($("compare-table"), ["", ...few.map((r) => r.name)], rows);
  }

  const PARTS = [["weights", "weights, masters, gradients"], ["moments", "optimizer moments"], ["saved", "saved for backward"], ["rest", "temporary"]];
  function drawPlans(runs) {
    const able = runs.filter((run) => number(run.about.plan?.peak));
    $("plans").hidden = able.length === 0;
    const most = Math.max(...able.map((run) => run.about.plan.peak));
    const bytes = (count) => count >= 2 ** 30 / 10 ? `${(count / 2 ** 30).toFixed(2)} GiB` : `${(count / 2 ** 20).toFixed(1)} MiB`;
    const rows = able.slice(0, 12).map((run) => {
      const plan = run.about.plan, parts = { ...plan, rest: Math.max(0, plan.peak - plan.weights - plan.moments - plan.saved) };
      const bar = element("div", { className: "bar", role: "img", ariaLabel: PARTS.map(([k, n]) => `${n} ${bytes(parts[k])}`).join(", ") },
        ...PARTS.map(([key], i) => { const piece = element("i", { className: `p${i}`, title: `${PARTS[i][1]}: ${bytes(parts[key])}` }); piece.style.width = `${100 * parts[key] / most}%`; return piece; }));
      const measured = run.last.gpu_memory_mib ?? run.last.peak_memory_mib;
      return element("div", { className: "plan" }, element("span", { textContent: run.name }), bar,
        element("span", { textContent: bytes(plan.peak) + (number(measured) ? `; the process peaked at ${bytes(measured * 2 ** 20)}` : "") }));
    });
    $("plans-list").replaceChildren(...rows, element("div", { className: "keys" }, ...PARTS.map(([, name], i) => element("span", {}, element("i", { className: `p${i}` }), name))));
  }

  async function drawLedger() {
    const found = await source.ledger(), text = JSON.stringify(found);
    if (text === state.ledgerText) return;
    state.ledgerText = text;
    if (!found) {
      $("ledger-body").replaceChildren(element("p", {}, "Every hand-written gradient compared with finite differences. To show it here, run ",
        element("code", { textContent: "python -m tinyforge.gradcheck --json runs/ledger.json" })));
      return;
    }
    const rows = [...found.rows].sort((a, b) => b.error - a.error), tolerance = found.tolerance ?? 1e-8, bad = rows.filter((r) => !(r.error <= tolerance)).length;
    const worst = element("b", { className: bad ? "bad" : "", textContent: rows[0].error.toExponential(1) });
    const dots = svg("svg", { class: "dots", viewBox: "0 0 1000 64", role: "img", "aria-label": `${rows.length} relative errors on a logarithmic axis, the worst ${rows[0].error.toExponential(1)}, the tolerance ${tolerance.toExponential(0)}` });
    const px = (e) => 10 + 980 * Math.min(1, Math.max(0, (Math.log10(Math.max(e, 1e-16)) + 16) / 10));
    for (let p = -16; p <= -6; p += 2) dots.append(svg("text", { x: px(10 ** p), y: 60, "text-anchor": p === -16 ? "start" : p === -6 ? "end" : "middle", fill: "var(--soft)", "font-size": 12 }, `1e${p}`));
    dots.append(svg("line", { x1: px(tolerance), x2: px(tolerance), y1: 4, y2: 46, stroke: "var(--bad)", "stroke-dasharray": "3 3" }));
    rows.forEach((r, i) => dots.append(svg("circle", { cx: px(r.error), cy: 10 + (i * 7) % 34, r: 2.6, fill: r.error <= tolerance ? "var(--accent)" : "var(--bad)", opacity: .55 })));
    const list = element("table");
    table(list, ["op", "with respect to", "cases", "worst relative error"], rows.map((r) => [r.op, r.name, r.cases, r.error.toExponential(1)].map(String)));
    $("ledger-body").replaceChildren(element("p", { className: "ledger-sum" }, `${rows.length} gradients of ${new Set(rows.map((r) => r.op)).size} ops and models; worst relative error `, worst, `, tolerance ${tolerance.toExponential(0)}`),
      dots, element("details", {}, element("summary", { textContent: "All rows" }), element("div", { className: "ledger-rows", tabIndex: 0, role: "region", ariaLabel: "All rows of the ledger" }, list)));
  }

  // --- the list of runs

  function drawRuns() {
    const stamp = JSON.stringify(state.runs.map((r) => [r.name, r.version, r.live, r.read, state.chosen.has(r.name)]));
    if ($("runs").dataset.stamp === stamp) return;
    $("runs").dataset.stamp = stamp;
    const focused = document.activeElement?.dataset?.run;
    $("runs").replaceChildren(...state.runs.map((run) => {
      const box = element("input", { type: "checkbox", checked: state.chosen.has(run.name) });
      box.dataset.run = run.name;
      box.addEventListener("change", () => { box.checked ? state.chosen.add(run.name) : state.chosen.delete(run.name); remember(); update(); });
      const settings = run.about.settings || {}, steps = settings.steps, key = ["val_bits_per_byte", "val_rewards/accuracies"].find((k) => run.keys.includes(k)) || run.keys.find((k) => k.startsWith("val_"));
      const facts = [number(run.last.step) ? `step ${run.last.step.toLocaleString("en")}${steps ? ` of ${steps.toLocaleString("en")}` : ""}` : "", key && number(run.last[key]) ? `${key.replace("val_", "held out ").replace(/_/g, " ").replace("bits per byte", "")} ${short(run.last[key])}`.replace("  ", " ") : ""].filter(Boolean).join(" \u00b7 ");
      const label = element("label", { className: "run", colour: colour(run) }, box, element("b", { textContent: run.name }), element("small", {}, ...(run.live ? [element("span", embedded ? { textContent: "not finished" } : { className: "live", textContent: "live" }), facts ? " \u00b7 " : ""] : []), facts,
        ...(run.read < 1 ? [` \u00b7 reading, ${Math.round(100 * run.read)} %`] : []), ...(run.damaged ? [` \u00b7 ${run.damaged} damaged lines left out`] : []), ...(run.left_out ? [` \u00b7 ${run.left_out} rows with too many keys left out`] : [])));
      if (run.live && steps) { const bar = element("i"); bar.style.width = `${Math.min(100, 100 * run.last.step / steps)}%`; label.append(element("div", { className: "progress" }, bar)); }
      return element("li", {}, label);
    }));
    if (focused !== undefined) [...$("runs").querySelectorAll("input")].find((i) => i.dataset.run === focused)?.focus();
  }

  const remember = () => memory.set("hidden", state.runs.filter((r) => !state.chosen.has(r.name)).map((r) => r.name));

  function choose() {
    const known = memory.get("hidden");
    if (state.chosen === null) {
      const newest = [...state.runs].sort((a, b) => (a.age ?? 1e12) - (b.age ?? 1e12)).slice(0, COLOURS).map((r) => r.name);
      state.chosen = new Set(Array.isArray(known) && known.length ? state.runs.map((r) => r.name).filter((n) => !known.includes(n)) : newest);
      state.known = new Set(state.runs.map((r) => r.name));
    }
    for (const run of state.runs) if (!state.known.has(run.name)) { state.known.add(run.name); state.chosen.add(run.name); }
  }

  // --- the loop

  let busy = false, again = false;
  async function update() {
    if (busy) { again = true; return; }
    busy = true;
    try {
      do { again = false; drawRuns(); await load(); draw(); await drawSamples(); } while (again);
    } finally { busy = false; }
  }

  let timer, drawn = -Infinity, shown = "";
  async function follow() {
    clearTimeout(timer);
    let wait = SECONDS * 1000;
    try {
      const found = await source.runs();
      state.runs = found.runs.map((run, place) => ({ ...run, place }));
      state.texts = found.texts;
      if (state.chosen === null && !kept && Math.max(0, ...state.runs.map((r) => r.rows)) < 3000) form.smooth.value = "0.9";  // a longer average lags
      choose();
      const now = JSON.stringify(state.runs.map((r) => [r.name, r.version, r.live]));
      if (now !== shown && !(found.more && performance.now() - drawn < 5000)) { await update(); drawn = performance.now(); shown = now; } else drawRuns();
      if (!document.documentElement.dataset.drawn && !found.more) document.documentElement.dataset.drawn = Math.round(performance.now());
      await drawTexts();
      await drawLedger();
      if (found.more) wait = 50;
      const rows = state.runs.reduce((sum, run) => sum + run.rows, 0), live = state.runs.filter((r) => r.live).length;
      $("state").textContent = `${state.runs.length} ${state.runs.length === 1 ? "run" : "runs"}, ${rows.toLocaleString("en")} ${rows === 1 ? "row" : "rows"}${embedded ? ", exported" : live ? `, ${live} live` : ""}${found.too_many ? "; more than the board shows" : ""}`;
    } catch (error) {
      $("state").textContent = `The board does not answer (${error.message}); trying again.`;
    }
    if (!embedded) timer = setTimeout(follow, document.hidden ? 10 * wait : wait);
  }

  const THEMES = { auto: "Auto", light: "Light", dark: "Dark" };
  const dark = matchMedia("(prefers-color-scheme: dark)");
  function theme(name) {
    document.documentElement.dataset.theme = name === "dark" || (name === "auto" && dark.matches) ? "dark" : "light";
    $("theme").textContent = THEMES[name];
    $("theme").setAttribute("aria-label", `Theme: ${name === "auto" ? "as the system's" : name}`);
    memory.set("theme", name);
  }
  let themed = memory.get("theme") in THEMES ? memory.get("theme") : "auto";
  theme(themed);
  dark.addEventListener("change", () => { theme(themed); if (state.chosen) draw(); });
  $("theme").addEventListener("click", () => { const all = Object.keys(THEMES); themed = all[(all.indexOf(themed) + 1) % all.length]; theme(themed); draw(); });

  const kept = memory.get("view");
  if (kept) { for (const name of ["axis", "smooth"]) if ([...form[name]].some((i) => i.value === String(kept[name]))) form[name].value = String(kept[name]); form.log.checked = kept.log === true; }
  let axis = form.axis.value;
  form.addEventListener("change", () => { if (form.axis.value !== axis) state.zoom = null; axis = form.axis.value; memory.set("view", view()); update(); });
  form.addEventListener("submit", (e) => e.preventDefault());
  $("all").addEventListener("click", () => { state.runs.forEach((r) => state.chosen.add(r.name)); remember(); update(); });
  $("none").addEventListener("click", () => { state.chosen.clear(); remember(); update(); });
  $("layers-run").addEventListener("change", draw);
  $("samples-run").addEventListener("change", drawSamples);
  $("texts-name").addEventListener("change", drawTexts);
  document.addEventListener("keydown", (e) => { if (e.key === "Escape" && state.zoom) zoom(null); });
  document.addEventListener("visibilitychange", () => { if (!document.hidden && !embedded) follow(); });
  let resized;
  addEventListener("resize", () => { clearTimeout(resized); resized = setTimeout(() => state.chosen && draw(), 150); });
  follow();
})();
