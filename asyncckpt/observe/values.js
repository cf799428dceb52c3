// Values for people, and elements made of them. Names come from files of unknown origin: they become text, never markup,
// and characters that cannot be seen or that turn the direction of what follows are shown as escapes.
const HIDDEN = /[\p{C}\p{Zl}\p{Zp}]/gu;
const shown = (value) => String(value).replace(HIDDEN, (c) => `\\u{${c.codePointAt(0).toString(16)}}`);

const SVG = "http://www.w3.org/2000/svg";
function fill(made, facts, parts) {
  for (const [name, value] of Object.entries(facts)) {
    if (name === "text") made.textContent = value;
    else if (name === "on") for (const [event, act] of Object.entries(value)) made.addEventListener(event, act);
    else if (value !== null && value !== false) made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...parts.flat().filter((part) => part !== null));
  return made;
}
const html = (tag, facts = {}, ...parts) => fill(document.createElement(tag), facts, parts);
const svg = (tag, facts = {}, ...parts) => fill(document.createElementNS(SVG, tag), facts, parts);
const at = (id) => document.getElementById(id);

const count = (value) => value.toLocaleString("en-US");
const many = (value, noun) => `${count(value)} ${noun}${value === 1 ? "" : "s"}`;
function digits(value) {
  const rounded = value >= 100 ? Math.round(value) : Number(value.toPrecision(3));
  return rounded.toLocaleString("en-US", { maximumFractionDigits: 3 });
}
const UNITS = ["B", "KiB", "MiB", "GiB", "TiB", "PiB"];
const power = (bytes) => Math.max(0, Math.min(UNITS.length - 1, Math.floor(Math.log2(Math.max(1, bytes) / 0.98) / 10)));
const size = (bytes) => `${digits(bytes / 1024 ** power(bytes))} ${UNITS[power(bytes)]}`;
function lasting(seconds) {
  if (seconds === 0) return "0 s";
  if (seconds < 1e-3) return `${digits(seconds * 1e6)} µs`;
  if (seconds < 1) return `${digits(seconds * 1e3)} ms`;
  if (seconds < 120) return `${digits(seconds)} s`;
  if (seconds < 7200) return `${digits(seconds / 60)} min`;
  if (seconds < 172800) return `${digits(seconds / 3600)} h`;
  if (seconds < 63072000) return `${digits(seconds / 86400)} days`;
  return `${(seconds / 31557600).toLocaleString("en-US", { notation: "compact", maximumFractionDigits: 1 })} y`;
}
const two = (value) => String(value).padStart(2, "0");
function clock(seconds, form = "all") {
  const time = new Date(seconds * 1000);
  if (Number.isNaN(time.getTime())) return "unknown";
  const day = `${time.getFullYear()}-${two(time.getMonth() + 1)}-${two(time.getDate())}`;
  const hour = `${two(time.getHours())}:${two(time.getMinutes())}`;
  return { all: `${day} ${hour}:${two(time.getSeconds())}`, day, hour, second: `${hour}:${two(time.getSeconds())}` }[form];
}
const ago = (seconds) => (seconds < 1.5 ? "just now" : `${lasting(Math.round(seconds))} ago`);
function rank(values, share) {
  const sorted = values.slice().sort((a, b) => a - b);
  return sorted[Math.min(sorted.length - 1, Math.floor(share * sorted.length))];
}

// Ticks of an axis from 0 to `most` (or of decades, from `least`), at round values of the unit that is shown.
function ticks(most, wanted, unit = 1) {
  const rough = most / unit / wanted;
  const tens = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].find((factor) => factor * tens >= 0.7 * rough) * tens * unit;
  return Array.from({ length: Math.floor(most / step + 1e-9) + 1 }, (_, number) => number * step);
}
function decades(least, most) {
  const first = Math.floor(Math.log10(least));
  const last = Math.ceil(Math.log10(most));
  return Array.from({ length: last - first + 1 }, (_, number) => 10 ** (first + number));
}
const TIMES = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400, 172800, 604800,
  1209600, 2592000, 7776000, 31536000];
function timeTicks(from, to, wanted) {
  const step = TIMES.find((length) => (to - from) / length <= wanted) ?? 31536000 * Math.ceil((to - from) / 31536000 / wanted);
  const shift = new Date(from * 1000).getTimezoneOffset() * 60;
  const first = Math.ceil((from - shift) / step) * step + shift;
  const found = [];
  for (let time = first; time <= to; time += step) found.push(time);
  return { found, form: step >= 86400 ? "day" : step >= 60 ? "hour" : "second" };
}
