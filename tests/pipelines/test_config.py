"""One tree: what is given comes to one InferenceConfig, one ServerConfig, LLM arguments and a layout, or is refused."""

from __future__ import annotations

import dataclasses
import itertools
import json
import logging
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import yaml
from model_files import in_effect, resolved

from megatron_infer.cli.main import main
from megatron_infer.config.capacity import GIB
from megatron_infer.config.inference import ConfigWarning, InferenceConfig
from megatron_infer.config.lora import LoRAConfig
from megatron_infer.config.speculative import SpeculativeConfig
from megatron_infer.errors import CapacityError, ConfigError
from megatron_infer.pipelines import (
    KVCacheConfig,
    MAXModelConfig,
    PipelineConfig,
    Setting,
)
from megatron_infer.pipelines.config import NAMES
from megatron_infer.pipelines.config_layers import flat_name
from megatron_infer.pipelines.field_rows import description_of, rows_of
from megatron_infer.server.socket_base import SocketBase

pytestmark = pytest.mark.usefixtures("models_folder")


# ---------------------------------------------------------------------- what it comes to


def test_fields_come_to_the_options_of_engine_server_model_and_layout():
    config = resolved(
        max_length=512,
        max_batch_size=6,
        max_batch_input_tokens=256,
        max_batch_total_tokens=2048,
        enable_in_flight_batching=True,
        enable_overlap_scheduler=True,
        kvcache_ce_watermark=0.5,
        kv_cache_page_size=32,
        served_model_name="short",
        quantization_encoding="float32",
        data_parallel_degree=2,
        enable_kvcache_swapping_to_host=True,
        host_kvcache_swap_space_gb=0.5,
        port=0,
        logprobs_mode="processed",
        threads=3,
    )
    found = config.resolved
    engine = found.engine
    assert (engine.max_sequence_length, engine.max_requests, engine.max_tokens) == (512, 6, 256)
    assert (engine.max_batch_total_tokens, engine.admission_watermark, engine.overlap) == (2048, 0.5, True)
    assert (engine.batching, engine.block_size_tokens, engine.logprobs_mode) == ("mixed", 32, "processed")
    assert (engine.enable_prefix_caching, engine.prefix_caching_eviction_policy) == (True, "lru")
    assert (engine.preemption_mode, engine.swap_buffer_size_gb) == ("swap", 0.5)
    assert (found.server.served_model_name, found.server.port) == (("short",), 0)
    assert dict(found.llm) == {"model": "llama", "dtype": "float32", "device": "cpu", "threads": 3} | {
        "use_legacy_module": True
    }
    assert dataclasses.asdict(found.layout) == {"dp": 2, "tp": 1, "pp": 1, "ep": 1}
    assert engine.buffer_size_gb * GIB >= 6 * 512 * 2 * 4 * 4 * 2 * 16
    assert resolved().resolved.engine.batching == "prefill_first"
    assert resolved(max_num_steps=4).resolved.engine.max_steps_in_flight == 4
    assert resolved(use_vendor_blas="true").resolved.engine.linear_backend == "vendor"
    assert resolved(gpu_profiling="detailed").resolved.engine.step_ranges == "detailed"
    assert resolved().resolved.engine.step_ranges == "off" and resolved().resolved.server.pool_embeddings
    assert not resolved(pool_embeddings=False).resolved.server.pool_embeddings
    gates = ("enable_echo", "enable_structured_output", "enable_penalties", "enable_min_tokens")
    assert not any(getattr(resolved().resolved.server, name) for name in gates)
    opened = resolved(**dict.fromkeys(gates, True)).resolved.server
    assert all(getattr(opened, name) for name in gates)
    assert resolved(batching="phased", ce_delay_ms=5.0).resolved.engine.ce_delay_ms == 5.0


