"use strict";
// Figures come from /v1/status once a second, chats from /v1/chat/completions. Texts are inserted as text, never as HTML.

const KINDS = ["used", "cached", "paused", "free"];
const EVERY_MS = 1000;
const WINDOW_S = 3; // tokens/s over this time
const HISTORY = 120; // points of the curve
const MAX_CELLS = 1200;
const $ = (id) => document.getElementById(id);

let key = ""; // never stored
let asksKey = false;
const samples = []; // {time, tokens} of the last WINDOW_S
const rates = [];
let messages = [];
let pending = null; // AbortController of the running reply

function headers() {
  const all = { "Content-Type": "application/json" };
  if (key) all.Authorization = `Bearer ${key}`;
  return all;
}

async function reason(reply) {
  try {
    return (await reply.json()).error.message;
  } catch {
    return `the server answered ${reply.status}`;
  }
}

// ---------------------------------------------------------------- figures

async function refresh() {
  if (asksKey) return;
  let status;
  try {
    const reply = await fetch("/v1/status", { headers: headers(), cache: "no-store", redirect: "error" });
    if (reply.status === 401) return askKey(key ? "That is not the key." : "");
    if (!reply.ok) throw new Error(await reason(reply));
    status = await reply.json();
  } catch (error) {
    return state("bad", "no answer", String(error.message || error));
  }
  $("key-form").hidden = true;
  show(status);
}

function askKey(note) {
  asksKey = true;
  key = "";
  state("bad", "asks for an API key");
  $("key-form").hidden = false;
  $("key-note").textContent = note || "Kept in this page's memory only.";
  $("key").focus();
}

function state(kind, text, title = "") {
  const badge = $("state");
  badge.className = `badge ${kind}`;
  if (badge.textContent !== text) badge.textContent = text;
  badge.title = title;
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
}

function measure(time, tokens) {
  const last = samples[samples.length - 1];
  if (last && (tokens < last.tokens || time <= last.time)) samples.length = 0; // an engine was restarted
  samples.push({ time, tokens });
  while (samples.length > 2 && time - samples[1].time >= WINDOW_S) samples.shift();
  const first = samples[0];
  const rate = time > first.time ? (tokens - first.tokens) / (time - first.time) : 0;
  $("rate").textContent = rate < 10 ? rate.toFixed(1) : Math.round(rate).toLocaleString();
  rates.push(rate);
  if (rates.length > HISTORY) rates.shift();
  drawHistory();
}

function sized(canvas, height) {
  const scale = window.devicePixelRatio || 1;
  const width = canvas.clientWidth || 400;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(height * scale);
  canvas.style.height = `${height}px`;
  const pen = canvas.getContext("2d");
  pen.scale(scale, scale);
  return [pen, width];
}

function color(name) {
  return getComputedStyle(document.documentElement).getPropertyValue(`--${name}`).trim();
}

function drawHistory() {
  const canvas = $("history");
  const [pen, width] = sized(canvas, 56);
  const top = Math.max(1, ...rates);
  const x = (i) => width - (rates.length - 1 - i) * (width / (HISTORY - 1));
  const y = (rate) => 54 - (rate / top) * 50;
  pen.beginPath();
  rates.forEach((rate, i) => pen.lineTo(x(i), y(rate)));
  pen.strokeStyle = color("used");
  pen.lineWidth = 2;
  pen.stroke();
  pen.lineTo(width, 56);
  pen.lineTo(x(0), 56);
  pen.fillStyle = color("used");
  pen.globalAlpha = 0.15;
  pen.fill();
  canvas.setAttribute("aria-label", `tokens per second over the last two minutes, at most ${Math.round(top)}`);
}

function showReplicas(replicas) {
  const box = $("replicas");
  for (const node of [...box.children]) if (!replicas.some((one) => one.name === node.dataset.name)) node.remove();
  for (const one of replicas) {
    let node = [...box.children].find((child) => child.dataset.name === one.name);
    if (!node) {
      node = document.createElement("div");
      node.className = "replica";
      node.dataset.name = one.name;
      node.append(...["h3", "p", "canvas", "p"].map((tag) => document.createElement(tag)));
      node.children[2].setAttribute("role", "img");
      box.append(node);
    }
    const [title, line, canvas, counts] = node.children;
    title.textContent = `${one.name}: ${one.state}`;
    line.textContent =
      `${one.running} running, ${one.paused} paused, ${one.waiting} waiting, room for ${one.capacity}; ` +
      `weights version ${one.weight_version}`;
    counts.textContent = "blocks: " + KINDS.map((kind) => `${one.blocks[kind].toLocaleString()} ${kind}`).join(", ");
    canvas.setAttribute("aria-label", counts.textContent);
    drawBlocks(canvas, one.blocks);
  }
}

