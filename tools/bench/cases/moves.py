"""A request that moves to another engine, by what is computed of it and by its tokens."""

from __future__ import annotations

import argparse
import contextlib
import random
import secrets
import tempfile
from collections.abc import Iterator
from functools import partial
from multiprocessing.shared_memory import SharedMemory

import torch

from cases.case import Case, Clock, Done, Measure
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.coordinator.parcel_transfer import ParcelTransfer
from megatron_infer.coordinator.protocol import ParcelPlace
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.engine.requests.drawn_sequence import DrawnSequence
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.sources import open_source

GREEDY = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
LOOPBACK = "tcp://127.0.0.1:1"
"""Says that parcels go over loopback; nothing listens there."""


class Pair:
    """Two engines of one model, each with its side of the transfer."""

    def __init__(self, model: torch.nn.Module, longest: int, folder: str) -> None:
        config = InferenceConfig(
            block_size_tokens=16,
            buffer_size_gb=1.0,
            max_sequence_length=longest + 16,
            max_tokens=512,
            max_requests=4,
            enable_chunked_prefill=True,
            enable_prefix_caching=True,
            prefix_caching_eviction_policy="lru",
        )
        self.engines = [DynamicInferenceEngine(model, config) for _ in range(2)]
        key = secrets.token_bytes(32)
        self.local = [ParcelTransfer(f"ipc://{folder}/c", None) for _ in self.engines]
        self.tcp = [ParcelTransfer(LOOPBACK, key) for _ in self.engines]
        for transfer in (*self.local, *self.tcp):
            transfer.start()

    def begun(self, prompt: list[int]) -> list[int]:
        """The first engine has the request and its first token."""
        for engine in self.engines:
            engine.reset_prefix_cache()
        self.engines[0].add_request(prompt, GREEDY, request_id="a", stream="delta")
        while not (outputs := self.engines[0].step()):
            pass
        return outputs[0].outputs[0].token_ids

    def finish(self) -> list[int]:
        """The second engine to the end -> the tokens that it draws."""
        outputs = []
        while self.engines[1].has_unfinished():
            outputs += self.engines[1].step()
        return [token for output in outputs for token in output.outputs[0].token_ids]


def moved(clock: Clock, pair: Pair, prompt: list[int], *, hit: bool = False, tcp: bool = False) -> Done:
    """From the hand-over to the next token. hit: the receiver has the prompt's blocks."""
    (one, other), (sender, receiver) = pair.engines, pair.tcp if tcp else pair.local
    pair.begun(prompt)
    if hit:
        other.generate(prompt, SamplingParams(max_tokens=1))
    with clock:
        parcel = one.hand_out("a")
        id = sender.offer(parcel)
        assert id is not None
        place, here = ParcelPlace(sender.address, id), other.num_published(prompt)
        content = receiver.fetch(place, num_published=here, max_bytes=1 << 34).result()
        assert content is not None
        report = other.take_in(content)
        other.step()
    pair.finish()
    assert report.with_kv == ["a"], report.recomputed
    return Done(
        1, {"MB sent": content.num_bytes / 1e6, "MB of the layout": -(-len(prompt) // 16) * one.sizes.block_bytes / 1e6}
    )


def computed_again(clock: Clock, pair: Pair, prompt: list[int]) -> Done:
    """From the hand-over of the tokens to the next token."""
    one, other = pair.engines
    drawn = pair.begun(prompt)
    with clock:
        one.abort("a")
        other.continue_request("a", prompt, GREEDY, [DrawnSequence(token_ids=drawn, num_chars=0)])
        while not other.step():
            pass
    pair.finish()
    return Done(1)


class Carried:
    """Bytes in the place of a parcel."""

    def __init__(self, content: bytes) -> None:
        self.content, self.num_bytes = content, len(content)

    def without(self, _: int) -> Carried:
        return self

    def to_bytes(self) -> bytes:
        return self.content


def carried(clock: Clock, pair: Pair, prompt: list[int], *, shared: bool = False) -> Done:
    """A parcel's bytes alone, from process memory to process memory. shared: through a new segment of shared memory."""
    pair.begun(prompt)
    content, (sender, receiver) = pair.engines[0].hand_out("a").to_bytes(), pair.local
    with clock:
        if shared:
            segment = SharedMemory(create=True, size=len(content))
            segment.buf[: len(content)] = content
            came = bytes(segment.buf[: len(content)])
        else:
            id = sender.offer(Carried(content))  # type: ignore[arg-type]
            came = receiver._fetch(sender.address, str(id), 0, 1 << 34)
    if shared:
        segment.close()
        segment.unlink()
    assert came == content
    return Done(1)


@contextlib.contextmanager
def moves(args: argparse.Namespace) -> Iterator[list[Measure]]:
    torch.set_num_threads(args.threads)
    model = build_model(open_source(args.model), dtype=getattr(torch, args.dtype))
    lengths = [int(text) for text in args.lengths.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        pair = Pair(model, max(lengths), folder)
        yield [_measure(pair, length) for length in lengths]
        for transfer in (*pair.local, *pair.tcp):
            transfer.close()


def _measure(pair: Pair, length: int) -> Measure:
    rng = random.Random(5)
    how = {"pair": pair, "prompt": [rng.randrange(4, 1000) for _ in range(length)]}
    variants = {
        "computed again": partial(computed_again, **how),
        "moved": partial(moved, **how),
        "moved over TCP": partial(moved, tcp=True, **how),
        "moved to a hit": partial(moved, hit=True, **how),
        "its bytes, Unix socket": partial(carried, **how),
        "its bytes, shared memory": partial(carried, shared=True, **how),
    }
    return Measure(f"{length} tokens", "move", variants)


CASES = {
    "moves": Case(
        about="A move between two engines, by memory and by tokens.\n\n"
        "From the hand-over to the token after it. Parcels go over a Unix socket, or over TCP\n"
        "with a key (encrypted), within one process.",
        prepare=moves,
        options={"model": "smollm2", "dtype": "float32", "lengths": "64,256,1024,4096", "threads": 1},
    ),
}
