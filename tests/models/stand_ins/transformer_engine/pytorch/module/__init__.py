"""Parameters, attributes and arithmetic of Transformer Engine's modules; a bias that is not there is no parameter.

In FP8 a forward writes what the real one does: recipes and quantisers on first use, amaxes, copies of weights.
"""

import torch
import torch.nn.functional as F

from transformer_engine.pytorch.cpp_extensions import general_gemm
from transformer_engine.pytorch.fp8 import FP8GlobalStateManager, RecipeState
from transformer_engine.pytorch.quantisers import QuantizedTensor


def normed(x, weight, bias, eps, *, rms, zero_centered):
    weight = weight + 1 if zero_centered else weight
    return F.rms_norm(x, weight.shape, weight, eps) if rms else F.layer_norm(x, weight.shape, weight, bias, eps)


class _Norm(torch.nn.Module):
    rms = False

    def __init__(
        self,
        normalized_shape=None,
        eps=1e-5,
        *,
        hidden_size=None,
        sequence_parallel=None,
        zero_centered_gamma=False,
        params_dtype=None,
        device=None,
    ):
        super().__init__()
        hidden_size = normalized_shape if hidden_size is None else hidden_size
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        start = torch.zeros if zero_centered_gamma else torch.ones
        self.weight = torch.nn.Parameter(start(hidden_size, dtype=params_dtype, device=device))
        if not self.rms:
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=params_dtype, device=device))
        for parameter in self.parameters():
            parameter.sequence_parallel = bool(sequence_parallel)

    def forward(self, x):
        bias = None if self.rms else self.bias
        return normed(x, self.weight, bias, self.eps, rms=self.rms, zero_centered=self.zero_centered_gamma)


class LayerNorm(_Norm):
    pass


class RMSNorm(_Norm):
    rms = True


class _Base(torch.nn.Module):
    """What the linears share: `TransformerEngineBaseModule`."""

    def __init__(self):
        super().__init__()
        self.fp8 = self.fp8_initialized = self.fp8_calibration = self.save_original_input = False
        self.fp8_meta = {"fp8_checkpoint": False, "fp8_group": None}
        self.quantizers = {"scaling_fwd": []}
        self._fp8_workspaces = {}
        self.primary_weights_in_fp8 = FP8GlobalStateManager.with_fp8_parameters()

    def get_extra_state(self):
        return torch.empty(0, dtype=torch.uint8)

    def set_extra_state(self, state):
        assert state is None or not state.numel()

    def init_fp8_metadata(self, num_gemms=1):
        self.fp8 = FP8GlobalStateManager.is_fp8_enabled()
        self.fp8_meta["fp8_checkpoint"] = self.fp8
        if not self.fp8 and not FP8GlobalStateManager.with_fp8_parameters():
            self.fp8_initialized = False
            return
        recipe = FP8GlobalStateManager.get_fp8_recipe()
        self.fp8_meta |= {"recipe": recipe, "num_gemms": num_gemms}
        if "scaling_fwd" not in self.fp8_meta:
            state = RecipeState.create(recipe, mode="forward", num_quantizers=3 * num_gemms, device=torch.device("cpu"))
            self.fp8_meta["scaling_fwd"] = state
            self.quantizers["scaling_fwd"] = state.make_quantizers()
        self.fp8_initialized = True

    def in_eight_bits(self, weight, num_gemms=1, gemm=0):
        """The parameter as `fp8_model_init` leaves it."""
        if not self.primary_weights_in_fp8:
            return weight
        self.init_fp8_metadata(num_gemms)
        quantiser = self.quantizers["scaling_fwd"][3 * gemm + 1]
        return torch.nn.Parameter(quantiser(weight.detach()))

    def product(self, x, weight, bias, gemm=0, is_first_microbatch=None):
        if not self.fp8:
            weight = weight.dequantize() if isinstance(weight, QuantizedTensor) else weight
            return F.linear(x, weight, bias)
        FP8GlobalStateManager.add_fp8_tensors_to_global_buffer(self.fp8_meta)
        quantisers = self.quantizers["scaling_fwd"]
        if not isinstance(weight, QuantizedTensor):
            kept = self._fp8_workspaces.get(gemm) if is_first_microbatch is False else None
            if kept is None:
                kept = quantisers[3 * gemm + 1](weight.detach())
                if is_first_microbatch is not None:
                    self._fp8_workspaces[gemm] = kept
            weight = kept
        flat = x.detach().reshape(-1, x.shape[-1])
        if not len(flat):
            return x.new_empty(0, len(weight))
        if bias is not None and x.dtype is torch.float32:
            bias = bias.to(torch.bfloat16)
        out = general_gemm(weight, quantisers[3 * gemm](flat), torch.empty(1), out_dtype=x.dtype, bias=bias)[0]
        return out.view(*x.shape[:-1], -1)


