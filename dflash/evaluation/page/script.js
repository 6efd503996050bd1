"use strict";
// Shows what a block did while it is hovered or focused, or once it is chosen by a tap, a click or Enter.
const texts = JSON.parse(document.getElementById("data").textContent);
const detail = document.getElementById("detail");
let chosen = null;
let closing = false;

const percent = (p) => (p == null ? "" : p < 0.001 ? "<0.1\u00a0%" : `${Number((100 * p).toPrecision(p < 0.9995 ? 2 : 3))}\u00a0%`);

function element(name, options = {}, ...children) {
  const made = Object.assign(document.createElement(name), options);
  made.append(...children);
  return made;
}

const token = (text, kind) => element("code", { className: kind }, text === "" ? "·" : text.replaceAll("\n", "⏎"));

function likeliest(row, without) {
  const others = (row || []).filter(([text, p]) => text !== without && p >= 0.001).slice(0, 3);
  const words = others.map(([text, p]) => element("span", {}, `${JSON.stringify(text)} ${percent(p)}`));
  return element("div", { className: "others" }, ...(words.length ? ["else "] : []), ...words.flatMap((word) => [word, " "]));
}

function rows(block) {
  return block.drafts.map(([text, p], i) => {
    const kind = i < block.accepted ? "accepted" : i < block.verified ? "tail" : "plain";
    const outcome = i < block.accepted ? "accepted" : i === block.accepted && i < block.verified ? "rejected" : i < block.verified ? "dropped" : "not checked";
    const target = (block.target[i] || [])[0];
    const theirs = i < block.verified && target
      ? [token(target[0], i === block.accepted ? "own" : ""), ` ${percent(target[1])}`, likeliest(block.target[i], target[0])]
      : [element("span", { className: "muted" }, "–")];
    return element("tr", { className: i > block.accepted ? "after" : "" },
      element("td", { className: "number" }, String(i + 1)),
      element("td", {}, token(text, kind), ` ${percent(p)}`, likeliest(block.draft[i], text)),
      element("td", {}, ...theirs),
      element("td", { className: "outcome" }, outcome));
  });
}

function heading(place, block) {
  const where = `${place.dataset.trace}, block ${block.number}`;
  if (block.number === 0) return `${where}: the prompt's own pass`;
  if (block.asleep) return `${where}: a plain step, without the drafter`;
  return `${where}: ${block.accepted} of ${block.verified} checked drafts accepted`;
}

function show(place) {
  const block = texts[place.dataset.text][place.dataset.block];
  const facts = [`${block.tokens} token${block.tokens === 1 ? "" : "s"} committed at position ${block.position}`];
  if (block.source) facts.push(`drafts by ${block.source}`);
  facts.push(Object.entries(block.ms).map(([part, ms]) => `${part} ${ms} ms`).join(", "));
  const why = Object.entries(block.why).map(([name, value]) => `${name} ${Number(value).toPrecision(3)}`).join(", ");
  if (why) facts.push(`the policy expected: ${why}`);
  const close = element("button", { className: "close", type: "button", ariaLabel: "Close" }, "×");
  close.addEventListener("click", () => clear(true));
  const parts = [close, element("h3", { role: "status" }, heading(place, block)), ...facts.map((fact) => element("p", { className: "muted" }, fact))];
  if (block.drafts.length) {
    const names = ["", "drafter", "target", ""].map((name) => element("th", { scope: "col" }, name));
    parts.push(element("table", {}, element("thead", {}, element("tr", {}, ...names)), element("tbody", {}, ...rows(block))));
  }
  const next = (block.target[block.accepted] || []).slice(0, 4);
  if (!block.drafts.length && next.length) {
    parts.push(element("p", {}, "target: ", ...next.flatMap(([text, p]) => [token(text, "own"), ` ${percent(p)} `])));
  }
  detail.replaceChildren(...parts);
  detail.classList.remove("empty");
}

function clear(refocus) {
  const place = chosen;
  choose(null);
  detail.classList.add("empty");
  detail.replaceChildren(element("p", { className: "muted" }, detail.dataset.hint));
  if (refocus && place) {
    closing = true; // its focus would open the block again
    place.focus({ preventScroll: true });
    closing = false;
  }
}

function choose(place) {
  if (chosen) {
    chosen.classList.remove("chosen");
    chosen.setAttribute("aria-pressed", "false");
  }
  chosen = place;
  if (!place) return;
  place.classList.add("chosen");
  place.setAttribute("aria-pressed", "true");
  show(place);
}

function moveTo(place) {
  for (const other of place.closest(".text").querySelectorAll(".block")) other.tabIndex = -1;
  place.tabIndex = 0;
  place.focus();
}

function neighbour(place, key) {
  const all = [...place.closest(".text").querySelectorAll(".block")];
  const at = all.indexOf(place);
  const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: all.length - 1 }[key];
  return to === undefined ? undefined : all[Math.max(0, Math.min(all.length - 1, to))];
}

const blockOf = (event) => event.target.closest && event.target.closest(".block");

document.addEventListener("mouseover", (event) => {
  const place = blockOf(event);
  if (place && !chosen) show(place);
});
document.addEventListener("focusin", (event) => {
  const place = blockOf(event);
  if (!place || closing) return;
  if (chosen && chosen !== place) choose(place);
  else show(place);
});
document.addEventListener("click", (event) => {
  const place = blockOf(event);
  if (place) place === chosen ? clear(true) : choose(place);
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") return clear(true);
  const place = blockOf(event);
  if (!place) return;
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    return place === chosen ? clear(true) : choose(place);
  }
  const to = neighbour(place, event.key);
  if (to) {
    event.preventDefault();
    moveTo(to);
  }
});

const toggle = document.getElementById("show-rejected");
toggle.addEventListener("change", () => document.body.classList.toggle("show-rejected", toggle.checked));

function openLinked() {
  const place = document.getElementById(location.hash.slice(1));
  if (!place || !place.classList.contains("block")) return;
  choose(place);
  moveTo(place);
}
clear(false);
window.addEventListener("hashchange", openLinked);
openLinked();
