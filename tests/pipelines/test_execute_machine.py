"""The contract of `execute` under any order of calls: hypothesis names batches, adds, releases, aborts and drains."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test
from pipeline_case import collect, contexts_of, free_pages, make_engine, workload

from megatron_infer.pipelines.overlap import OverlapTextGenerationPipeline
from megatron_infer.pipelines.text_generation import TextGenerationInputs

WORK = workload(6, seed=4)
ROOMY, TIGHT = 64, 8
"""Blocks of the pool; the largest request alone needs 7."""


class ExecuteMachine(RuleBasedStateMachine):
    """One pipeline; its engines are kept between examples, as a run leaves nothing behind."""

    engines: dict = {}
    expected: list = []

    @initialize(overlap=st.booleans(), disabled=st.booleans(), blocks=st.sampled_from([ROOMY, TIGHT]))
    def start(self, overlap, disabled, blocks):
        if not self.expected:
            outputs = make_engine().generate([prompt for prompt, _ in WORK], [params for _, params in WORK])
            type(self).expected = [output.outputs[0].token_ids for output in outputs]
        key = (overlap, blocks)
        if key not in self.engines:
            self.engines[key] = make_engine(overlap=overlap, blocks=blocks)
        self.engine = self.engines[key]
        self.pipeline = OverlapTextGenerationPipeline.of_engine(self.engine, disable_overlap=disabled)
        self.before = free_pages(self.engine)
        self.contexts = contexts_of(WORK)
        self.answers, self.released, self.aborted = {}, set(), set()
        self.last: set[str] = set()
        """Ids of the batch before."""

    @rule(names=st.sets(st.integers(0, len(WORK) - 1), max_size=len(WORK)))
    def execute(self, names):
        chosen = [self.contexts[name] for name in names if self.contexts[name].request_id not in self.released]
        given = {context.request_id for context in chosen if not context.is_done}
        held = {context.request_id: len(context.generated) for context in self.contexts}
        outputs = self.pipeline.execute(TextGenerationInputs.of(chosen))
        collect(self.answers, outputs)
        asked = self.last if self.pipeline.overlap_active else given
        assert outputs.keys() <= asked and not outputs.keys() & (self.released | self.aborted)
        assert all(context.status.value == "cancelled" for context in chosen if context.request_id in self.aborted)
        for context in self.contexts:
            new = outputs[context.request_id].tokens if context.request_id in outputs else []
            assert len(context.generated) == held[context.request_id] + len(new) and len(new) <= 1
        if self.pipeline.overlap_active:
            self.last = given
        else:
            assert not self.pipeline.has_pending_outputs()

    @rule()
    def drain(self):
        outputs = self.pipeline.execute(TextGenerationInputs.empty())
        collect(self.answers, outputs)
        assert outputs.keys() <= self.last - self.aborted and not self.pipeline.has_pending_outputs()
        assert self.pipeline.execute(TextGenerationInputs.empty()) == {}
        self.last = set()

    @rule(name=st.integers(0, len(WORK) - 1))
    def release(self, name):
        context = self.contexts[name]
        pages, known = self.pipeline.kv_manager.num_pages_of(context.request_id), context.is_done
        self.pipeline.release(context.request_id)
        assert self.pipeline.kv_manager.num_pages_of(context.request_id) == 0 or known
        assert pages == 0 or context.is_done
        self.released.add(context.request_id)

    @rule(name=st.integers(0, len(WORK) - 1))
    def abort(self, name):
        """Of the engine itself, between calls: nothing of it comes afterwards, and it ends when it is named next."""
        context = self.contexts[name]
        if context.request_id not in self.engine.output_processor or context.is_done:
            return
        self.engine.abort(context.request_id)
        self.aborted.add(context.request_id)

    @invariant()
    def tokens_are_those_of_generate(self):
        for context, tokens in zip(getattr(self, "contexts", ()), self.expected, strict=False):
            assert context.generated == tokens[: len(context.generated)]
            answer = self.answers.get(context.request_id)
            assert answer is None or answer.tokens == context.generated

    def teardown(self):
        if not hasattr(self, "pipeline"):
            return
        for _ in range(400):
            live = [one for one in self.contexts if not one.is_done and one.request_id not in self.released]
            if not live and not self.pipeline.has_pending_outputs():
                break
            collect(self.answers, self.pipeline.execute(TextGenerationInputs.of(live)))
        for context, tokens in zip(self.contexts, self.expected, strict=True):
            if context.request_id in self.aborted:
                assert context.is_done and context.status.value == "cancelled"
            elif context.request_id not in self.released:
                assert context.is_done and context.generated == tokens == self.answers[context.request_id].tokens
        assert not self.engine.has_unfinished() and free_pages(self.engine) == self.before


def run(examples: int, steps: int) -> None:
    how = settings(
        max_examples=examples,
        stateful_step_count=steps,
        deadline=None,
        derandomize=True,
        suppress_health_check=list(HealthCheck),
    )
    run_state_machine_as_test(ExecuteMachine, settings=how)


def test_execute_keeps_its_contract_in_any_order_of_calls():
    run(12, 25)


@pytest.mark.long
def test_execute_keeps_its_contract_in_many_orders_of_calls():
    run(60, 50)
