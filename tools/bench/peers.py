"""Other engines next to this one: the same weights, the same workloads, in the same rounds; with a plot of the rates.

    python tools/bench/peers.py smollm2 --columns single,16,32,prefill,rl --vs vllm,openvino,llama.cpp,transformers
        [--peer-python vllm=peers/vllm/bin/python ...] [--json out.json] [--plot out.png]
    python tools/bench/peers.py smollm2 --speculative ngram --vs off,transformers-lookup --concurrency 1

All options of `megatron-infer bench` are options here too, and the report has the same fields. Each peer loads the
weights in another process, in the environment of its own interpreter (peer_engines.py).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import importlib.util
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

ROOT = Path(__file__).resolve().parents[2]
if str(ROOT) not in sys.path:
    sys.path.insert(0, str(ROOT))

# ruff: noqa: E402
from megatron_infer.cli.bench import OFF, RunResult, Workload, add_options, measure, open_report, prepare
from megatron_infer.cli.loading import note
from megatron_infer.config.model_shape import ModelShape
from megatron_infer.errors import ConfigError, InferenceError
from megatron_infer.utils.child_process import ChildProcess
from megatron_infer.utils.gc_pause import end_without_collection
from megatron_infer.utils.host import CpuClock, processes_below, resident_mib
from megatron_infer.utils.openmp import SPIN_COUNT, limit_spinning

if TYPE_CHECKING:
    from megatron_infer.models.loading.sources import ModelSource

GGUF_TYPES = {"llama.cpp": "", "llama.cpp-q8_0": "Q8_0", "llama.cpp-q4_0": "Q4_0"}
"""llama.cpp by the type of its file's matrices; "": the dtype that is measured."""
PEERS = ("vllm", "openvino", *GGUF_TYPES, "transformers", "transformers-lookup", "transformers-assisted")
ADAPTER = Path(__file__).with_name("peer_engines.py")
TIMEOUT_S = 900.0
"""For loading (vLLM compiles, OpenVINO converts), and for one run of a workload."""
NEWS_S = 15.0
"""Seconds between two lines that tell which peers are still loading."""


def parse_pythons(texts: Sequence[str], names: Sequence[str]) -> dict[str, str]:
    """ "vllm=/venv/bin/python" ... -> each peer's interpreter; this one where none is given. Raises ConfigError."""
    pythons = dict.fromkeys(names, sys.executable)
    for text in texts:
        name, _, path = text.partition("=")
        if not names:
            raise ConfigError(f"--peer-python {text}: no engine is named; add --vs {name if name in PEERS else 'NAME'}")
        if name not in pythons or not path:
            raise ConfigError(f"--peer-python {text}: expected NAME=PATH, with one of --vs {','.join(names)}")
        if (found := shutil.which(path)) is None:
            raise ConfigError(f"--peer-python {text}: {path} is not a program that can be run")
        pythons[name] = os.path.abspath(found)  # a peer runs in another folder
    return pythons


