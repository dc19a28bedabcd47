"""A request that moves between engines with its memory goes on as if it had not moved, to the bit; bad parcels are
refused before anything is taken in."""

from __future__ import annotations

import json
import random
from dataclasses import replace

import pytest
import torch
import vocabularies
from durable_case import PROMPT, VOCAB, make_engine, make_model, pool_of
from model_kinds import KINDS

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.durable.parcel import Parcel
from megatron_infer.engine.requests.drawn_sequence import DrawnSequence
from megatron_infer.errors import DuplicateRequest, InferenceError, RequestError, SnapshotError, UnknownRequest
from megatron_infer.outputs.token_outputs import TOKEN_OUTPUTS
from megatron_infer.scheduler.request import Status
from megatron_infer.testing.inspect import inspect

FREE = {"ignore_eos": True, "logprobs": 2}
WORK = {
    "greedy": (PROMPT, SamplingParams(max_tokens=14, temperature=0.0, prompt_logprobs=1, **FREE)),
    "long": (list(range(VOCAB)), SamplingParams(max_tokens=12, seed=7, temperature=0.9, **FREE)),
    "group": (PROMPT[3:], SamplingParams(n=3, max_tokens=12, seed=3, stop_token_ids=list(range(0, VOCAB, 9)))),
    "edited": (PROMPT[::-1], SamplingParams(max_tokens=12, seed=5, repetition_penalty=1.3, min_p=0.02, **FREE)),
    "pooled": (PROMPT + PROMPT, SamplingParams(max_tokens=1, pooling="all")),
    "support": (PROMPT[5:], SamplingParams(max_tokens=10, seed=9, top_k=5, return_support=True, **FREE)),
}
"""With 24 tokens a step prompts take several."""


def add(engine, stream="final") -> None:
    for request_id, (prompt, params) in WORK.items():
        engine.add_request(prompt, params, request_id=request_id, stream=stream)


def answer(output) -> dict:
    """All that a caller gets but times."""
    each = [
        [
            getattr(one, name)
            for name in ("token_ids", "text", "logprobs", "cumulative_logprob", "finish_reason", "spans")
        ]
        + [str(getattr(one, row.name)) for row in TOKEN_OUTPUTS]
        for one in output.outputs
    ]
    return {"prompt": output.prompt_logprobs, "pooled": output.pooled, "error": output.error, "outputs": each}


def run(engines, moves=lambda step: ()) -> dict[str, dict]:
    """Step all engines to the end; moves(step) -> (request id, from, to) before it."""
    done, step = {}, 0
    while any(engine.has_unfinished() for engine in engines):
        for request_id, one, other in moves(step):
            if request_id in engines[one].output_processor:
                try:
                    parcel = engines[one].hand_out(request_id)
                except UnknownRequest:  # the step in flight has ended it
                    continue
                assert request_id not in engines[one].output_processor
                content = parcel.without(engines[other].num_published(WORK[request_id][0])).to_bytes()
                assert not engines[other].take_in(content).recomputed
        for engine in engines:
            if engine.has_unfinished():
                done |= {output.request_id: answer(output) for output in engine.step() if output.finished}
        step += 1
    for engine in engines:
        stats = engine.stats()
        assert stats.num_free_blocks == stats.num_blocks
    return done


@pytest.fixture(scope="module")
def unmoved(model) -> dict[str, dict]:
    engine = make_engine(model, max_tokens=24, max_requests=12)
    add(engine)
    return run([engine])


@pytest.mark.parametrize("kind", KINDS, indirect=True)
@pytest.mark.parametrize("how", [{}, {"overlap": True, "prefix": "lru"}], ids=["plain", "overlap, cache"])
def test_moved_requests_answer_as_unmoved_ones_to_the_bit(model, kind, unmoved, how):
    """Every request moves every few steps, at every state, and finds its own blocks when it comes back."""
    engines = [make_engine(model, max_tokens=24, max_requests=12, **how) for _ in range(2)]
    add(engines[0])
    rng, states = random.Random(kind), set()

    def moves(step):
        for request_id in WORK if step % 3 == 1 else ():
            for one in (0, 1):
                state = engines[one].output_processor.get(request_id)
                if state is not None and rng.random() < 0.6:
                    states.update(sequence.request.status for sequence in state.sequences)
                    yield request_id, one, 1 - one

    assert run(engines, moves) == unmoved
    assert states >= {Status.WAITING, Status.RUNNING}
    computed = sum(engine.stats().counters["prefill_tokens"] for engine in engines)
    prompts = sum(len(prompt) for prompt, _ in WORK.values())
    assert computed <= prompts, "what had been computed was computed again"