def test_overlap_is_left_to_the_device_unless_it_is_asked_for():
    config = resolved()
    assert config.resolved.engine.overlap is None and config.effective["enable_overlap_scheduler"].value is False
    assert resolved(enable_overlap_scheduler=True).resolved.engine.overlap is True
    assert resolved(options={"overlap": False}).resolved.engine.overlap is False


def test_experimental_kernels_choose_options_of_the_engine_and_say_why_they_cannot_run():
    named = resolved(use_experimental_kernels="fused_rope")
    assert named.resolved.engine.use_flashinfer_fused_rope is True and in_effect(named, "use_experimental_kernels") == (
        "fused_rope",
        "argument",
    )
    every = resolved(use_experimental_kernels="true")
    assert in_effect(every, "use_experimental_kernels") == ("false", "argument")
    assert every.effective["use_experimental_kernels"].note == "fused_rope: for GPUs"
    assert resolved().resolved.engine.use_flashinfer_fused_rope is False


def test_what_yaml_reads_as_truth_or_number_is_what_was_written():
    path = _write(
        "yaml.yaml", "gpu_profiling: on\nuse_vendor_blas: true\nuse_experimental_kernels: off\npdl_level: 0\n"
    )
    config = PipelineConfig(config_file=path, defer_resolve=True)
    found = (config.profiling.gpu_profiling.value, config.use_vendor_blas, config.use_experimental_kernels)
    assert found == ("on", "true", "false") and config.pdl_level == "0"


def test_ranks_are_those_that_torchrun_started(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "4")
    layout = resolved(ep_size=2, data_parallel_degree=2).resolved.layout
    assert (layout.ep, layout.dp, layout.world_size) == (2, 2, 4)
    with pytest.raises(
        ConfigError, match=r"= 1 x 1 x 1 x 2 = 2 \(.*ep_size\), but torchrun started 4 processes; start as"
    ):
        resolved(ep_size=2)


def test_stock_classes_are_built_unless_they_are_not_asked_for_or_cannot_be():
    assert in_effect(resolved(), "use_legacy_module") == (True, "default")
    assert resolved(use_legacy_module=False).resolved.llm["use_legacy_module"] is False
    hybrid = resolved(model_path="hybrid")
    assert in_effect(hybrid, "use_legacy_module") == (False, "derived")
    assert not hybrid.resolved.llm["use_legacy_module"] and "mamba-ssm" in hybrid.effective["use_legacy_module"].note


def test_drafts_and_adapters_are_given_by_either_names_of_their_fields():
    drafting = resolved(speculative_method="ngram", num_speculative_tokens=3)
    assert drafting.resolved.engine.speculative == SpeculativeConfig(num_speculative_tokens=3)
    assert drafting.effective["speculative"].source == "argument"
    assert resolved(speculative_method="ngram").resolved.engine.speculative.num_speculative_tokens == 5
    own = resolved(speculative={"method": "ngram", "adaptive": False}, lora={"max_loras": 3})
    assert own.resolved.engine.speculative == SpeculativeConfig(adaptive=False)
    assert in_effect(own, "lora") == (LoRAConfig(max_loras=3), "argument")
    assert resolved(speculative=SpeculativeConfig()).resolved.engine.speculative == SpeculativeConfig()
    assert resolved(enable_lora=True, max_num_loras=3).resolved.engine.lora == LoRAConfig(max_loras=3)
    assert resolved(lora_root=".").resolved.engine.lora == LoRAConfig()
    alone, beside = resolved(), resolved(speculative_method="standalone", draft_model_path="llama")
    assert beside.resolved.engine.speculative == SpeculativeConfig(
        method="draft", draft_model="llama", num_speculative_tokens=5
    )
    assert in_effect(beside, "draft_model")[1] == "argument"
    assert beside.resolved.estimate.weights == 2 * alone.resolved.estimate.weights
    assert beside.resolved.sizes.block_bytes == 2 * beside.resolved.sizes.draft_block_bytes
    assert beside.resolved.estimate.total <= beside.resolved.estimate.free
    none = resolved()
    assert none.resolved.engine.speculative is None and in_effect(none, "speculative") == (None, "default")


