// The page: what is shown of the data, which range of it, and which checkpoint was chosen.
const RANGES = [50, 200, 1000, Infinity];
const PAGE_ROWS = 15;
const state = { report: null, all: [], byStep: new Map(), range: 200, chosen: null, follows: true, page: 0 };

function read(report) {
  const all = report.rows.map((row) => Object.fromEntries(report.fields.map((name, index) => [name, row[index]])));
  state.report = report;
  state.all = all;
  state.byStep = new Map(all.map((point) => [point.step, point]));
  for (const point of all) {
    const below = point.upon === null ? undefined : state.byStep.get(point.upon);
    if (below || point.depth === null) point.depth = below ? below.depth + 1 : 0; // Its base may have been compacted.
    point.root = point.upon === null ? point.step : (below?.root ?? point.upon);
    point.when = point.called === null ? point.created : point.called / 1e6;
  }
}
const inRange = () => state.all.slice(-Math.min(state.range, state.all.length));
const seconds = (us) => (us === null || us === undefined ? null : us / 1e6);
const pointOf = (step) => state.byStep.get(step);

function tip(point) {
  const said = [`step ${count(point.step)}`];
  if (point.error) return [...said, "damaged", shown(point.error)];
  said.push(point.upon === null ? point.kind : `${point.kind} on ${count(point.upon)}, ${many(point.depth, "delta")} deep`);
  said.push(size(point.bytes));
  if (point.written !== null) {
    said.push(point.stall === null ? "blocking save" : `stall ${lasting(seconds(point.stall))}`);
    said.push(`files written after ${lasting(seconds(point.written))}`);
  }
  if (point.when !== null) said.push(clock(point.when));
  return said;
}

function choose(point, follows = false) {
  state.chosen = point.step;
  state.follows = follows;
  const index = state.all.length - 1 - state.all.indexOf(point);
  state.page = Math.floor(index / PAGE_ROWS);
  draw();
}
function sizeTicks(most) {
  const step = 2 ** Math.max(0, Math.ceil(Math.log2(most / 5)));
  return Array.from({ length: Math.floor(most / step) + 1 }, (_, number) => number * step);
}
const timeUnit = (value) => [1e-6, 1e-3, 1, 60, 3600].findLast((unit) => value >= unit) ?? 1e-6;
const common = { tip, choose };
const charts = {
  timeline: new Chart(at("timeline"), { ...common, label: "Timeline of saves", time: true, log: true,
    shows: (point) => point.when !== null, x: (point) => point.when, y: (point) => seconds(point.written), form: lasting, unit: timeUnit }),
  stalls: new Chart(at("stalls"), { ...common, label: "Stall of each save", log: true, x: (_, index) => index,
    y: (point) => seconds(point.stall), form: lasting, unit: timeUnit, colour: () => "stall" }),
  sizes: new Chart(at("sizes"), { ...common, label: "Size of each checkpoint", bars: true, x: (_, index) => index,
    y: (point) => (point.error ? null : point.bytes), form: size, ticksOf: sizeTicks }),
  chains: new Chart(at("chains"), { ...common, label: "Chain of each checkpoint", x: (_, index) => index, least: 2,
    y: (point) => point.depth, form: (value) => (value === 0 ? "full" : `${value} deep`),
    ticksOf: (deepest) => ticks(deepest, Math.min(5, deepest)).filter(Number.isInteger), links: chainLinks }),
};
function chainLinks(points, places) {
  const index = new Map(points.map((point, number) => [point.step, number]));
  return points.map((point, number) => {
    const below = point.upon === null ? undefined : index.get(point.upon);
    if (below === undefined) return "";
    return `M${places[below].x.toFixed(1)},${places[below].y.toFixed(1)}L${places[number].x.toFixed(1)},${places[number].y.toFixed(1)}`;
  }).join("");
}

