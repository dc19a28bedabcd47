"""`megatron-infer generate`: runs prompts from flags or a JSON Lines file in one batch."""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
import time
from collections.abc import Iterator
from typing import Any, TextIO

from megatron_infer.cli.config_flags import add_sampling_options, sampling_from
from megatron_infer.cli.loading import add_model_options, has_chat_template, load_llm, note
from megatron_infer.cli.prompts import PromptJob, read_jobs, to_token_ids
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import InferenceError
from megatron_infer.outputs.request_output import CompletionOutput, RequestOutput
from megatron_infer.outputs.token_outputs import values_in
from megatron_infer.utils import progress

DEFAULTS = {"max_tokens": 256, "temperature": 0.0}
"""Defaults of this command: a whole answer, the same each time. All others are SamplingParams'."""


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "generate",
        help="answer prompts, many at once",
        description="Answer prompts, batched together. A plain prompt goes through the chat template, if the model has "
        "one; --raw completes it without.",
    )
    add_model_options(parser)
    parser.add_argument("--prompt", action="append", default=[], metavar="TEXT", help="a prompt; repeatable")
    parser.add_argument(
        "--prompts-file",
        metavar="FILE",
        help='JSON Lines: {"prompt": "text" or [ids]}, {"messages": [...]} or {"token_ids": [...]}, with an optional '
        '"id" and sampling fields for this line; - reads standard input',
    )
    parser.add_argument(
        "--output", metavar="FILE", help="write JSON Lines, one per answer, in prompt order; - is stdout"
    )
    parser.add_argument("--raw", action="store_true", help="complete the text without the chat template")
    parser.add_argument("--system", metavar="TEXT", help="system message before every plain prompt")
    parser.add_argument("--record", metavar="FILE", help="record the run for megatron-infer replay")
    add_sampling_options(parser, **DEFAULTS)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """-> 0 all answered, 1 some prompts failed, 130 interrupted. Raises InferenceError if none can be answered."""
    common = sampling_from(args)
    SamplingParams.from_dict(common)  # fails for a wrong flag before the model loads
    jobs = [PromptJob(where=f"--prompt {i}", prompt=text) for i, text in enumerate(args.prompt, start=1)]
    if args.prompts_file is not None:
        jobs += read_jobs(args.prompts_file)
    if not jobs:
        note("error: no prompts; give --prompt TEXT or --prompts-file FILE")
        return 2
    with contextlib.ExitStack() as stack:
        sink = _open_output(args.output, stack)
        llm = load_llm(args)
        if args.system is not None and (args.raw or not has_chat_template(llm)):
            note("error: --system needs the model's chat template" + (" and --raw turns it off" if args.raw else ""))
            return 2
        if args.record is not None:
            from megatron_infer.engine.record import RunRecorder

            recorder = stack.enter_context(RunRecorder(args.record))
            recorder.attach(llm.engine, model=args.model)
        printer = Printer(jobs, as_ids=llm.tokenizer is None or common.get("detokenize") is False)
        run = BatchRun(llm, jobs, writer=JsonLinesWriter(sink, jobs) if sink is not None else printer)
        run.add_all(common, chat=has_chat_template(llm) and not args.raw, system=args.system)
        return run.run()


def _open_output(path: str | None, stack: contextlib.ExitStack) -> TextIO | None:
    if path is None or path == "-":
        return sys.stdout if path else None
    try:
        return stack.enter_context(open(path, "w", encoding="utf-8"))
    except OSError as error:
        raise InferenceError(f"{path}: cannot be written: {error.strerror or error}") from error


