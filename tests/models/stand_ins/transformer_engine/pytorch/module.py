"""Parameters, attributes and arithmetic of Transformer Engine's modules; a bias that is not there is no parameter."""

import torch
import torch.nn.functional as F


def normed(x, weight, bias, eps, *, rms, zero_centered):
    weight = weight + 1 if zero_centered else weight
    return F.rms_norm(x, weight.shape, weight, eps) if rms else F.layer_norm(x, weight.shape, weight, bias, eps)


class _Norm(torch.nn.Module):
    rms = False

    def __init__(self, hidden_size, eps, *, sequence_parallel, zero_centered_gamma, params_dtype, device):
        super().__init__()
        self.eps, self.zero_centered_gamma = eps, zero_centered_gamma
        start = torch.zeros if zero_centered_gamma else torch.ones
        self.weight = torch.nn.Parameter(start(hidden_size, dtype=params_dtype, device=device))
        if not self.rms:
            self.bias = torch.nn.Parameter(torch.zeros(hidden_size, dtype=params_dtype, device=device))

    def forward(self, x):
        bias = None if self.rms else self.bias
        return normed(x, self.weight, bias, self.eps, rms=self.rms, zero_centered=self.zero_centered_gamma)


class LayerNorm(_Norm):
    pass


class RMSNorm(_Norm):
    rms = True


class Linear(torch.nn.Module):
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
        **_,
    ):
        super().__init__()
        self.in_features, self.out_features, self.parallel_mode = in_features, out_features, parallel_mode
        self.use_bias, self.return_bias = bias, return_bias
        self.weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
        init_method(self.weight)
        if bias:
            self.bias = torch.nn.Parameter(torch.zeros(out_features, dtype=params_dtype, device=device))
        else:
            self.bias = torch.Tensor()

    def forward(self, x, is_first_microbatch=None):
        out = F.linear(x, self.weight, self.bias if self.use_bias and not self.return_bias else None)
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

    def forward(self, x, is_first_microbatch=None):
        kind = {"rms": self.normalization == "RMSNorm", "zero_centered": self.zero_centered_gamma}
        x = normed(x, self.layer_norm_weight, self.layer_norm_bias, self.eps, **kind)
        return super().forward(x, is_first_microbatch)


class GroupedLinear(torch.nn.Module):
    def __init__(
        self, num_gemms, in_features, out_features, *, init_method, bias, return_bias, params_dtype, device, **_
    ):
        super().__init__()
        self.num_gemms, self.use_bias, self.return_bias = num_gemms, bias, return_bias
        for i in range(num_gemms):
            weight = torch.nn.Parameter(torch.empty(out_features, in_features, dtype=params_dtype, device=device))
            torch.nn.init.normal_(weight, std=0.1)
            self.register_parameter(f"weight{i}", weight)
            if bias:
                self.register_parameter(f"bias{i}", torch.nn.Parameter(torch.zeros(out_features, dtype=params_dtype)))

    def forward(self, x, m_splits, is_first_microbatch=None):
        pieces = x.split(m_splits)
        biases = [getattr(self, f"bias{i}") if self.use_bias else None for i in range(self.num_gemms)]
        added = [None] * self.num_gemms if self.return_bias else biases
        out = torch.cat([F.linear(p, getattr(self, f"weight{i}"), added[i]) for i, p in enumerate(pieces)])
        return (out, biases) if self.return_bias else out


class DotProductAttention(torch.nn.Module):
    def __init__(self, num_attention_heads, kv_channels, *, num_gqa_groups, softmax_scale=None, window_size=None, **_):
        super().__init__()
        self.scale, self.window = softmax_scale or kv_channels**-0.5, window_size

    def forward(self, query, key, value, attention_mask, attn_mask_type="causal", **_):
        assert attn_mask_type == "causal"
        length, group = len(query), query.shape[2] // key.shape[2]
        key, value = (x.repeat_interleave(group, dim=2) for x in (key, value))
        seen = torch.ones(length, length, dtype=torch.bool).tril()
        if self.window is not None:
            seen = seen.triu(-self.window[0])
        query, key, value = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=seen, scale=self.scale)
        return out.permute(2, 0, 1, 3).flatten(2)
