"""Orders of decode and prompts: golden traces, bounds, and the oracle under each order."""

from __future__ import annotations

import random
from functools import partial

import pytest
from fake_device import draw, make_group, make_request, prefix_digests
from world import Swap, World

from megatron_infer.config.batching import BatchingLimits
from megatron_infer.config.inference import InferenceConfig, PreemptionMode
from megatron_infer.config.model_shape import ModelShape
from megatron_infer.errors import ConfigError
from megatron_infer.scheduler.phases import MAX_PREFILLS_IN_A_ROW, Phased, PrefillFirst
from megatron_infer.scheduler.request import FinishReason

SHAPE = ModelShape(
    num_layers=2,
    num_attention_layers=2,
    num_query_heads=2,
    num_kv_heads=2,
    head_dim=8,
    hidden_size=16,
    vocab_size=100,
    padded_vocab_size=100,
    max_position=None,
    kv_dtype_bytes=4,
    dtype="float32",
    num_parameters=1000,
)


class OrderedWorld(World):
    """A World with an order of decode and prompts, and a trace in the notation of the golden ones."""

    def __init__(self, phases=None, *, limits=None, **settings):
        self.scheduling = {"phases": phases, "limits": BatchingLimits(**(limits or {}))}
        self.steps_in_flight = settings.pop("steps_in_flight", 1)
        super().__init__(**{"num_blocks": 64, "max_tokens": 64, **settings})

    @property
    def ahead(self):
        return self.steps_in_flight + self.overlap - 1

    def ask(self, name, num_prompt, max_new, **kwargs):
        first = 10 + 7 * len(self.requests)
        tokens = [first + i for i in range(num_prompt)]
        return self.add(make_request(name, tokens, max_new, stop_ids=frozenset(), **kwargs))

    def trace(self, *, arrivals=None):
        """Run to the end -> "CE[a:5 b:5] TG[a b]". arrivals: number of the step -> (name, prompt, new) to add first."""
        shown = []
        for number in range(200):
            for arrival in (arrivals or {}).get(number, ()):
                self.ask(*arrival)
            if not self.scheduler.has_unfinished:
                self.drain()
                return " ".join(shown)
            plan = self.step()
            if not plan.num_tokens:
                continue  # the last step in flight is read
            decode = [request.id + ":1" * bool(plan.prefill) for request in plan.decode]
            rows = [*decode, *(f"{chunk.request.id}:{chunk.n}" for chunk in plan.prefill)]
            shown.append(("CE" if plan.prefill else "TG") + "[" + " ".join(rows) + "]")
        raise AssertionError(shown)


# ------------------------------------------------------------------ golden traces


