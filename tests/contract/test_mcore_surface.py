"""The part of megatron-core that is touched, pinned: a release that moves it fails here first, by name.

Set MEGATRON_CORE_019 to a folder with an unpacked megatron-core 0.19 wheel (and triton, which it imports) to drive that
version too: `MEGATRON_CORE_019=/path/to/core:/path/to/triton`.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import operator
import os
import subprocess
import sys
from pathlib import Path

import pytest
from megatron.core.transformer.multi_token_prediction import (
    MultiTokenPredictionLayerSubmodules,
    get_mtp_layer_spec_for_backend,
)

from megatron_infer.models import mcore_compat as mcore
from megatron_infer.models import mtp_head
from megatron_infer.models.activations import PLAIN
from megatron_infer.models.adoption_checks import REFUSED_SETTINGS
from megatron_infer.models.mamba_mixer import SlottedMambaMixer
from megatron_infer.testing.tiny import EXPERTS, tiny_gpt

ROOT = Path(__file__).parents[2]

_SIGNATURES = """
SelfAttention.forward self hidden_states attention_mask key_value_states inference_context rotary_pos_emb
TopKRouter.gating self input
RotaryEmbedding.get_emb self max_seq_len offset
YarnRotaryEmbedding.get_emb self max_seq_len offset
_yarn._yarn_find_correction_range low_rot high_rot dim rotary_base max_position_embeddings round_to_int
_yarn._yarn_linear_ramp_mask min max dim device
_yarn._yarn_get_concentration_factor scaling_factor mscale mscale_all_dim
_attention._yarn_get_concentration_factor_from_config config
RotaryEmbedding.get_freqs_non_repeated self max_seq_len offset
TransformerBlock.forward self hidden_states attention_mask inference_context
LanguageModelEmbedding.forward self input_ids position_ids
GPTModel.__init__ config transformer_layer_spec vocab_size max_sequence_length position_embedding_type
GPTModel.forward self input_ids position_ids attention_mask inference_context runtime_gather_output
GPTModel._preprocess self
GPTModel._postprocess self hidden_states
GPTModel.shared_embedding_or_output_weight self
TopKRouter.sinkhorn_load_balancing self logits
topk_routing logits topk use_pre_softmax num_groups group_topk scaling_factor score_function expert_bias fused
is_layer_window_attention window_size window_attn_skip_freq layer_number
get_gpt_layer_local_spec num_experts qk_layernorm normalization qk_l2_norm
get_num_layers_to_build config
get_bias_dropout_add training fused
DotProductAttention.__init__ config layer_number attn_mask_type attention_type softmax_scale cp_comm_type pg_collection
HybridModel.__init__ config vocab_size max_sequence_length position_embedding_type pg_collection
HybridModel.forward self input_ids position_ids attention_mask inference_context runtime_gather_output
HybridModel.shared_embedding_or_output_weight self
HybridStack.__init__ self config submodules post_layer_norm post_process pg_collection
HybridStack.forward self hidden_states attention_mask inference_context rotary_pos_emb packed_seq_params
MambaLayer.__init__ self config submodules layer_number pg_collection pp_layer_offset
MambaLayer.forward self hidden_states attention_mask inference_context packed_seq_params
MLPLayer.__init__ self config submodules layer_number
build_module args kwargs
sharded_state_dict_default module prefix sharded_offsets metadata tp_group
make_sharded_tensors_for_checkpoint state_dict prefix tensor_parallel_layers_axis_map sharded_offsets tp_group \
    dp_cp_group