function drawFacts() {
  const sound = state.all.filter((point) => !point.error);
  const newest = state.all[state.all.length - 1];
  const known = sound.filter((point) => point.stall !== null);
  const stalls = known.map((point) => seconds(point.stall));
  const written = sound.filter((point) => point.written !== null).map((point) => seconds(point.written));
  const kinds = KINDS.map((kind) => [kind, state.all.filter((point) => point.kind === kind).length]).filter(([, n]) => n);
  const fact = (name, value, more) =>
    html("dl", { class: "fact" }, html("dt", { text: name }), html("dd", { text: value }), html("dd", { class: "more", text: more }));
  const found = [
    fact("Newest step", count(newest.step), newest.created === null ? "" : clock(newest.created)),
    fact("Checkpoints", count(state.all.length), kinds.map(([kind, n]) => `${count(n)} ${kind}`).join(", ")),
    fact("On disk", size(sound.reduce((sum, point) => sum + point.bytes, 0)),
      sound.length ? `largest ${size(Math.max(...sound.map((point) => point.bytes)))}` : ""),
  ];
  if (stalls.length) {
    const worst = known.reduce((a, b) => (b.stall > a.stall ? b : a));
    found.push(fact("Stall, median", lasting(rank(stalls, 0.5)), `most ${lasting(seconds(worst.stall))}, at step ${count(worst.step)}`));
  }
  if (written.length) found.push(fact("Files written, median", lasting(rank(written, 0.5)), `95 % within ${lasting(rank(written, 0.95))} of the call`));
  const span = known.length > 1 ? (known[known.length - 1].called - known[0].called) / 1e6 : 0;
  if (span > 0) {
    const share = (100 * stalls.slice(1).reduce((sum, value) => sum + value, 0)) / span;
    found.push(fact("Training waited", `${share < 0.001 ? "< 0.001" : digits(share)} %`, "of the time between these saves"));
  }
  at("facts").replaceChildren(...found);
}

function drawRanges(points) {
  const offered = RANGES.filter((range, index) => range < state.all.length || range === Infinity || (index && RANGES[index - 1] < state.all.length));
  at("ranges").hidden = state.all.length <= RANGES[0];
  at("ranges").replaceChildren(...offered.filter((range) => range === Infinity || range < state.all.length).map((range) =>
    html("button", { type: "button", "aria-pressed": String(range === state.range || (range === Infinity && points.length === state.all.length)),
      text: range === Infinity ? `All ${count(state.all.length)}` : `Newest ${count(range)}`,
      on: { click: () => { state.range = range; draw(); } } })));
}

const kindOf = (point) => html("span", { class: `kind ${point.kind}`, text: point.kind });
function drawSteps() {
  const pages = Math.max(1, Math.ceil(state.all.length / PAGE_ROWS));
  state.page = Math.max(0, Math.min(pages - 1, state.page));
  const newestFirst = state.all.slice().reverse().slice(state.page * PAGE_ROWS, (state.page + 1) * PAGE_ROWS);
  const turn = (by, text, disabled) => html("button", { type: "button", text, disabled,
    on: { click: () => { state.page += by; drawSteps(); } } });
  at("pages").replaceChildren(...(pages === 1 ? [] : [html("span", { text: `${count(state.page + 1)} of ${count(pages)}` }),
    turn(-1, "Newer", state.page === 0), turn(1, "Older", state.page === pages - 1)]));
  const heads = [["step", "number"], ["kind", ""], ["base", "number rare"], ["saved", "rare"], ["size", "number"],
    ["rows", "number rare"], ["stall", "number"], ["written", "number rare"]];
  const cell = (text, kind = "number") => html("td", { class: kind }, text);
  const rows = newestFirst.map((point) => html("tr", { "aria-selected": String(point.step === state.chosen), "data-step": point.step,
    on: { click: () => choose(point) } },
    cell(html("button", { type: "button", text: count(point.step), "aria-label": `show step ${point.step}` })),
    html("td", {}, kindOf(point), point.pinned ? html("span", { class: "badge", text: "pinned" }) : null),
    ...(point.error ? [html("td", { class: "name", colspan: 6, text: shown(point.error) })] : [
      cell(point.upon === null ? "–" : count(point.upon), "number rare"), cell(point.created === null ? "–" : clock(point.created), "rare"),
      cell(size(point.bytes)), cell(count(point.rows), "number rare"),
      cell(point.written === null ? "–" : point.stall === null ? "blocking" : lasting(seconds(point.stall))),
      cell(point.written === null ? "–" : lasting(seconds(point.written)), "number rare")])));
  at("steps").replaceChildren(html("thead", {}, html("tr", {}, ...heads.map(([text, kind]) => html("th", { class: kind, scope: "col", text })))),
    html("tbody", {}, ...rows));
}

