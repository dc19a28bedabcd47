"""`megatron-infer chat`: a streamed conversation in the terminal, or with lines from a pipe."""

from __future__ import annotations

import argparse
import contextlib
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from megatron_infer.cli.config_flags import add_sampling_options, sampling_from
from megatron_infer.cli.loading import add_model_options, has_chat_template, load_llm, note
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import InferenceError, PromptTooLong
from megatron_infer.outputs.request_output import RequestOutput

DEFAULTS = {"max_tokens": 512, "temperature": 0.7, "top_p": 0.9}
HELP = """\
/reset          forget the conversation, keep the system message
/system TEXT    set the system message and restart the conversation (no TEXT: remove it)
/stats          tokens, speed and cache of the last answer and of the engine
/quit           leave (also Ctrl-D)
Ctrl-C          stop the running answer; its text so far stays in the conversation"""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "chat",
        help="talk with a model",
        description="Talk with a model. Answers are streamed, and the conversation is kept in the prefix cache. Also "
        "reads lines from a pipe.",
    )
    add_model_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message")
    add_sampling_options(parser, **DEFAULTS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """-> 0 at the end of the conversation; 2 if the model has no chat template or a flag is not supported here."""
    params = SamplingParams.from_dict(sampling_from(args))
    scored = params.logprobs is not None or params.prompt_logprobs is not None or params.carries
    if params.n != 1 or not params.detokenize or scored:
        note(
            "error: chat shows one answer as text; --n, --logprobs, --prompt-logprobs, --return-..., --no-detokenize "
            "are for generate"
        )
        return 2
    llm = load_llm(args)
    if not has_chat_template(llm):
        note(
            f"error: {args.model} has no chat template; complete text with: megatron-infer generate {args.model} --raw"
        )
        return 2
    session = ChatSession(llm, params, system=args.system)
    tty = sys.stdin.isatty()
    if tty:
        with contextlib.suppress(ImportError):
            import readline  # noqa: F401 - gives input() editing and history
        note("type a message, /help for commands")
    for line in _lines(tty):
        if not session.handle(line):
            break
    return 0


def _lines(tty: bool) -> Iterator[str]:
    """The user's lines until end of file. Ctrl-C at the prompt clears the line; a second one ends."""
    if not tty:
        yield from (line.rstrip("\n") for line in sys.stdin)
        return
    interrupts = 0
    while interrupts < 2:
        try:
            line, interrupts = input("> "), 0
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            interrupts += 1
            note("\n(Ctrl-C again or /quit leaves)" if interrupts == 1 else "")
            continue
        yield line


class ChatSession:
    """A conversation with an engine. Turns come in pairs: the user's, the assistant's."""

    def __init__(
        self, llm: Any, params: SamplingParams, *, system: str | None = None, show: Callable[[str], None] | None = None
    ) -> None:
        self.engine, self.tokenizer, self.params = llm.engine, llm.tokenizer, params
        self.show = show if show is not None else _show
        self.system = system
        self.turns: list[dict[str, str]] = []
        self.last: RequestOutput | None = None
        self.seconds = 0.0

    def handle(self, line: str) -> bool:
        """Handle a line: a command or a message -> False when the session ends."""
        text = line.strip()
        command, _, rest = text.partition(" ")
        if not text:
            return True
        if not command.startswith("/"):
            self.answer(text)
        elif command in ("/quit", "/exit"):
            return False
        elif command == "/reset":
            self.turns.clear()
            note("(conversation forgotten)")
        elif command == "/system":
            self.system = rest.strip() or None
            self.turns.clear()
            note("(system message set, conversation restarted)" if self.system else "(no system message)")
        elif command == "/stats":
            note(self.stats())
        elif command == "/help":
            note(HELP)
        else:
            note(f"unknown command {command}; /help lists them")
        return True

    def answer(self, text: str) -> str | None:
        """Send a message and stream the answer -> its text; None, and an unchanged conversation, if it is refused."""
        self.turns.append({"role": "user", "content": text})
        try:
            request_id = self._submit()
        except InferenceError as error:
            self.turns.pop()
            note(f"error: {error}")
            return None
        started = time.perf_counter()
        output = self._stream(request_id)
        self.seconds, self.last = time.perf_counter() - started, output
        if output.error is not None:
            self.turns.pop()
            note(f"error: {output.error}")
            return None
        if output.outputs[0].finish_reason == "length":
            note(f"(cut after {output.metrics.num_output_tokens} tokens; --max-tokens allows more)")
        reply = output.outputs[0].text
        self.turns.append({"role": "assistant", "content": reply})
        return reply

    def stats(self) -> str:
        """Two lines: the last answer and the engine."""
        stats = self.engine.stats()
        used = stats.num_blocks - stats.num_free_blocks
        engine = f"engine: {stats.num_steps} steps, {used} of {stats.num_blocks} blocks in use"
        if self.last is None:
            return f"no answer yet\n{engine}"
        m = self.last.metrics
        rate = m.num_output_tokens / max(self.seconds, 1e-9)
        first = "" if m.ttft_s is None else f", first after {m.ttft_s * 1e3:.0f} ms"
        return (
            f"last answer: {m.num_output_tokens} tokens at {rate:.0f} tok/s{first}; "
            f"prompt {m.num_prompt_tokens} tokens, {m.num_cached_tokens} of them from the cache\n{engine}"
        )

    def _submit(self) -> str:
        """Add the conversation as a request; while it does not fit, drop its oldest exchange."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        turns = list(self.turns)
        while True:
            text = self.tokenizer.apply_chat_template(system + turns, add_generation_prompt=True)
            ids = self.tokenizer.encode(text, add_special=False)
            try:
                request_id = self.engine.add_request(ids, self.params)
                break
            except PromptTooLong:
                if len(turns) < 3:
                    raise
                del turns[:2]
        if len(turns) < len(self.turns):
            forgotten = (len(self.turns) - len(turns)) // 2
            note(f"(the conversation is too long: its oldest {forgotten} exchanges are forgotten)")
            self.turns = turns
        return request_id

    def _stream(self, request_id: str) -> RequestOutput:
        """Show text as it comes until the answer ends; Ctrl-C aborts it."""
        shown = 0
        try:
            while True:
                for output in self.engine.step():
                    if output.request_id != request_id:
                        continue
                    text = output.outputs[0].text
                    self.show(text[shown:])
                    shown = len(text)
                    if output.finished:
                        self.show("\n")
                        return output
        except KeyboardInterrupt:
            output = self.engine.abort(request_id)
            self.show(output.outputs[0].text[shown:] + "\n")
            note("(stopped)")
            return output


def _show(text: str) -> None:
    print(text, end="", flush=True)