def parallel_product(linear, x, product):
    """`product` of x on a tensor-parallel rank: x and the result are those of all ranks, with gradients."""
    if linear.tp_size == 1 or linear.parallel_mode is None:
        return product(x)
    from megatron.core.tensor_parallel import mappings  # which imports Transformer Engine

    if linear.parallel_mode == "column":
        if linear.sequence_parallel:
            return product(mappings.gather_from_sequence_parallel_region(x, group=linear.tp_group))
        return product(mappings.copy_to_tensor_model_parallel_region(x, group=linear.tp_group))
    if linear.sequence_parallel:
        return mappings.reduce_scatter_to_sequence_parallel_region(product(x), group=linear.tp_group)
    return mappings.reduce_from_tensor_model_parallel_region(product(x), group=linear.tp_group)


class Linear(_Base):
    def __init__(
        self,
        in_features,
        out_features,
        *,
        init_method,
        bias,
        return_bias,
        parallel_mode,
        tp_size,
        params_dtype,
        device,
        tp_group=None,
        sequence_parallel=False,
        **_,
    ):
        super().__init__()
        self.tp_size, self.tp_group = tp_size, tp_group
        self.sequence_parallel = sequence_parallel and tp_size > 1
        if parallel_mode == "column":
            out_features //= tp_size
        elif parallel_mode == "row":
            in_features //= tp_size
        self.in_features, self.out_features, self.parallel_mode = in_features, out_features, parallel_mode
        self.use_bias, self.return_bias = bias, return_bias
        weight = torch.nn.Parameter(torch.zeros(out_features, in_features, dtype=params_dtype, device=device))
        init_method(weight)
        self.weight = self.in_eight_bits(weight)
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(out_features, dtype=params_dtype, device=device))
        else:
            self.bias = torch.Tensor()

    def forward(self, x, is_first_microbatch=None):
        self.init_fp8_metadata()
        bias = self.bias if self.use_bias and not self.return_bias else None
        own = None if self.parallel_mode == "row" and self.tp_size > 1 else bias
        out = parallel_product(
            self, x, lambda whole: self.product(whole, self.weight, own, is_first_microbatch=is_first_microbatch)
        )
        if own is not bias:
            out = out + bias
        return (out, self.bias) if self.return_bias else out


class LayerNormLinear(Linear):
    def __init__(self, in_features, out_features, *, eps, normalization, zero_centered_gamma, **more):
        super().__init__(in_features, out_features, **more)
        self.eps, self.normalization, self.zero_centered_gamma = eps, normalization, zero_centered_gamma
        start = torch.zeros if zero_centered_gamma else torch.ones
        self.layer_norm_weight = torch.nn.Parameter(start(in_features, dtype=self.weight.dtype))
        if normalization == "LayerNorm":
            self.layer_norm_bias = torch.nn.Parameter(torch.zeros(in_features, dtype=self.weight.dtype))
        else:
            self.layer_norm_bias = None
        for parameter in (self.layer_norm_weight, self.layer_norm_bias):
            if parameter is not None:
                parameter.sequence_parallel = self.sequence_parallel

    def forward(self, x, is_first_microbatch=None):
        kind = {"rms": self.normalization == "RMSNorm", "zero_centered": self.zero_centered_gamma}
        x = normed(x, self.layer_norm_weight, self.layer_norm_bias, self.eps, **kind)
        return super().forward(x, is_first_microbatch)