function drawDetails() {
  const point = pointOf(state.chosen);
  if (!point) return at("details").replaceChildren();
  const listed = [];
  const row = (name, ...parts) => listed.push(html("dt", { text: name }), html("dd", {}, ...parts));
  const title = html("h2", {}, `Step ${count(point.step)}`, kindOf(point), point.pinned ? html("span", { class: "badge", text: "pinned" }) : null);
  if (point.error) return at("details").replaceChildren(title, html("p", { class: "error", text: shown(point.error) }));
  if (point.upon !== null) {
    const chain = [];
    for (let below = point.upon; below !== null && chain.length < 6; below = pointOf(below)?.upon ?? null) chain.push(below);
    row("bases", ...chain.map((step) => (pointOf(step) ? html("button", { type: "button", text: count(step),
      on: { click: () => choose(pointOf(step)) } }) : `${count(step)} (not here) `)), point.depth > chain.length ? `and ${count(point.depth - chain.length)} more, down to ${count(point.root)}` : "");
  }
  const above = state.all.filter((other) => other.upon === point.step);
  if (above.length) row("base of", ...above.slice(0, 6).map((other) => html("button", { type: "button", text: count(other.step), on: { click: () => choose(other) } })), above.length > 6 ? `and ${above.length - 6} more` : "");
  row("committed", point.created === null ? "unknown" : clock(point.created));
  row("size", `${size(point.bytes)} in ${many(point.files, "file")}`);
  row("holds", [many(point.tensors, "tensor"), ...(point.tables.length ? [`${count(point.rows)} table rows`] : []),
    ...(point.removed ? [`${count(point.removed)} removed ids`] : []), many(point.blocks, "block")].join(", "));
  if (point.ranks > 1) row("ranks", count(point.ranks));
  row("written by", shown(point.writer));
  row("digest", html("span", { class: "path", text: shown(point.digest) }));
  const parts = [title, html("dl", {}, ...listed), ...timesOf(point)];
  if (point.tables.length) {
    parts.push(html("h3", { text: "Tables" }), html("div", { class: "scroll" }, html("table", {}, html("tbody", {}, ...point.tables.map(([table, rows, removed, whole]) =>
      html("tr", {}, html("td", { class: "name", text: shown(state.report.tables[table]) }),
        html("td", { class: "number", text: `${count(rows)} ${whole ? "rows" : "changed"}${removed ? `, ${count(removed)} removed` : ""}` })))))));
  }
  at("details").replaceChildren(...parts);
}

function timesOf(point) {
  if (point.written === null) return [html("h3", { text: "Time" }), html("p", { class: "soft", text: "Not recorded: this checkpoint was imported, or saved by DCP or an earlier version." })];
  const stall = seconds(point.stall ?? 0);
  const waits = Math.max(0, seconds(point.begun) - stall);
  const spans = [["stall", "training waited", stall], ["waits", "queued", waits], ["writes", "filtered and written", Math.max(0, seconds(point.written) - stall - waits)]]
    .filter(([name, , length]) => length > 0 || name === "writes");
  const total = spans.reduce((sum, [, , length]) => sum + length, 0) || 1;
  const bars = html("div", { class: "parts", "aria-hidden": "true" }, ...spans.map(([name]) => html("i", { class: name })));
  spans.forEach(([, , length], index) => { bars.children[index].style.flex = `${(100 * length) / total} 0 0`; });
  return [html("h3", { text: `Time until all files were written: ${lasting(seconds(point.written))}` }), bars,
    html("ul", { class: "key" }, ...spans.map(([name, what, length]) => html("li", { class: name, text: `${what} ${lasting(length)}` })),
      point.stall === null ? html("li", { text: "a blocking save: training waited to its end" }) : null)];
}

