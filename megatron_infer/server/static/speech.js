// Speech, where the model speaks: a text is sent to /v1/audio/speech and its sound is played by the page's audio element.

import { call, inWords } from "./server.js";

const LENGTHS_AT = [[4, 8], [40, 44]]; // of a WAV header: where a length stands, and where what it counts begins
const $ = (id) => document.getElementById(id);

let source = ""; // of the sound that is shown

// voices: names, or null where the model does not speak.
export function showSpeech(voices) {
  $("speech").hidden = voices === null;
  if (voices === null || $("voice").dataset.names === String(voices)) return;
  $("voice").dataset.names = String(voices);
  $("voice").replaceChildren(...["", ...voices].map((name) => new Option(name || "no voice", name)));
  if (voices.length) $("voice").value = voices[0];
}

// The sound with its lengths in the header: those of a stream are not known when it begins.
function whole(sound) {
  const view = new DataView(sound);
  for (const [place, begin] of LENGTHS_AT) view.setUint32(place, sound.byteLength - begin, true);
  return new Blob([sound], { type: "audio/wav" });
}

async function speak() {
  const note = $("speech-note");
  const began = performance.now();
  note.className = "note";
  note.textContent = "Speaking ...";
  $("speak").disabled = true;
  try {
    const body = { input: $("speech-text").value, response_format: "wav" };
    if ($("voice").value) body.voice = $("voice").value;
    const sound = await (await call("/v1/audio/speech", { body })).arrayBuffer();
    if (source) URL.revokeObjectURL(source);
    source = URL.createObjectURL(whole(sound));
    $("sound").hidden = false;
    $("sound").src = source;
    note.textContent = `Made in ${((performance.now() - began) / 1000).toFixed(1)} s`;
    await $("sound").play();
  } catch (error) {
    note.textContent = inWords(error);
    note.classList.add("bad");
  }
  $("speak").disabled = false;
}

export function startSpeech() {
  $("speech").addEventListener("submit", (event) => {
    event.preventDefault();
    speak();
  });
}