ShardedTensorFactory.__init__ self key data build_fn merge_fn replica_id flattened_range
"""
"""Functions that are overridden, called or filled in by specs, and the parameters that must be there in this order."""
SIGNATURES = {name: parameters for name, *parameters in map(str.split, _SIGNATURES.strip().splitlines())}

_FIELDS = """
multi_latent_attention experimental_attention_variant linear_attention_freq attention_output_gate softmax_type
fp32_residual_connection fp8 fp4 cuda_graph_impl heterogeneous_block_specs inference_fuse_tp_communication
batch_invariant_mode mtp_num_layers sequence_parallel pipeline_model_parallel_size context_parallel_size
virtual_pipeline_model_parallel_size use_kitchen softmax_scale window_size window_attn_skip_freq no_rope_freq
normalization layernorm_zero_centered_gamma qk_layernorm qk_l2_norm gated_linear_unit activation_func
activation_func_clamp_value glu_linear_offset bias_activation_fusion use_te_activation_func num_query_groups
kv_channels moe_layer_freq num_moe_experts moe_router_dtype moe_router_load_balancing_type moe_router_pre_softmax
moe_router_num_groups moe_router_group_topk moe_router_topk_scaling_factor moe_router_fusion
moe_expert_capacity_factor moe_input_jitter_eps moe_router_force_load_balancing moe_apply_probs_on_input
moe_latent_size moe_enable_routing_replay
mamba_state_dim mamba_head_dim mamba_num_groups mamba_num_heads is_hybrid_model
"""

ONLY_IN_LATER_VERSIONS = {"use_mup"}


@pytest.mark.parametrize("function_name", SIGNATURES)
def test_signatures_are_the_ones_we_call_and_override(function_name):
    needed = SIGNATURES[function_name]
    function = mcore.topk_routing() if function_name == "topk_routing" else operator.attrgetter(function_name)(mcore)
    parameters = inspect.signature(function).parameters
    assert set(needed) <= set(parameters), f"{function_name} lost {set(needed) - set(parameters)}"
    ordered = [parameter for parameter in parameters if parameter in needed]
    assert ordered == [parameter for parameter in needed if parameter in ordered], f"{function_name} changed its order"


def test_config_fields_we_read_exist():
    fields = {field.name for field in dataclasses.fields(mcore.TransformerConfig)}
    needed = set(_FIELDS.split())
    assert needed <= fields, needed - fields
    assert set(REFUSED_SETTINGS) - ONLY_IN_LATER_VERSIONS - {"quant_recipe"} <= fields


def test_stack_specs_have_the_slots_we_fill():
    slots = {field.name for field in dataclasses.fields(mcore.HybridStackSubmodules)}
    assert {"mamba_layer", "attention_layer", "mlp_layer", "moe_layer"} <= slots
    slots = {field.name for field in dataclasses.fields(mcore.MambaLayerSubmodules)}
    assert {"norm", "mixer", "mamba_bda", "sharded_state_dict_keys_map"} <= slots
    slots = {field.name for field in dataclasses.fields(mcore.TransformerLayerSubmodules)}
    assert {"input_layernorm", "self_attention", "self_attn_bda", "pre_mlp_layernorm", "mlp", "mlp_bda"} <= slots


def test_mtp_layers_have_the_parts_we_read():
    slots = {field.name for field in dataclasses.fields(MultiTokenPredictionLayerSubmodules)}
    assert {"enorm", "hnorm", "eh_proj", "layer_norm"} <= slots
    assert len(slots & set(mtp_head._LAYERS)) == 1
    assert {"transformer_layer_spec", "mtp_model_layer_spec"} & set(
        inspect.signature(get_mtp_layer_spec_for_backend).parameters
    )


def test_the_stock_mixer_has_the_names_we_know_it_by():
    """Read as text: its module does not import without triton."""
    source = Path(mcore.megatron.core.__file__).parent / "ssm" / "mamba_mixer.py"
    classes = {node.name: node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef)}
    assert {"MambaMixer", "ExtendedRMSNorm", "MambaMixerSubmodules"} <= set(classes)
    mixer = classes["MambaMixer"]
    held = {
        node.attr
        for node in ast.walk(mixer)
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self"
    }
    read = {"nheads_local_tp", "headdim", "d_state", "ngroups_local_tp", "d_conv", "rmsnorm", "norm_before_gate"}
    read |= {"activation", "norm", "in_proj", "out_proj", "A_log", "D", "dt_bias"}
    assert read <= held, read - held
    assert "conv1d" in held or {"conv1d_weight", "conv1d_bias"} <= held
    methods = {node.name: [a.arg for a in node.args.args] for node in mixer.body if isinstance(node, ast.FunctionDef)}
    assert methods["forward"] == ["self", "hidden_states", "inference_context"]
    ours = inspect.signature(SlottedMambaMixer.__init__).parameters
    fixed = {"self", "norm_before_gate", "dt_init", "dt_scale", "bias"}  # megatron-core takes one value, or uses none
    gone = {"use_mem_eff_path", "d_state", "headdim", "ngroups"}  # deprecated in 0.16, taken from the config
    assert set(methods["__init__"]) - fixed - gone <= set(ours)


def test_the_parallel_path_finds_what_it_reads_of_live_modules():
    """Parts and groups of linears, embedding, attention and experts, by the names that megatron-core gives them."""
    model = tiny_gpt(**EXPERTS, moe_shared_expert_intermediate_size=40)
    layer, words = model.decoder.layers[0], model.embedding.word_embeddings
    assert layer.self_attention.linear_qkv.gather_output is False
    assert layer.self_attention.linear_proj.input_is_parallel is True
    assert layer.self_attention.world_size == 1
    assert (words.vocab_start_index, words.vocab_end_index) == (0, len(words.weight))
    assert list(layer.mlp.local_expert_indices) == [0, 1, 2, 3]
    groups = layer.mlp.token_dispatcher.tp_ep_group, layer.mlp.ep_group, layer.mlp.experts.tp_group
    assert [group.size() for group in (*groups, layer.mlp.experts.ep_group)] == [1, 1, 1, 1]


@pytest.mark.long
def test_compiled_activations_equal_our_formulas():
    import torch

    x = torch.linspace(-4, 4, 101)
    for theirs, ours in PLAIN.items():
        torch.testing.assert_close(
            ours(x), getattr(theirs, "_torchdynamo_orig_callable", theirs)(x), atol=1e-6, rtol=1e-6
        )


@pytest.mark.long
def test_import_is_silent_and_leaves_warnings_and_loggers_as_they_were():
    code = (
        "import warnings, logging\n"
        "before = list(warnings.filters)\n"
        "import torch\n"
        "between = list(warnings.filters)\n"
        "import megatron_infer.models.adopt\n"
        "mine = [f for f in warnings.filters if f not in between]\n"
        "assert not [f for f in mine if f[1] is not None and 'Apex' in str(f[1].pattern)], mine\n"
        "assert not logging.getLogger().filters\n"
    )
    result = subprocess.run(
        [sys.executable, "-W", "default", "-c", code],
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])},
    )
    assert result.returncode == 0, result.stderr
    assert "megatron" not in result.stderr.lower(), result.stderr
    assert "Apex" not in result.stderr and "Transformer Engine" not in result.stderr, result.stderr


@pytest.mark.slow
def test_version_019_is_adopted_and_driven_from_the_same_source():
    folder = os.environ.get("MEGATRON_CORE_019")
    if not folder:
        pytest.skip("MEGATRON_CORE_019 does not point at an unpacked megatron-core 0.19 wheel")
    path = os.pathsep.join([folder, str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": path, "NO_VCS_VERSION": "1"}
    found = subprocess.run(
        [sys.executable, "-c", "from megatron_infer.models.mcore_compat import version; print(version()[:2])"],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment,
        cwd=ROOT,
    )
    assert found.stdout.strip() == "(0, 19)", found.stdout + found.stderr
    files = [f"tests/engine/adopt/test_adopt_{part}.py" for part in ("logits", "refusals", "training", "hybrid")]
    files += ["tests/engine/adopt/test_mamba_mixer.py"]
    files.append("tests/contract/test_mcore_surface.py")
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files],
        capture_output=True,
        text=True,
        timeout=280,
        env={name: value for name, value in environment.items() if name != "MEGATRON_CORE_019"},
        cwd=ROOT,
    )
    assert result.returncode == 0, result.stdout[-4000:]
