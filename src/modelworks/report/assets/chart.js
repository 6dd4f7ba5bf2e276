// Draws every <figure class="chart"> from the JSON inside it. No dependencies, no requests.
//
// A curve is {label, colour, dashed, role: line | faint | points, step[], seconds[], value[], tokens[] or null};
// a null value is one that was not finite: the line breaks there and a mark stands at the top edge.
"use strict";
(() => {
  const MARGIN = { left: 56, right: 14, top: 14, bottom: 26 };
  const charts = [];
  let xMode = "step";

  const xOf = {
    step: (curve, i) => curve.step[i],
    tokens: (curve, i) => (curve.tokens ? curve.tokens[i] : NaN),
    time: (curve, i) => curve.seconds[i],
  };

  function escape(text) {
    return String(text).replace(/[&<>"]/g, (c) => ({ "&": "&amp;", "<": "&lt;", ">": "&gt;", '"': "&quot;" })[c]);
  }

  function compact(value) {
    const size = Math.abs(value);
    for (const [unit, suffix] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e4, "K"]]) {
      if (size >= unit) return +(value / (suffix === "K" ? 1e3 : unit)).toPrecision(3) + suffix;
    }
    if (size !== 0 && size < 1e-3) return value.toExponential(1).replace("e-", "e−");
    return size >= 1000 ? Math.round(value).toLocaleString("en-US") : String(+value.toPrecision(4));
  }

  // Readings keep their last zeros, so that they do not jump about as the cursor moves.
  function reading(value) {
    const size = Math.abs(value);
    return size >= 1000 || size === 0 || size < 1e-3 ? compact(value) : value.toPrecision(4);
  }

  function clock(seconds) {
    if (seconds < 120) return Math.round(seconds) + " s";
    if (seconds < 7200) return +(seconds / 60).toPrecision(3) + " min";
    return +(seconds / 3600).toPrecision(3) + " h";
  }

  const formatX = { step: (v) => Math.round(v).toLocaleString("en-US"), tokens: compact, time: clock };

  // Round numbers (1, 2 or 5 times a power of ten; for time also of a minute or an hour) that cover low..high.
  function linearTicks(low, high, wanted, time) {
    const rough = (high - low) / wanted;
    const base = !time || rough < 60 ? 1 : rough < 3600 ? 60 : 3600;
    const power = base * 10 ** Math.floor(Math.log10(rough / base));
    const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= rough * 0.999);
    const ticks = [];
    for (let v = Math.ceil(low / step - 1e-9) * step; v <= high + step * 1e-9; v += step) ticks.push(+v.toPrecision(12));
    return ticks;
  }

  function logTicks(low, high, wanted) {
    const decades = Math.log10(high / low);
    if (decades < 0.7) return linearTicks(low, high, wanted);
    const multiples = decades < 1.3 ? [1, 1.5, 2, 3, 5, 7] : decades < 2.5 ? [1, 2, 5] : [1];
    const every = Math.max(1, Math.ceil(decades / wanted));
    const ticks = [];
    for (let p = Math.floor(Math.log10(low)); p <= Math.log10(high); p += every) {
      for (const m of multiples) if (m * 10 ** p >= low * 0.999 && m * 10 ** p <= high * 1.001) ticks.push(+(m * 10 ** p).toPrecision(6));
    }
    return ticks;
  }

  // A scale maps values to pixels and back; `log` drops what is not positive.
  function scale(low, high, from, to, log) {
    const f = log ? Math.log : (v) => v;
    const a = f(low), b = f(high);
    return {
      at: (v) => (log && v <= 0 ? NaN : from + ((f(v) - a) / (b - a || 1)) * (to - from)),
      value: (pixel) => { const t = a + ((pixel - from) / (to - from)) * (b - a); return log ? Math.exp(t) : t; },
    };
  }

  class Chart {
    constructor(figure) {
      this.figure = figure;
      this.data = JSON.parse(figure.querySelector("script").textContent);
      this.svg = figure.querySelector("svg");
      this.log = { x: false, y: this.data.log };
      this.cursor = null;
      this.legend();
      for (const button of figure.querySelectorAll("button[data-log]")) {
        button.setAttribute("aria-pressed", this.log[button.dataset.log]);
        button.addEventListener("click", () => {
          const axis = button.dataset.log;
          this.log[axis] = !this.log[axis];
          button.setAttribute("aria-pressed", this.log[axis]);
          this.draw();
        });
      }
      this.svg.addEventListener("pointermove", (event) => {
        const left = this.svg.getBoundingClientRect().left;
        point(this.x.value(Math.min(Math.max(event.clientX - left, MARGIN.left), this.width - MARGIN.right)));
      });
      this.svg.addEventListener("pointerleave", () => point(null));
      this.svg.addEventListener("keydown", (event) => this.key(event));
      this.svg.addEventListener("blur", () => point(null));
      new ResizeObserver(() => this.draw()).observe(this.svg);
    }

    legend() {
      const list = this.figure.querySelector(".legend");
      this.readings = this.data.curves.map((curve) => {
        const item = document.createElement("span");
        item.className = `key c${curve.colour} ${curve.role}${curve.dashed ? " dashed" : ""}`;
        const swatch = document.createElement("i");
        const reading = document.createElement("b");
        item.append(swatch, curve.label, " ", reading);
        list.append(item);
        return reading;
      });
      this.read();
    }

    // Left and right walk along the main curve.
    key(event) {
      const step = { ArrowLeft: -1, ArrowRight: 1, PageUp: -10, PageDown: 10 }[event.key];
      if (event.key === "Escape") return point(null);
      if (!step) return;
      event.preventDefault();
      const curve = this.data.curves.find((c) => c.role !== "faint") || this.data.curves[0];
      const last = curve.step.length - 1;
      const here = this.cursor === null ? (step > 0 ? -1 : last + 1) : nearest(curve, this.cursor);
      point(xOf[xMode](curve, Math.min(Math.max(here + step, 0), last)));
    }

    range() {
      let [x0, x1, y0, y1] = [Infinity, -Infinity, Infinity, -Infinity];
      for (const curve of this.data.curves) {
        curve.value.forEach((value, i) => {
          const x = xOf[xMode](curve, i);
          if (Number.isFinite(x) && !(this.log.x && x <= 0)) [x0, x1] = [Math.min(x0, x), Math.max(x1, x)];
          if (value !== null && !(this.log.y && value <= 0)) [y0, y1] = [Math.min(y0, value), Math.max(y1, value)];
        });
      }
      for (const { value } of this.data.references) [y0, y1] = [Math.min(y0, value), Math.max(y1, value)];
      if (!(x0 < x1)) [x0, x1] = Number.isFinite(x0) ? [x0 - (this.log.x ? 0 : 1), x0 + 1] : [this.log.x ? 1 : 0, 2];
      if (!(y0 <= y1)) [y0, y1] = this.log.y ? [1, 10] : [0, 1];
      if (this.log.y) return { x0, x1, y0: y0 / 1.03, y1: y1 * 1.03 };
      if (this.data.zero && y0 >= 0) y0 = 0;
      const pad = (y1 - y0) * 0.05 || Math.abs(y1) * 0.1 || 1;
      return { x0, x1, y0: this.data.zero && y0 === 0 ? 0 : y0 - pad, y1: y1 + pad };
    }

    draw() {
      this.width = this.svg.clientWidth;
      this.height = this.svg.clientHeight;
      if (!this.width) return;
      const { x0, x1, y0, y1 } = this.range();
      const right = this.width - MARGIN.right, bottom = this.height - MARGIN.bottom;
      this.x = scale(x0, x1, MARGIN.left, right, this.log.x);
      this.y = scale(y0, y1, bottom, MARGIN.top, this.log.y);
      const parts = [];
      const rows = Math.max(3, Math.floor(this.height / 36)), columns = Math.max(2, Math.floor(this.width / 110));
      for (const v of this.log.y ? logTicks(y0, y1, rows) : linearTicks(y0, y1, rows)) {
        const y = this.y.at(v).toFixed(1);
        parts.push(`<line class="grid" x1="${MARGIN.left}" x2="${right}" y1="${y}" y2="${y}"/>`,
          `<text class="tick" x="${MARGIN.left - 8}" y="${y}" dy="0.32em" text-anchor="end">${compact(v)}</text>`);
      }
      for (const v of this.log.x ? logTicks(x0, x1, columns) : linearTicks(x0, x1, columns, xMode === "time")) {
        const x = this.x.at(v);
        const anchor = x > right - 24 ? "end" : "middle";
        parts.push(`<line class="axis" x1="${x.toFixed(1)}" x2="${x.toFixed(1)}" y1="${bottom}" y2="${bottom + 4}"/>`,
          `<text class="tick" x="${anchor === "end" ? right : x.toFixed(1)}" y="${bottom + 17}" text-anchor="${anchor}">${formatX[xMode](v)}</text>`);
      }
      parts.push(`<line class="axis" x1="${MARGIN.left}" x2="${right}" y1="${bottom}" y2="${bottom}"/>`);
      // Lines too close together for a name each share one, above the upper line.
      let name = null;
      for (const reference of [...this.data.references].sort((a, b) => b.value - a.value)) {
        const y = this.y.at(reference.value);
        if (!Number.isFinite(y)) continue;
        parts.push(`<line class="reference" x1="${MARGIN.left}" x2="${right}" y1="${y.toFixed(1)}" y2="${y.toFixed(1)}"/>`);
        const text = `${escape(reference.label)} ${reading(reference.value)}`;
        if (name && y - name.y < 17) name.text += ` · ${text}`;
        else {
          if (name) parts.push(name.svg());
          name = { y, text, svg() { return `<text class="label" x="${right}" y="${(this.y - 5).toFixed(1)}" text-anchor="end">${this.text}</text>`; } };
        }
      }
      if (name) parts.push(name.svg());
      this.data.marks.label.forEach((label, i) => {
        const x = this.x.at(xOf[xMode](this.data.marks, i));
        if (Number.isFinite(x)) parts.push(`<line class="reference" x1="${x.toFixed(1)}" x2="${x.toFixed(1)}" y1="${MARGIN.top}" y2="${bottom}"><title>${escape(label)}</title></line>`);
      });
      for (const curve of this.data.curves) parts.push(this.path(curve));
      parts.push('<g class="cursor"></g>');
      this.svg.innerHTML = parts.join("");
      this.overlay = this.svg.querySelector(".cursor");
      this.read();
    }

    path(curve) {
      let line = "", pen = "M";
      const marks = [];
      const dots = curve.role === "points" && curve.step.length <= 80 || curve.step.length === 1;
      curve.value.forEach((value, i) => {
        const x = this.x.at(xOf[xMode](curve, i)), y = value === null ? NaN : this.y.at(value);
        if (value === null && Number.isFinite(x)) marks.push(`<path class="gap" d="M${x.toFixed(1)} ${MARGIN.top - 8}v7"><title>not finite at step ${curve.step[i]}</title></path>`);
        if (!Number.isFinite(x) || !Number.isFinite(y)) { pen = "M"; return; }
        line += `${pen}${x.toFixed(1)} ${y.toFixed(1)}`;
        pen = "L";
        if (dots) marks.push(`<circle cx="${x.toFixed(1)}" cy="${y.toFixed(1)}" r="3"/>`);
      });
      return `<g class="curve c${curve.colour} ${curve.role}${curve.dashed ? " dashed" : ""}"><path d="${line}"/>${marks.join("")}</g>`;
    }

    // The legend reads the values at the cursor, or the last ones.
    read() {
      let spot = null;
      this.data.curves.forEach((curve, c) => {
        const i = this.cursor === null ? curve.value.findLastIndex((v) => v !== null) : nearest(curve, this.cursor);
        const value = i < 0 ? null : curve.value[i];
        this.readings[c].textContent = i < 0 ? "–" : value === null ? "not finite" : reading(value);
        if (i >= 0 && curve.role !== "points") spot = spot || { curve, i };
      });
      if (!this.overlay) return;
      if (this.cursor === null) {
        this.overlay.innerHTML = "";
        return;
      }
      spot = spot || { curve: this.data.curves[0], i: nearest(this.data.curves[0], this.cursor) };
      const x = this.x.at(this.cursor);
      if (!Number.isFinite(x)) return;
      let marks = `<line x1="${x.toFixed(1)}" x2="${x.toFixed(1)}" y1="${MARGIN.top}" y2="${this.height - MARGIN.bottom}"/>`;
      for (const curve of this.data.curves) {
        const i = nearest(curve, this.cursor);
        if (i < 0 || curve.value[i] === null || curve.role === "faint") continue;
        const [cx, cy] = [this.x.at(xOf[xMode](curve, i)), this.y.at(curve.value[i])];
        if (Number.isFinite(cx) && Number.isFinite(cy)) marks += `<circle class="c${curve.colour}" cx="${cx.toFixed(1)}" cy="${cy.toFixed(1)}" r="4"/>`;
      }
      const { curve, i } = spot;
      const places = [`step ${curve.step[i].toLocaleString("en-US")}`];
      if (this.width > 600) {
        if (curve.tokens) places.push(`${compact(curve.tokens[i])} tokens`);
        places.push(clock(curve.seconds[i]));
      }
      // Beside the line, on the side with more room.
      const side = x > (MARGIN.left + this.width) / 2 ? [-6, "end"] : [6, "start"];
      marks += `<text x="${(x + side[0]).toFixed(1)}" y="${MARGIN.top + 8}" text-anchor="${side[1]}">${places.join(" · ")}</text>`;
      this.overlay.innerHTML = marks;
    }
  }

  // Index of the point of a curve nearest to x on the current axis; -1 for none.
  function nearest(curve, x) {
    let best = -1, distance = Infinity;
    for (let i = 0; i < curve.step.length; i++) {
      const d = Math.abs(xOf[xMode](curve, i) - x);
      if (d < distance) [best, distance] = [i, d];
    }
    return best;
  }

  // One cursor for all charts.
  function point(x) {
    for (const chart of charts) {
      chart.cursor = x;
      chart.read();
    }
  }

  for (const figure of document.querySelectorAll("figure.chart")) charts.push(new Chart(figure));
  for (const button of document.querySelectorAll("button[data-x]")) {
    button.addEventListener("click", () => {
      xMode = button.dataset.x;
      for (const other of document.querySelectorAll("button[data-x]")) other.setAttribute("aria-pressed", other === button);
      for (const chart of charts) {
        chart.cursor = null;
        chart.draw();
      }
    });
  }
})();
