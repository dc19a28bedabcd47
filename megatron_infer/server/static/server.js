// Calls to the server that the page came from, and what went wrong with them in words.

let key = ""; // never stored

export function useKey(given) {
  key = given;
}

export const hasKey = () => key !== "";

export class Refused extends Error {
  constructor(status, code, message) {
    super(message);
    Object.assign(this, { status, code });
  }
}

// The reply, if it is a success; raises an error with a message to show. `body`: posted as JSON.
export async function call(path, { body, signal } = {}) {
  const headers = { "Content-Type": "application/json" };
  if (key) headers.Authorization = `Bearer ${key}`;
  const method = body === undefined ? "GET" : "POST";
  const sent = body === undefined ? undefined : JSON.stringify(body);
  const reply = await fetch(path, { method, headers, body: sent, signal, cache: "no-store", redirect: "error" });
  if (!reply.ok) throw await refused(reply);
  return reply;
}

async function refused(reply) {
  const wait = reply.headers.get("Retry-After");
  const later = wait ? ` Try again in ${wait} s.` : "";
  try {
    const { message, code } = (await reply.json()).error;
    return new Refused(reply.status, code, `${message.replace(/\.$/, "")} (${reply.status}).${later}`);
  } catch {
    const message = `The server answered ${reply.status} ${reply.statusText} and gave no reason.${later}`;
    return new Refused(reply.status, "", message);
  }
}

export function inWords(error) {
  if (error.name === "TimeoutError") return "The server has not answered in time. It may be busy, or stopped.";
  if (error instanceof TypeError) return "The server cannot be reached. It may have ended, or the network is down.";
  if (error instanceof SyntaxError) return "The server sent something that cannot be read.";
  return error.message || String(error);
}

// The JSON values of a stream of server-sent events, up to its [DONE].
export async function* events(stream) {
  const reader = stream.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) throw new Error("The connection was cut before the answer was complete.");
    const lines = (rest + value).split("\n");
    rest = lines.pop();
    for (const line of lines) {
      if (line === "data: [DONE]") return;
      if (line.startsWith("data: ")) yield JSON.parse(line.slice(6));
    }
  }
}