def test_setting_tells_what_was_asked_what_is_in_effect_from_where_and_why():
    config = resolved(enable_overlap_scheduler=True, api_key="secret")
    note = "one step is in flight: enable_overlap_scheduler"
    assert config.effective["max_num_steps"] == Setting(requested=-1, value=1, source="derived", note=note)
    assert config.effective["max_batch_input_tokens"].source == "default"
    assert config.effective["host_kvcache_swap_space_gb"].note == "acts only with enable_kvcache_swapping_to_host"
    assert config.effective["max_length"].value == 4096 and config.effective["max_length"].source == "derived"
    assert "secret" not in repr(config) + str(config.effective) and config.resolved.server.api_key == "secret"


def test_every_field_has_a_row_and_a_help_text():
    sections = {".".join(path) for path in NAMES.sections if len(path) == 1} - {"model", "sampling", "profiling"}
    fields = {".".join(path) for path in NAMES.paths if path[0] not in sections} | sections
    assert {".".join(path) for path, _, _ in rows_of(PipelineConfig)} == fields
    for path, owner in NAMES.paths.items():
        assert description_of(owner.model_fields[path[-1]]), path
    shown = set(resolved().effective)
    assert shown == {flat_name(tuple(name.split("."))) for name in fields} - {"options"} | {"device"}


def test_option_by_its_own_name_goes_where_its_field_goes():
    config = resolved(max_tokens=64, buffer_size_gb=0.01, max_requests=4)
    assert (config.resolved.engine.max_tokens, config.resolved.engine.buffer_size_gb) == (64, 0.01)
    assert in_effect(config, "max_batch_input_tokens") == (64, "derived")
    assert in_effect(config, "max_tokens") == (64, "argument")


# ---------------------------------------------------------------------- layers


PRECEDENCE = {
    "max_batch_size": (3, 4, 5),
    "enable_chunked_prefill": (False, True, False),
    "ce_delay_ms": (1.5, 2.5, 3.5),
    "served_model_name": ("a", "b", "c"),
    "kv_cache_page_size": (16, 32, 64),
    "enable_penalties": (True, False, True),
    "quantization_encoding": ("float32", "bfloat16", "float32"),
    "max_queue": (7, 8, 9),
    "seed": (1, 2, 3),
    "allow_origin": (("http://a",), ("http://b",), ("http://c",)),
    "use_vendor_blas": ("true", "false", "true"),
    "device_memory_utilization": (0.5, 0.6, 0.7),
    "data_parallel_degree": (1, 2, 1),
    "threads": (1, 2, 3),
    "chat_template": ("a.jinja", "b.jinja", "c.jinja"),
    "gpu_profiling": ("on", "detailed", "off"),
    "host_kvcache_swap_space_gb": (1.5, 2.5, 3.5),
}
"""Field or option of each kind -> its values by argument, environment and file."""


@pytest.fixture
def templates():
    for name in PRECEDENCE["chat_template"]:
        Path(name).write_text("{{ messages }}")


def listed(one: object) -> object:
    return list(one) if isinstance(one, tuple) else one


def plain(one: object) -> object:
    return str(one) if isinstance(one, Path) else listed(getattr(one, "value", one))


@pytest.mark.parametrize("field", PRECEDENCE)
def test_argument_goes_before_environment_before_file(field, monkeypatch, tmp_path, templates):
    by_argument, by_environment, by_file = PRECEDENCE[field]

    path = tmp_path / "config.yaml"
    path.write_text(yaml.safe_dump({field: listed(by_file)}))
    given = {"model_path": "llama", "config_file": str(path), "batching": "phased", "device": "cpu"}
    cast = {"allow_safetensors_weights_fp32_bf6_bidirectional_cast": True}

    def value(**more: object) -> tuple[object, str]:
        one = PipelineConfig(**given | cast | more).effective[field]
        return plain(one.requested), one.source

    assert value() == (listed(by_file), "file")
    text = ",".join(by_environment) if isinstance(by_environment, tuple) else str(by_environment)
    monkeypatch.setenv(f"MEGATRON_INFER_{field.upper()}", text)
    assert value() == (listed(by_environment), "environment")
    assert value(**{field: by_argument}) == (listed(by_argument), "argument")


