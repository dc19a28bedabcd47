"""A config and sampling parameters written for megatron-core move over, of the installed release and of the others."""

from __future__ import annotations

import dataclasses
import enum
import importlib
import importlib.util
import inspect
import re
import types
from pathlib import Path

import megatron.core
import pytest
import torch
from megatron.core.inference.sampling_params import SamplingParams as MegatronSamplingParams

from megatron_infer.config import from_megatron as table
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.mamba_state import MambaInferenceStateConfig
from megatron_infer.config.options import options_of
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.config.speculative import SpeculativeConfig
from megatron_infer.errors import ConfigError, RequestError

VERSION = tuple(int(part) for part in megatron.core.__version__.split(".")[:2])
PAGE = Path(__file__).parents[2] / "docs" / "configuration.md"
HAS_CONFIG = importlib.util.find_spec("megatron.core.inference.config") is not None


class Policy(str, enum.Enum):
    LOAD_BALANCED = "load_balanced"


class Schedule(str, enum.Enum):
    LEGACY = "legacy"
    ASYNC = "async"


class Mode(str, enum.Enum):
    PERSIST = "persist"
    OFFLOAD = "offload"


@dataclasses.dataclass
class MegatronConfig:
    """The fields of 0.19's InferenceConfig that differ from ours, and some that do not."""

    block_size_tokens: int = 256
    buffer_size_gb: int = 20
    kv_cache_management_mode: Mode = Mode.PERSIST
    mamba_inference_state_config: object | None = None
    num_speculative_tokens: int = 0
    use_cuda_graphs_for_non_decode_steps: bool = True
    prefix_caching_coordinator_policy: Policy = Policy.LOAD_BALANCED
    sampling_backend: str = "torch"
    async_sched_mode: Schedule = Schedule.LEGACY
    logprobs_mode: str = "raw_logprobs"
    use_synchronous_zmq_collectives: bool = False
    disable_ep_consensus: bool = False
    ep_consensus_interval: int = 20
    image_preprocessing_config: object | None = None  # 0.20
    newer: list[int] = dataclasses.field(default_factory=lambda: [1])  # of no release
    verbose: dataclasses.InitVar[bool] = False

    def __post_init__(self, verbose: bool) -> None:
        self._verbose = verbose


SINCE = {
    **{name: one.since for name, one in options_of(InferenceConfig).items() if one.since},
    **{name: since for name, since in table.CONVERTED.items() if since != "0.16"},
    **{name: since for name, (since, _, _) in table.UNSUPPORTED.items()},
}
"""Field of megatron-core's InferenceConfig -> the first version that has it."""


def known_fields(version: tuple[int, int]) -> set[str]:
    return {name for name, since in SINCE.items() if tuple(map(int, since.split("."))) <= version}


# ---------------------------------------------------------------------- the installed release


@pytest.mark.skipif(not HAS_CONFIG, reason="megatron-core 0.16 has no InferenceConfig")
def test_the_table_has_the_fields_of_the_installed_class():
    from megatron.core.inference.config import InferenceConfig as Theirs

    declared = set(inspect.signature(Theirs).parameters)
    assert declared == known_fields(VERSION)
    defaults = {name: parameter.default for name, parameter in inspect.signature(Theirs).parameters.items()}
    assert {name: defaults[name] for name in table.UNSUPPORTED if name in defaults} == {
        name: default for name, (_, default, _) in table.UNSUPPORTED.items() if name in defaults
    }
    converted = InferenceConfig.from_megatron(Theirs())
    assert converted == dataclasses.replace(
        InferenceConfig(),
        prefix_caching_coordinator_policy=Theirs().prefix_caching_coordinator_policy.value,
        prefix_caching_routing_alpha=Theirs().prefix_caching_routing_alpha,
    )


