// Keeps the page true while it is open: listens for changes, fetches the parts, and puts what changed in its place.
// Whatever it cannot learn it calls unknown: a state that was fine a minute ago is not shown as fine.
"use strict";

const THEME = "floodmark-theme";
const QUIET_MS = 8_000; // so long nothing was heard: ask
const ANSWER_MS = 8_000; // so long an answer may take
const BETWEEN_MS = 900; // between two fetches; in a hidden page, more
const HIDDEN_BETWEEN_MS = 10_000;
const BACKOFF_MS = [500, 1_000, 2_000, 4_000, 8_000, 15_000];

// ── theme: before anything is painted ──

const root = document.documentElement;
const dark = window.matchMedia("(prefers-color-scheme: dark)");

function rememberedTheme() {
  try { return localStorage.getItem(THEME); } catch { return null; }
}

function showTheme() {
  const chosen = rememberedTheme();
  if (chosen === "light" || chosen === "dark") root.dataset.theme = chosen;
  else delete root.dataset.theme;
  const button = document.getElementById("theme");
  if (button) button.setAttribute("aria-pressed", String(isDark()));
}

function isDark() {
  return root.dataset.theme ? root.dataset.theme === "dark" : dark.matches;
}

function toggleTheme() {
  try { localStorage.setItem(THEME, isDark() ? "light" : "dark"); } catch { /* not remembered */ }
  showTheme();
}

root.classList.add("js");
showTheme();
dark.addEventListener("change", showTheme);

// ── putting new parts in the place of old ones, so that focus, scroll and what is open stay ──

function keyOf(node) {
  return node.nodeType === Node.ELEMENT_NODE ? node.id || node.dataset.key || null : null;
}

function isAlike(old, fresh) {
  return old.nodeType === fresh.nodeType && old.nodeName === fresh.nodeName && keyOf(old) === keyOf(fresh);
}

function morph(old, fresh) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.data !== fresh.data) old.data = fresh.data;
    return;
  }
  if (old.isEqualNode(fresh)) return;
  if (old.dataset.figure && old.dataset.value !== fresh.dataset.value) flash(old);
  for (const { name, value } of [...fresh.attributes]) {
    if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  }
  for (const { name } of [...old.attributes]) {
    const isReaders = name === "open" && old.nodeName === "DETAILS";
    if (!fresh.hasAttribute(name) && !isReaders) old.removeAttribute(name);
  }
  if ("replace" in old.dataset) old.replaceChildren(...fresh.childNodes);
  else morphChildren(old, fresh);
}

function morphChildren(old, fresh) {
  const wanted = new Set([...fresh.childNodes].map(keyOf).filter(Boolean));
  const known = new Map([...old.childNodes].filter(keyOf).map((node) => [keyOf(node), node]));
  let next = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    // What is not wanted any more goes before its place is compared: the others need not move.
    while (next && keyOf(next) && !wanted.has(keyOf(next))) {
      const gone = next;
      next = next.nextSibling;
      gone.remove();
    }
    const key = keyOf(child);
    let match = key ? known.get(key) : next && isAlike(next, child) ? next : null;
    if (match && match.nodeName !== child.nodeName) match = null;
    if (!match) {
      old.insertBefore(child, next);
    } else {
      if (match === next) next = next.nextSibling;
      else old.insertBefore(match, next);
      morph(match, child);
    }
  }
  while (next) {
    const gone = next;
    next = next.nextSibling;
    gone.remove();
  }
}

const calm = window.matchMedia("(prefers-reduced-motion: reduce)");

function flash(element) {
  if (calm.matches || document.hidden || !element.animate) return;
  const color = getComputedStyle(root).getPropertyValue("--flash");
  element.animate([{ backgroundColor: color }, { backgroundColor: "transparent" }], { duration: 1_200, easing: "ease-out" });
}

// ── times ──

let clockAhead = 0; // how far the server's clock is ahead of this one