FOUR = (("a", 5, 2), ("b", 5, 2), ("c", 10, 2), ("d", 3, 2))
EIGHT = tuple((name, 8, 2) for name in "abc")
LATE = {3: [(name, 4, 5) for name in "cdef"]}
LONG = {2: [("L", 20, 2)]}
CHUNKS_OF_8 = {"max_tokens": 8, "chunked": True}
GOLDEN = {
    "prompts are chunked and go first": (
        PrefillFirst, {"max_tokens": 16, "chunked": True}, FOUR, {},
        "CE[a:5 b:5 c:6] CE[c:4 d:3] TG[a b c d]",
    ),
    "without chunks no step exceeds its budget": (  # MAX computes 20 tokens in the first step
        PrefillFirst, {"max_tokens": 16}, FOUR, {},
        "CE[a:5 b:5 d:3] CE[c:10] TG[a b c d]",
    ),
    "prefill_first stalls decode while a long prompt is computed": (
        PrefillFirst, CHUNKS_OF_8, [("a", 4, 6)], LONG,
        "CE[a:4] TG[a] CE[L:8] CE[L:8] CE[L:4] TG[a L] TG[a] TG[a] TG[a]",
    ),
    "mixed decodes beside a long prompt": (
        None, CHUNKS_OF_8, [("a", 4, 6)], LONG,
        "CE[a:4] TG[a] CE[a:1 L:7] CE[a:1 L:7] CE[a:1 L:6] TG[a L]",
    ),
    "a watermark holds a prompt back while others run": (
        PrefillFirst, {"num_blocks": 10, "limits": {"max_used_blocks": 5}}, [("a", 12, 3), ("b", 12, 3)], {},
        "CE[a:12] TG[a] TG[a] CE[b:12] TG[b] TG[b]",
    ),
    "a watermark of all blocks holds none back": (
        PrefillFirst, {"num_blocks": 10, "limits": {"max_used_blocks": 10}}, [("a", 12, 3), ("b", 12, 3)], {},
        "CE[a:12 b:12] TG[a b] TG[a b]",
    ),
    "a watermark of zero runs one request at a time": (
        None, {"limits": {"max_used_blocks": 0}}, [("a", 4, 2), ("b", 4, 2)], {},
        "CE[a:4] TG[a] CE[b:4] TG[b]",
    ),
    "the newest request is recomputed with what it has drawn": (
        PrefillFirst, {"num_blocks": 6, "paused_limit": 0, "limits": {"max_used_blocks": 6}},
        [(name, 7, 6) for name in "abc"], {},
        "CE[a:7 b:7 c:7] TG[a b c] TG[a b] TG[a b] TG[a b] TG[a b] CE[c:9] TG[c] TG[c] TG[c]",
    ),
    "a step never goes past the length of a request": (  # MAX runs one step too many
        PrefillFirst, {"overlap": True}, [("a", 4, 6), ("b", 4, 10)], {},
        "CE[a:4 b:4] TG[a b] TG[a b] TG[a b] TG[a b] TG[a b] TG[b] TG[b] TG[b] TG[b]",
    ),
    "total context bounds steps with prompts only": (
        PrefillFirst, {"limits": {"max_total_tokens": 20}}, EIGHT, {},
        "CE[a:8 b:8] CE[c:8] TG[a b c]",
    ),
    "total context counts decoding requests and chunks": (  # a has 9 tokens in its first decode step: 7 of b fit;
        None, CHUNKS_OF_8 | {"limits": {"max_total_tokens": 20}}, [("a", 8, 4)], {1: [("b", 16, 2)]},
        "CE[a:8] CE[a:1 b:7] TG[a] TG[a] CE[b:8] CE[b:1] TG[b]",  # then b would have 14 beside a's 10
    ),
    "total context counts what earlier steps have computed of a chunk": (
        None, CHUNKS_OF_8 | {"limits": {"max_total_tokens": 15}}, [("a", 14, 2), ("b", 4, 2)], {},
        "CE[a:8] CE[a:6] TG[a] CE[b:4] TG[b]",  # a has 14 tokens in the second step, and 2 of b would fit the budget
    ),
    "no more requests run than rows": (
        PrefillFirst, {"num_rows": 2}, [(name, 4, 2) for name in "abc"], {},
        "CE[a:4 b:4] TG[a b] CE[c:4] TG[c]",
    ),
    "phased keeps its floor of four and its cap": (
        partial(Phased, min_decoding=4, prioritizes_first_decode=False), {"limits": {"max_live": 4}},
        [("a", 4, 5), ("b", 4, 5)], LATE,
        "CE[a:4 b:4] TG[a b] TG[a b] CE[c:4 d:4] TG[a b c d] TG[a b c d] "
        "CE[e:4 f:4] TG[c d e f] TG[c d e f] TG[e f] TG[e f]",
    ),
    "phased keeps its floor of two and its cap": (
        partial(Phased, min_decoding=2, prioritizes_first_decode=False), {"limits": {"max_live": 4}},
        [("a", 4, 5), ("b", 4, 5)], LATE,
        "CE[a:4 b:4] TG[a b] TG[a b] TG[a b] TG[a b] "
        "CE[c:4 d:4 e:4 f:4] TG[c d e f] TG[c d e f] TG[c d e f] TG[c d e f]",
    ),
    "phased decodes new requests alone at first": (
        partial(Phased, min_decoding=4, prioritizes_first_decode=True), {"limits": {"max_live": 4}},
        [("a", 4, 5), ("b", 4, 5)], {3: LATE[3][:2]},
        "CE[a:4 b:4] TG[a b] TG[a b] CE[c:4 d:4] TG[c d] TG[a b c d] TG[a b c d] TG[c d]",
    ),
}  # fmt: skip
"""By promise: phases, settings of the world, requests, those that arrive before a step, and the trace."""