class BatchRun:
    """Runs all jobs on one engine. Answers are written in prompt order, each as soon as those before it are written."""

    def __init__(self, llm: Any, jobs: list[PromptJob], *, writer: JsonLinesWriter | Printer) -> None:
        self.engine, self.tokenizer = llm.engine, llm.tokenizer
        self.jobs, self.writer = jobs, writer
        self.index_of: dict[str, int] = {}
        """Request id -> index of its job."""
        self.results: list[RequestOutput | str | None] = [None] * len(jobs)
        self.num_written = 0
        self.num_tokens = 0

    def add_all(self, common: dict[str, Any], *, chat: bool, system: str | None) -> None:
        """Add every job; one that is refused is reported and does not affect the others."""
        for index, job in enumerate(self.jobs):
            if job.error is not None:
                self.fail(index, job.error)
                continue
            try:
                params = SamplingParams.from_dict({**common, **(job.sampling or {})})
                prompt = to_token_ids(job, self.tokenizer, chat=chat, system=system)
                streams = self.writer.streams and params.n == 1
                request = self.engine.add_request(prompt, params, stream="cumulative" if streams else "final")
                self.index_of[request] = index
            except InferenceError as error:
                self.fail(index, str(error))

    def run(self) -> int:
        """Step until all jobs have finished -> exit code; an interrupt keeps partial answers."""
        started, interrupted = time.perf_counter(), False
        try:
            with _progress(len(self.jobs), show=not self.writer.streams) as bar:
                bar.update(sum(r is not None for r in self.results))
                while self.index_of and self.engine.has_unfinished():
                    for output in self.engine.step():
                        self.take(output, bar)
                        rate = self.num_tokens / max(time.perf_counter() - started, 1e-9)
                        bar.set_postfix_str(f"{rate:.0f} tok/s", refresh=False)
        except KeyboardInterrupt:
            interrupted = True
            for request_id in list(self.index_of):
                self.take(self.engine.abort(request_id), None)
        finally:
            self.flush(everything=True)
        return self._summary(time.perf_counter() - started, interrupted)

    def take(self, output: RequestOutput, bar: Any) -> None:
        """Handle an output: show it when streaming, store it when finished."""
        index = self.index_of.get(output.request_id)
        if index is None:
            return
        if not output.finished:
            self.writer.stream(output)
            return
        del self.index_of[output.request_id]
        self.num_tokens += output.metrics.num_output_tokens
        if output.error is not None:
            self.fail(index, str(output.error))
        else:
            self.results[index] = output
        if bar is not None:
            bar.update()
        self.flush()

    def fail(self, index: int, message: str) -> None:
        note(f"error: {self.jobs[index].where}: {message}")
        self.results[index] = message

    def flush(self, *, everything: bool = False) -> None:
        """Write the next answers in prompt order. everything: also those behind a missing one."""
        while self.num_written < len(self.jobs):
            result = self.results[self.num_written]
            if result is None and not everything:
                return
            if result is not None:
                self.writer.write(self.num_written, result)
            self.num_written += 1

    def _summary(self, seconds: float, interrupted: bool) -> int:
        failed = sum(isinstance(result, str) for result in self.results)
        answered = sum(isinstance(result, RequestOutput) for result in self.results)
        rate = self.num_tokens / max(seconds, 1e-9)
        text = f"{answered} answered, {self.num_tokens:,} tokens in {seconds:.1f} s ({rate:.0f} tok/s)"
        note(
            text
            + (f", {failed} failed" if failed else "")
            + (", interrupted: answers are partial" if interrupted else "")
        )
        if interrupted:
            return 130
        return 1 if failed else 0


class JsonLinesWriter:
    """Writes JSON Lines, one line per sequence, with the index of its prompt."""

    streams = False

    def __init__(self, sink: TextIO, jobs: list[PromptJob]) -> None:
        self._sink, self._jobs = sink, jobs

    def stream(self, output: RequestOutput) -> None:
        raise AssertionError("only finished answers are written to a file")

    def write(self, index: int, result: RequestOutput | str) -> None:
        job = self._jobs[index]
        line: dict[str, Any] = {"index": index}
        if job.id is not None:
            line["id"] = job.id
        line["messages" if job.is_chat else "prompt"] = job.prompt
        if isinstance(result, str):
            self._put({**line, "error": f"{job.where}: {result}"})
            return
        line["prompt_token_ids"] = result.prompt_token_ids
        if result.prompt_logprobs is not None:
            line["prompt_logprobs"] = [p and _logprobs(p) for p in result.prompt_logprobs]
        if result.pooled is not None:
            line["pooled"] = result.pooled
        for one in result.outputs:
            self._put({**line, **_completion(one, many=len(result.outputs) > 1)})

    def _put(self, line: dict[str, Any]) -> None:
        self._sink.write(json.dumps(line, ensure_ascii=False) + "\n")
        self._sink.flush()