class Peer:
    """A peer engine that has loaded a model, driven over pipes; `peer_engines.py` is its other end."""

    def __init__(self, name: str, python: str, settings: Mapping[str, Any], log: Path) -> None:
        """Starts the process; `wait_until_loaded` returns when it is ready."""
        self.name, self.version, self.start_s = name, "", 0.0
        self.failure: str | None = None
        """Why it is left out; None while it answers."""
        self._log, self._python = log, python
        # Our own spinning limit is not the peer's default.
        env = {k: v for k, v in os.environ.items() if (k, v) != ("GOMP_SPINCOUNT", str(SPIN_COUNT))}
        env.pop("PYTHONPATH", None)
        with log.open("wb") as errors:
            self._process = ChildProcess(
                [python, str(ADAPTER), json.dumps({"engine": name, **settings})],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=log.parent,
                env=env,
            )

    @property
    def answers(self) -> IO[bytes]:
        """What it writes; something to read means that it is loaded, or has ended."""
        assert self._process.stdout is not None
        return self._process.stdout

    def wait_until_loaded(self, timeout_s: float = TIMEOUT_S) -> None:
        """Raises InferenceError with the end of its log where the engine does not start."""
        loaded = self._receive("start", timeout_s)
        self.version, self.start_s = loaded["version"], loaded["start_s"]

    def warm_up(self, workload: Workload) -> None:
        self._call(workload, is_warm_up=True)

    def run(self, workload: Workload, *, company: Sequence[int] = ()) -> RunResult | None:
        """None: this engine cannot run the workload, or its process has ended. Raises InferenceError unless every
        answer has its length.

        company: processes whose use of the cores is meant to be there.
        """
        clock = CpuClock.now([self._process.pid, *company])
        answer = self._call(workload, is_warm_up=False)
        end = CpuClock.now([self._process.pid, *company])
        if answer is None:
            return None
        if "unsupported" in answer:
            note(f"{self.name}: not measured: {answer['unsupported']}")
            return None
        outputs = answer["outputs"]
        expected = [length for length in workload.output_lens for _ in range(workload.num_samples)]
        if [len(tokens) for tokens in outputs] != expected:
            raise InferenceError(
                f"{self.name} gave answers of {list(map(len, outputs))} tokens, {expected} were asked for"
            )
        return RunResult(seconds=answer["seconds"], outputs=outputs, other_load=end.other_load(clock))

    def facts(self) -> dict[str, Any]:
        """Its version, seconds to load, the resident memory of its processes now, and why it was left out."""
        rss_mib = sum(resident_mib(pid) for pid in processes_below(self._process.pid))
        facts: dict[str, Any] = {"version": self.version, "start_s": self.start_s, "rss_mib": rss_mib}
        return facts if self.failure is None else facts | {"failure": self.failure}

    def close(self) -> None:
        """End the process and what it started."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(5)
        self._process.end()
        self._process.stdout.close()

    def _call(self, workload: Workload, *, is_warm_up: bool) -> dict[str, Any] | None:
        """None: its process has ended, now or before; the others go on."""
        assert self._process.stdin is not None
        if self.failure is not None:
            return None
        line = json.dumps({**dataclasses.asdict(workload), "is_warm_up": is_warm_up})
        with contextlib.suppress(BrokenPipeError):  # its end is reported by what is read
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        try:
            return self._receive("run a workload")
        except InferenceError as error:
            self.failure = str(error)
            note(f"{self.name} is left out from here on: {error}")
            return None

    def _receive(self, what: str, timeout_s: float = TIMEOUT_S) -> dict[str, Any]:
        assert self._process.stdout is not None
        readable, _, _ = select.select([self._process.stdout], [], [], timeout_s)
        line = self._process.stdout.readline() if readable else b""
        if line.endswith(b"\n"):
            answer: dict[str, Any] = json.loads(line)
            return answer
        end = "\n".join(self._log.read_text(encoding="utf-8", errors="replace").splitlines()[-12:])
        why = "ended" if readable else f"gave no answer within {TIMEOUT_S:.0f} s"
        if "ModuleNotFoundError" in end:
            remedy = f"give the one of the environment that has {self.name} as --peer-python {self.name}=PATH"
            end += f"\nThe interpreter is {self._python}; {remedy}"
        raise InferenceError(f"{self.name} could not {what}: its process {why}. It wrote:\n{end}")


@contextlib.contextmanager
def peers_of(
    model: str,
    pythons: Mapping[str, str],
    *,
    shape: ModelShape,
    device: str,
    threads: int,
    workloads: Sequence[Workload],
    assistant: str | None = None,
) -> Iterator[list[Peer]]:
    """The peers, loaded and sized for the workloads; ended afterwards. They load at the same time.

    assistant: the model that drafts for those to which a model can be given for it; None: the model itself.
    """
    lengths = [len(p) + n for w in workloads for p, n in zip(w.prompts, w.output_lens, strict=True)]
    rows = max(w.concurrency * w.num_samples for w in workloads)
    with tempfile.TemporaryDirectory(prefix="megatron-infer-bench-") as scratch, contextlib.ExitStack() as stack:
        settings = {
            **weights_for_peers(model, pythons, shape.dtype, Path(scratch), assistant=assistant),
            "dtype": shape.dtype,
            "device": device,
            "threads": threads,
            "max_rows": rows,
            "max_length": max(lengths) + 1,
            "kv_gib": _kv_gib(shape, rows * (max(lengths) + 64)),
        }
        peers = []
        for name, python in pythons.items():
            note(f"loading {name} ...")
            folder = Path(scratch) / name
            folder.mkdir()
            peers.append(Peer(name, python, {**settings, "scratch": str(folder)}, folder / "log"))
            stack.callback(peers[-1].close)
        _wait_until_loaded(peers)
        yield peers


def _wait_until_loaded(peers: Sequence[Peer]) -> None:
    """Return when all are loaded; a line tells when each is, and every NEWS_S seconds which are not."""
    began, waiting = time.monotonic(), {peer.answers: peer for peer in peers}
    while waiting:
        ready, _, _ = select.select(list(waiting), [], [], NEWS_S)
        elapsed_s = time.monotonic() - began
        if not ready and elapsed_s < TIMEOUT_S:
            note(f"still loading {', '.join(peer.name for peer in waiting.values())}: {elapsed_s:.0f} s")
        for answers in ready if ready or elapsed_s < TIMEOUT_S else list(waiting):
            peer = waiting.pop(answers)
            peer.wait_until_loaded(timeout_s=0.0)
            note(f"{peer.name} {peer.version}, loaded in {peer.start_s:.1f} s")


def weights_for_peers(
    model: str, names: Collection[str], dtype: str, scratch: Path, *, assistant: str | None = None
) -> dict[str, str]:
    """Paths of the same weights for engines that read Hugging Face directories, and for llama.cpp."""
    from megatron_infer.models.loading.sources import GGUFSource, open_source

    source = open_source(model)
    paths = {}
    if set(names) - set(GGUF_TYPES):
        paths["model"] = _hugging_face(source, scratch / "model", dtype)
    if assistant is not None and "transformers-assisted" in names:
        paths["assistant"] = _hugging_face(open_source(assistant), scratch / "assistant", dtype)
    for name in names:
        if name in GGUF_TYPES:
            if not isinstance(source, GGUFSource):
                raise ConfigError(f"--vs {name} reads .gguf files, {model} is none; give one, or leave {name} out")
            note(f"writing the weights of {source.name} for {name} ...")
            paths[name] = str(scratch / f"{name}.gguf")
            write_gguf(Path(source.path), Path(paths[name]), GGUF_TYPES[name] or dtype)
    return paths


def _hugging_face(source: ModelSource, folder: Path, dtype: str) -> str:
    """Its own directory, or `folder`, where its weights are written."""
    from megatron_infer.models.loading.hf_export import write_hugging_face
    from megatron_infer.models.loading.sources import HFDirectory

    if isinstance(source, HFDirectory):
        return str(Path(source.path).absolute())
    note(f"writing the weights of {source.name} for other engines ...")
    write_hugging_face(source, folder, dtype=dtype)
    return str(folder.absolute())


def write_gguf(source: Path, target: Path, dtype: str) -> None:
    """A copy of a .gguf file with its matrices in `dtype` and its vectors in float32, as llama.cpp wants them.

    dtype: torch's name, or a quantised type of gguf's.
    """
    import gguf

    reader = gguf.GGUFReader(source)
    architecture = reader.fields["general.architecture"].contents()
    matrices = gguf.GGMLQuantizationType[{"float32": "F32", "bfloat16": "BF16"}.get(dtype, dtype)]
    writer = gguf.GGUFWriter(target, architecture)
    for field in reader.fields.values():
        if field.name.startswith("GGUF.") or field.name in ("general.architecture", "general.file_type"):
            continue
        kind = field.types[0]
        sub_type = field.types[-1] if kind == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(field.name, field.contents(), kind, sub_type=sub_type)
    for tensor in reader.tensors:
        values = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        raw = matrices if values.ndim > 1 else gguf.GGMLQuantizationType.F32
        writer.add_tensor(tensor.name, gguf.quants.quantize(values, raw), raw_dtype=raw)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _kv_gib(shape: ModelShape, num_tokens: int) -> int:
    """Memory that holds the keys and values of so many tokens, rounded up, with some to spare."""
    per_token = 2 * shape.num_attention_layers * shape.num_kv_heads * shape.head_dim * shape.kv_dtype_bytes
    return 1 + -(-num_tokens * per_token // 2**30)


def plot_engines(report: dict[str, Any], path: str) -> None:
    """Write a PNG of a report: for each workload a bar of each engine's median rate, with the least and the most of its
    rounds."""
    from matplotlib.figure import Figure

    names = list(report["engines"])
    columns = report["columns"]
    figure = Figure(figsize=(2.6 * len(columns) + 1, 4), layout="constrained")
    panels = figure.subplots(1, len(columns), squeeze=False)[0]
    for panel, (title, column) in zip(panels, columns.items(), strict=True):
        for place, name in enumerate(names):
            if (found := column["engines"].get(name)) is None:
                continue
            rate = found["tok_s"]
            spread = [[rate["median"] - rate["min"]], [rate["max"] - rate["median"]]]
            panel.bar(place, rate["median"], yerr=spread, capsize=3, color=f"C{place}", label=name)
        panel.set(title=title, xticks=[])
    panels[0].set(ylabel="tokens per second")
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center", ncols=len(names))
    settings = report["settings"]
    figure.suptitle(f"{report['model']}, {report['shape']['dtype']}, {settings['threads']} threads")
    figure.savefig(path, format="png", dpi=110)


def names_of(texts: Sequence[str]) -> list[str]:
    """The engines of all `--vs`. Raises ConfigError for an unknown one, and for one that is named twice."""
    names = [name for text in texts for name in text.split(",")]
    if len(set(names)) < len(names):
        raise ConfigError(f"--vs {','.join(names)}: an engine is named twice; name each once")
    if unknown := [name for name in names if name not in (*PEERS, OFF)]:
        raise ConfigError(f"--vs: unknown engine {unknown[0]!r}; there are {', '.join(PEERS)} and off")
    return names


def parse_args(argv: Sequence[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    add_options(parser)
    parser.add_argument(
        "--vs",
        action="append",
        required=True,
        metavar="NAME,...",
        help=f"engines: {', '.join(PEERS)}; off: this engine without --speculative",
    )
    parser.add_argument(
        "--peer-python",
        action="append",
        default=[],
        metavar="NAME=PATH",
        help="the interpreter of the environment in which a peer is installed (default: this one)",
    )
    parser.add_argument("--plot", metavar="FILE", help="draw bars of the engines (PNG; needs matplotlib)")
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    """-> 0; 1 if a peer ended early. Raises InferenceError if an engine does not start or gives other lengths."""
    report_path = open_report(args.json)
    if args.plot is not None:
        if importlib.util.find_spec("matplotlib") is None:
            raise ConfigError("--plot needs matplotlib: pip install matplotlib")
        open_report(args.plot)
    names = names_of(args.vs)
    pythons = parse_pythons(args.peer_python, [name for name in names if name != OFF])
    benchmark = prepare(args, with_off=OFF in names)
    import torch

    with peers_of(
        args.model,
        pythons,
        shape=benchmark.shape,
        device=benchmark.device,
        threads=torch.get_num_threads(),
        workloads=list(benchmark.workloads.values()),
        assistant=benchmark.drafting.get("draft_model"),
    ) as peers:
        report = measure(benchmark, report_path, peers)
    if args.plot is not None:
        plot_engines(report, args.plot)
    return int(any(peer.failure is not None for peer in peers))


def main() -> int:
    limit_spinning()
    end_without_collection()
    try:
        return run(parse_args())
    except InferenceError as error:
        print(f"peers.py: error: {error}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