def test_flags_go_before_environment_and_file_for_every_kind(monkeypatch, tmp_path, templates):
    from megatron_infer.cli import serve
    from megatron_infer.server import launch

    made, make = [], serve.pipeline_from
    monkeypatch.setattr(serve, "pipeline_from", lambda args: made.append(make(args)) or made[0])
    monkeypatch.setattr(launch, "serve", lambda options, settings, note: None)
    path, flags = tmp_path / "config.yaml", []
    path.write_text(yaml.safe_dump({name: listed(values[2]) for name, values in PRECEDENCE.items()}))
    for name, (by_argument, by_environment, _) in PRECEDENCE.items():
        text = ",".join(by_environment) if isinstance(by_environment, tuple) else str(by_environment)
        monkeypatch.setenv(f"MEGATRON_INFER_{name.upper()}", text)
        flag = {"seed": "--engine-seed"}.get(name, "--" + name.replace("_", "-"))
        given = [flag, *map(str, by_argument if isinstance(by_argument, tuple) else (by_argument,))]
        flags += [flag if by_argument else f"--no-{flag[2:]}"] if isinstance(by_argument, bool) else given
    cast = ["--allow-safetensors-weights-fp32-bf6-bidirectional-cast", "--device", "cpu"]
    monkeypatch.setenv("MEGATRON_INFER_BATCHING", "phased")
    assert main(["serve", "llama", "--config-file", str(path), *flags, *cast]) == 0
    for name, (by_argument, _, _) in PRECEDENCE.items():
        found = made[0].effective[name]
        assert (plain(found.requested), found.source) == (listed(by_argument), "argument"), name


def test_mappings_of_file_and_arguments_are_merged_key_by_key(tmp_path):
    path = tmp_path / "config.yaml"
    path.write_text(
        textwrap.dedent("""
            serving:
              model:
                model_path: llama
                kv_cache: {kv_cache_page_size: 32, enable_prefix_caching: false}
              max_batch_size: 4
            other: {max_batch_size: 9}
        """)
    )
    at = {"config_file": str(path), "section_name": "serving"}
    config = PipelineConfig(**at, model={"kv_cache": {"kv_cache_page_size": 64}}, max_length=256)
    cache = config.model.kv_cache
    assert (cache.kv_cache_page_size, cache.enable_prefix_caching, config.max_batch_size) == (64, False, 4)
    nested = MAXModelConfig(model_path="llama", kv_cache=KVCacheConfig(kv_cache_page_size=64))
    by_class = PipelineConfig(**at, model=nested, max_length=256)
    assert by_class == config
    flat = PipelineConfig(
        model_path="llama", kv_cache_page_size=64, enable_prefix_caching=False, max_batch_size=4, max_length=256
    )
    assert flat == config and flat != PipelineConfig(model_path="llama")


def test_file_with_every_field_at_its_default_changes_nothing(tmp_path):
    plain = PipelineConfig(model_path="llama")
    values = json.loads(plain.model_dump_json(exclude={"config_file", "section_name"}))
    path = tmp_path / "defaults.yaml"
    path.write_text(yaml.safe_dump(values))
    config = PipelineConfig(config_file=str(path))
    assert len(values) >= 34 and config == plain
    free = 1 << 30
    engines = []
    for one in ({"config_file": str(path)}, {"model_path": "llama"}):
        config = PipelineConfig(**one, defer_resolve=True)
        config.resolve(free_bytes=free)
        engines.append((config.resolved.engine, config.resolved.server, config.resolved.llm, config.resolved.layout))
    assert engines[0] == engines[1]