class GroupedLinear(_Base):
    def __init__(
        self, num_gemms, in_features, out_features, *, init_method, bias, return_bias, params_dtype, device, **_
    ):
        super().__init__()
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        for i in range(num_gemms):
            weight = torch.nn.Parameter(torch.zeros(out_features, in_features, dtype=params_dtype, device=device))
            torch.nn.init.normal_(weight, std=0.1)
            self.register_parameter(f"weight{i}", self.in_eight_bits(weight, num_gemms, i))
            if bias:
                self.register_parameter(f"bias{i}", torch.nn.Parameter(torch.zeros(out_features, dtype=params_dtype)))

    def forward(self, x, m_splits, is_first_microbatch=None):
        pieces = x.split(m_splits)
        biases = [getattr(self, f"bias{i}") if self.use_bias else None for i in range(self.num_gemms)]
        added = [None] * self.num_gemms if self.return_bias else biases
        self.init_fp8_metadata(self.num_gemms)
        products = enumerate(zip(pieces, added, strict=True))
        out = torch.cat([self.product(p, getattr(self, f"weight{i}"), bias, i) for i, (p, bias) in products])
        return (out, biases) if self.return_bias else out


class Fp8Padding(torch.nn.Module):
    def __init__(self, num_gemms, align_size=None):
        super().__init__()
        self.align_size = align_size or 32

    def forward(self, inp, m_splits):
        to = [-(-count // self.align_size) * self.align_size for count in m_splits]
        pieces = zip(inp.split(m_splits), to, strict=True)
        return torch.cat([F.pad(piece, (0, 0, 0, count - len(piece))) for piece, count in pieces]), to


class Fp8Unpadding(Fp8Padding):
    def forward(self, inp, m_splits):
        to = [-(-count // self.align_size) * self.align_size for count in m_splits]
        return torch.cat([piece[:count] for piece, count in zip(inp.split(to), m_splits, strict=True)])


class DotProductAttention(torch.nn.Module):
    """kv_channels: of keys and of values, where they differ. softmax_offset: a sink's logit for each head."""

    def __init__(
        self,
        num_attention_heads,
        kv_channels,
        *,
        num_gqa_groups,
        softmax_scale=None,
        window_size=None,
        softmax_type="vanilla",
        **_,
    ):
        super().__init__()
        key_channels = kv_channels[0] if isinstance(kv_channels, tuple) else kv_channels
        self.scale, self.window = softmax_scale or key_channels**-0.5, window_size
        self.softmax_type, self.softmax_offset = softmax_type, None
        if softmax_type == "learnable":
            self.softmax_offset = torch.nn.Parameter(torch.zeros(num_attention_heads))

    def forward(self, query, key, value, attention_mask, attn_mask_type="causal", **_):
        assert attn_mask_type == "causal"
        length, group = len(query), query.shape[2] // key.shape[2]
        key, value = (x.repeat_interleave(group, dim=2) for x in (key, value))
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        if self.window is not None and self.window[0] >= 0:
            seen = seen.triu(-self.window[0])
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        if self.softmax_type == "vanilla":
            out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=self.scale)
        else:
            logits = (query @ key.transpose(2, 3) * self.scale).masked_fill(~seen, float("-inf"))
            sink = logits.new_zeros(1) if self.softmax_offset is None else self.softmax_offset.view(1, -1, 1, 1)
            weights = torch.cat([logits, sink.expand(*logits.shape[:3], 1)], -1).softmax(-1)[..., :-1]
            out = weights @ value
        return out.permute(2, 0, 1, 3).flatten(2)