@pytest.mark.parametrize("promise", GOLDEN)
def test_steps_are_those_of_the_golden_trace(promise):
    phases, settings, requests, arrivals, expected = GOLDEN[promise]
    world = OrderedWorld(phases and phases(), **settings)
    for name, num_prompt, max_new in requests:
        world.ask(name, num_prompt, max_new)
    assert world.trace(arrivals=arrivals) == expected


def test_an_end_drops_as_many_steps_as_were_in_flight_behind_it():
    for steps_in_flight in (1, 2, 4):
        world = OrderedWorld(steps_in_flight=steps_in_flight)
        a = world.ask("a", 4, 20)
        a.stop_ids = frozenset({draw(prefix_digests(a.tokens)[-1], 0)})
        world.drain()
        assert len(a.tokens) == 5 and a.finish_reason is FinishReason.STOP
        assert world.scheduler.stats.decode_tokens == steps_in_flight - 1


def test_total_context_counts_all_that_a_swapped_request_brings_back():
    """c comes back with 11 tokens beside b, which has 14 by then; within fewer than 25 it waits until b has ended."""
    swap = Swap(slots=64, mode=PreemptionMode.SWAP)
    for limit, beside in ((24, ([],)), (25, (["b"], []))):
        world = OrderedWorld(num_blocks=16, block_size=2, paused_limit=0, swap=swap, limits={"max_total_tokens": limit})
        for name, max_new in (("a", 8), ("b", 16), ("c", 16)):
            world.ask(name, 6, max_new)
        found = []
        while world.scheduler.has_unfinished:
            plan = world.step()
            if any(chunk.start for chunk in plan.prefill):
                found.append([request.id for request in plan.decode])
        assert tuple(found) == beside and world.scheduler.stats.swapped_in == len(beside)


# ------------------------------------------------------------------ bounds


def test_decode_is_not_starved_by_a_stream_of_prompts():
    world = OrderedWorld(PrefillFirst(), num_rows=4)
    long = world.ask("long", 4, 4)
    for number in range(3 * MAX_PREFILLS_IN_A_ROW + 10):
        if long.finish_reason is not None:
            break
        world.ask(f"p{number}", 4, 1)
        world.step()
    assert long.finish_reason is not None, "prompts of one drawn token kept it waiting"
    world.drain()


def test_siblings_count_against_the_cap():
    world = OrderedWorld(Phased(min_decoding=2, prioritizes_first_decode=False), limits={"max_live": 2})
    world.add(make_group("g", [5, 6, 7, 8, 9], 4, 4, stop_ids=frozenset()))
    while world.scheduler.has_unfinished:
        world.step()
        assert world.scheduler.num_running + world.scheduler.num_paused <= 2
    world.drain()


def test_requests_wait_until_they_are_released():
    world = OrderedWorld(Phased(min_decoding=4, prioritizes_first_decode=False))
    queue = world.scheduler.queue
    queue.release(0)
    a = world.ask("a", 4, 2)
    assert world.scheduler.schedule().num_tokens == 0
    queue.release(queue.num_arrivals)
    world.ask("b", 4, 2)
    assert [chunk.request for chunk in world.step().prefill] == [a]
    queue.release(queue.num_arrivals)
    world.drain()


# ------------------------------------------------------------------ the oracle under each order

