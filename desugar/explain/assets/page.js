"use strict";
const report = JSON.parse(document.getElementById("data").textContent);
const view = document.getElementById("view"), search = document.getElementById("search"), found = document.getElementById("found");
const programs = report.programs, folds = JSON.parse(document.getElementById("folds").textContent);
const isOne = programs.length === 1 && report.seconds === 0;  // an explanation, which has no overview
let current = null, cursor = 0, picked = new Set(), hits = [], hit = -1, texts = null;

// ---- small things ---------------------------------------------------------------------------------------

function el(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes || {})) {
    if (name === "class") node.className = value;
    else if (name === "style") node.style.cssText = value;
    else if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else if (value !== false && value != null) node.setAttribute(name, value === true ? "" : value);
  }
  node.append(...children.flat(Infinity).filter(child => child != null && child !== false));
  return node;
}
const fill = (...children) => view.replaceChildren(...children.flat(Infinity).filter(child => child != null && child !== false));
const time = s => s >= 1 ? s.toPrecision(3) + " s" : s >= 1e-3 ? (s * 1e3).toPrecision(3) + " ms" : (s * 1e6).toPrecision(3) + " µs";
const percent = x => x > 0 && x < .01 ? "< 1 %" : Math.round(x * 100) + " %";
const bytes = n => n >= 2 ** 20 ? (n / 2 ** 20).toPrecision(3) + " MiB" : n >= 1024 ? (n / 1024).toPrecision(3) + " KiB" : n + " B";
const many = (n, noun) => n + " " + noun + (n === 1 ? "" : "s");
const short = file => file.split("/").slice(-2).join("/");
const where = place => place ? `${short(place.file)}:${place.line}` : "no line of yours";
const share = cost => cost && cost.call ? Math.max(cost.call - cost.graph, 0) / cost.call : null;
// A dotted name that breaks after a dot rather than inside a word.
const dotted = name => name.split(/(?<=[._])/).map((part, n) => n ? [el("wbr"), part] : part);
const key = place => place ? place.file + ":" + place.line : "";