function drawTables(points) {
  const names = state.report.tables;
  at("tables-card").hidden = !names.length;
  const spark = (values) => {
    const top = Math.max(...values, 1);
    const step = values.length > 1 ? 158 / (values.length - 1) : 0;
    const d = values.map((value, index) => `${index ? "L" : "M"}${(1 + index * step).toFixed(1)},${(24 - (value / top) * 21).toFixed(1)}`).join("");
    return svg("svg", { class: "spark", viewBox: "0 0 160 26", preserveAspectRatio: "none", "aria-hidden": "true" }, svg("path", { d, "vector-effect": "non-scaling-stroke" }));
  };
  const sound = points.filter((point) => !point.error);
  const rows = names.map((name, number) => {
    const held = sound.map((point) => point.tables?.find(([table]) => table === number) ?? null);
    const last = held.findLast((item) => item !== null) ?? [number, 0, 0, true];
    const full = held.findLast((item) => item?.[3]);
    return html("tr", {}, html("td", { class: "name", text: shown(name) }), html("td", { class: "number", text: full ? count(full[1]) : "–" }),
      html("td", { class: "number rare", text: last[3] ? "–" : count(last[1]) }), html("td", { class: "number rare", text: count(last[2]) }),
      html("td", {}, spark(held.map((item) => item?.[1] ?? 0))));
  });
  if (state.report.more_tables) rows.push(html("tr", {}, html("td", { class: "soft", colspan: 5, text: `and ${many(state.report.more_tables, "smaller table")}` })));
  const heads = [["table", ""], ["rows, last full", "number"], ["changed, newest", "number rare"], ["removed", "number rare"], ["rows by checkpoint", ""]];
  at("tables").replaceChildren(html("thead", {}, html("tr", {}, ...heads.map(([text, kind]) => html("th", { class: kind, scope: "col", text })))), html("tbody", {}, ...rows));
}

function draw() {
  const { report, all } = state;
  at("name").textContent = shown(report.name);
  at("path").textContent = shown(report.path);
  at("notice").hidden = !report.problem;
  at("notice").textContent = report.problem ? shown(report.problem) : "";
  const none = !all.length;
  at("none").hidden = !none || Boolean(report.problem);
  at("all").hidden = at("facts").hidden = none;
  if (none) return;
  if (state.follows || !pointOf(state.chosen)) state.chosen = all[all.length - 1].step;
  const points = inRange();
  drawFacts();
  drawRanges(points);
  for (const chart of Object.values(charts)) chart.show(points.filter(chart.choices.shows ?? (() => true)), state.chosen);
  drawSteps();
  drawDetails();
  drawTables(points);
}

const stored = at("data").textContent.trim();
if (stored) {
  read(JSON.parse(stored));
  at("status").textContent = `Report of ${clock(state.report.made)}`;
  draw();
} else live();

// Of a page that is served: ask for what is new, less often while nobody answers.
async function live() {
  const POLL_MS = 1000, POLL_MS_MAX = 15000;
  const status = at("status");
  let seen = "", wait = POLL_MS, since = 0;
  for (;;) {
    try {
      const answer = await fetch(`data?seen=${encodeURIComponent(seen)}`, { cache: "no-store" });
      if (!answer.ok) throw new Error(String(answer.status));
      if (answer.status === 200) {
        const report = await answer.json();
        seen = report.seen;
        since = Date.now();
        read(report);
        draw();
      }
      wait = POLL_MS;
      status.className = "status live";
      status.textContent = `Live, last change ${ago((Date.now() - since) / 1000)}`;
    } catch {
      wait = Math.min(POLL_MS_MAX, 2 * wait);
      status.className = "status lost";
      status.textContent = "asyncckpt watch does not answer";
    }
    await new Promise((resolve) => setTimeout(resolve, wait));
  }
}