ORDERS = {
    "mixed": lambda: None,
    "prefill_first": lambda: PrefillFirst(),
    "phased": lambda: Phased(min_decoding=3, prioritizes_first_decode=False),
    "phased_first": lambda: Phased(min_decoding=5, prioritizes_first_decode=True),
}


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("order", ORDERS)
def test_every_request_gets_its_tokens_under_each_order(order, seed):
    rng = random.Random(f"{order} {seed}")
    world = OrderedWorld(
        ORDERS[order](),
        num_blocks=rng.choice([12, 20, 40]),
        num_rows=rng.choice([3, 8]),
        max_tokens=rng.choice([8, 24]),
        chunked=True,
        caching=rng.random() < 0.5,
        keep_cached=rng.random() < 0.5,
        overlap=rng.random() < 0.5,
        steps_in_flight=rng.choice([1, 1, 2, 4]),
        paused_limit=rng.choice([0, 4]),
        num_cached_states=rng.choice([None, 4]),
        limits={
            "max_live": rng.choice([None, 3]),
            "max_total_tokens": rng.choice([None, 48]),
            "max_used_blocks": rng.choice([None, 8]),
        },
    )
    for number in range(60):
        if rng.random() < 0.4:
            start, size = rng.choice([10, 10, 30]), rng.randint(1, 24)
            tokens = [start + i % 20 for i in range(size)]
            group = make_group(f"r{number}", tokens, rng.randint(1, 16), rng.choice([1, 1, 3]), seed=number)
            world.add(group)
        if rng.random() < 0.05 and world.requests:
            world.scheduler.abort(rng.choice(world.requests))
        if rng.random() < 0.04:
            world.fail_step(rng.choice(["before", "early", "late"]))
        elif rng.random() < 0.03:
            world.recompute()
        else:
            world.step()
    world.drain()


# ------------------------------------------------------------------ options


def limits_of(**options):
    config = InferenceConfig(buffer_size_gb=0.001, max_requests=8, max_sequence_length=64, **options)
    sizes = config.resolve(SHAPE)
    return BatchingLimits.of(config, sizes), sizes


def test_options_become_integers():
    limits, sizes = limits_of(admission_watermark=0.5, max_batch_total_tokens=100)
    assert limits == BatchingLimits(max_total_tokens=100, max_used_blocks=sizes.num_usable_blocks // 2)
    assert limits_of(batching="phased")[0].min_decoding == sizes.max_requests
    assert limits_of(batching="phased", max_queue_size_tg=4)[0] == BatchingLimits(max_live=4, min_decoding=4)
    assert limits_of(batching="phased", max_queue_size_tg=4, min_batch_size_tg=2)[0].min_decoding == 2


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_queue_size_tg": 4}, 'max_queue_size_tg is 4, it acts only with batching="phased"'),
        ({"batching": "prefill_first", "min_batch_size_tg": 1}, "min_batch_size_tg is 1, it acts only"),
        ({"ce_delay_ms": 2.5}, "ce_delay_ms is 2.5, it acts only"),
        ({"enable_prioritize_first_decode": True}, "enable_prioritize_first_decode is True, it acts only"),
        ({"batching": "phased", "max_queue_size_tg": 9}, "max_queue_size_tg is 9, the limit is max_requests = 8"),
        ({"batching": "phased", "max_queue_size_tg": 4, "min_batch_size_tg": 5}, "at most 4 requests ever decode"),
        ({"batching": "phased", "min_batch_size_tg": 9}, "at most 8 requests ever decode"),
        ({"batching": "phased", "ce_delay_ms": -1}, "ce_delay_ms is -1, it must be a finite number"),
        ({"batching": "phased", "ce_delay_ms": float("inf")}, "ce_delay_ms is inf"),
        ({"batching": "phased", "max_queue_size_tg": 0}, "max_queue_size_tg is 0, it must be at least 1"),
        ({"batching": "prefil_first"}, "did you mean 'prefill_first'"),
        ({"max_batch_total_tokens": 63}, "at least max_sequence_length = 64"),
        ({"max_batch_total_tokens": 0}, "max_batch_total_tokens is 0, it must be at least 1"),
        ({"admission_watermark": 1.01}, "number from 0 to 1"),
        ({"admission_watermark": True}, "number from 0 to 1"),
        ({"admission_watermark": float("nan")}, "number from 0 to 1"),
    ],
)
def test_options_that_cannot_act_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        limits_of(**options)