function drawBlocks(canvas, blocks) {
  // A cell is one block, or as many as keep the map below MAX_CELLS.
  const total = KINDS.reduce((sum, kind) => sum + blocks[kind], 0);
  const each = Math.max(1, Math.ceil(total / MAX_CELLS));
  const cells = KINDS.flatMap((kind) => Array(Math.ceil(blocks[kind] / each)).fill(kind));
  const width = canvas.clientWidth || 400;
  const side = Math.max(4, Math.min(12, Math.floor(Math.sqrt((width * 120) / Math.max(1, cells.length)))));
  const columns = Math.max(1, Math.floor(width / side));
  const [pen] = sized(canvas, Math.max(side, Math.ceil(cells.length / columns) * side));
  cells.forEach((kind, i) => {
    pen.fillStyle = color(kind);
    pen.fillRect((i % columns) * side, Math.floor(i / columns) * side, side - 1, side - 1);
  });
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
    const path = button.dataset.path + (button.dataset.query || "");
    const reply = await fetch(path, { method: "POST", headers: headers(), body: "{}" });
    note.textContent = reply.ok ? `${button.textContent}: done` : await reason(reply);
    note.classList.toggle("bad", !reply.ok);
  } catch (error) {
    note.textContent = String(error.message || error);
    note.classList.add("bad");
  }
  isControlling = false;
  refresh();
}

// ---------------------------------------------------------------- chat

function addTurn(role, text) {
  const turn = document.createElement("div");
  turn.className = `turn ${role}`;
  const who = document.createElement("div");
  who.className = "who";
  who.textContent = role === "user" ? "you" : $("model").textContent || "model";
  const body = document.createElement("p");
  body.textContent = text;
  turn.append(who, body);
  $("log").append(turn);
  $("log").scrollTop = $("log").scrollHeight;
  return [who, body];
}

async function ask(text) {
  const chat = messages; // New chat replaces the list
  chat.push({ role: "user", content: text });
  addTurn("user", text);
  const [who, body] = addTurn("assistant", "");
  pending = new AbortController();
  $("stop").hidden = false;
  $("send").disabled = true;
  $("log").setAttribute("aria-busy", "true"); // screen readers read it when it is complete
  const began = performance.now();
  let answer = "";
  let first = 0;
  let usage = null;
  let failed = "";
  try {
    const reply = await fetch("/v1/chat/completions", {
      method: "POST",
      headers: headers(),
      signal: pending.signal,
      body: JSON.stringify({
        messages: chat,
        stream: true,
        stream_options: { include_usage: true },
        max_tokens: Number($("max-tokens").value) || 200,
        temperature: Number($("temperature").value),
      }),
    });
    if (reply.status === 401) askKey("");
    if (!reply.ok) throw new Error(await reason(reply));
    for await (const chunk of events(reply.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage || usage;
      const piece = chunk.choices.length ? chunk.choices[0].delta.content || "" : "";
      if (!piece) continue;
      first ||= performance.now();
      answer += piece;
      body.textContent = answer;
      $("log").scrollTop = $("log").scrollHeight;
    }
  } catch (error) {
    failed = error.name === "AbortError" ? "stopped" : String(error.message || error);
  }
  const seconds = (performance.now() - began) / 1000;
  if (usage) {
    const speed = usage.completion_tokens / seconds;
    const wait = first ? `, first after ${Math.round(first - began)} ms` : "";
    who.textContent += ` · ${usage.completion_tokens} tokens, ${speed.toFixed(1)}/s${wait}`;
  }
  if (failed) {
    who.textContent += ` · ${failed}`;
    who.classList.toggle("bad", failed !== "stopped");
  }
  if (answer) chat.push({ role: "assistant", content: answer });
  else chat.pop(); // a question without an answer is not sent again
  pending = null;
  $("stop").hidden = true;
  $("send").disabled = false;
  $("log").setAttribute("aria-busy", "false");
}

async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("the connection was cut");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}

// ---------------------------------------------------------------- input

$("ask").addEventListener("submit", (event) => {
  event.preventDefault();
  const text = $("text").value.trim();
  if (!text || pending) return;
  $("text").value = "";
  ask(text);
});
$("text").addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  $("ask").requestSubmit();
});
$("stop").addEventListener("click", () => pending && pending.abort());
$("clear").addEventListener("click", () => {
  if (pending) pending.abort();
  messages = [];
  $("log").replaceChildren();
  $("text").focus();
});
$("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  key = $("key").value.trim();
  $("key").value = "";
  asksKey = false;
  refresh();
});
for (const button of $("controls").querySelectorAll("button")) button.addEventListener("click", () => control(button));

async function watch() {
  for (;;) {
    if (!document.hidden) await refresh();
    await new Promise((next) => setTimeout(next, EVERY_MS));
  }
}
watch();