@pytest.mark.skipif(HAS_CONFIG, reason="the keywords of 0.16")
def test_every_keyword_of_the_installed_context_and_engine_moves_over():
    from megatron.core.inference.contexts.dynamic_context import DynamicInferenceContext
    from megatron.core.inference.engines.dynamic_engine import DynamicInferenceEngine

    given = {}
    for owner in (DynamicInferenceContext, DynamicInferenceEngine):
        for name, parameter in inspect.signature(owner.__init__).parameters.items():
            if name not in ("self", "controller", "context"):
                given[name] = None if parameter.default is parameter.empty else parameter.default
    given |= {"buffer_size_gb": 2.5, "max_sequence_length": 1024, "random_seed": 7}
    assert InferenceConfig.from_megatron(given) == InferenceConfig(
        buffer_size_gb=2.5,
        max_sequence_length=1024,
        max_tokens=given["max_tokens"],
        use_cuda_graphs_for_non_decode_steps=True,
        seed=7,
        enable_chunked_prefill=True,
        kv_cache_management_mode="recompute",
    )


def test_the_table_has_the_sampling_fields_of_the_installed_class():
    declared = {item.name for item in dataclasses.fields(MegatronSamplingParams)}
    known = {*table._SAMPLING_FIELDS, *table.UNSUPPORTED_SAMPLING}
    assert declared <= known
    later = {"detokenize_stop_sequence", "return_prompt_tokens", "detokenize_generations", "seed"}
    assert known - declared <= later | {"streaming", "streaming_interval", "do_kv_handoff"}
    default = MegatronSamplingParams()
    assert SamplingParams.from_megatron(default) == SamplingParams(max_tokens=default.num_tokens_to_generate)


CALLED = {
    "engines.dynamic_engine": "DynamicInferenceEngine",
    "inference_client": "InferenceClient",
    "inference_request": "InferenceRequest DynamicInferenceRequest DynamicInferenceRequestRecord FinishedRequestRecord",
    "apis.llm": "MegatronLLM",
    "apis.async_llm": "MegatronAsyncLLM",
    "apis.serve_config": "ServeConfig",
}
"""Module of megatron.core.inference -> classes whose methods and fields scripts use."""


def test_each_call_of_the_installed_release_has_a_row():
    page = (PAGE.parent / "megatron_calls.md").read_text(encoding="utf-8")
    columns = [line.split(" | ")[0].replace("add_event...", "") for line in page.splitlines() if line.startswith("| ")]
    known = set(re.findall(r"[a-z]\w+", " ".join(columns)))
    for path, classes in CALLED.items():
        if importlib.util.find_spec(f"megatron.core.inference.{path.partition('.')[0]}") is None:
            continue  # of a later release
        module = importlib.import_module(f"megatron.core.inference.{path}")
        for kind in filter(None, (getattr(module, name, None) for name in classes.split())):
            own = [*vars(kind), *getattr(kind, "__annotations__", {})]
            lacking = {name for name in own if not name.startswith(("_", "add_event"))} - known
            assert not lacking, (kind.__name__, lacking)


# ---------------------------------------------------------------------- a config


def test_a_config_of_0_19_at_its_defaults_is_ours_at_our_defaults_but_for_the_routing():
    """An object's graphs of steps that prefill are not asked for: they are on there, and off here."""
    assert InferenceConfig.from_megatron(MegatronConfig()) == InferenceConfig(
        prefix_caching_coordinator_policy="load_balanced"
    )
    asked = InferenceConfig.from_megatron({"use_cuda_graphs_for_non_decode_steps": True})
    assert asked.use_cuda_graphs_for_non_decode_steps


def test_attribute_next_to_the_fields_of_a_config_and_slots_do_not_matter():
    config = MegatronConfig()
    config.tag = "run 7"
    assert InferenceConfig.from_megatron(config) == InferenceConfig.from_megatron(MegatronConfig())
    slotted = dataclasses.make_dataclass("Slotted", [("buffer_size_gb", float, 2.0)], slots=True)()
    assert InferenceConfig.from_megatron(slotted).buffer_size_gb == 2.0


def test_values_move_over_under_our_names():
    config = InferenceConfig.from_megatron(
        MegatronConfig(
            block_size_tokens=64,
            buffer_size_gb=2,
            kv_cache_management_mode=Mode.OFFLOAD,
            async_sched_mode=Schedule.ASYNC,
            logprobs_mode="processed_logprobs",
            sampling_backend="flashinfer",
            num_speculative_tokens=2,
        )
    )
    assert config.speculative == SpeculativeConfig(method="mtp", num_speculative_tokens=2)
    assert InferenceConfig.from_megatron(MegatronConfig()).speculative is None
    assert (config.block_size_tokens, config.buffer_size_gb) == (64, 2)
    assert config.kv_cache_management_mode == "offload"
    assert config.overlap and config.logprobs_mode == "processed"
    assert config.sampling_backend == "auto"


