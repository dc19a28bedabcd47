"""ModelInputs, ModelOutputs, log probabilities and the tokenizer of pipelines: what the documented examples say."""

from __future__ import annotations

import asyncio
import dataclasses

import pytest
import torch
from server_case import END, tokenizer
from torch import Tensor

from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.errors import ConfigError, InferenceError, RequestError
from megatron_infer.pipelines.interfaces import (
    AlwaysSignalBuffersMixin,
    GenerateMixin,
    ModelInputs,
    ModelOutputs,
    PipelineModel,
    get_paged_manager,
    upper_bounded_default,
)
from megatron_infer.pipelines.text_generation import (
    GenerationStatus,
    TextContext,
    TextGenerationInputs,
    TextGenerationOutput,
    TextGenerationRequest,
    TextTokenizer,
)


class ReplitInputs(ModelInputs):
    tokens: Tensor
    input_row_offsets: Tensor

    def __init__(self, tokens: Tensor, input_row_offsets: Tensor):
        self.tokens = tokens
        self.input_row_offsets = input_row_offsets


def test_inputs_iterate_their_tensors_in_the_order_of_definition():
    tokens, offsets = torch.zeros(1, 2, 3), torch.zeros(1, 1, 1)
    assert [id(one) for one in ReplitInputs(tokens=tokens, input_row_offsets=offsets)] == [id(tokens), id(offsets)]
    inputs = ReplitInputs(tokens, offsets)
    del inputs.tokens, inputs.input_row_offsets
    inputs.input_row_offsets, inputs.later, inputs.number = offsets, torch.ones(1), 3
    inputs.tokens, inputs.lora_ids = tokens, torch.ones(2)
    order = [tokens, offsets, inputs.later, inputs.lora_ids]
    assert [id(one) for one in inputs] == [id(one) for one in order]


def test_update_takes_known_names_and_leaves_none_alone():
    inputs, later = ReplitInputs(torch.zeros(2), torch.zeros(3)), torch.ones(2)
    before = inputs.input_row_offsets
    inputs.update(tokens=later, input_row_offsets=None, lora_ranks=torch.ones(1))
    assert inputs.tokens is later and inputs.input_row_offsets is before and len(list(inputs)) == 3
    with pytest.raises(ConfigError, match=r"unknown input 'token'.*tokens"):
        inputs.update(tokens=before, token=before)
    assert inputs.tokens is later


def test_outputs_are_frozen():
    outputs = ModelOutputs(logits=torch.zeros(1))
    assert outputs.next_token_logits is None and outputs.logit_offsets is None
    with pytest.raises(dataclasses.FrozenInstanceError):
        outputs.logits = torch.ones(1)


class TableModel(PipelineModel):
    """Logits from a table: next tokens follow from the last one alone."""

    calculate_max_seq_len = classmethod(lambda cls, config, description: 16)

    def prepare_initial_token_inputs(self, context_batch, kv_cache_inputs=None, return_n_logits=1): ...
    def prepare_next_token_inputs(self, next_tokens, prev_model_inputs): ...
    def execute(self, model_inputs): ...


def make(kind=TableModel, devices=("cpu",)):
    return kind(None, None, None, None, [torch.device(one) for one in devices], None, None)


def test_log_probabilities_are_log_softmax_of_the_logits_with_the_token_among_the_top():
    torch.manual_seed(0)
    logits_TV = torch.randn(5, 11)
    inputs = ReplitInputs(torch.tensor([3, 1, 4, 1, 5]), torch.tensor([0, 3, 4, 5]))
    outputs = ModelOutputs(logits_TV, next_token_logits=logits_TV[[2, 3, 4]])
    next_tokens = torch.tensor([9, 2, 6])
    found = make().compute_log_probabilities(None, inputs, outputs, next_tokens, [2, 0, 20], [True, True, False])
    assert found[1] is None
    reference = logits_TV.log_softmax(-1)
    targets = [1, 4, 9]  # the prompt's second and third token, and the drawn one
    for row, (target, top) in enumerate(zip(targets, found[0].top_log_probabilities, strict=True)):
        best = reference[row].topk(2).indices.tolist()
        assert top == pytest.approx({one: reference[row, one].item() for one in {target, *best}}, abs=1e-6)
        assert found[0].token_log_probabilities[row] == pytest.approx(reference[row, target].item(), abs=1e-6)
    assert found[2].top_log_probabilities == [
        pytest.approx({one: reference[4, one].item() for one in range(11)}, abs=1e-6)
    ]
    last_only = ModelOutputs(outputs.next_token_logits, outputs.next_token_logits)
    assert make().compute_log_probabilities(None, inputs, last_only, next_tokens, [2, 2, 2], [False] * 3)[0] is not None
    with pytest.raises(ConfigError, match=r"there are 3 for 5 tokens.*enable_echo=True"):
        make().compute_log_probabilities(None, inputs, last_only, next_tokens, [2, 2, 2], [True] * 3)
    own_names = ModelInputs()  # a model may name its inputs as it likes: only an echo reads them
    scored = make().compute_log_probabilities(None, own_names, last_only, next_tokens, [2, 2, 2], [False] * 3)
    assert scored[0].token_log_probabilities == pytest.approx([reference[2, 9].item()], abs=1e-6)
    with pytest.raises(ConfigError, match="tokens and input_row_offsets of the inputs, which ModelInputs lacks"):
        make().compute_log_probabilities(None, own_names, outputs, next_tokens, [2, 2, 2], [True] * 3)