const TOKENS = /(#.*$)|("(?:[^"\\]|\\.)*"|'(?:[^'\\]|\\.)*')|\b(def|class|return|if|not|is|in|and|or|for|with|import|from|else|elif|while|None|True|False|lambda|as|try|except|raise|assert|yield)\b|\b(\d+(?:\.\d+)?(?:e-?\d+)?)\b|(\w+)(?=\()/g;
function python(line) {
  const out = document.createDocumentFragment();
  let at = 0;
  for (const m of line.matchAll(TOKENS)) {
    out.append(line.slice(at, m.index));
    out.append(el("span", { class: m[1] ? "c" : m[2] ? "s" : m[3] ? "w" : m[4] ? "d" : "f" }, m[0]));
    at = m.index + m[0].length;
  }
  out.append(line.slice(at));
  return out;
}

// ---- overview -------------------------------------------------------------------------------------------

const stageNames = [...new Set(programs.flatMap(p => p.stages.map(s => s[0])))];
const shades = { discover: 0, trace: 1, partition: 2, "compile forward": 3, "compile backward": 4, wrapper: 5, "compile backward, late": 7, "build kernels": 8, compile: 9, load: 10 };
const color = name => `var(--s${shades[name] ?? 11})`;

// The parts of the time that programs took to compile: stages, and what is in none.
function timeParts(some) {
  const parts = stageNames.map(name => [name, some.reduce((sum, p) => sum + p.stages.filter(s => s[0] === name).reduce((part, s) => part + s[1], 0), 0), color(name)]);
  const rest = some.reduce((sum, p) => sum + p.seconds, 0) - parts.reduce((sum, part) => sum + part[1], 0);
  return [...parts, ["the rest", Math.max(rest, 0), "var(--s6)"]].filter(part => part[1] > 0);
}

function stageBar(program, widest, width) {
  const total = Math.max(program.seconds, 1e-9), parts = timeParts([program]);
  return el("span", { class: "bar", role: "img", "aria-label": parts.map(([name, s]) => `${name} ${time(s)}`).join(", "), style: `width:${Math.max(program.seconds / widest * width, .5)}%` },
    parts.map(([name, seconds, shade]) => el("i", { style: `width:${seconds / total * 100}%;background:${shade}`, title: `${name}: ${time(seconds)}` })));
}

function overview() {
  current = null; picked.clear();
  document.title = report.title;
  const total = programs.reduce((sum, p) => sum + p.seconds, 0), widest = Math.max(...programs.map(p => p.seconds), 1e-9);
  const calls = programs.reduce((sum, p) => sum + (p.calls || 0), 0);
  const spent = programs.filter(p => p.cost && p.calls > 1).map(p => [p.calls * p.cost.call, p.calls * p.cost.call * share(p.cost)]);
  const whole = spent.reduce((sum, s) => sum + s[0], 0), wrapped = spent.reduce((sum, s) => sum + s[1], 0);
  const functions = new Set(programs.map(p => p.name)).size;
  const rows = programs.map((p, n) => programRow(p, n, widest));
  fill(
    el("h1", {}, report.title),
    el("p", {}, report.versions.map(v => v.join(" ")).join(" · ")),
    el("div", { class: "tiles" },
      tile(programs.length, `${programs.length === 1 ? "program" : "programs"} of ${many(functions, "function")}`), tile(time(total), "to compile"),
      calls ? tile(calls.toLocaleString("en"), "calls") : null, whole ? tile(percent(wrapped / whole), "of repeated calls' time in wrappers") : null,
      tile(report.materialized.reduce((sum, m) => sum + m.count, 0), "materializing fallbacks", report.materialized.length > 0)),
    programs.length ? timeBar(timeParts(programs), "time to compile") : null,
    el("div", { class: "card", id: "programs" }, rows.length ? rows : el("p", {}, "Nothing was compiled.")),
    listed("Not compiled", report.not_compiled), listed("Graph breaks", report.breaks), listed("Slow paths", report.slow),
    report.materialized.length ? materialized(report.materialized) : null);
  cursor = Math.min(cursor, Math.max(programs.length - 1, 0));
  mark(); find();
}

const tile = (value, text, bad) => el("div", { class: "card tile" }, el("b", { class: bad ? "error" : "" }, String(value)), el("span", {}, text));

function programRow(p, n, widest) {
  const part = share(p.cost);
  return el("button", { class: "program", "data-n": n, onclick: () => open(n) },
    el("span", { class: "number" }, n + 1), el("span", { class: "name" }, title(p)),
    el("span", { class: "timed" }, stageBar(p, widest, 70), el("small", {}, time(p.seconds))),
    el("span", { class: "calls" }, p.calls == null ? "" : many(p.calls, "call")),
    el("span", { class: "share" }, part == null ? null : [el("span", { class: "bar" }, el("i", { style: `width:${part * 100}%` })), el("small", {}, el("i", { class: "of-wrapper" }), `wrapper ${percent(part)}, `, el("i", { class: "of-graph" }), `graph ${percent(1 - part)} of ${time(p.cost.call)}`)]),
    p.worth ? el("span", { class: "others" }, inOtherWays(p.worth)) : null,
    el("span", { class: "why" + (p.error ? " error" : "") }, p.error ? p.error.split("\n")[0] : [p.reason, p.failed.map(f => " — " + f)]));
}

const listed = (title, list) => list.length ? el("div", { class: "card" }, el("h2", {}, title), el("ul", {}, list.map(text => el("li", {}, text)))) : null;

function materialized(list) {
  return el("div", { class: "card", style: "margin-top:1rem" }, el("h2", {}, "Materializing fallbacks"),
    el("div", { class: "wide" }, el("table", {}, el("tr", {}, ["class", "op", "times", "when", "your line"].map(t => el("th", {}, t))),
      list.map(m => el("tr", {}, el("td", {}, m.cls), el("td", { class: "mono" }, m.op), el("td", {}, m.count), el("td", {}, m.traced ? "traced" : "eager"),
        el("td", { class: "mono" }, where(m.place), m.place && m.place.text ? "  " + m.place.text : ""))))));
}

// ---- one program ----------------------------------------------------------------------------------------

const title = p => p.label || p.name;
function open(n) { location.hash = "program-" + (n + 1); }

function program(n) {
  const p = programs[n];
  current = n; cursor = 0; picked.clear();
  document.title = `${title(p)} – ${report.title}`;
  const part = share(p.cost);
  fill(
    isOne ? null : el("nav", {}, el("button", { onclick: () => location.hash = "", title: "All programs (Esc)" }, "All"),
      el("button", { disabled: n === 0, onclick: () => open(n - 1), title: "Previous ([)" }, "←"), el("button", { disabled: n === programs.length - 1, onclick: () => open(n + 1), title: "Next (])" }, "→")),
    el("h1", {}, title(p)), el("p", {}, isOne ? p.reason : `Program ${n + 1}: ${p.reason}`), p.error ? null : el("p", { class: "words" }, inWords(p)),
    p.failed.map(text => el("p", { class: "error" }, "A guard of an earlier program failed: " + text)),
    p.error ? el("pre", { class: "card error row" }, p.error) : null,
    el("div", { class: "tiles" }, tile(time(p.seconds), "to compile" + (p.backend ? " with " + p.backend : "")), p.calls == null ? null : tile(p.calls, "calls"),
      p.cost ? tile(time(p.cost.call), "a call") : null, part == null ? null : tile(percent(part), `wrapper, ${time(p.cost.call * part)} of a call`),
      p.graphs.length > 1 ? tile(bytes(p.saved_bytes), "saved for the backward") : null,
      p.materialized.length ? tile(p.materialized.length, "materialized", true) : null),
    timeBar(timeParts([p]), "time to compile"), worth(p),
    p.error ? null : [el("div", { class: "panes" }, pane("Your code", sources(p)), pane("Ops, and what each became", ops(p, folds[n])), pane("Plain graphs", p.graphs.map((g, at) => graph(g, folds[n].graphs[at])))),
      el("div", { class: "cards" }, signature(p, folds[n]), sentences(p), saved(p, folds[n]), wrapper(p, folds[n]), guards(p, folds[n]))]);
  find();
}

function inWords(p) {
  const wrappers = [...p.inputs, ...p.captured].filter(x => x.inner.length), classes = {}, kinds = {};
  const inside = x => x.inner.length ? x.inner.reduce((sum, inner) => sum + inside(inner), 0) : 1;
  for (const x of wrappers) classes[x.kind] = (classes[x.kind] || 0) + 1;
  for (const op of p.ops) if (!["plain", "inside"].includes(op.kind)) kinds[op.kind] = (kinds[op.kind] || 0) + 1;
  const taken = Object.entries(classes).map(([name, n]) => many(n, name)).join(" and ");
  const graphs = p.graphs.map(g => `a ${g.name} graph of ${many(g.nodes.length, "plain op")}`).join(" and ");
  const ran = Object.entries(kinds).sort((a, b) => b[1] - a[1]).map(([kind, n]) => `${n} by ${kind}`).join(", ");
  return [taken ? `${taken} among what goes in: taken apart into ${many(wrappers.reduce((sum, x) => sum + inside(x), 0), "tensor")}. ` : "No tensor subclass among what goes in. ",
    `What runs is ${graphs}. `, ran ? `Ops on tensor subclasses: ${ran}. ` : "",
    p.cost ? `Dynamo checks ${many(p.guards.length, "guard")}; the wrapper does without ${many(p.left_out.length, "check")} of its own, and takes ${time(Math.max(p.cost.call - p.cost.graph, 0))} of a call of ${time(p.cost.call)}.` : ""];
}

const pane = (title, body) => el("section", { class: "card pane" }, el("h2", {}, title), el("div", {}, body));
const pickable = (attributes, pick) => ({ ...attributes, tabindex: 0, role: "button", onclick: pick, onkeydown: e => { if (e.key === "Enter" || e.key === " ") { e.preventDefault(); pick(); } } });

function sources(p) {
  const lines = new Map();
  for (const op of p.ops) if (op.place) lines.set(key(op.place), [...(lines.get(key(op.place)) || []), op.number]);
  if (!p.sources.length) return el("p", {}, "No line of yours was on the stack.");
  return p.sources.map(source => [el("h3", {}, `${short(source.file)} — ${source.function}`), source.lines.map((line, n) => {
    const at = source.file + ":" + (source.first + n), mine = lines.get(at);
    const text = [el("span", { class: "n" }, source.first + n), python(line)];
    return mine ? el("code", pickable({ class: "row", "data-line": at }, () => pick(mine)), text) : el("code", { class: "row" }, text);
  })]);
}

function ops(p, runs) {
  const counted = names => Object.entries(names.reduce((sum, name) => ({ ...sum, [name]: (sum[name] || 0) + 1 }), {})).map(([name, n]) => n > 1 ? `${name} ×${n}` : name).join(", ");
  return folded(p.ops, runs.ops, op => el("div", pickable({ class: "op" + (op.parent != null ? " inside" : ""), "data-op": op.number }, () => pick(family(p, op.number))),
    el("span", { class: "kind " + op.kind }, op.kind), " ", el("code", {}, dotted(op.name)), el("small", {}, op.operands),
    ["plain", "inside"].includes(op.kind) ? null : el("small", {}, op.how),
    op.forward.length ? el("small", { class: "mono" }, "→ " + counted(op.forward)) : null, op.backward.length ? el("small", { class: "mono" }, "backward → " + counted(op.backward)) : null));
}

function family(p, number) {
  const all = [number];
  for (const op of p.ops) if (op.parent != null && all.includes(op.parent)) all.push(op.number);
  return all;
}

function graph(g, runs) {
  const nodes = new Map(g.nodes.map(node => [node.line, node]));
  return [el("h3", {}, g.name + (g.needs.length ? ` (reads ${g.needs.join(", ")} of its module)` : "")), folded(g.text.trimEnd().split("\n"), runs, (line, n) => {
    const node = nodes.get(n);
    if (!node || node.op == null) return el("code", { class: "row" }, python(line));
    return el("code", pickable({ class: "row", "data-node": node.name, "data-of": node.op }, () => pick([node.op])), python(line));
  })];
}

function pick(numbers) {
  const same = numbers.length === picked.size && numbers.every(n => picked.has(n));
  picked = new Set(same ? [] : numbers);
  const p = programs[current], lines = new Set(p.ops.filter(op => picked.has(op.number)).map(op => key(op.place)));
  const show = (selector, test) => {
    let first = null;
    for (const node of view.querySelectorAll(selector)) {
      const on = picked.size > 0 && test(node);
      node.classList.toggle("on", on);
      node.setAttribute("aria-pressed", on);
      if (on && (!first || (first.closest("[hidden]") && !node.closest("[hidden]")))) first = node;
    }
    if (first) reveal(first);
  };
  show("[data-line]", node => lines.has(node.dataset.line));
  show("[data-op]", node => picked.has(+node.dataset.op));
  show("[data-of]", node => picked.has(+node.dataset.of));
}

function reveal(node) {
  unfold(node);
  const box = node.closest(".pane > div");
  if (!box) return node.scrollIntoView({ block: "nearest" });
  const top = node.getBoundingClientRect().top - box.getBoundingClientRect().top + box.scrollTop;
  if (top < box.scrollTop || top > box.scrollTop + box.clientHeight - 40) box.scrollTop = top - box.clientHeight / 3;
}

// ---- search ---------------------------------------------------------------------------------------------

function words() {
  return texts ||= programs.map(p => [title(p), p.reason, p.error, ...p.failed, ...p.ops.map(op => [op.name, op.how, op.place ? op.place.text : ""].join(" ")),
    ...p.graphs.map(g => g.text), p.wrapper, ...p.sources.map(s => s.lines.join("\n"))].join("\n").toLowerCase());
}

function find() {
  const query = search.value.trim().toLowerCase();
  for (const node of view.querySelectorAll(".hit")) node.classList.remove("hit");
  hits = []; hit = -1;
  if (current == null) {
    let shown = 0;
    for (const row of view.querySelectorAll(".program")) {
      const on = !query || words()[+row.dataset.n].includes(query);
      row.hidden = !on; row.style.display = on ? "" : "none"; shown += on;
    }
    found.textContent = query ? many(shown, "program") : "";
    return;
  }
  if (query) for (const node of view.querySelectorAll(".row, .op, .tree code, .kept code, td, li")) if (node.textContent.toLowerCase().includes(query)) hits.push(node);
  for (const node of hits) node.classList.add("hit");
  found.textContent = query ? many(hits.length, "place") : "";
}

function nextHit() {
  if (current == null) { const row = view.querySelector(".program:not([hidden])"); if (row) open(+row.dataset.n); return; }
  if (!hits.length) return;
  hit = (hit + 1) % hits.length;
  reveal(hits[hit]); hits[hit].scrollIntoView({ block: "nearest" });
  found.textContent = `${hit + 1} of ${hits.length}`;
}

// ---- keys, theme, address -------------------------------------------------------------------------------

function mark() {
  for (const row of view.querySelectorAll(".program.at")) row.classList.remove("at");
  const row = view.querySelector(`.program[data-n="${cursor}"]`);
  if (row) row.classList.add("at");
  return row;
}

function step(by) {
  if (current == null) {
    const rows = [...view.querySelectorAll(".program:not([hidden])")].map(row => +row.dataset.n);
    if (!rows.length) return;
    const at = rows.indexOf(cursor);
    cursor = rows[Math.min(Math.max(at + by, 0), rows.length - 1)];
    const row = mark();
    if (row) row.scrollIntoView({ block: "nearest" });
    return;
  }
  const every = programs[current].ops.filter(op => op.parent == null && !view.querySelector(`[data-op="${op.number}"]`).closest("[hidden]"));
  if (!every.length) return;
  const at = every.findIndex(op => picked.has(op.number));
  picked.clear();
  pick(family(programs[current], every[at < 0 ? 0 : Math.min(Math.max(at + by, 0), every.length - 1)].number));
}

function setTheme(theme) {
  document.documentElement.dataset.theme = theme;
  try { localStorage.setItem("desugar-theme", theme); } catch { /* a page from a file may not have a store */ }
}
const toggleTheme = () => setTheme(document.documentElement.dataset.theme === "dark" ? "light" : "dark");

function escape() {
  if (picked.size) pick([]);
  else if (current != null && !isOne) { cursor = current; location.hash = ""; }
}

const actions = { "/": () => search.focus(), j: () => step(1), ArrowDown: () => step(1), k: () => step(-1), ArrowUp: () => step(-1), t: toggleTheme, "?": () => document.getElementById("help").showModal(), Escape: escape,
  "[": () => current > 0 && open(current - 1), "]": () => current != null && current < programs.length - 1 && open(current + 1), Enter: () => current == null && programs.length && open(cursor) };

document.addEventListener("keydown", event => {
  if (event.ctrlKey || event.metaKey || event.altKey || document.getElementById("help").open) return;
  if (event.target === search) {
    if (event.key === "Enter") nextHit();
    else if (event.key === "Escape") { search.value = ""; find(); search.blur(); }
    return;
  }
  if (event.key === "Enter" && event.target.matches("button, a, [tabindex='0']")) return;
  const action = actions[event.key];
  if (action) { event.preventDefault(); action(); }
});
search.addEventListener("input", find);
document.getElementById("theme").addEventListener("click", toggleTheme);
document.getElementById("keys").addEventListener("click", actions["?"]);
document.getElementById("home").addEventListener("click", event => { event.preventDefault(); location.hash = ""; });

function route() {
  const n = /^#program-(\d+)$/.exec(location.hash);
  if (n && programs[+n[1] - 1]) program(+n[1] - 1);
  else if (isOne) program(0);
  else overview();
  window.scrollTo(0, 0);
}
window.addEventListener("hashchange", route);
document.getElementById("title").textContent = report.title;
let theme = null;
try { theme = localStorage.getItem("desugar-theme"); } catch { /* as above */ }
setTheme(theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light"));
route();