function spanText(ms) {
  const seconds = Math.max(0, ms / 1000);
  if (seconds >= 86_400) return `${(seconds / 86_400).toFixed(1)} d`;
  if (seconds >= 3_600) return `${(seconds / 3_600).toFixed(1)} h`;
  if (seconds >= 60) return `${Math.round(seconds / 60)} min`;
  return `${Math.round(seconds)} s`;
}

function ageText(at) {
  const away = Date.now() + clockAhead - at;
  if (away >= 1_000) return `${spanText(away)} ago`;
  return away > -1_000 ? "now" : `in ${spanText(-away)}`;
}

function tellTimes() {
  for (const time of document.querySelectorAll("time[data-age]")) {
    const text = ageText(Date.parse(time.dateTime));
    if (time.textContent !== text) time.textContent = text;
  }
}

// ── what is known ──

let heardAt = 0; // when the state was last known, by this clock
let isKnown = true;

function setLive(state, text) {
  root.dataset.live = state;
  const place = document.getElementById("live-text");
  if (place) place.textContent = text;
}

function known(parts) {
  heardAt = Date.now();
  clockAhead = Date.parse(parts.dataset.at) - heardAt;
  document.title = parts.dataset.title;
  const health = document.getElementById("health");
  document.getElementById("unknown").hidden = true;
  if (health) health.hidden = false;
  // Ages are no news: only what is said of health is read out.
  if (!isKnown || announced !== parts.dataset.health) announce(parts.dataset.health);
  isKnown = true;
  const word = source && source.readyState === EventSource.OPEN ? "live" : "polling";
  setLive(word, word);
}

function unknown(reason) {
  const section = document.getElementById("unknown");
  document.getElementById("unknown-reason").textContent = reason;
  if (!isKnown) return;
  isKnown = false;
  const since = new Date(heardAt + clockAhead);
  const time = document.getElementById("unknown-since");
  time.dateTime = since.toISOString();
  time.textContent = `${since.toISOString().slice(11, 19)} UTC`;
  time.title = since.toISOString();
  document.getElementById("unknown-below").hidden = !document.getElementById("health");
  section.hidden = false;
  const health = document.getElementById("health");
  if (health) health.hidden = true;
  document.title = "State unknown – Floodmark";
  setLive("unknown", "unknown");
  announce(`State unknown: ${reason}`);
}

let announced = null;

function announce(text) {
  const first = announced === null;
  announced = text;
  // The page was just read: what it said is not said again.
  if (!first) document.getElementById("heard").textContent = text;
}

// ── fetching ──

let fetching = false;
let wantedAgain = false;
let fetchedAt = 0;
let waiting = null;

function refreshSoon() {
  if (waiting !== null) return;
  const between = document.hidden ? HIDDEN_BETWEEN_MS : BETWEEN_MS;
  waiting = setTimeout(refresh, Math.max(0, fetchedAt + between - Date.now()));
}

async function refresh() {
  clearTimeout(waiting);
  waiting = null;
  if (fetching) { wantedAgain = true; return; }
  fetching = true;
  fetchedAt = Date.now();
  try {
    const answer = await fetch("/?fragment=1", { cache: "no-store", signal: AbortSignal.timeout(ANSWER_MS) });
    const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
    const parts = fresh.getElementById("parts");
    if (answer.status === 401) unknown("You are signed out: load this page again to sign in.");
    else if (answer.ok && parts) show(parts);
    else unknown(fresh.getElementById("unknown-reason")?.textContent || `The server answered with status ${answer.status}.`);
  } catch (error) {
    unknown(error.name === "TimeoutError" ? "The server does not answer in time." : "The server does not answer.");
  } finally {
    fetching = false;
    if (wantedAgain) { wantedAgain = false; refreshSoon(); }
  }
}