def test_deferred_config_checks_types_only_until_it_is_resolved(monkeypatch):
    config = PipelineConfig(model_path="no/such/model/here", defer_resolve=True)
    with pytest.raises(ConfigError, match=r"not resolved .*call its resolve\(\)"):
        config.log_pipeline_info()
    config.model.model_path, config.max_batch_size = "llama", 3
    config.resolve()
    path = _write("assigned.yaml", "max_batch_size: 8\nmax_length: 99\nquantization_encoding: FLOAT32\n")
    assigned = PipelineConfig(config_file=path, model_path="llama", defer_resolve=True)
    assigned.max_batch_size = 4
    assigned.resolve()
    sources = [assigned.effective[name].source for name in ("max_batch_size", "max_length", "quantization_encoding")]
    assert sources == ["argument", "file", "file"]
    first = config.resolved
    config.resolve()
    assert config.resolved is first and config.effective["max_batch_size"].source == "argument"
    for section, name in ((config, "max_batch_size"), (config.model.kv_cache, "kv_cache_page_size")):
        with pytest.raises(ConfigError, match=f"{name} cannot be set: the config is resolved"):
            setattr(section, name, 7)
    monkeypatch.setenv("MEGATRON_INFER_DEFER_RESOLVE", "true")
    assert not PipelineConfig(model_path="no/such/model/here").is_resolved


def _write(name: str, text: str) -> str:
    Path(name).write_text(text)
    return name


# ---------------------------------------------------------------------- memory


def test_length_is_cut_to_what_the_cache_holds_unless_it_was_asked_for():
    page = 2 * 4 * 128 * 2 * 16 * 4  # K and V, layers, tokens, kv heads, width, bytes
    asked = {"buffer_size_gb": 5 * page / GIB, "quantization_encoding": "float32"}
    with pytest.warns(ConfigWarning, match="the model has 4,096 positions, the cache holds 512 tokens"):
        config = resolved(**asked)
    assert config.resolved.engine.max_sequence_length == 512 == config.resolved.sizes.max_sequence_length
    assert in_effect(config, "max_length") == (512, "derived")
    with pytest.raises(CapacityError, match=r"one sequence of 2,000 tokens.*what would fit: max_length=512"):
        resolved(**asked, max_length=2000)


@pytest.mark.parametrize("model", ["llama", "hybrid"])
@pytest.mark.parametrize("free_mib", [1, 3, 6, 12, 64])
def test_each_remedy_for_too_little_memory_fits(free_mib, model):
    values = {"model_path": model, "quantization_encoding": "float32", "max_length": 4000}
    cast = {"allow_safetensors_weights_fp32_bf6_bidirectional_cast": True}
    try:
        config = resolved(free_mib, **values, **cast)
    except CapacityError as error:
        message = str(error)
    else:
        estimate = config.resolved.estimate
        assert estimate.total <= estimate.free and config.resolved.sizes.max_prompt_tokens == 3999
        return
    assert "do not hold the weights" in message
    if "what would fit" not in message:
        assert "take a smaller model or more memory" in message
        return
    for remedy in message.split("what would fit: ")[1].split(", or "):
        name, text = remedy.split("=")
        value = text if name == "quantization_encoding" else yaml.safe_load(text)
        resolved(free_mib, **values | cast | {name: value})