class Counter(GenerateMixin[TextContext, TextGenerationRequest]):
    """The members that a pipeline must have, and no others: each request counts on from its prompt's last token."""

    def __init__(self, late: bool) -> None:
        self.late, self.flying, self.ended = late, {}, []

    kv_managers = ()
    pipeline_config = None
    tokenizer = property(lambda self: TextTokenizer(tokenizer()))

    def execute(self, inputs):
        news, before = {}, self.flying
        for context in inputs.flat_batch:
            drawn = sum(one.request_id == context.request_id for one in before.values()) if self.late else 0
            token, left = context.tokens[-1] + 1 + drawn, context.max_length - len(context.tokens) - drawn
            status = GenerationStatus.MAXIMUM_LENGTH if left <= 1 else GenerationStatus.ACTIVE
            news[context.request_id] = TextGenerationOutput(
                request_id=context.request_id, tokens=[token], text="", final_status=status
            )
        self.flying = news
        read = before if self.late else news
        for context in inputs.flat_batch:
            context.tokens += read[context.request_id].tokens if context.request_id in read else []
        return read

    def release(self, request_id):
        self.flying.pop(request_id, None)
        self.ended.append(request_id)


@pytest.mark.parametrize("late", [False, True], ids=["own batch", "batch before"])
def test_a_pipeline_of_the_documented_members_alone_generates(late):
    pipeline = Counter(late)
    asked = [
        TextGenerationRequest(prompt=[10 * n], sampling_params=SamplingParams(max_tokens=n), request_id=str(n))
        for n in (1, 3)
    ]
    assert [one.tokens for one in pipeline.generate(asked)] == [[11], [31, 32, 33]]
    assert pipeline.ended == ["1", "3"]

    async def pieces():
        return [one.tokens async for news in pipeline.generate_async(asked[1]) for one in news]

    assert asyncio.run(pieces()) == [[31], [32], [33]]
    assert get_paged_manager(pipeline) is None
    pipeline.kv_managers = [marker := object()]
    assert get_paged_manager(pipeline) is marker


def test_signal_buffers_are_there_on_one_device_only_where_a_model_always_wants_them():
    class Always(AlwaysSignalBuffersMixin, TableModel):
        pass

    assert make().signal_buffers == [] and make().lora_manager is None
    one = make(Always, ("cpu", "cpu"))
    assert len(one.signal_buffers) == 2 and one.signal_buffers[0] is one.signal_buffers[0]
    assert get_paged_manager(make()) is None


def test_an_upper_bound_is_the_default_and_the_limit():
    assert (upper_bounded_default(8, None), upper_bounded_default(8, 3)) == (8, 3)
    with pytest.raises(ValueError, match="9 is more than the upper bound, 8"):
        upper_bounded_default(8, 9)


def test_stop_ids_of_one_context_are_not_those_of_the_next():
    text = TextTokenizer(tokenizer())
    ask = lambda **how: TextGenerationRequest(prompt="ab", sampling_params=SamplingParams(**how))  # noqa: E731
    first = text.new_context(ask(stop_token_ids=[7], stop=["x"]))
    assert first.eos_ids == {7, END} and first.params.stop == ("x",)
    assert text.new_context(ask()).eos_ids == {END} and text.eos == END
    assert text.new_context(ask(ignore_eos=True, stop_token_ids=[7])).eos_ids == {7}
    assert text.delegate.eos_ids == (END,)


def test_the_tokenizer_makes_contexts_of_text_ids_and_conversations():
    text = TextTokenizer(tokenizer(), max_length=12)
    ids = text.encode("hallo")
    assert ids.dtype == "int64" and text.decode(ids) == "hallo"
    same = text.new_context(TextGenerationRequest(prompt=ids.tolist(), sampling_params=SamplingParams(max_tokens=3)))
    assert same.tokens == ids.tolist() and same.next_tokens.tolist() == ids.tolist() and same.max_length == 8
    chat = text.new_context(TextGenerationRequest(messages=[{"role": "user", "content": "hi"}]))
    assert "user\nhi" in text.decode(chat.tokens) and chat.max_length == 12
    for wrong in ({}, {"prompt": "a", "messages": []}):
        with pytest.raises(InferenceError, match="exactly one of prompt and messages"):
            TextGenerationRequest(**wrong)
    with pytest.raises(RequestError, match="prompt is empty"):
        text.new_context(TextGenerationRequest(prompt=[]))
    with pytest.raises(RequestError, match="n is 2"):
        text.new_context(TextGenerationRequest(prompt="a", sampling_params=SamplingParams(n=2)))


def test_a_context_ends_at_its_length_and_at_its_stop_ids_but_not_before_min_tokens():
    text = TextTokenizer(tokenizer())
    params = SamplingParams(max_tokens=4, min_tokens=2)
    context = text.new_context(TextGenerationRequest(prompt="ab", sampling_params=params))
    context.update(END)
    assert not context.is_done and context.active_length == 1 and context.next_tokens.tolist() == [END]
    context.update(5)
    context.update(END)
    assert context.status.value == "end_of_sequence"
    context.update(6)
    assert context.generated == [END, 5, END]
    assert not TextGenerationInputs.empty() and TextGenerationInputs.of([context]).flat_batch == [context]