function show(parts) {
  const old = document.getElementById("parts");
  const focused = document.activeElement;
  morph(old, parts);
  // A keyboard user continues from the same place, or from the start of the state if that is gone.
  if (focused && focused !== document.activeElement) (focused.isConnected ? focused : document.getElementById("main")).focus({ preventScroll: true });
  known(parts);
  tellTimes();
}

// ── listening ──

let source = null;
let failures = 0;

function listen() {
  source = new EventSource("/api/events");
  source.addEventListener("open", () => { failures = 0; refreshSoon(); });
  source.addEventListener("change", refreshSoon);
  source.addEventListener("trouble", refresh);
  source.addEventListener("error", () => {
    // Its own way to connect again gives up after some answers, and never waits longer: ours does neither.
    source.close();
    source = null;
    const wait = BACKOFF_MS[Math.min(failures++, BACKOFF_MS.length - 1)];
    setTimeout(listen, wait * (0.75 + Math.random() / 2));
    refresh();
  });
}

function tick() {
  tellTimes();
  // A server that hangs, or a line that is cut, does not end the stream: silence is asked about.
  const silent = Math.max(heardAt, fetchedAt);
  const patience = isKnown ? QUIET_MS : 2_000;
  if (!fetching && Date.now() - silent > (source ? patience : Math.min(patience, 5_000))) refreshSoon();
}

// ── doing ──

let saidTimer = null;

function say(text) {
  const place = document.getElementById("said");
  place.textContent = text;
  clearTimeout(saidTimer);
  saidTimer = setTimeout(() => { place.textContent = ""; }, 8_000);
}

async function act(verb, job, name) {
  try {
    const answer = await fetch(`/api/jobs/${encodeURIComponent(job)}/${verb}`, { method: "POST", signal: AbortSignal.timeout(ANSWER_MS) });
    const result = await answer.json();
    if (!answer.ok) say(`Not done: ${result.error.message}. ${result.error.advice}`);
    else if (verb === "acknowledge") say("Dismissed.");
    else if (result.outcome === "asked") say(`${name} was asked to stop; finished work is kept.`);
    else say(result.outcome === "cancelled" ? `${name} is cancelled.` : `${name} had ended already.`);
  } catch {
    say("Unknown whether it was done: the server does not answer.");
  }
  refresh();
}

function askToCancel(button) {
  const dialog = document.getElementById("ask");
  const { job, name } = button.dataset;
  document.getElementById("ask-text").textContent =
    `“${name}” stops after the chunk or batch that it is at. What is done stays, and it can be resumed.`;
  dialog.returnValue = "no";
  dialog.onclose = () => {
    if (dialog.returnValue === "yes") act("cancel", job, name);
    // The button may have gone meanwhile: a keyboard user continues from the jobs.
    if (button.isConnected) button.focus();
    else document.getElementById("main").focus({ preventScroll: true });
  };
  dialog.showModal();
}

function clicked(event) {
  const button = event.target.closest("button");
  if (!button) return;
  if (button.id === "theme") toggleTheme();
  else if (button.dataset.act === "cancel") askToCancel(button);
  else if (button.dataset.act === "acknowledge") act("acknowledge", button.dataset.job, "");
}

document.addEventListener("DOMContentLoaded", () => {
  showTheme();
  document.addEventListener("click", clicked);
  if (root.dataset.page !== "lake") return;
  const parts = document.getElementById("parts");
  heardAt = Date.now();
  clockAhead = Date.parse(parts.dataset.at) - heardAt;
  isKnown = root.dataset.live !== "unknown";
  announced = parts.dataset.health ?? "unknown";
  if (!isKnown) setLive("unknown", "unknown");
  document.addEventListener("visibilitychange", () => { if (!document.hidden) refresh(); });
  window.addEventListener("online", refresh);
  window.addEventListener("pageshow", (event) => { if (event.persisted) refresh(); });
  setInterval(tick, 1_000);
  tick();
  listen();
});