def test_copies_of_weights_take_what_their_dtype_takes(monkeypatch):
    bits, found = {"int8": 8 + 16 / 32, "int4": 4 + 32 / 32}, {}
    monkeypatch.setattr("megatron_infer.kernels.native.native_build.runs_linears", lambda option: option != "vendor")
    for encoding, name in itertools.product(("float32", "bfloat16"), ("auto", *bits)):
        given = {"quantization_encoding": encoding, "allow_safetensors_weights_fp32_bf6_bidirectional_cast": True}
        found[encoding, name] = resolved(64, weight_dtype=name, **given).resolved.estimate.weights
    copies = [2 * found["bfloat16", name] - found["float32", name] for name in bits]
    packed = copies[0] * 8 / bits["int8"]
    output = (found["float32", "int8"] - copies[0]) / 4 - packed  # in 8 bits with both, as large as the embedding
    saved = (packed - output) * (bits["int8"] - bits["int4"]) / 8
    assert output > 1000 and copies[1] == pytest.approx(copies[0] - saved, abs=4)
    beside = resolved(64, batch_invariant=True, **given).resolved.estimate.weights  # in bfloat16
    assert beside - found["bfloat16", "auto"] == pytest.approx(2 * packed, rel=0.01)


def test_host_memory_is_that_of_the_mode_by_either_name():
    for mode in ("swap", "auto"):
        config = resolved(preemption_mode=mode, host_kvcache_swap_space_gb=4.0)
        assert config.resolved.engine.swap_buffer_size_gb == 4.0
    for options in ({}, {"preemption_mode": "recompute"}):
        config = resolved(host_kvcache_swap_space_gb=4.0, **options)
        assert in_effect(config, "host_kvcache_swap_space_gb")[0] == 0.0


def test_batch_comes_from_the_memory_and_the_tokens_of_a_step():
    assert resolved(max_batch_input_tokens=64).resolved.engine.max_requests == 64
    assert resolved(max_batch_input_tokens=8192).resolved.engine.max_requests == 512
    few = resolved(max_length=128, buffer_size_gb=9 * 2 * 4 * 128 * 2 * 16 * 4 / GIB, quantization_encoding="float32")
    assert few.resolved.engine.max_requests == 8


# ---------------------------------------------------------------------- parts of one's own


def test_architectures_of_ones_own_are_imported_and_their_arguments_required():
    folder = Path("plugins")
    folder.mkdir()
    (folder / "good_architecture.py").write_text(
        "from megatron_infer.pipelines import Architecture\n"
        "ARCHITECTURES = [Architecture(name='LlamaForCausalLM', required_arguments={'enable_prefix_caching': False})]\n"
    )
    (folder / "empty_architecture.py").write_text("ARCHITECTURES = []\n")
    (folder / "lacking_architecture.py").write_text("")
    (folder / "broken_architecture.py").write_text("import no_such_package_here\n")
    (folder / "wrong_architecture.py").write_text("ARCHITECTURES = [3]\n")
    for entry in ("plugins/good_architecture", "plugins:good_architecture"):
        with pytest.warns(ConfigWarning, match="replaces the architecture LlamaForCausalLM|goes before True"):
            config = resolved(custom_architectures=[entry])
        assert config.effective["enable_prefix_caching"].value is False
        assert not config.resolved.engine.enable_prefix_caching
    with pytest.warns(ConfigWarning, match="force: True is kept"):
        config = resolved(custom_architectures=["plugins/good_architecture"], force=True)
    assert config.resolved.engine.enable_prefix_caching
    for name, message in (
        ("empty", "has an empty ARCHITECTURES"),
        ("lacking", "has no ARCHITECTURES"),
        ("broken", "cannot be imported: ModuleNotFoundError"),
        ("wrong", r"holds 3 \(int\), it must hold megatron_infer.pipelines.Architecture"),
    ):
        with pytest.raises(ConfigError, match=f"'plugins/{name}_architecture' {message}|{message}"):
            resolved(custom_architectures=[f"plugins/{name}_architecture"])
    (folder / "demanding_architecture.py").write_text(
        "from megatron_infer.pipelines import Architecture\n"
        "needed = {'enable_echo': True, 'max_batch_size': 3, 'quantization_encoding': 'bfloat16'}\n"
        "ARCHITECTURES = [Architecture(name='LlamaForCausalLM', required_arguments=needed)]\n"
    )
    with pytest.warns(ConfigWarning, match="replaces|goes before"):
        config = resolved(custom_architectures=["plugins/demanding_architecture"])
    assert config.resolved.server.enable_echo and config.effective["enable_echo"].value is True
    assert config.resolved.engine.max_requests == 3 and config.resolved.llm["dtype"] == "bfloat16"
    (folder / "odd_architecture.py").write_text(
        "from megatron_infer.pipelines import Architecture\n"
        "ARCHITECTURES = [Architecture(name='LlamaForCausalLM', required_arguments={'max_batch_size': 'few'})]\n"
    )
    with (
        pytest.warns(ConfigWarning, match="replaces"),
        pytest.raises(ConfigError, match="an architecture requires max_batch_size='few', which cannot be"),
    ):
        resolved(custom_architectures=["plugins/odd_architecture"])
    (folder / "json.py").write_text("ARCHITECTURES = []\n")
    with pytest.raises(ConfigError, match=r"a module json is imported already, from .*; rename one"):
        resolved(custom_architectures=["plugins/json"])


