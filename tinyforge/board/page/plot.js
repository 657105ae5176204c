"use strict";
// Charts in SVG and heat maps on a canvas: no library, nothing fetched.
const Plot = (() => {
  const NS = "http://www.w3.org/2000/svg";

  function svg(name, attributes, ...children) {
    const element = document.createElementNS(NS, name);
    for (const [key, value] of Object.entries(attributes || {})) element.setAttribute(key, value);
    element.append(...children);
    return element;
  }

  function element(name, options = {}, ...children) {
    const { colour, ...rest } = options;
    const made = Object.assign(document.createElement(name), rest);
    if (colour) made.style.setProperty("--colour", colour);
    made.append(...children);
    return made;
  }

  // 12,345,678 as 12.3M
  function short(value) {
    const size = Math.abs(value);
    if (size >= 1e4) for (const [unit, name] of [[1e18, "E"], [1e15, "P"], [1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]])
      if (size >= unit) return trim((value / unit).toPrecision(3)) + name;
    if (size >= 1000) return Math.round(value).toLocaleString("en");
    if (size && size < 1e-3) return value.toExponential(1).replace("e-", "e\u2212");
    return trim(value.toPrecision(4));
  }
  const trim = (text) => text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text;

  function duration(seconds) {
    if (seconds < 90) return `${trim(seconds.toPrecision(3))} s`;
    if (seconds < 5400) return `${trim((seconds / 60).toPrecision(3))} min`;
    if (seconds < 172800) return `${trim((seconds / 3600).toPrecision(3))} h`;
    return `${trim((seconds / 86400).toPrecision(3))} d`;
  }

  function ticks(low, high, most, time) {
    const wide = (high - low) / most || 1;
    let step = 10 ** Math.floor(Math.log10(wide));
    if (time) step = [1, 5, 15, 30, 60, 300, 600, 1800, 3600, 7200, 21600, 43200, 86400].find((s) => s >= wide) || step * 5;
    else step *= [1, 2, 2.5, 5, 10].find((m) => step * m >= wide);
    const found = [];
    for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) found.push(i * step);
    return found;
  }

  function logTicks(low, high, most) {
    const found = [];
    for (let power = Math.floor(low); power <= Math.ceil(high); power++)
      for (const m of high - low < 1.2 ? [1, 1.5, 2, 3, 4, 5, 6, 8] : high - low < most ? [1, 2, 5] : [1])
        found.push(Math.log10(m) + power);
    const inside = found.filter((t) => t >= low && t <= high);
    const every = Math.ceil(inside.length / most);
    return inside.filter((_, i) => i % every === 0);
  }

  /* One chart. onzoom(from, to) is called after a drag, onzoom(null) to see all; cursor(x) shares the cursor. */
  class Chart {
    constructor(title, unit, wide, hooks) {
      Object.assign(this, { title, unit, wide, hooks, curves: [], at: null });
      this.caption = element("figcaption");
      this.figure = element("figure", { className: wide ? "chart wide" : "chart" }, this.caption);
      this.svg = svg("svg", { tabindex: "0", role: "img" });
      this.figure.append(this.svg);
      this.svg.addEventListener("pointermove", (e) => this.move(e));
      this.svg.addEventListener("pointerleave", () => this.leave());
      this.svg.addEventListener("pointerdown", (e) => { if (e.button === 0 && e.pointerType !== "touch") { this.from = this.inverse(e); this.svg.setPointerCapture(e.pointerId); } });
      this.svg.addEventListener("pointerup", (e) => this.release(e));
      this.svg.addEventListener("dblclick", () => hooks.zoom(null));
      this.svg.addEventListener("keydown", (e) => this.key(e));
      this.svg.addEventListener("blur", () => this.leave());
    }

    /* curves: {name, label, colour, dash, kind: "raw" | "smooth" | "held", x: [], y: []}; view: {axis, log, from, to} */
    draw(curves, view) {
      this.curves = curves; this.view = view;
      const width = Math.max(260, this.figure.clientWidth - 28), height = this.wide ? 340 : 190;
      const pad = { left: 50, right: 8, top: 10, bottom: 24 };
      this.box = { left: pad.left, right: width - pad.right, top: pad.top, bottom: height - pad.bottom };
      const log = view.log && curves.every((c) => c.y.every((v) => v > 0)) && curves.length > 0;
      const scale = log ? Math.log10 : (v) => v;
      let [low, high, start, end] = [Infinity, -Infinity, Infinity, -Infinity];
      const all = [];
      for (const c of curves) for (let i = 0; i < c.x.length; i++) {
        const v = scale(c.y[i]);
        if (c.x[i] < start) start = c.x[i];
        if (c.x[i] > end) end = c.x[i];
        if (v < low) low = v;
        if (v > high) high = v;
        all.push(v);
      }
      if (view.from !== null) { start = view.from; end = view.to; }
      else if (this.wide && all.length > 50) {
        // The first steps, from random weights, would squeeze the rest against the axis.
        const sorted = Float64Array.from(all).sort();
        high = Math.min(high, Math.max(sorted[Math.floor(sorted.length * 0.97)], ...curves.filter((c) => c.kind === "held").map((c) => scale(Math.max(...c.y)))));
      }
      this.svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
      this.svg.setAttribute("height", height);
      const parts = [];
      this.caption.replaceChildren(this.title, ...(this.unit ? [element("small", { textContent: this.unit })] : []), ...(this.hooks.legend && this.wide ? this.hooks.legend() : []));
      if (!all.length || !(start <= end)) {
        this.svg.replaceChildren(svg("text", { x: width / 2, y: height / 2, "text-anchor": "middle" }, "nothing here yet"));
        this.svg.setAttribute("aria-label", `${this.title}: nothing here yet`);
        return;
      }
      if (low === high) { low -= Math.abs(low) * 0.05 || 1; high += Math.abs(high) * 0.05 || 1; }
      const margin = (high - low) * 0.05;
      low -= margin; high += margin;
      if (!log && low < 0 && all.every((v) => v >= 0)) low = 0;
      if (start === end) end = start + 1;
      const { left, right, top, bottom } = this.box;
      this.px = (x) => left + (x - start) / (end - start) * (right - left);
      this.py = (y) => bottom - (scale(y) - low) / (high - low) * (bottom - top);
      this.start = start; this.end = end;
      for (const tick of log ? logTicks(low, high, this.wide ? 9 : 6) : ticks(low, high, this.wide ? 9 : 6)) {
        const y = bottom - (tick - low) / (high - low) * (bottom - top);
        parts.push(svg("line", { class: "grid", x1: left, x2: right, y1: y, y2: y }),
          svg("text", { x: left - 8, y: y + 4, "text-anchor": "end" }, short(log ? 10 ** tick : tick)));
      }
      for (const tick of ticks(start, end, Math.max(5, Math.floor((right - left) / 56)), view.axis === "seconds"))
        parts.push(svg("text", { x: this.px(tick), y: height - 6, "text-anchor": this.px(tick) > right - 24 ? "end" : "middle" }, this.where(tick)));
      parts.push(svg("line", { class: "axis", x1: left, x2: right, y1: bottom, y2: bottom }));
      const clip = `clip-${Chart.count = (Chart.count || 0) + 1}`;
      const inside = svg("g", { "clip-path": `url(#${clip})` });
      for (const c of curves) {
        let d = "";
        for (let i = 0; i < c.x.length; i++) d += `${i ? "L" : "M"}${this.px(c.x[i]).toFixed(1)} ${this.py(c.y[i]).toFixed(1)}`;
        inside.append(svg("path", { class: `curve ${c.kind}`, d, stroke: c.colour, "data-run": c.name, ...(c.dash ? { "stroke-dasharray": c.dash } : {}) }));
        if (c.kind !== "raw" && c.x.length < 60)
          for (let i = 0; i < c.x.length; i++) inside.append(svg("circle", { cx: this.px(c.x[i]).toFixed(1), cy: this.py(c.y[i]).toFixed(1), r: 2.6, fill: c.colour }));
      }
      this.cursor = svg("line", { class: "cursor", y1: top, y2: bottom, visibility: "hidden" });
      this.band = svg("rect", { class: "band", y: top, height: bottom - top, visibility: "hidden" });
      this.svg.replaceChildren(svg("defs", {}, svg("clipPath", { id: clip }, svg("rect", { x: left, y: top - 4, width: right - left, height: bottom - top + 8 }))), ...parts, inside, this.cursor, this.band);
      const said = curves.filter((c) => c.kind !== "raw" && c.y.length).map((c) => `${c.label} ${short(c.y[c.y.length - 1])}`);
      this.svg.setAttribute("aria-label", `${this.title}, latest values: ${said.slice(0, 12).join(", ")}`);
    }

    where(x) { return this.view.axis === "seconds" ? duration(x) : short(x); }
    inverse(event) {
      const box = this.svg.getBoundingClientRect();
      const x = (event.clientX - box.left) * (this.svg.viewBox.baseVal.width / box.width);
      return this.start + (Math.min(Math.max(x, this.box.left), this.box.right) - this.box.left) / (this.box.right - this.box.left) * (this.end - this.start);
    }

    move(event) {
      if (!this.px) return;
      const x = this.inverse(event);
      if (this.from !== undefined) {
        const [a, b] = [this.px(Math.min(x, this.from)), this.px(Math.max(x, this.from))];
        this.band.setAttribute("x", a); this.band.setAttribute("width", Math.max(1, b - a)); this.band.setAttribute("visibility", "visible");
      }
      this.show(x, event.clientX, event.clientY);
    }

    show(x, left, top) {
      this.at = x;
      this.cursor.setAttribute("x1", this.px(x)); this.cursor.setAttribute("x2", this.px(x)); this.cursor.setAttribute("visibility", "visible");
      const rows = this.curves.filter((c) => c.kind !== "raw" || this.view.smooth === 0).map((c) => [c, nearest(c.x, x)]).filter(([c, i]) => i >= 0);
      this.hooks.tip(`${this.hooks.axis()} ${this.where(x)}`, rows.map(([c, i]) => [c.colour, c.label, short(c.y[i])]), left, top);
    }

    key(event) {
      if (!this.px) return;
      const step = (this.end - this.start) / 50;
      if (event.key === "Escape") { this.leave(); this.hooks.zoom(null); return; }
      const to = { ArrowLeft: (this.at ?? this.end) - step, ArrowRight: (this.at ?? this.start) + step, Home: this.start, End: this.end }[event.key];
      if (to === undefined) return;
      event.preventDefault();
      const x = Math.min(Math.max(to, this.start), this.end), box = this.svg.getBoundingClientRect();
      this.show(x, box.left + this.px(x) * box.width / this.svg.viewBox.baseVal.width, box.top + 30);
    }

    release(event) {
      if (this.from === undefined) return;
      const [a, b] = [this.from, this.inverse(event)].sort((x, y) => x - y);
      this.from = undefined; this.band.setAttribute("visibility", "hidden");
      if (this.px(b) - this.px(a) > 8) this.hooks.zoom(a, b);
    }

    leave() {
      if (this.cursor) this.cursor.setAttribute("visibility", "hidden");
      this.at = null;
      this.hooks.tip(null);
    }
  }

  function nearest(xs, x) {
    let [low, high] = [0, xs.length - 1];
    if (high < 0) return -1;
    while (high - low > 1) { const middle = (low + high) >> 1; if (xs[middle] <= x) low = middle; else high = middle; }
    return Math.abs(xs[high] - x) < Math.abs(xs[low] - x) ? high : low;
  }

  // From the card's own colour to the accent, by the share t; read from the style sheet, so that it fits the theme.
  function ramp() {
    const style = getComputedStyle(document.documentElement);
    const [a, b] = ["--sunk", "--accent"].map((name) => style.getPropertyValue(name).trim().match(/[0-9a-f]{2}/gi).map((h) => parseInt(h, 16)));
    return (t) => `rgb(${a.map((v, i) => Math.round(v + (b[i] - v) * t)).join(" ")})`;
  }

  return { Chart, element, svg, short, duration, ramp };
})();
