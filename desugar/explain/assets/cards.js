"use strict";
// The cards of a program's page, and what they share. `page.js` puts them together.

// ---- repeated layers -------------------------------------------------------------------------------------

// Items as `show` draws them. Of a run of equal layers there is the first, below a button that shows the others.
function folded(items, runs, show, from = 0, to = items.length) {
  const out = [];
  let at = from;
  const drawn = (start, end) => { const all = []; for (let n = start; n < end; n++) all.push(show(items[n], n)); return all; };
  for (const run of runs || []) {
    const first = run.start + run.length, end = run.start + run.length * run.count;
    out.push(drawn(at, run.start), foldBox(run.count, run.label, folded(items, run.inner, show, run.start, first), drawn(first, end)));
    at = end;
  }
  return [out, drawn(at, to)];
}

function foldBox(count, label, first, others) {
  const rest = el("div", { hidden: true }, others);
  const button = el("button", { class: "more", "aria-expanded": "false", onclick: () => openFold(rest, rest.hidden) },
    el("b", {}, `× ${count}`), label ? [" ", el("code", {}, dotted(label))] : null, el("span", { class: "verb" }));
  return el("div", { class: "fold" }, button, first, rest);
}

function openFold(rest, isOpen) {
  rest.hidden = !isOpen;
  rest.parentElement.firstElementChild.setAttribute("aria-expanded", isOpen);
}

// Opens the folds around a node.
function unfold(node) {
  for (let rest = node.closest("[hidden]"); rest; rest = rest.parentElement.closest("[hidden]")) openFold(rest, true);
}

// ---- the signature, what is saved, the wrapper ---------------------------------------------------------------

function leaf(x, arrow) {
  const size = x.dtype ? [" ", x.dtype, "[", x.size.map((extent, n) => [n ? ", " : "", el("span", { class: /^-?\d+$/.test(extent) ? "" : "symbolic" }, extent)]), "]"] : null;
  return el("div", {}, el("code", {}, arrow, x.name), " ", el("b", {}, x.kind), size ? el("code", {}, size) : el("span", { class: "tag" }, " " + x.note),
    x.requires_grad ? el("span", { class: "tag" }, " requires grad") : null, x.device && x.device !== "cpu" ? el("span", { class: "tag" }, " " + x.device) : null,
    x.metadata.map(([name, value]) => el("div", {}, el("code", {}, `${name} = ${value}`), el("span", { class: "tag" }, " constant"))),
    x.dynamics.map(([name, value]) => el("div", {}, el("code", { class: "symbolic" }, `${name} = ${value}`), el("span", { class: "tag" }, " dynamic"))),
    x.inner.map(inner => leaf(inner, ".")));
}

function signature(p, folds) {
  return el("section", { class: "card" }, el("h2", {}, "Signature"), el("div", { class: "tree" }, folded(p.inputs, folds.inputs, x => leaf(x, "")),
    p.captured.length ? el("details", { open: p.captured.length <= 8 || folds.captured.length > 0 }, el("summary", {}, `of modules, closures and globals: ${many(p.captured.length, "tensor")}`), folded(p.captured, folds.captured, x => leaf(x, ""))) : null,
    p.symbols.length ? p.symbols.map(s => el("div", {}, el("code", { class: "symbolic" }, `${s.name} = ${s.source}`), el("span", { class: "tag" }, ` ${s.value} here`))) : null,
    el("p", {}, "results"), folded(p.outputs, folds.outputs, x => leaf(x, "→ "))));
}

function sentences(p) {
  const all = [...p.aliasing, ...p.mutation];
  return el("section", { class: "card" }, el("h2", {}, "Aliasing and mutation"), all.length ? el("ul", {}, all.map(text => el("li", {}, text))) : el("p", {}, "None found."));
}

function saved(p, folds) {
  if (p.graphs.length < 2) return null;
  const row = s => el("div", { class: "kept" }, el("code", {}, s.name), el("code", {}, s.source === "a size" ? s.dtype : `${s.dtype}[${s.size.join(", ")}]`), el("span", {}, s.source), el("span", {}, s.nbytes === 0 ? "" : bytes(s.nbytes)));
  return el("section", { class: "card" }, el("h2", {}, "Saved for the backward"),
    el("div", { class: "long" }, folded(p.saved, folds.saved, row)),
    el("p", {}, `${bytes(p.saved_bytes)} besides inputs and results${p.symbols.length ? ", at the sizes of this call" : ""}`));
}