SETTINGS = {
    "drafts": ({"speculative": {"num_speculative_tokens": 4, "adaptive": False}}, {}),
    "cache in fp8": ({"kv_cache_dtype": "fp8_e4m3"}, {}),
    "other blocks there": ({}, {"block_size_tokens": 8, "max_tokens": 17}),
    "swapped": ({"preemption_mode": "swap", "swap_buffer_size_gb": 0.01, "buffer_size_gb": 10}, {}),
}


@pytest.mark.parametrize("case", SETTINGS)
def test_a_move_answers_alike_with_features_on(model, case):
    settings, changes = (dict(one) for one in SETTINGS[case])
    work = {str(i): (PROMPT[i:], SamplingParams(max_tokens=24, seed=i, temperature=0.7, **FREE)) for i in range(3)}
    if case == "swapped":
        settings["buffer_size_gb"] = pool_of(model, settings["buffer_size_gb"])
    one, other = make_engine(model, **settings), make_engine(model, **settings | changes)
    want = {name: answer(one.generate(*each)[0]) for name, each in work.items()}
    for name, (prompt, params) in work.items():
        one.add_request(prompt, params, request_id=name)
    done, num_swapped = {}, 0
    while one.has_unfinished() or other.has_unfinished():
        for name in work:
            if name in one.output_processor and (case != "swapped" or one.stats().counters["swapped_out"]):
                num_swapped += one.output_processor.get(name).sequences[0].request.lease is None
                if one.output_processor.get(name).sequences[0].request.num_output > int(name):
                    other.take_in(one.hand_out(name))
        for engine in (one, other):
            if engine.has_unfinished():
                done |= {output.request_id: answer(output) for output in engine.step() if output.finished}
    assert done == want and one.stats().counters["finished"] == 6
    assert num_swapped or case != "swapped"


def test_streams_texts_and_stop_strings_go_on_across_the_move():
    tokenizer = vocabularies.byte_level()
    model = make_model(vocab_size=tokenizer.vocab_size)
    params = {"max_tokens": 30, "temperature": 1.2, "seed": 2, "ignore_eos": True}
    whole = make_engine(model, tokenizer=tokenizer).generate("hello", SamplingParams(**params))[0].outputs[0]
    stop = whole.text[10:14]
    params = SamplingParams(**params, stop=[stop])
    want = make_engine(model, tokenizer=tokenizer).generate("hello", params)[0].outputs[0]
    for steps in range(1, want.text.count("") - 1):
        one, other = (make_engine(model, tokenizer=tokenizer, overlap=True) for _ in range(2))
        one.add_request("hello", params, request_id="a", stream="delta")
        outputs = []
        while one.has_unfinished():
            outputs += one.step()
            if len(outputs) == steps and not outputs[-1].finished:
                other.take_in(one.hand_out("a"), request_id="b")
        while other.has_unfinished():
            outputs += other.step()
        assert "".join(output.outputs[0].text for output in outputs) == want.text
        assert sum((output.outputs[0].token_ids for output in outputs), []) == want.token_ids
        assert outputs[-1].outputs[0].stop_reason == stop
        if outputs[-1].request_id == "a":
            break
    assert steps > 3


def test_blocks_that_the_receiver_has_published_are_not_sent_and_the_next_turn_finds_what_came(model):
    one, other = (make_engine(model, prefix="lru") for _ in range(2))
    params = SamplingParams(max_tokens=24, temperature=0.0, ignore_eos=True)
    want = make_engine(model).generate(PROMPT * 2, params)[0].outputs[0].token_ids
    other.generate(PROMPT * 2, SamplingParams(max_tokens=1))
    one.add_request(PROMPT * 2, params, request_id="a")
    for _ in range(9):
        one.step()
    parcel = one.hand_out("a")
    held = other.num_published(PROMPT * 2)
    assert held == 64
    fewer = parcel.without(held)
    saved = parcel.num_bytes - fewer.num_bytes
    assert abs(saved - 4 * one.sizes.block_bytes) < 64
    assert other.take_in(fewer).with_kv == ["a"]
    outputs = []
    while other.has_unfinished():
        outputs += other.step()
    assert outputs[-1].outputs[0].token_ids == want
    turn = PROMPT * 2 + want + [3]
    assert other.generate(turn, SamplingParams(max_tokens=1))[0].num_cached_tokens >= (len(turn) - 2) // 16 * 16
    third = make_engine(model, prefix="lru")
    assert "no room" in third.take_in(_again(one, "b", params).without(held)).recomputed["b"]  # has none of it
    while third.has_unfinished():
        outputs += third.step()
    assert outputs[-1].outputs[0].token_ids == want


