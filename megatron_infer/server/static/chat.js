// The chat: turns, the answer as it is drawn, and a log that follows it for as long as its reader does.

import { show } from "./markdown.js";
import { call, events, inWords } from "./server.js";

const REDRAW_MS = 40;
const DOUBLE_CLICK_MS = 400;
const $ = (id) => document.getElementById(id);

let messages = [];
let pending = null; // AbortController of the running reply
let clickedAt = -Infinity; // when Send was clicked
let askKey = () => {};

// ---------------------------------------------------------------- the log

let follows = true; // whether the log stays at its end
let place = 0; // where it was scrolled to

function atEnd() {
  const log = $("log");
  return log.scrollHeight - log.clientHeight - log.scrollTop < 2;
}

function follow() {
  if (follows) $("log").scrollTop = $("log").scrollHeight;
  $("newest").hidden = follows || atEnd();
}

function scrolled() {
  if (atEnd()) follows = true;
  else if ($("log").scrollTop < place) follows = false;
  place = $("log").scrollTop;
  $("newest").hidden = follows;
}

function followAgain() {
  follows = true;
  follow();
}

function part(tag, name, text) {
  const made = document.createElement(tag);
  made.className = name;
  made.textContent = text;
  return made;
}

function addTurn(role, name, text) {
  $("hello").hidden = true;
  const turn = part("article", `turn ${role}`, "");
  const who = part("p", "who", name);
  const body = part("div", "text", text);
  turn.append(who, body);
  $("log").append(turn);
  $("clear").disabled = false;
  followAgain();
  return { turn, who, body };
}

// ---------------------------------------------------------------- an answer

class Answer {
  // Shows the text as it grows, at most every REDRAW_MS and a fifth of the time.
  constructor({ turn, who, body }) {
    Object.assign(this, { turn, who, body, text: "", timer: 0, cost: 0 });
    body.textContent = "";
    turn.classList.add("drawing");
  }

  add(piece) {
    this.text += piece;
    this.timer ||= setTimeout(() => this.draw(), Math.max(REDRAW_MS, 4 * this.cost));
  }

  think(piece) {
    if (!this.thoughts) {
      const box = part("details", "thoughts", "");
      this.thoughts = part("div", "thought", "");
      box.append(part("summary", "", "Reasoning"), this.thoughts);
      this.body.before(box);
    }
    this.thoughts.append(piece);
    follow();
  }

  draw() {
    clearTimeout(this.timer);
    this.timer = 0;
    const began = performance.now();
    show(this.body, this.text);
    this.cost = performance.now() - began;
    follow();
  }

  end(figures, failed) {
    this.draw();
    this.turn.classList.remove("drawing");
    this.who.textContent += figures.map((figure) => ` · ${figure}`).join("");
    if (failed) this.turn.append(part("p", "failure", failed));
    follow();
    $("spoken").textContent = [this.body.innerText, failed || figures.at(-1)].filter(Boolean).join("\n");
  }
}

async function ask(text) {
  const chat = messages; // New chat replaces the list
  const control = (pending = new AbortController());
  chat.push({ role: "user", content: text });
  addTurn("user", "You", text);
  const answer = new Answer(addTurn("assistant", $("model").textContent || "Model", ""));
  const limit = Number($("max-tokens").value);
  isAnswering(true);
  const began = performance.now();
  let first = 0;
  let usage = null;
  let reason = "";
  let failed = "";
  try {
    const reply = await call("/v1/chat/completions", {
      signal: control.signal,
      body: {
        messages: chat,
        stream: true,
        stream_options: { include_usage: true },
        max_tokens: limit,
        temperature: Number($("temperature").value),
      },
    });
    for await (const chunk of events(reply.body)) {
      if (chunk.error) throw new Error(chunk.error.message);
      usage = chunk.usage || usage;
      reason = chunk.choices[0]?.finish_reason || reason;
      const { content, reasoning } = chunk.choices[0]?.delta || {};
      if (!content && !reasoning) continue;
      first ||= performance.now();
      if (reasoning) answer.think(reasoning);
      if (content) answer.add(content);
    }
  } catch (error) {
    if (error.name === "AbortError") reason = "stopped";
    else failed = inWords(error);
    if (error.status === 401) askKey();
    if (error.code === "context_length_exceeded") failed += " Ask for fewer tokens, or begin a new chat.";
  }
  const figures = [];
  if (usage) {
    const seconds = (performance.now() - began) / 1000;
    figures.push(`${usage.completion_tokens} tokens`, `${(usage.completion_tokens / seconds).toFixed(1)} tokens/s`);
    if (first) figures.push(`first after ${Math.round(first - began)} ms`);
  }
  if (reason === "stopped") figures.push("stopped");
  if (reason === "length") figures.push(`ended at the limit of ${limit} tokens`);
  if (chat === messages && failed && !$("text").value) {
    $("text").value = text;
    failed += " Your message is in the box again.";
  }
  answer.end(figures, failed);
  if (answer.text) chat.push({ role: "assistant", content: answer.text });
  else chat.pop(); // a question without an answer is not sent again
  if (pending !== control) return; // another chat has begun
  pending = null;
  isAnswering(false);
}

function isAnswering(yes) {
  // The button that was used goes, so its focus goes to the one that takes its place.
  const active = document.activeElement;
  const moved = yes ? active === $("send") && $("stop") : active === $("stop") && $("text");
  $("stop").hidden = !yes;
  $("send").hidden = yes;
  if (yes) $("spoken").textContent = "Answering.";
  if (moved) moved.focus();
}

function newChat() {
  if (pending) pending.abort();
  pending = null;
  messages = [];
  for (const turn of $("log").querySelectorAll(".turn")) turn.remove();
  $("hello").hidden = false;
  $("clear").disabled = true;
  $("spoken").textContent = "New chat.";
  isAnswering(false);
  followAgain();
  $("text").focus();
}

// ---------------------------------------------------------------- input

// onKeyMissing: called when the server asks for a key.
export function startChat({ onKeyMissing }) {
  askKey = onKeyMissing;
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
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape" && pending && !event.isComposing) pending.abort();
  });
  $("send").addEventListener("click", (event) => {
    if (event.detail) clickedAt = performance.now();
  });
  $("stop").addEventListener("click", (event) => {
    const isSecondOfTwo = event.detail && performance.now() - clickedAt < DOUBLE_CLICK_MS; // the first was on Send
    if (pending && !isSecondOfTwo) pending.abort();
  });
  $("clear").addEventListener("click", newChat);
  $("newest").addEventListener("click", () => {
    followAgain();
    $("text").focus();
  });
  $("log").addEventListener("scroll", scrolled, { passive: true });
  new ResizeObserver(follow).observe($("log"));
}