def test_chat_template_of_ones_own_goes_before_the_models():
    Path("own.jinja").write_text("{% for m in messages %}<{{ m.content }}>{% endfor %}")
    Path("own.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    assert resolved(chat_template="own.jinja").retrieve_chat_template().startswith("{% for m in")
    assert resolved(chat_template="own.json").retrieve_chat_template() == "{{ messages }}"
    for name, text, message in (
        ("broken.jinja", "{% for %}", "'broken.jinja': chat template: line 1"),
        ("keyless.json", '{"template": "x"}', "'keyless.json' is JSON without the key chat_template"),
    ):
        Path(name).write_text(text)
        with pytest.raises(ConfigError, match=message):
            resolved(chat_template=name)
    Path("latin.jinja").write_bytes(b"\xe9")
    with pytest.raises(ConfigError, match=r"'latin.jinja' cannot be read"):
        resolved(chat_template="latin.jinja")


def test_base_of_endpoints_is_held_by_one_server_at_a_time(tmp_path):
    base = f"ipc://{tmp_path}/made/base"
    first = SocketBase(base)
    assert first.coordinator == f"{base}-coordinator" and (tmp_path / "made").stat().st_mode & 0o777 == 0o700
    with pytest.raises(ConfigError, match="is in use by another server; stop it, or give another base"):
        SocketBase(base)
    first.close()
    (tmp_path / "made" / "base-coordinator").write_text("stale")
    assert resolved(zmq_endpoint_base=base).resolved.endpoint_base == base and not resolved().resolved.endpoint_base
    second = SocketBase(base)
    assert not (tmp_path / "made" / "base-coordinator").exists()
    second.close()


def test_a_role_takes_the_address_of_a_coordinator():
    for address in ("tcp://10.0.0.5:6000", "ipc:///tmp/folder/c"):
        found = resolved(pipeline_role="decode_only", zmq_endpoint_base=address).resolved
        assert (found.role, found.endpoint_base) == ("decode_only", address)
    assert resolved().resolved.role == "prefill_and_decode"


def test_info_is_logged_for_a_resolved_config(caplog):
    caplog.set_level(logging.INFO, "megatron_infer")
    config = resolved(max_batch_size=4, max_length=256, api_key="secret")
    config.log_basic_config()
    assert caplog.messages[0] == "model llama: LlamaForCausalLM"
    assert caplog.messages[1] == "at most 4 requests of 256 tokens" and "blocks of 128" in caplog.messages[2]
    caplog.clear()
    config.log_pipeline_info()
    assert "max_batch_size = 4, argument: max_requests of InferenceConfig" in caplog.messages
    assert not any("secret" in line for line in caplog.messages)


def test_session_gets_the_device_and_the_threads_in_effect():
    import torch

    from megatron_infer.pipelines.inference_session import InferenceSession

    before = torch.get_num_threads()
    session = InferenceSession(devices=[torch.device("cpu")], num_threads=1)
    resolved(threads=2).configure_session(session)
    assert session.devices == [torch.device("cpu")] and session.num_threads == 2 == torch.get_num_threads()
    torch.set_num_threads(before)


# ---------------------------------------------------------------------- command line


def test_flags_give_the_same_config_as_a_file(monkeypatch, capsys):
    from megatron_infer.server import launch

    served = []
    monkeypatch.setattr(launch, "serve", lambda options, settings, note: served.append((options, settings)))
    path = _write("serve.yaml", "pipeline:\n  model_path: llama\n  max_batch_size: 4\n  port: 1\n")
    file = ["--config-file", path, "--section-name", "pipeline"]
    flags = ["--max-batch-input-tokens", "512", "--kv-cache-page-size", "32", "--no-enable-prefix-caching"]
    own = ["--max-queue", "5", "--buffer-size-gb", "0.05", "--device", "cpu"]
    monkeypatch.setenv("MEGATRON_INFER_MAX_LENGTH", "256")
    assert main(["serve", *file, *flags, *own]) == 0
    assert main(["serve", "llama", "--max-batch-size", "4", "--port", "1", *flags, *own]) == 0
    (options, settings), other = served
    assert (options, settings) == other and (settings.port, settings.max_queue) == (1, 5)
    engine = InferenceConfig.from_dict(options.config)
    assert (engine.max_requests, engine.max_tokens, engine.max_sequence_length) == (4, 512, 256)
    assert (engine.block_size_tokens, engine.enable_prefix_caching, engine.buffer_size_gb) == (32, False, 0.05)
    drafting = ["--speculative", "ngram", "--num-speculative-tokens", "3", "--lora", "french=adapters"]
    assert main(["serve", "llama", *flags, *own, *drafting]) == 0
    engine = InferenceConfig.from_dict(served[-1][0].config)
    assert engine.speculative.num_speculative_tokens == 3 and engine.lora.adapters == (("french", "adapters"),)
    for arguments, message in (
        (["llama", *file], "MODEL llama beside|model_path"),
        ([*file, "--config", path], "--config beside --config-file"),
        ([*file, "--max-batch-size", "many"], "max_batch_size is 'many'"),
        ([*file, "--max-batch-siz", "3"], "did you mean '--max-batch-size'"),
    ):
        try:
            code = main(["serve", *arguments])
        except SystemExit as stop:
            code = stop.code
        error = capsys.readouterr().err
        assert (code == 2 and any(part in error for part in message.split("|"))) or arguments[0] == "llama", error


def test_plan_shows_every_field_asked_in_effect_from_where_and_why(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    assert main(["plan", "llama", "--max-batch-size", "4", "--memory-gb", "1", "--device", "cpu", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert set(ROWS_SHOWN := report["fields"]) >= {path[-1] for path, _, _ in rows_of(PipelineConfig)} - {"options"}
    assert ROWS_SHOWN["max_batch_size"]["value"] == 4 == report["sizes"]["max_requests"]["value"]
    assert main(["plan", "llama", "--max-batch-size", "4", "--device", "cpu"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "field asked in effect from why" in text and "max_batch_size 4 4 argument" in text


QUICK = """
import sys, time
from megatron_infer.models.loading import find
from megatron_infer.pipelines import PipelineConfig
times = []
for _ in range(4):
    find._describe_gguf.cache_clear()
    config = PipelineConfig(model_path=sys.argv[1], device="cpu", defer_resolve=True)
    begin = time.process_time()
    config.resolve()
    times.append(time.process_time() - begin)
print("torch" in sys.modules, min(times))
"""


def test_local_model_is_resolved_within_50_ms_and_without_torch():
    from megatron_infer.models.loading.find import find_model

    try:
        model = str(find_model("smollm2").path)
    except ValueError:
        model = "llama"
    command = [sys.executable, "-c", QUICK, model]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, env=os.environ, check=True)
    imported, seconds = done.stdout.split()
    assert imported == "False" and float(seconds) < 0.05