def _again(engine, request_id, params) -> Parcel:
    engine.add_request(PROMPT * 2, params, request_id=request_id)
    for _ in range(3):
        engine.step()
    return engine.hand_out(request_id)


CANNOT = {
    "other weights": (lambda: make_engine(make_model(seed=5)), "the weights differ"),
    "another version": (None, "the weights are of version 1, it was computed with version 0"),
    "another shape": (lambda: make_engine(make_model(num_layers=1)), "num_layers is 1"),
    "full": (None, "no room in the cache"),
}


@pytest.mark.parametrize("case", CANNOT)
def test_where_its_memory_cannot_be_used_a_request_goes_on_from_its_tokens(model, case):
    make, why = CANNOT[case]
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    one = make_engine(model)
    one.add_request(PROMPT, params, request_id="a")
    for _ in range(6):
        one.step()
    drawn = list(one.output_processor.get("a").sequences[0].request.tokens[len(PROMPT) :])
    other = make() if make else make_engine(model, **({"buffer_size_gb": pool_of(model, 5)} if case == "full" else {}))
    if case == "another version":
        other.set_weight_version(1)
    if case == "full":
        other.add_request(PROMPT, params)
        other.step()
    version = other.weight_version
    report = other.take_in(one.hand_out("a"))
    assert not report.with_kv and why in report.recomputed["a"]
    done = {}
    while other.has_unfinished():
        done |= {output.request_id: output for output in other.step() if output.finished}
    assert done["a"].outputs[0].token_ids[: len(drawn)] == drawn and len(done["a"].outputs[0].token_ids) == 20
    assert other.weight_version == version
    if make is None:
        assert done["a"].outputs[0].token_ids == make_engine(model).generate(PROMPT, params)[0].outputs[0].token_ids


