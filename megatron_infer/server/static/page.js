// The engines' figures, which come from /v1/status once a second, the controls, and the API key.

import { Replica, drawCurve, withinSpan } from "./charts.js";
import { startChat } from "./chat.js";
import { call, hasKey, inWords, useKey } from "./server.js";
import { showSpeech, startSpeech } from "./speech.js";

const EVERY_MS = 1000;
const PATIENCE_MS = 10000;
const WINDOW_S = 3; // tokens/s over this time
const $ = (id) => document.getElementById(id);

let asksKey = false;
const samples = []; // {time, tokens} of the last WINDOW_S
let points = []; // {time, rate} of the curve
let replicas = [];

// ---------------------------------------------------------------- figures

async function refresh() {
  if (asksKey) return;
  let status;
  try {
    status = await (await call("/v1/status", { signal: AbortSignal.timeout(PATIENCE_MS) })).json();
  } catch (error) {
    if (error.status === 401) return askKey(hasKey() ? "That is not the key." : "");
    state("bad", "no answer");
    return problem(inWords(error));
  }
  problem("");
  $("key-form").hidden = true;
  show(status);
}

function askKey(note = "") {
  asksKey = true;
  useKey("");
  state("bad", "asks for an API key");
  problem("");
  $("key-form").hidden = false;
  $("key-note").textContent = note || "Kept in this page's memory only.";
  $("key").focus();
}

function state(kind, text) {
  $("state").className = `badge ${kind}`;
  if ($("state").textContent !== text) $("state").textContent = text;
}

function problem(text) {
  const last = points.length ? ` The figures are of ${new Date(points.at(-1).time * 1000).toLocaleTimeString()}.` : "";
  const words = text && text + last;
  if ($("problem").textContent !== words) $("problem").textContent = words;
  $("problem").hidden = !text;
}

function show(status) {
  const total = (name) => status.replicas.reduce((sum, one) => sum + one[name], 0);
  const states = [...new Set(status.replicas.map((one) => one.state))];
  const shown = status.status === "ok" && states.some((one) => one !== "running") ? states.join(", ") : status.status;
  state(shown === "ok" ? "ok" : "bad", shown);
  $("model").textContent = status.model;
  $("running").textContent = total("running");
  $("paused").textContent = total("paused");
  $("waiting").textContent = status.waiting + total("waiting");
  measure(status.time, total("output_tokens"));
  showControls(status.controls, states);
  showReplicas(status.replicas);
  showClients(status.clients || {}); // of a server of the Tinker API
  showSpeech(status.voices);
}

function measure(time, tokens) {
  const last = samples.at(-1);
  if (last && (tokens < last.tokens || time <= last.time)) samples.length = 0; // an engine was restarted
  samples.push({ time, tokens });
  while (samples.length > 2 && time - samples[1].time >= WINDOW_S) samples.shift();
  const first = samples[0];
  const rate = time > first.time ? (tokens - first.tokens) / (time - first.time) : 0;
  $("rate").textContent = rate < 10 ? rate.toFixed(1) : Math.round(rate).toLocaleString();
  if (points.length && time <= points.at(-1).time) points = [];
  points = withinSpan([...points, { time, rate }]);
  drawCurve($("history"), points);
}

function showReplicas(statuses) {
  for (const one of replicas) if (!statuses.some((status) => status.name === one.name)) one.node.remove();
  replicas = statuses.map((status) => {
    const one = replicas.find((known) => known.name === status.name) || new Replica(status.name);
    if (!one.node.isConnected) $("replicas").append(one.node);
    one.show(status);
    return one;
  });
}

const COLUMNS = ["steps", "loss", "trained_tokens", "sampled_tokens", "queue"];

function showClients(clients) {
  const rows = Object.entries(clients).map(([label, figures]) => {
    const row = document.createElement("tr");
    row.insertCell().textContent = label;
    for (const name of COLUMNS) {
      const cell = row.insertCell();
      cell.className = "right";
      cell.textContent = figures[name] === null ? "" : figures[name].toLocaleString("en", { maximumFractionDigits: 2 });
    }
    return row;
  });
  $("client-rows").replaceChildren(...rows);
  $("clients").hidden = !rows.length;
}

// ---------------------------------------------------------------- control

const ALLOWED_IN = { // path -> engine states in which it has an effect
  "/pause": ["running"],
  "/resume": ["paused"],
  "/sleep": ["running", "paused"],
  "/wake_up": ["suspended"],
};
let isControlling = false;

function showControls(paths, states) {
  let any = false;
  for (const button of $("controls").querySelectorAll("button")) {
    const path = button.dataset.path;
    button.hidden = !paths.includes(path);
    button.disabled = isControlling || !states.some((one) => ALLOWED_IN[path].includes(one));
    any ||= !button.hidden;
  }
  $("controls").hidden = !any;
}

async function control(button) {
  const note = $("control-note");
  note.className = "note";
  note.textContent = `${button.textContent} ...`;
  isControlling = button.disabled = true;
  try {
    await call(button.dataset.path + (button.dataset.query || ""), { body: {} });
    note.textContent = `${button.textContent}: done`;
  } catch (error) {
    note.textContent = inWords(error);
    note.classList.add("bad");
  }
  isControlling = false;
  refresh();
}

// ---------------------------------------------------------------- input

function look(view) {
  // On a narrow screen one part is shown at a time.
  document.body.dataset.view = view;
  for (const button of $("views").children) button.setAttribute("aria-pressed", button.dataset.view === view);
  if (points.length) drawCurve($("history"), points);
}

for (const button of $("views").children) button.addEventListener("click", () => look(button.dataset.view));
for (const button of $("controls").querySelectorAll("button")) button.addEventListener("click", () => control(button));
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  useKey($("key").value.trim());
  $("key").value = "";
  asksKey = false;
  refresh();
});
startChat({ onKeyMissing: askKey });
startSpeech();

async function watch() {
  for (;;) {
    if (!document.hidden) await refresh();
    await new Promise((next) => setTimeout(next, EVERY_MS));
  }
}
watch();
