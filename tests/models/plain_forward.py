"""Full forward of a freshly built GPTModel on a CPU by the plainest means: the oracle side of the tests."""

from __future__ import annotations

import types

import torch
from torch import Tensor, nn


class PlainAttention(nn.Module):
    """Attention over a whole sequence, [s, b, h, d] -> [s, b, h * d]; stock core attention needs CUDA."""

    def __init__(self, window: int | None, scale: float | None):
        super().__init__()
        self.window, self.scale = window, scale

    def forward(self, query, key, value, attention_mask=None, **_):
        length, batch, heads, dim = query.shape
        q, k, v = (x.permute(1, 2, 0, 3) for x in (query, key, value))
        distance = torch.arange(length)[:, None] - torch.arange(length)[None]
        visible = distance >= 0
        if self.window is not None:
            visible &= distance < self.window
        out = nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=visible, scale=self.scale, enable_gqa=heads != k.shape[1]
        )
        return out.permute(2, 0, 1, 3).reshape(length, batch, heads * dim)


def make_runnable(model: nn.Module) -> nn.Module:
    from megatron.core.transformer.utils import is_layer_window_attention

    config = model.config
    for layer in model.decoder.layers:
        slides = is_layer_window_attention(config.window_size, config.window_attn_skip_freq, layer.layer_number)
        window = config.window_size[0] + 1 if slides else None
        layer.self_attention.core_attention = PlainAttention(window, config.softmax_scale)
    rotary = getattr(model, "rotary_pos_emb", None)
    if rotary is not None:

        def get_emb(self, max_seq_len, offset=0):
            freqs = self.get_freqs_non_repeated(max_seq_len, offset)
            return torch.cat((freqs, freqs), dim=-1)[:, None, None, :]

        rotary.get_emb = types.MethodType(get_emb, rotary)
    return model


def full_logits(model: nn.Module, ids: list[int]) -> Tensor:
    """[len(ids), padded vocabulary] in fp32."""
    tokens = torch.tensor([ids])
    positions = torch.arange(len(ids))[None]
    with torch.inference_mode():
        return model(tokens, positions, None)[0].float()