@pytest.mark.parametrize(
    "field, value",
    [
        ("use_synchronous_zmq_collectives", True),
        ("disable_ep_consensus", True),
        ("ep_consensus_interval", 5),
        ("verbose", True),
        ("image_preprocessing_config", "one"),
        ("newer", [2]),
    ],
)
def test_a_field_without_a_counterpart_passes_at_its_default_and_is_refused_by_name_otherwise(field, value):
    shown = re.escape(f"{field}={value!r}")
    with pytest.raises(ConfigError, match=f"{shown} of megatron-core.*: .*; leave it"):
        InferenceConfig.from_megatron(MegatronConfig(**{field: value}))
    if field in table.UNSUPPORTED:
        InferenceConfig.from_megatron({field: table.UNSUPPORTED[field][1]})
        with pytest.raises(ConfigError, match=field):
            InferenceConfig.from_megatron({field: value})


def test_a_mapping_with_an_unknown_keyword_is_refused():
    with pytest.raises(ConfigError, match=r"block_size=16 .*not known here"):
        InferenceConfig.from_megatron({"block_size": 16})


@pytest.mark.parametrize("wrong", [None, 3, InferenceConfig(), InferenceConfig, MegatronConfig])
def test_what_is_no_config_of_megatron_is_refused(wrong):
    with pytest.raises(ConfigError, match="takes megatron-core's InferenceConfig"):
        InferenceConfig.from_megatron(wrong)


@pytest.mark.parametrize("prefix", ["", "mamba_"])
def test_recurrent_states_move_over_with_either_name_of_their_shapes(prefix):
    state = types.SimpleNamespace(layer_type_list=["M", "*"], mamba_chunk_size=128)
    setattr(state, f"{prefix}conv_states_shape", (96, 4))
    setattr(state, f"{prefix}ssm_states_shape", torch.Size((8, 16, 32)))
    if not prefix:
        state.conv_states_dtype, state.ssm_states_dtype = torch.bfloat16, torch.float32
    dtypes = () if prefix else ("bfloat16", "float32")
    config = InferenceConfig.from_megatron(MegatronConfig(mamba_inference_state_config=state))
    assert config.mamba_inference_state_config == MambaInferenceStateConfig(["M", "*"], (96, 4), (8, 16, 32), *dtypes)


@pytest.mark.parametrize(
    "given, mode",
    [
        ({"offload_kv_cache": True}, "offload"),
        ({"offload_kv_cache": False}, "recompute"),
        ({"offload_kv_cache": False, "unified_memory_level": 1}, "persist"),
    ],
)
def test_keywords_of_0_16_say_what_a_suspend_does(given, mode):
    assert InferenceConfig.from_megatron(given).kv_cache_management_mode == mode


# ---------------------------------------------------------------------- sampling parameters


@pytest.mark.parametrize(
    "given, ours",
    [
        ({"num_tokens_to_generate": 30}, {"max_tokens": 30}),
        ({"num_tokens_to_generate": None}, {"max_tokens": None}),
        ({"top_p": 0.9, "temperature": 0.7}, {"max_tokens": None, "top_p": 0.9, "temperature": 0.7}),
        ({"top_k": 40, "top_p": 0.0}, {"max_tokens": None, "top_k": 40}),
        ({"top_k": 1, "temperature": 0.8}, {"max_tokens": None, "temperature": 0.0}),
        ({"termination_id": 5}, {"max_tokens": None, "ignore_eos": True, "stop_token_ids": (5,)}),
        ({"termination_id": -1}, {"max_tokens": None, "ignore_eos": True}),
        ({"return_log_probs": True}, {"max_tokens": None, "logprobs": 0, "prompt_logprobs": 0}),
        (
            {"return_log_probs": True, "top_n_logprobs": 3, "skip_prompt_log_probs": True},
            {"max_tokens": None, "logprobs": 3},
        ),
        ({"stop_words": ["\n\n"]}, {"max_tokens": None, "stop": "\n\n"}),
    ],
)
def test_sampling_parameters_move_over(given, ours):
    base = {"num_tokens_to_generate": None}  # 30 in 0.16
    assert SamplingParams.from_megatron(MegatronSamplingParams(**(base | given))) == SamplingParams(**ours)
    assert SamplingParams.from_megatron(given) == SamplingParams(**ours)