function wrapper(p, folds) {
  const left = new Set(p.left_out.map(one => one.line));
  return el("section", { class: "card" }, el("h2", {}, `The wrapper${p.left_out.length ? `, ${many(p.left_out.length, "check")} left out` : ""}`),
    el("pre", {}, folded(p.wrapper.trimEnd().split("\n"), folds.wrapper, (line, n) => el("code", { class: "row" }, left.has(n) ? el("span", { class: "left" }, line) : python(line)))));
}

// ---- guards --------------------------------------------------------------------------------------------------

function guards(p, folds) {
  const checks = many(p.guards.reduce((sum, g) => sum + g.checks, 0), "check");
  const row = (text, g, n) => el("code", { class: "row" }, el("span", { class: "n" }, n), python(text), g.place ? el("span", { class: "c" }, `  # ${where(g.place)}: ${g.place.text}`) : null);
  return el("section", { class: "card" }, el("h2", {}, "A call runs this program if"),
    el("p", {}, `${checks} of Dynamo's. The number before a name is how many of them are about it.`),
    el("pre", {}, folds.guards.map(group => {
      const first = group.texts.map((text, n) => row(text, group.guards[n], n ? "" : group.checks));
      return group.count > 1 ? foldBox(group.count, group.name, first, group.guards.map(g => row(g.text, g, g.checks))) : first;
    })));
}

// ---- was it worth it -----------------------------------------------------------------------------------------

// A bar of labelled parts, each [name, seconds, colour]; the labels are below it, so narrow parts have theirs too.
function timeBar(parts, label) {
  const total = Math.max(parts.reduce((sum, part) => sum + part[1], 0), 1e-12);
  const text = parts.map(([name, seconds]) => `${name} ${time(seconds)}`).join(", ");
  return [el("span", { class: "bar tall", role: "img", "aria-label": `${label}: ${text}` }, parts.map(([name, seconds, color]) => el("i", { style: `width:${seconds / total * 100}%;background:${color}`, title: `${name}: ${time(seconds)}` }))),
    el("div", { class: "legend" }, parts.map(([name, seconds, color]) => el("span", {}, el("i", { style: `background:${color}` }), `${name} `, el("b", {}, time(seconds)), ` ${percent(seconds / total)}`)))];
}

// One line about a call in other ways: the answer, and the times.
function inOtherWays(worth) {
  return [el("b", { class: /^no\b/.test(worth.answer) ? "error" : "good" }, worth.answer || "timed in other ways"), " · ", worth.ways.map(([name, seconds], n) => (n ? ", " : "") + `${name} ${seconds == null ? "failed" : time(seconds)}`)];
}

function worth(p) {
  if (!p.worth) return p.no_worth ? el("section", { class: "card worth" }, el("h2", {}, "Was it worth it"), el("p", {}, `Not timed in other ways: ${p.no_worth}.`)) : null;
  const ways = p.worth.ways, ours = ways[ways.length - 1][1];
  const peaks = new Map(p.worth.memory.map(([name, nbytes]) => [name, nbytes == null ? "" : `, ${bytes(nbytes)} at the peak`]));
  const longest = Math.max(...ways.map(way => way[1] || 0), 1e-12);
  const ratio = (seconds, last) => last || ours == null ? "" : ` — ${seconds / ours < .01 ? "< 0.01" : (seconds / ours).toPrecision(2)} × desugar's`;
  const row = ([name, seconds], last) => el("div", { class: "way" }, el("span", {}, name),
    el("span", { class: "bar" }, seconds == null ? null : el("i", { style: `width:${seconds / longest * 100}%;background:var(--${last ? "s0" : "s6"})` })),
    seconds == null ? el("span", {}, "failed") : el("span", {}, el("b", {}, time(seconds)), ratio(seconds, last), peaks.get(name) || ""));
  return el("section", { class: "card worth" }, el("h2", {}, "Was it worth it"), p.worth.answer ? el("p", { class: "answer" }, p.worth.answer) : null, ways.map((way, n) => row(way, n === ways.length - 1)), p.worth.losses.map(text => el("p", {}, `Loss: ${text}.`)), el("p", {}, p.worth.verdict));
}