def _completion(one: CompletionOutput, *, many: bool) -> dict[str, Any]:
    line: dict[str, Any] = {"sample": one.index} if many else {}
    line |= {
        "token_ids": one.token_ids,
        "text": one.text,
        "finish_reason": one.finish_reason,
        "stop_reason": one.stop_reason,
    }
    if one.logprobs is not None:
        line["cumulative_logprob"] = one.cumulative_logprob
        line["logprobs"] = [_logprobs(entry) for entry in one.logprobs]
    return line | {output.name: output.plain(value) for output, value in values_in(one)}


def _logprobs(entry: dict[int, Any]) -> list[dict[str, Any]]:
    return [
        {"token_id": token, "logprob": p.logprob, "rank": p.rank, "token": p.decoded_token}
        for token, p in entry.items()
    ]


class Printer:
    """Prints answers. A single prompt's answer is its text only, streamed.

    as_ids: print token ids, as tokens are not detokenized.
    """

    def __init__(self, jobs: list[PromptJob], *, as_ids: bool = False) -> None:
        self._jobs, self._as_ids = jobs, as_ids
        self.streams = len(jobs) == 1
        self._shown = 0

    def stream(self, output: RequestOutput) -> None:
        self._show(self._answer(output.outputs[0]))

    def write(self, index: int, result: RequestOutput | str) -> None:
        if isinstance(result, str):  # already reported on stderr
            return
        if self.streams and len(result.outputs) == 1:
            self._show(self._answer(result.outputs[0]))
            print(flush=True)
        else:
            for one in result.outputs:
                sample = f", sample {one.index + 1}" if len(result.outputs) > 1 else ""
                answer = self._answer(one).strip()
                print(f"[{index + 1}{sample}] {_headline(self._jobs[index])}\n{answer}\n", flush=True)
        if any(one.logprobs is not None for one in result.outputs):
            self._print_logprobs(result)
        for one in result.outputs:
            _print_token_details(one)

    def _answer(self, one: CompletionOutput) -> str:
        return " ".join(map(str, one.token_ids)) if self._as_ids else one.text

    def _show(self, text: str) -> None:
        print(text[self._shown :], end="", flush=True)
        self._shown = len(text)

    @staticmethod
    def _print_logprobs(result: RequestOutput) -> None:
        for one in result.outputs:
            for token, entry in zip(one.token_ids, one.logprobs or [], strict=False):
                first, *others = (_scored(other, entry[other]) for other in sorted(entry, key=lambda t: t != token))
                print(f"  {first}   {'  '.join(others)}".rstrip())


def _print_token_details(one: CompletionOutput) -> None:
    """The details that the return_ flags ask for, a line per token; --output writes all of them."""
    for i, token in enumerate(one.token_ids if one.raw_logprobs is not None or one.support is not None else ()):
        words = [f"  {token}"]
        if one.raw_logprobs is not None and one.processed_logprobs is not None:
            words.append(f"raw {one.raw_logprobs[i]:.3f}, as drawn {one.processed_logprobs[i]:.3f}")
        if one.support is not None:
            words.append(f"among {one.support.mask(i).sum()}")
        print("   ".join(words))
    if one.routing is not None:
        positions, layers, experts = one.routing.shape
        print(f"  routing of {positions} positions in {layers} layers, {experts} experts each: --output writes it")
    if one.index_choices is not None:
        positions, layers, keys = one.index_choices.shape
        print(f"  chosen keys of {positions} positions in {layers} layers, up to {keys} each: --output writes them")


def _scored(token: int, entry: Any) -> str:
    """Example: ' Paris' -0.301; 318 -0.301 for a token without text."""
    return f"{token if entry.decoded_token is None else repr(entry.decoded_token)} {entry.logprob:.3f}"


def _headline(job: PromptJob) -> str:
    if job.is_chat:
        text = str(job.prompt[-1].get("content", ""))  # type: ignore[index,union-attr]
    elif isinstance(job.prompt, str):
        text = job.prompt
    else:
        text = f"{len(job.prompt or [])} token ids"
    line = " ".join(text.split())
    return line if len(line) <= 100 else line[:97] + "..."


@contextlib.contextmanager
def _progress(total: int, *, show: bool) -> Iterator[Any]:
    """A progress bar on stderr, if it is a terminal."""
    with progress.bar(total=total, unit="prompt", shown=None if show else False) as bar:
        yield bar