@pytest.mark.security
@pytest.mark.parametrize("kind", ["attention", "hybrid"], indirect=True)
def test_cut_changed_and_forged_parcels_are_refused_and_leave_the_engine_as_it_was(model, kind):
    params = SamplingParams(n=2, seed=1, max_tokens=20, ignore_eos=True, logprobs=1)
    one, other = make_engine(model), make_engine(model, prefix="lru")
    one.add_request(PROMPT, params, request_id="a")
    want = other.generate(PROMPT, params)[0].outputs
    for _ in range(5):
        one.step()
    parcel = one.hand_out("a")
    content = parcel.to_bytes()
    rng = random.Random(3)
    for size in (0, 1, 7, 8, 100, len(content) // 2, len(content) - 1):
        with pytest.raises(SnapshotError, match=r"damaged|truncated"):
            other.take_in(content[:size])
    for _ in range(40):
        changed = bytearray(content)
        changed[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        with pytest.raises(SnapshotError):
            other.take_in(bytes(changed))
    for huge in (b"\xff" * 8 + content[8:], (1 << 40).to_bytes(8, "little") + content[8:]):
        with pytest.raises(SnapshotError, match="damaged"):
            other.take_in(huge)
    for name, tensor in parcel.tensors.items():
        if name == "records":
            continue
        forged = [tensor[:-1], tensor[..., :-1].contiguous(), tensor.to(torch.int64), tensor[:0]]
        for one_forged in forged:
            tensors = {**parcel.tensors, name: one_forged}
            with pytest.raises(SnapshotError, match="cannot be understood"):
                other.take_in(Parcel(manifest=parcel.manifest, tensors=tensors))
    for wrong in (None, "text", 5):
        for whole in (False, True):
            with pytest.raises(RequestError, match=rf"given {type(wrong).__name__}, which is no parcel"):
                other.take_in(wrong, whole=whole)
    for refused in (_null_metadata, _without_prompt):
        with pytest.raises(SnapshotError, match=r"not a file of saved requests|has no prompt"):
            other.take_in(refused(parcel))
    _fuzz_fields(parcel, other, rng)
    check_idle(other)
    with pytest.raises(SnapshotError, match="do not begin with those"):
        other.take_in(parcel, drawn=[DrawnSequence(token_ids=[VOCAB - 1] * 3, num_chars=0)] * 2)
    other.take_in(content)
    with pytest.raises((SnapshotError, DuplicateRequest), match="in the engine already"):
        other.take_in(content)
    outputs = []
    while other.has_unfinished():
        outputs += other.step()
    assert [one.token_ids for one in outputs[-1].outputs] == [one.token_ids for one in want]
    with pytest.raises(UnknownRequest, match="finished or was never added"):
        one.hand_out("a")


def _null_metadata(parcel: Parcel) -> bytes:
    header = b'{"__metadata__":null}'
    return len(header).to_bytes(8, "little") + header


def _without_prompt(parcel: Parcel) -> Parcel:
    """Nothing of it is computed, drawn or asked."""
    import msgspec

    from megatron_infer.engine.durable.request_codec import Records

    records = msgspec.msgpack.decode(parcel.tensors["records"].numpy().tobytes(), type=Records)
    (record,) = records.requests
    record.prompt_ids = b""
    for sequence in record.sequences:
        sequence.piece = msgspec.structs.replace(sequence.piece, tokens=b"", logprobs=None)
        sequence.place = replace(sequence.place, kv=None, sent=(0, 0))
    content = bytearray(msgspec.msgpack.encode(records))
    return Parcel(
        manifest=parcel.manifest | {"kv": None},
        tensors={"records": torch.frombuffer(content, dtype=torch.uint8)},
    )


def _fuzz_fields(parcel: Parcel, engine, rng: random.Random) -> None:
    """Each number of the description and of the record replaced: refused, or served without harm."""
    import msgspec

    def refused_or_harmless(changed: Parcel) -> None:
        try:
            engine.take_in(changed, request_id="fuzz")
        except InferenceError:
            check_idle(engine)
            return
        for _ in range(3):
            engine.step()
        if "fuzz" in engine.output_processor:
            engine.abort("fuzz")
        check_idle(engine)

    def replaced(value):
        """`value` with one of its leaves replaced."""
        if isinstance(value, dict) and value:
            name = rng.choice(sorted(value, key=str))
            return {**value, name: replaced(value[name])}
        if isinstance(value, list) and value:
            place = rng.randrange(len(value))
            return [*value[:place], replaced(value[place]), *value[place + 1 :]]
        return rng.choice([None, -1, 1 << 62, "x", [], {}, 3.5, True, b"\x00\x01\x02"])

    for _ in range(60):
        manifest = replaced(json.loads(json.dumps(parcel.manifest)))
        refused_or_harmless(Parcel(manifest=manifest, tensors=parcel.tensors))
        record = msgspec.msgpack.encode(replaced(msgspec.msgpack.decode(parcel.tensors["records"].numpy().tobytes())))
        tensors = {**parcel.tensors, "records": torch.frombuffer(bytearray(record), dtype=torch.uint8)}
        refused_or_harmless(Parcel(manifest=parcel.manifest, tensors=tensors))


def check_idle(engine) -> None:
    assert not engine.has_unfinished() and not len(engine.output_processor)
    inspect(engine).scheduler.context.check()
    stats = engine.stats()
    assert stats.num_free_blocks == stats.num_blocks


def test_kept_files_follow_a_move(model, tmp_path):
    """After a crash of both engines the request is in the files of the one that has it."""
    params = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    one, other = make_engine(model), make_engine(model)
    one.keep_snapshots(tmp_path / "one")
    other.keep_snapshots(tmp_path / "other")
    one.add_request(PROMPT, params, request_id="a")
    one.step()
    other.take_in(one.hand_out("a"))
    later = [make_engine(model) for _ in range(2)]
    assert [
        engine.load_requests(tmp_path / name).loaded for engine, name in zip(later, ("one", "other"), strict=True)
    ] == [
        [],
        ["a"],
    ]
    assert one.figures().ended["moved"] == 1
    assert make_engine(model).generate(PROMPT, params)[0].outputs[0].token_ids == _to_end(later[1])


def _to_end(engine) -> list[int]:
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    return outputs[-1].outputs[0].token_ids