def test_fields_of_later_releases_move_over():
    given = {"stop_words": ["END"], "detokenize_stop_sequence": True, "return_prompt_tokens": True}
    assert SamplingParams.from_megatron(given) == SamplingParams(
        max_tokens=None, stop="END", include_stop_str_in_output=True
    )


def test_a_total_that_counts_the_prompt_needs_its_length():
    with pytest.raises(RequestError, match=r"num_tokens_total=64 .*num_prompt_tokens"):
        SamplingParams.from_megatron({"num_tokens_total": 64})
    assert SamplingParams.from_megatron({"num_tokens_total": 64}, num_prompt_tokens=24).max_tokens == 40
    with pytest.raises(RequestError, match="takes one of them"):
        SamplingParams.from_megatron({"num_tokens_total": 64, "num_tokens_to_generate": 2}, num_prompt_tokens=24)


@dataclasses.dataclass
class LaterSamplingParams(MegatronSamplingParams):
    """What 0.20 has more, and fields of no release."""

    detokenize_generations: bool = True
    streaming: bool = False
    streaming_interval: int = 1
    do_kv_handoff: bool = False
    seed: int | None = None
    newer: float = 0.5
    newest: list[str] = dataclasses.field(default_factory=list)

    def serialize(self) -> dict:
        return vars(self).copy()


def test_fields_that_are_not_known_pass_at_their_default():
    plain = SamplingParams.from_megatron(MegatronSamplingParams())
    assert SamplingParams.from_megatron(LaterSamplingParams()) == plain
    sent = LaterSamplingParams().serialize()
    del sent["newer"], sent["newest"]
    assert SamplingParams.from_megatron(sent) == plain
    seeded = SamplingParams.from_megatron(LaterSamplingParams(seed=7, detokenize_generations=False))
    assert seeded == dataclasses.replace(plain, seed=7, detokenize=False)
    for field, value in {"streaming": True, "streaming_interval": 4, "do_kv_handoff": True, "newer": 1.0}.items():
        with pytest.raises(RequestError, match=f"{field}={value!r} of megatron-core.*: .*; leave it"):
            SamplingParams.from_megatron(LaterSamplingParams(**{field: value}))
    with pytest.raises(RequestError, match=r"newest=\['a'\] of megatron-core.*leave it \[\]"):
        SamplingParams.from_megatron(LaterSamplingParams(newest=["a"]))


@pytest.mark.parametrize("name", ["return_segments", "add_BOS"])
def test_a_switch_without_a_counterpart_is_refused_by_name(name):
    with pytest.raises(RequestError, match=f"{name}=True of megatron-core"):
        SamplingParams.from_megatron(MegatronSamplingParams(**{name: True}))


def test_an_attribute_that_was_added_is_refused_by_name():
    params = MegatronSamplingParams()
    params.add_attributes({"min_length": 4})
    with pytest.raises(RequestError, match=r"min_length=4 .*not known here"):
        SamplingParams.from_megatron(params)
    with pytest.raises(RequestError, match="it needs return_log_probs=True"):
        SamplingParams.from_megatron({"top_n_logprobs": 2})


@pytest.mark.parametrize("wrong", [None, 3, SamplingParams(), SamplingParams])
def test_what_are_no_parameters_of_megatron_is_refused(wrong):
    with pytest.raises(RequestError, match="takes megatron-core's SamplingParams"):
        SamplingParams.from_megatron(wrong)


# ---------------------------------------------------------------------- docs/configuration.md


def test_the_page_runs_as_printed_and_names_each_field_that_is_not_the_same_here():
    text = PAGE.read_text(encoding="utf-8")
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), {})
    ours = {item.name for item in dataclasses.fields(InferenceConfig)}
    theirs = set(SINCE)
    for name in (
        (theirs - ours)
        | set(table.KEYWORDS_OF_0_16)
        | {
            *table._SAMPLING_FIELDS,
            *table.UNSUPPORTED_SAMPLING,
        }
    ):
        assert f"`{name}`" in text, name
