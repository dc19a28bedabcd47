"""What cannot be is refused by the name that was given, with what to do instead."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron_infer.errors import ConfigError
from megatron_infer.pipelines import PipelineConfig

pytestmark = pytest.mark.usefixtures("models_folder")


BAD = [
    ({"max_batch_size": 0}, r"^max_batch_size \(max_requests\): is 0, it must be at least 1"),
    ({"max_batch_size": "many"}, r"max_batch_size is 'many' \(str\), it must be a valid integer"),
    ({"max_batch_size": True}, "max_batch_size is True"),
    ({"max_batch_size": 9000}, r"max_batch_size \(max_requests\): is 9,000, the limit is max_batch_input_tokens|raise"),
    ({"max_batch_size": 4, "max_requests": 4}, "max_batch_size=4 and max_requests=4 set the same thing"),
    ({"kv_cache_page_size": 8, "block_size_tokens": 8}, "kv_cache_page_size=8 and block_size_tokens=8 set the same"),
    ({"enable_in_flight_batching": True, "batching": "phased"}, "set the same thing; give one of them"),
    ({"quantization_encoding": "float32", "dtype": "float32"}, "quantization_encoding='float32' and dtype='float32'"),
    ({"max_batch_sise": 4}, "unknown field 'max_batch_sise'; did you mean 'max_batch_size'"),
    ({"max_len": 128}, "unknown field 'max_len'; did you mean 'max_length'"),
    ({"device_specs": "cpu", "device": None}, r"device_specs is 'cpu' \(str\), it must be a list: \['cpu'\]"),
    ({"quantization_encoding": 32}, r"quantization_encoding is 32 \(int\), it must be one of float32, bfloat16"),
    ({"max_batch_size": 4, "blok_size_tokens": 4}, "did you mean 'block_size_tokens'"),
    ({"model": {"kv_cache": {"page": 3}}}, "unknown field of model.kv_cache 'page'"),
    ({"model": "llama"}, "model is 'llama', it must be a mapping of its fields; model_path: llama names the model"),
    ({"model": {"model_path": "llama"}}, "model_path is given twice, by itself and in model; give it once"),
    ({"options": {"bufer_size_gb": 1}}, "did you mean 'buffer_size_gb'"),
    ({"options": 3}, "options is 3, it must be a mapping of options by name"),
    ({"max_length": -1}, r"max_length \(max_sequence_length\): is -1, it must be at least 2"),
    ({"model_path": "gpt2", "max_length": 129}, "max_length is 129, the model has 128 learned positions; lower it"),
    ({"model_path": ""}, "model_path is empty: give an alias"),
    ({"model_path": "nowhere"}, "unknown model 'nowhere': no such file or directory; give an alias"),
    ({"model_path": "own"}, "architecture 'OwnForCausalLM' is not supported; supported: .*Bamba"),
    ({"max_batch_input_tokens": 0}, r"max_batch_input_tokens \(max_tokens\): is 0, it must be at least 1"),
    ({"max_length": 512, "max_batch_total_tokens": 100}, "max_batch_total_tokens is 100, it must be at least max_len"),
    ({"max_num_steps": 0}, r"max_num_steps \(max_steps_in_flight\): is 0, it must be at least 1"),
    ({"max_num_steps": 4, "max_steps_in_flight": 4}, "max_num_steps=4 and max_steps_in_flight=4 set the same"),
    ({"max_queue_size_tg": 3, "batching": "mixed"}, 'max_queue_size_tg is 3, it acts only with batching="phased"'),
    ({"ce_delay_ms": 1.0, "enable_in_flight_batching": True}, "ce_delay_ms acts in phased .*leave one of them out"),
    ({"batching": "phased", "ce_delay_ms": -1.0}, "ce_delay_ms is -1.0, it must be a finite number of milliseconds"),
    ({"batching": "phased", "max_queue_size_tg": 10**6}, "max_queue_size_tg is 1,000,000, the limit is max_batch_size"),
    ({"kvcache_ce_watermark": 1.5}, r"kvcache_ce_watermark \(admission_watermark\): is 1.5, .* number from 0 to 1"),
    (
        {"pipeline_role": "prefill_only"},
        "pipeline_role is 'prefill_only' and zmq_endpoint_base is empty: .*--prefill 1",
    ),
    ({"pipeline_role": "decode_only", "zmq_endpoint_base": "x"}, "address 'x' of a coordinator; give one like tcp://"),
    (
        {"pipeline_role": "both"},
        "pipeline_role is 'both' .* it must be one of prefill_and_decode, prefill_only",
    ),
    ({"buffer_size_gb": 1, "device_memory_utilization": 0.5}, "set the same thing; give one of them"),
    ({"use_experimental_kernels": "fused_rope", "use_flashinfer_fused_rope": False}, "set the same thing"),
    ({"enable_kvcache_swapping_to_host": True, "preemption_mode": "recompute"}, "set the same thing"),
    ({"ep_size": 2}, "ep_size is 2, but there is 1 process; start 2: torchrun --nproc-per-node 2"),
    ({"ep_size": 0}, "ep_size is 0, it must be an integer of at least 1"),
    ({"tp": 2}, "tp is 2, but there is 1 process"),
    ({"data_parallel_degree": 0}, "data_parallel_degree is 0, it must be an integer of at least 1"),
    ({"device_specs": ["cpu"], "device": None, "dp": 0}, "data_parallel_degree is 0"),
    ({"use_experimental_kernels": "fused_rop"}, "unknown experimental kernel 'fused_rop'; did you mean 'fused_rope'"),
    ({"use_experimental_kernels": "fused_rope,compiled_layers"}, "compiled_layers is not built: a CPU runs its layers"),
    ({"use_experimental_kernels": "flashinfer_sampling"}, "flashinfer_sampling is not built: a draw is a function of"),
    ({"use_vendor_blas": "maybe"}, 'use_vendor_blas is \'maybe\', it must be "true" or "false"'),
    ({"pdl_level": "3"}, 'pdl_level is \'3\', it must be "0", "1" or "2"'),
    ({"zmq_endpoint_base": "tcp://127.0.0.1:1"}, r"it must be ipc://PATH: .*megatron-infer coordinator"),
    ({"zmq_endpoint_base": "ipc:///tmp/" + "x" * 96}, "has 113 bytes, the limit is 107; take a shorter folder"),
    ({"draft_weight_path": ["a"]}, "draft_weight_path needs draft_model_path"),
    ({"draft_model_path": "llama"}, "'llama', and nothing drafts with it; set speculative_method to standalone"),
    (
        {"draft_model_path": "llama", "speculative_method": "standalone", "draft_quantization_encoding": "float32"},
        "draft_quantization_encoding: a draft model has the dtype, device and cache of .*; leave it out",
    ),
    (
        {"draft_model_path": "gpt2", "speculative_method": "standalone", "max_length": 256},
        "the draft model has 128 positions, .*; set .*, or take another draft model",
    ),
    (
        {"draft_model_path": "hybrid", "speculative_method": "standalone"},
        "the draft model has recurrent states, .*; take a draft model of",
    ),
    ({"speculative_method": "eagle"}, "method='eagle' is not built: megatron-core has no EAGLE heads; known: ngram"),
    ({"speculative_method": "standalone"}, "speculative: draft_model is None with method .draft."),
    ({"num_speculative_tokens": 3}, "num_speculative_tokens needs speculative_method; set it"),
    ({"speculative_method": "ngram", "num_speculative_tokens": 128}, r"128, it must be below kv_cache_page_size \(blo"),
    ({"speculative_method": "ngram", "rejection_sampling_strategy": "typical-acceptance"}, "it changes the distribut"),
    ({"speculative_method": "ngram", "synthetic_acceptance_rate": 0.5}, "synthetic_acceptance_rate is for benchmarks"),
    ({"speculative": {"xmethod": "ngram"}}, "unknown field of speculative 'xmethod'; did you mean 'method'"),
    (
        {"speculative": {"method": "ngram"}, "speculative_method": "ngram"},
        "by fields of its section and by its own; giv",
    ),
    (
        {"lora": {"max_loras": 2}, "enable_lora": True},
        "lora is given by fields of its section and by its own; give one",
    ),
    ({"max_num_loras": 2}, "max_num_loras needs enable_lora=True"),
    ({"enable_lora": True, "max_num_loras": 0}, "max_loras is 0, it must be 1 to 4096"),
    ({"trust_remote_code": True}, "trust_remote_code=True: no code of a model directory is ever run; leave it False"),
    ({"quantization_encoding": "q4_k"}, "quantization_encoding=q4_k: 'llama' is no .gguf file; take float32"),
    ({"quantization_encoding": "gptq"}, "quantization_encoding=gptq is not supported; take bfloat16"),
    ({"quantization_encoding": "float4_e2m1fnx2"}, "is not supported; take bfloat16"),
    ({"quantization_encoding": "float8_e4m3fn"}, "needs a model that trains in FP8"),
    ({"quantization_encoding": "bfloat16"}, "bfloat16, but the .safetensors files have float32; take float32, or set"),
    ({"device_specs": ["gpu:0", "gpu:1"], "device": None}, "an engine's process has one device; take data_parallel_"),
    ({"use_subgraphs": False}, "use_subgraphs=False: layers that are alike always share"),
    ({"rope_type": "normal"}, "rope_type=normal, but the model's files say neox; leave it out"),
    ({"vision_config_overrides": {"a": 1}}, "there are no vision models here; leave it empty"),
    ({"weight_path": ["a", "b"]}, "weight_path is .*it must be one .gguf file"),
    ({"weight_path": ["a.gguf"]}, "a .gguf file holds the model's description, too; give one of them"),
    ({"huggingface_model_revision": "v1"}, "'llama' is no hub id; leave it out"),
    ({"force_download": True}, "'llama' is no hub id, nothing is downloaded; leave it False"),
    ({"device_memory_utilization": 1.5}, "device_memory_utilization is 1.5, it must be above 0 and at most 1"),
    ({"kv_cache_page_size": 0}, r"kv_cache_page_size \(block_size_tokens\): is 0, it must be at least 1"),
    ({"in_dtype": "bfloat16"}, "in_dtype='bfloat16': logits are sampled in float32; leave it at float32"),
    ({"out_dtype": "bfloat16"}, "out_dtype='bfloat16'"),
    ({"gpu_profiling": "loud"}, "gpu_profiling is 'loud' .* it must be one of off, on, detailed"),
    ({"custom_architectures": ["a:b:c"]}, "'a:b:c' has a second colon; give MODULE_PATH or FOLDER:MODULE"),
    ({"custom_architectures": ["no/such/module"]}, "'no/such' is no directory; give its path"),
    ({"chat_template": "none.jinja"}, "'none.jinja' is no file; give the path of a template, or leave it out"),
    ({"section_name": "a"}, "section_name is 'a', but there is no config_file; give both"),
    ({"config_file": "none.yaml"}, "config_file none.yaml: .*No such file"),
    ({"port": 70000}, "port is 70,000, it must be 0 to 65535"),
    ({"buffer_size_gb": "x"}, r"buffer_size_gb is 'x' \(str\), it must be a finite number of GiB above 0"),
    ({"preemption_mode": "swp"}, "preemption_mode: unknown value 'swp'; did you mean 'swap'"),
    ({"buffer_size_gb": 0.0001}, "buffer_size_gb=0.000 .*does not hold|at least .* are needed"),
]


REMEDY = re.compile(
    "must be|must hold|give |take |leave |set |lower |raise |did you mean|start |one of |known: |needs |what would fit|"
    "stop it|names the model|acts only with|supported: |No such file|least"
)


@pytest.mark.parametrize(("values", "message"), BAD, ids=lambda one: next(iter(one)) if isinstance(one, dict) else "")
def test_bad_configuration_is_refused_with_the_remedy(values, message):
    given = {"model_path": "llama", "device": "cpu"} | values
    with pytest.raises(ValueError, match=message) as refused:
        PipelineConfig(**{name: value for name, value in given.items() if value is not None})
    assert REMEDY.search(str(refused.value)), refused.value


BAD_FILES = [
    ("- 1", None, "holds a list, it must be a mapping of fields"),
    ("a: [", None, "bad.yaml: "),
    ("max_batch_sise: 3", None, "config_file bad.yaml: unknown field 'max_batch_sise'; did you mean"),
    ("one: {max_length: 4}\ntwo: {}", "three", "unknown section 'three'; its sections: one, two"),
    (
        "one: {max_length: 4}\nflat: 3",
        "flat",
        "section flat is a int, it must be a mapping of fields; its sections: one",
    ),
    ("flat: 3", "one", "its sections: none"),
]


@pytest.mark.parametrize(("text", "section", "message"), BAD_FILES)
def test_bad_file_is_refused_with_its_name_and_sections(text, section, message):
    Path("bad.yaml").write_text(text)
    with pytest.raises(ConfigError, match=message):
        PipelineConfig(config_file="bad.yaml", section_name=section)


def test_values_without_a_name_and_assigned_ones_are_refused_alike():
    with pytest.raises(ConfigError, match="takes values by name; write model_path='llama'"):
        PipelineConfig("llama")
    config = PipelineConfig(model_path="llama", defer_resolve=True)
    for name, value, message in (
        ("max_lenght", 3, "unknown field of PipelineConfig 'max_lenght'; did you mean 'max_length'"),
        ("kv_cache_page_size", 3, "unknown field .* flat names are for the constructor"),
        ("max_length", "3", r"max_length is '3' \(str\), it must be a valid integer"),
    ):
        with pytest.raises(ConfigError, match=message):
            setattr(config, name, value)
