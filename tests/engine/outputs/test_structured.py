"""Structured output yields texts of its language and nothing else, whatever an engine does to requests meanwhile."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest
import torch
from engines import finish, submit
from structured_case import PERSON, VOCAB, check, make_engine, model, run, tokenizer, told, workload
from test_async_llm import make_async

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.config.structured_output import StructuredOutput
from megatron_infer.engine.executor import FailedStep
from megatron_infer.errors import RequestError
from megatron_infer.runner.sampling.grammar_matchers import Grammars
from megatron_infer.scheduler.draft_depth import Proposal
from megatron_infer.scheduler.request import Request
from megatron_infer.scheduler.step_plan import PrefillChunk
from megatron_infer.testing.inspect import inspect
from megatron_infer.text.grammar import LIMITS, GrammarCache

DRAFTS = {"speculative": {"method": ["grammar", "ngram"], "adaptive": False}}
UGLY = {
    "pool_blocks": 12,
    "paused_blocks": 2,
    "overlap": True,
    "enable_chunked_prefill": True,
    "max_tokens": 24,
    "max_requests": 12,
    "enable_prefix_caching": True,
}
FEATURES = {
    "overlap": {"overlap": True},
    "few rows": {"max_requests": 3},
    "evicting": {"pool_blocks": 16},
    "swapping": {"pool_blocks": 16, "preemption_mode": "swap", "swap_buffer_size_gb": 0.02},
    "ugly": UGLY,
    "drafts": DRAFTS,
    "ugly with drafts": UGLY | DRAFTS,
}


@pytest.fixture(scope="module")
def alone() -> list:
    """One request at a time, nothing switched on."""
    engine = make_engine()
    return [run(engine, [one])[0] for one in workload()]


def structured(**language) -> SamplingParams:
    how = {"max_tokens": 100, "seed": 1}
    kinds = set(StructuredOutput.__dataclass_fields__)
    said = {name: value for name, value in language.items() if name in kinds}
    rest = {name: value for name, value in language.items() if name not in kinds}
    return SamplingParams(**{**how, **rest}, structured=StructuredOutput(**said))


def test_every_answer_is_of_its_language_and_ends_when_it_is_complete(alone):
    for (_, params), answers in zip(workload(), alone, strict=True):
        if params.structured is not None:
            for _, text, reason, _, _ in answers:
                assert reason == "stop", text
                check(params.structured, text)


@pytest.mark.parametrize("name", FEATURES)
def test_no_feature_changes_an_answer(name, alone):
    engine = make_engine(**FEATURES[name])
    assert run(engine, workload()) == alone
    assert not engine.output_processor.num_structured
    counters = engine.stats().counters
    assert counters["evicted"] > 0 or name in ("overlap", "few rows", "drafts")
    found = engine.spec_decode_metrics()
    assert found is None or 20 < found.num_accepted < found.num_drafted


@pytest.mark.long
@pytest.mark.parametrize("name", ["overlap", "ugly", "ugly with drafts"])
def test_masks_made_next_to_the_steps_change_no_answer(name, alone, monkeypatch):
    made = []
    whole = Grammars._mask_behind
    monkeypatch.setattr("megatron_infer.text.grammar.SLOW_MASK_S", 0.0)
    monkeypatch.setattr(Grammars, "_mask_behind", lambda self, match: made.append(1) or whole(self, match))
    engine = make_engine(**FEATURES[name])
    assert run(engine, workload()) == alone
    assert made and not engine.output_processor.num_structured


def ended_in_order(engine, other, slow, go):
    """Outputs by id; `slow` ends after `other`, and not before `go` is set."""
    ended: dict = {}
    while other not in ended:
        ended |= {one.request_id: one for one in engine.step()}
    assert slow not in ended
    go.set()
    while slow not in ended:
        ended |= {one.request_id: one for one in engine.step()}
    return ended


@pytest.mark.security
@pytest.mark.parametrize("overlap", [False, True])
def test_masks_that_take_long_hold_their_own_request_alone(overlap, monkeypatch):
    """The masks behind its second token on take until they are let go."""
    go, whole = threading.Event(), Grammars._mask_behind

    def held(self, match):
        assert len(match.request.tokens) == 1 or go.wait(60)
        return whole(self, match)

    monkeypatch.setattr("megatron_infer.text.grammar.SLOW_MASK_S", 0.0)
    monkeypatch.setattr(Grammars, "_mask_behind", held)
    engine = make_engine(overlap=overlap)
    slow = engine.add_request([7], structured(regex="[ab]{20}"), stream="final")
    other = engine.add_request([8], SamplingParams(max_tokens=30, temperature=0.0, ignore_eos=True), stream="final")
    ended = ended_in_order(engine, other, slow, go)
    alone = make_engine(overlap=overlap).generate([[7]], [structured(regex="[ab]{20}")])[0]
    assert ended[slow].outputs[0].token_ids == alone.outputs[0].token_ids and len(alone.outputs[0].text) == 20


@pytest.mark.security
def test_a_mask_that_was_begun_holds_no_other_request_when_its_grammar_becomes_quick(monkeypatch):
    go, whole = threading.Event(), Grammars._mask_behind
    monkeypatch.setattr("megatron_infer.text.grammar.SLOW_MASK_S", 0.0)
    monkeypatch.setattr(Grammars, "_mask_behind", lambda self, match: go.wait(60) and whole(self, match))
    engine = make_engine()
    slow = engine.add_request([7], structured(regex="[ab]{20}"), stream="final")
    other = engine.add_request([8], SamplingParams(max_tokens=8, temperature=0.0, ignore_eos=True), stream="final")
    engine.step()
    engine.input_processor.grammars.cache.slow.clear()
    ended = ended_in_order(engine, other, slow, go)
    assert len(ended[slow].outputs[0].text) == 20


@pytest.mark.security
def test_requests_of_a_slow_grammar_share_no_lock_from_their_first_mask_on(monkeypatch):
    """Sharing a lock, each would wait for the masks of the others."""
    monkeypatch.setattr("megatron_infer.text.grammar.SLOW_MASK_S", 0.0)
    engine = make_engine()
    grammars = engine.input_processor.grammars
    engine.generate([[7]], [structured(regex="[ab]{20}")])
    grammars.cache.took(StructuredOutput(regex="[ab]{20}"), 60.0)
    compiled, whole = [], grammars.cache.matcher
    monkeypatch.setattr(grammars.cache, "matcher", lambda wanted: compiled.append(wanted) or whole(wanted))
    engine.generate([[7], [8]], [structured(regex="[ab]{20}", n=2, temperature=1.0)] * 2)
    assert len(compiled) == 4


@pytest.mark.long
@pytest.mark.security
def test_step_matches_a_token_while_the_mask_of_another_request_is_made(monkeypatch):
    """Both requests have one ambiguous grammar: to compute a mask takes far longer than to consume a token."""
    began, whole = threading.Event(), Grammars._compute
    monkeypatch.setattr("megatron_infer.text.grammar.SLOW_MASK_S", 0.0)
    monkeypatch.setattr(Grammars, "_compute", lambda *args: began.set() or whole(*args))
    letters = " | ".join(f'"{letter}"' for letter in "abcdefghij")
    grammars = Grammars(tokenizer(), tokenizer().vocab_size)
    params = structured(grammar=f"start: e\ne: e e | {letters}")
    output = tokenizer().encode("abcdefghij" * 20)
    first, second = (
        Request(id=name, tokens=[7, *output], prompt_len=1, params=params, max_total=1000, seed=0, stop_ids=frozenset())
        for name in ("first", "second")
    )

    def is_made(request: Request, *, waits: bool = False) -> bool:
        return grammars.without_held([(request.id, [request])], None, waits=waits) is None

    for one in (first, second) * 6:  # until each has spent as much on masks as its own grammar costs
        assert not grammars.advance(one)
        while not is_made(one, waits=True):
            pass
        one.tokens += tokenizer().encode("a")
    met = False
    for _ in range(10):  # a busy machine may keep this thread waiting until the mask is made
        began.clear()
        for one in (first, second):
            one.tokens += tokenizer().encode("a")
            assert not grammars.advance(one) and began.wait(20)
            time.sleep(0.004)  # the mask takes some 20 ms, a token 2
        met = not is_made(first)
        for one in (first, second):
            while not is_made(one, waits=True):
                pass
        if met:
            break
    assert met


@pytest.mark.security
@pytest.mark.parametrize("is_slow", [False, True])
def test_nothing_is_drafted_where_masks_take_long(is_slow, monkeypatch):
    """Masks behind drafts are made in the step, which others wait for."""
    if is_slow:
        monkeypatch.setattr("megatron_infer.text.grammar.SLOW_MASK_S", 0.0)
    engine = make_engine(speculative={"method": "ngram", "adaptive": False})
    (output,) = engine.generate([[7]], [structured(regex="a{40}")])
    assert output.outputs[0].text == "a" * 40
    assert bool(inspect(engine).drafts.stats.num_drafted) is not is_slow


@pytest.mark.security
def test_grammar_of_a_request_is_compiled_once_however_many_others_wait(monkeypatch):
    """A second compilation would hold the steps of all."""
    begun, whole = [], GrammarCache._compile
    monkeypatch.setattr("megatron_infer.text.grammar.MAX_KEPT", 1)
    monkeypatch.setattr(GrammarCache, "_compile", lambda self, wanted: begun.append(wanted) or whole(self, wanted))
    engine = make_engine(max_requests=2)
    asked = [structured(regex=f"[ab]{{{count}}}") for count in range(1, 9)]
    prepared = [engine.prepare(params, caller=3) for params in asked]
    for one in prepared:
        one.result(20)
    for params in asked:
        engine.add_request([7], params)
    del prepared, one
    finish(engine)
    assert begun == [params.structured for params in asked]


@pytest.mark.security
def test_grammar_is_compiled_for_those_who_still_wait(monkeypatch):
    go, begun, whole = threading.Event(), [], GrammarCache._compile

    def compile_held(self, wanted):
        begun.append(wanted.regex)
        assert go.wait(20)
        return whole(self, wanted)

    monkeypatch.setattr(GrammarCache, "_compile", compile_held)
    engine = make_engine()
    first = engine.prepare(structured(regex="a"), caller=1)
    left, waits, alone = (engine.prepare(structured(regex=text), caller=1) for text in "bbc")
    assert left.cancel() and alone.cancel() and not waits.done()
    go.set()
    first.result(20)
    waits.result(20)
    engine.prepare(structured(regex="d"), caller=1).result(20)
    assert begun == ["a", "b", "d"]


@pytest.mark.parametrize("method", ["grammar", ("draft", "grammar")], ids=str)
def test_forced_tokens_are_drafted_and_kept(method, monkeypatch):
    monkeypatch.setattr("megatron_infer.text.grammar.SLOW_MASK_S", 10.0)  # nothing is drafted next to slow masks
    schema = {"type": "object", "properties": {"a_long_name": {"enum": ["x", "y"]}}, "required": ["a_long_name"]}
    params = structured(json_schema=schema | {"additionalProperties": False}, compact=True)
    plain, engine = (
        make_engine(),
        make_engine(
            speculative={
                "method": method,
                "num_speculative_tokens": 8,
                "draft_model": model() if "draft" in method else None,
            }
        ),
    )
    inspect(engine).drafts.depth = None
    assert run(engine, [([65], params)]) == run(plain, [([65], params)])
    found = engine.spec_decode_metrics()
    assert found.num_accepted >= 12 and found.acceptance_rate > 0.9 and engine.num_steps < plain.num_steps - 9


def test_a_draft_that_the_grammar_forbids_is_cut_before_the_forward():
    class Letters:
        """Drafts what a text of letters goes on with, and then a digit."""

        def propose(self, request, most):
            return Proposal([*b"abc", ord("1"), *b"de"])

    engine = make_engine(speculative={"num_speculative_tokens": 6, "adaptive": False})
    inspect(engine).drafts.proposer = Letters()
    engine.add_request([65], structured(regex="[a-z]{30}"), stream="final")
    finish(engine)
    found = engine.spec_decode_metrics()
    assert all(count > 20 for count in found.drafted_per_position[:3])
    assert not any(found.drafted_per_position[3:])


@pytest.mark.parametrize("drafts", [b'{"k":', b'{"k":"v"', b'{"k":"v"}', b'{"j', b"9"])
def test_masks_behind_drafts_are_those_of_one_token_a_step(drafts):
    """Up to a draft that ends the text or is forbidden; and the matcher is where it was."""
    grammars = Grammars(tokenizer(), VOCAB)
    params = structured(json_schema={"const": {"k": "v"}}, compact=True)
    request, other = (
        Request(id=name, tokens=[65], prompt_len=1, params=params, max_total=99, seed=0) for name in ("r", "other")
    )
    chunk = PrefillChunk(request=request, start=0, n=1 + len(drafts), samples=True, drafts=tuple(drafts))
    walked = grammars.masks([request] * chunk.n, [chunk]).bits_GW
    for place, mask in enumerate(walked):
        stepped = grammars.masks([other]).bits_GW[0]
        assert mask.tolist() == stepped.tolist(), place
        if place == len(drafts) or not (stepped[drafts[place] // 32] >> (drafts[place] % 32)) & 1:
            break
        other.tokens.append(drafts[place])
        if grammars.advance(other):
            break
    assert grammars.masks([request]).bits_GW[0].tolist() == walked[0].tolist()
    assert grammars.num_allowed(request, list(drafts), skips_slow=False) == min(len(drafts), len(other.tokens) - 1)


@pytest.mark.parametrize("mode", ["recompute", "offload", "persist", "keep", "retract"])
def test_a_suspended_or_paused_request_goes_on_with_its_language(mode, alone):
    engine = make_engine(overlap=True)
    submit(engine, workload())
    outputs = [output for _ in range(5) for output in engine.step()]
    if mode in ("keep", "retract"):
        engine.pause(mode)
        engine.unpause()
    else:
        engine.suspend(mode)
        engine.resume()
    found = {one.request_id: one for one in outputs} | finish(engine)
    assert [told(found[str(place)]) for place in range(len(alone))] == alone


def test_saved_requests_go_on_in_another_engine(alone, tmp_path):
    engine = make_engine()
    submit(engine, workload())
    outputs = [output for _ in range(4) for output in engine.step()]
    engine.save_requests(tmp_path / "saved")
    other = make_engine(overlap=True)
    other.load_requests(tmp_path / "saved")
    found = {one.request_id: one for one in outputs} | finish(other)
    assert [told(found[str(place)]) for place in range(len(alone))] == alone


def test_max_tokens_cuts_with_length_unless_the_last_one_completes_it():
    engine = make_engine()
    one = engine.generate([[1, 2]], [structured(regex="a{10}", max_tokens=4)])[0].outputs[0]
    assert (one.text, one.finish_reason) == ("aaaa", "length")
    one = engine.generate([[1, 2]], [structured(regex="a{4}", max_tokens=4)])[0].outputs[0]
    assert (one.text, one.finish_reason, len(one.token_ids)) == ("aaaa", "stop", 4)


def test_it_ends_without_an_end_of_sequence_where_there_is_none():
    engine = make_engine()
    params = [
        structured(regex="ab", ignore_eos=True),
        structured(choice=["he"], min_tokens=50),
        structured(regex="a+b?", ignore_eos=True, max_tokens=9),
    ]
    outputs = [one.outputs[0] for one in engine.generate([[5]] * 3, params)]
    assert [one.text for one in outputs[:2]] == ["ab", "he"]
    assert all(one.finish_reason == "stop" for one in outputs[:2])
    assert (
        outputs[2].text in ("a" * 9, outputs[2].text.rstrip("b") + "b")
        and tokenizer().eos_ids[0] not in outputs[2].token_ids
    )


def test_min_tokens_puts_off_the_end_of_what_can_go_on():
    engine = make_engine()
    for seed in range(4):
        one = engine.generate([[7]], [structured(regex="a+", min_tokens=6, seed=seed)])[0].outputs[0]
        assert len(one.token_ids) >= 6 and set(one.text) == {"a"}


def test_a_stop_text_cuts_wherever_it_comes():
    engine = make_engine()
    one = engine.generate([[7]], [structured(regex="abc{5}d", stop="cc")])[0].outputs[0]
    assert (one.text, one.finish_reason, one.stop_reason) == ("ab", "stop", "cc")


@pytest.mark.security
def test_what_leaves_nothing_to_draw_is_that_requests_error_alone():
    engine = make_engine(overlap=True)
    a = tokenizer().encode("a")
    params = [structured(regex="[ab]c", bad_token_ids=[*a, *tokenizer().encode("b")]), structured(regex="[ab]c")]
    bad, good = engine.generate([[7], [8]], params, on_error="return")
    assert bad.outputs[0].finish_reason == "error" and "structured output has no token to draw" in str(bad.error)
    assert type(bad.error) is RequestError, "it is the caller's to mend: 400, as is known by the class's name"
    assert good.outputs[0].text in ("ac", "bc") and good.error is None


def test_weights_that_give_no_numbers_are_not_blamed_on_structured_output():
    engine = make_engine()
    weight = model().embedding.word_embeddings.weight  # the model is that of all tests here
    kept = weight.detach().clone()
    with torch.no_grad():
        weight.fill_(float("nan"))
        try:
            (output,) = engine.generate([[7]], [structured(regex="[ab]c")], on_error="return")
        finally:
            weight.copy_(kept)
    assert isinstance(output.error, FailedStep) and "logits are not finite" in str(output.error)


LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}
AMBIGUOUS = "start: a0\n" + "".join(f"a{i}: a{i + 1} a{i + 1}\n" for i in range(200)) + 'a200: "x" | ""\n'


@pytest.mark.security
def test_schema_whose_references_go_in_a_circle_is_refused_before_it_is_queued():
    engine = make_engine()
    with pytest.raises(RequestError, match="json_schema: nothing can begin with it, as with references in a circle"):
        engine.add_request([7], structured(json_schema=LOOP))
    assert not engine.has_unfinished() and not engine.output_processor.num_structured


def test_grammar_that_goes_beyond_its_limits_at_once_is_refused_for_that(monkeypatch):
    monkeypatch.setitem(LIMITS, "step_max_items", 20)
    letters = " | ".join(f'"{letter}"' for letter in "abcdefghijkl")
    with pytest.raises(RequestError, match="grammar: its first mask takes too much work, as where"):
        make_engine().add_request([7], structured(grammar=f"start: e\ne: e e | {letters}"))


def test_grammar_that_goes_beyond_its_limits_later_is_the_error_of_its_request():
    ambiguous = structured(grammar=AMBIGUOUS, allowed_token_ids=tokenizer().encode("x"))
    bad, good = make_engine().generate([[7], [8]], [ambiguous, structured(regex="[ab]c")], on_error="return")
    assert type(bad.error) is RequestError and "Parser Error" in str(bad.error)
    assert good.outputs[0].text in ("ac", "bc") and good.error is None


@pytest.mark.security
@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"min_tokens": 2, "allowed_token_ids": [9], "stop_token_ids": [9]}, "all allowed_token_ids end the sequence"),
        (
            {"min_tokens": 2, "allowed_token_ids": [9, 10], "bad_token_ids": [10], "stop_token_ids": [9]},
            "min_tokens is 2",
        ),
        ({"min_tokens": 1, "bad_token_ids": range(1, 10**6), "stop_token_ids": [0]}, "outside the vocabulary"),
    ],
)
def test_choice_of_tokens_that_min_tokens_empties_is_refused_before_it_is_queued(asked, message):
    engine = make_engine()
    with pytest.raises(RequestError, match=message):
        engine.add_request([7], SamplingParams(max_tokens=4, **asked))
    vocab_size = engine.input_processor.vocab_size
    with pytest.raises(RequestError, match="leaves only tokens that end the sequence"):
        bad = range(1, vocab_size)
        engine.add_request([7], SamplingParams(max_tokens=4, min_tokens=1, bad_token_ids=bad, stop_token_ids=[0]))
    (output,) = engine.generate([[7]], SamplingParams(max_tokens=4, allowed_token_ids=[9], stop_token_ids=[9]))
    assert output.outputs[0].finish_reason == "stop" and output.error is None


def test_a_grammar_that_is_lost_ends_its_request_alone(monkeypatch):
    engine = make_engine(overlap=True)
    lost = engine.add_request([7], structured(regex="[ab]{30}"), stream="final")
    kept = engine.add_request([8], structured(regex="[ab]{9}"), stream="final")
    cache, whole = engine.input_processor.grammars.cache, engine.input_processor.grammars.cache.template

    def template(wanted):
        if wanted.regex == "[ab]{30}":
            raise RequestError("regex: not compiled within 30 s; make it smaller")
        return whole(wanted)

    monkeypatch.setattr(cache, "template", template)
    outputs = finish(engine)
    assert outputs[lost].outputs[0].finish_reason == "error"
    assert len(outputs[kept].outputs[0].text) == 9 and outputs[kept].outputs[0].finish_reason == "stop"


def test_aborted_requests_leave_nothing_behind():
    engine = make_engine(overlap=True)
    name = engine.add_request([1, 2, 3], structured(regex="[a-z]{50}"), request_id="x")
    for _ in range(3):
        engine.step()
    engine.abort(name)
    assert not engine.output_processor.num_structured
    engine.add_request([1, 2, 3], structured(regex="[0-9]{5}"), request_id="x")
    assert finish(engine)["x"].outputs[0].text.isdigit()


def test_steps_without_structured_output_ask_for_no_mask(monkeypatch):
    engine = make_engine(overlap=True)
    engine.generate([[1, 2]], [structured(regex="ab")])
    asked = []
    monkeypatch.setattr(engine.input_processor.grammars, "masks", asked.append)
    engine.generate([[1, 2]], [SamplingParams(max_tokens=5)])
    assert not asked


def test_async_llm_takes_structured_output_and_refuses_what_is_wrong():
    async def ask():
        async with make_async(make_engine()) as served:
            with pytest.raises(RequestError, match="Invalid type"):
                async for _ in served.generate([1, 2], structured(json_schema={"type": "thing"})):
                    pass
            async for output in served.generate([1, 2], structured(json_schema=PERSON, compact=True)):
                last = output
        return last

    check(StructuredOutput(json_schema=PERSON), asyncio.run(ask()).outputs[0].text)
