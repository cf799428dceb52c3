// One kind of chart: marks over stems, from left to right, of which one can be pointed at, or reached by arrow keys.
const KINDS = ["full", "delta", "compacted", "damaged"];
const EDGE = { left: 62, right: 16, top: 12, bottom: 34 };
const MARKS_MAX = 400; // Of more, stems are drawn alone.

function shape(kind, x, y, r) {
  if (kind === "full") return `M${x - r},${y - r}h${2 * r}v${2 * r}h${-2 * r}z`;
  if (kind === "delta") return `M${x - r},${y}a${r},${r} 0 1 0 ${2 * r},0a${r},${r} 0 1 0 ${-2 * r},0z`;
  if (kind === "compacted") return `M${x},${y - 1.3 * r}l${1.3 * r},${1.3 * r}l${-1.3 * r},${1.3 * r}l${-1.3 * r},${-1.3 * r}z`;
  return `M${x},${y - 1.2 * r}L${x + 1.2 * r},${y + r}L${x - 1.2 * r},${y + r}z`;
}

class Chart {
  // choices: label, x(point, index), y(point) or null, form(y), xForm, unit, title, tip(point), choose(point), and
  // perhaps log, links(points, place), colour(point), ticksOf(most)
  constructor(host, choices) {
    Object.assign(this, { host, choices, points: [], here: null });
    new ResizeObserver(() => this.draw()).observe(host);
  }
  show(points, chosen) {
    Object.assign(this, { points, chosen });
    if (this.here !== null && this.here >= points.length) this.here = null;
    this.draw();
  }
  draw() {
    const { host, choices, points } = this;
    const [width, height] = [host.clientWidth, host.clientHeight];
    if (!width) return;
    const right = width - EDGE.right, bottom = height - EDGE.bottom;
    const base = svg("svg", { viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true" });
    const values = points.map(choices.y).filter((value) => value !== null);
    if (!values.length) {
      base.append(svg("text", { class: "empty", x: width / 2, y: height / 2, "text-anchor": "middle",
        text: "Not recorded in these checkpoints" }));
      host.replaceChildren(base);
      return;
    }
    const ys = this.scale(values, bottom);
    for (const tick of ys.ticks) {
      base.append(svg("path", { class: tick.at === bottom ? "axis" : "grid", d: `M${EDGE.left},${tick.at}H${right}` }));
      base.append(svg("text", { x: EDGE.left - 8, y: tick.at + 4, "text-anchor": "end", text: tick.text }));
    }
    if (ys.log) base.append(svg("text", { x: right, y: EDGE.top - 2, "text-anchor": "end", text: "logarithmic scale" }));
    const xs = points.map(choices.x);
    const [from, to] = [Math.min(...xs), Math.max(...xs)];
    const room = right - EDGE.left - 24;
    const place = (index) => EDGE.left + 12 + (to > from ? ((xs[index] - from) / (to - from)) * room : room / 2);
    this.axis(base, from, to, room, bottom, place);
    this.places = points.map((point, index) => {
      const value = choices.y(point);
      return { x: place(index), y: value === null ? bottom : ys.at(value), known: value !== null };
    });
    if (choices.links) base.append(svg("path", { class: "link", d: choices.links(points, this.places) }));
    const gap = room / Math.max(1, points.length);
    const stems = {}, marks = {};
    points.forEach((point, index) => {
      const { x, y, known } = this.places[index];
      const colour = point.kind === "damaged" ? "damaged" : (choices.colour?.(point) ?? point.kind);
      if (known && !choices.links) stems[colour] = (stems[colour] ?? "") + `M${x.toFixed(1)},${bottom}V${y.toFixed(1)}`;
      if (points.length <= MARKS_MAX || point.kind === "damaged") {
        const radius = Math.max(2, Math.min(4, gap / 2.6));
        if (known || point.kind === "damaged") marks[colour] = (marks[colour] ?? "") + shape(point.kind, x, y, radius);
      }
    });
    const thick = Math.max(1, Math.min(choices.bars ? 18 : 2, gap * 0.6));
    for (const [name, d] of Object.entries(stems)) base.append(svg("path", { class: `stem ${name}`, d, "stroke-width": thick }));
    if (!choices.bars) for (const [name, d] of Object.entries(marks)) base.append(svg("path", { class: `mark ${name}`, d }));
    else if (marks.damaged) base.append(svg("path", { class: "mark damaged", d: marks.damaged }));
    if (choices.links && points.length > MARKS_MAX) {
      const full = points.map((point, index) => (point.kind === "delta" ? "" : shape(point.kind, this.places[index].x, this.places[index].y, 1.5)));
      base.append(svg("path", { class: "mark full", d: full.join(""), "stroke-width": 0 }));
    }
    this.pointer = svg("path", { class: "here", d: "" });
    base.append(this.pointer);
    const number = points.findIndex((point) => point.step === this.chosen);
    if (number >= 0) {
      const { x, y } = this.places[number];
      base.append(svg("path", { class: "chosen", d: shape("delta", x, y, 7) }));
    }
    base.append(svg("rect", { x: 0, y: 0, width, height, fill: "transparent" }));
    this.listen(base);
    const focused = document.activeElement === this.frame;
    this.frame ??= this.slider();
    this.frame.replaceChildren(base);
    if (this.frame.parentNode !== host) host.replaceChildren(this.frame);
    if (focused) this.frame.focus();
    if (this.here !== null) this.point(this.here, false);
    else this.say(points.length - 1);
  }
  scale(values, bottom) {
    const { choices } = this;
    const most = Math.max(...values, choices.least ?? 0) || 1;
    const positive = values.filter((value) => value > 0);
    const least = Math.min(...positive, most);
    const reach = bottom - EDGE.top;
    if (choices.log && positive.length > 3 && most / rank(positive, 0.5) > 15) {
      const all = decades(least, most);
      const [low, high] = [Math.log10(all[0]), Math.log10(all[all.length - 1])];
      const to = (value) => bottom - ((Math.log10(Math.max(value, all[0])) - low) / (high - low)) * reach;
      return { log: true, at: to, ticks: all.map((value) => ({ at: Math.round(to(value)), text: choices.form(value) })) };
    }
    const found = choices.ticksOf ? choices.ticksOf(most) : ticks(most, 4, choices.unit?.(most) ?? 1);
    const top = Math.max(most, found[found.length - 1]) * 1.04;
    const to = (value) => bottom - (value / top) * reach;
    return { at: to, ticks: found.map((value) => ({ at: Math.round(to(value)), text: choices.form(value) })) };
  }
  axis(base, from, to, room, bottom, place) {
    const { points, choices } = this;
    const label = (x, text, anchor = "middle") =>
      base.append(svg("text", { x, y: bottom + 17, "text-anchor": anchor, text }),
        svg("path", { class: "axis", d: `M${Math.round(x)},${bottom}v4` }));
    if (choices.time) {
      const { found, form } = timeTicks(from, to, Math.max(2, room / 110));
      for (const time of found) label(EDGE.left + 12 + ((time - from) / (to - from || 1)) * room, clock(time, form));
      if (!found.length) label(EDGE.left + 12 + room / 2, clock(from, "second"));
    } else {
      const wanted = Math.max(2, Math.floor(room / 80));
      const every = Math.max(1, Math.ceil(points.length / wanted));
      for (let index = points.length - 1; index >= 0; index -= every) label(place(index), count(points[index].step));
    }
    base.append(svg("text", { x: EDGE.left + 12 + room / 2, y: bottom + 31, "text-anchor": "middle",
      text: choices.time ? `time (${Intl.DateTimeFormat().resolvedOptions().timeZone || "local"}), ${clock(from, "day")}${
        clock(from, "day") === clock(to, "day") ? "" : ` to ${clock(to, "day")}`}` : "step" }));
  }
  slider() {
    const keys = { ArrowLeft: -1, ArrowRight: 1, ArrowDown: -1, ArrowUp: 1, PageDown: -10, PageUp: 10, Home: -Infinity, End: Infinity };
    return html("div", { role: "slider", tabindex: "0", class: "frame", "aria-label": this.choices.label,
      "aria-valuemin": 0, style: null, on: {
        keydown: (event) => {
          if (event.key === "Enter" || event.key === " ") {
            if (this.here !== null) this.choices.choose(this.points[this.here]);
          } else if (event.key === "Escape") this.leave();
          else if (event.key in keys) {
            const last = this.points.length - 1;
            this.point(Math.max(0, Math.min(last, (this.here ?? last + (keys[event.key] > 0 ? 0 : 1)) + keys[event.key])));
          } else return;
          event.preventDefault();
        },
        blur: () => this.leave(),
      } });
  }
  listen(base) {
    base.addEventListener("pointermove", (event) => this.point(this.nearest(event)));
    base.addEventListener("pointerleave", () => this.leave());
    base.addEventListener("click", (event) => {
      const index = this.nearest(event);
      if (index !== null) this.choices.choose(this.points[index]);
    });
  }
  nearest(event) {
    const x = event.clientX - this.frame.getBoundingClientRect().left;
    let best = null;
    this.places.forEach((place, index) => {
      if (best === null || Math.abs(place.x - x) <= Math.abs(this.places[best].x - x)) best = index;
    });
    return best;
  }
  say(index) {
    const point = this.points[index];
    this.frame.setAttribute("aria-valuemax", this.points.length - 1);
    this.frame.setAttribute("aria-valuenow", index);
    this.frame.setAttribute("aria-valuetext", this.choices.tip(point).join(", "));
  }
  point(index, move = true) {
    if (index === null) return;
    this.here = index;
    const { x, y } = this.places[index];
    this.pointer.setAttribute("d", `M${Math.round(x) + 0.5},${EDGE.top}V${this.host.clientHeight - EDGE.bottom}`);
    this.say(index);
    const [first, ...more] = this.choices.tip(this.points[index]);
    const tip = at("tip");
    tip.replaceChildren(html("b", { text: first }), ...more.map((text) => html("span", { text })));
    if (!move && tip.hidden) return;
    tip.hidden = false;
    const box = this.frame.getBoundingClientRect();
    const left = Math.min(box.left + x + 14, document.documentElement.clientWidth - tip.offsetWidth - 8);
    const over = box.left + x + 14 > left ? box.left + x - 14 - tip.offsetWidth : left;
    tip.style.left = `${Math.max(8, over)}px`;
    tip.style.top = `${Math.max(8, Math.min(box.top + y - 20, innerHeight - tip.offsetHeight - 8))}px`;
  }
  leave() {
    this.here = null;
    this.pointer?.setAttribute("d", "");
    at("tip").hidden = true;
  }
}
