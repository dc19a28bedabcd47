"""A stand-in for FlashInfer's rotation in plain torch on a CPU: what the documentation promises, and no more.

It checks what the real kernel checks (dtypes, shapes) so that a call which a GPU would refuse fails here. Written from
flashinfer 0.7.2.
"""

from __future__ import annotations

import sys
from types import ModuleType

import torch


def apply_rope_with_cos_sin_cache_inplace(positions, query, key, head_size, cos_sin_cache, is_neox=True):
    assert cos_sin_cache.dtype is torch.float32 and positions.dtype in (torch.int32, torch.int64)
    half = cos_sin_cache.shape[1] // 2
    assert half % 8 == 0, "the kernel reads eight dims at once"
    cos, sin = (part[:, None] for part in cos_sin_cache[positions.long()].split(half, dim=-1))
    for x in (query, key):
        x = x.view(x.shape[0], -1, head_size)  # the real one writes through such a view
        pair = (slice(0, half), slice(half, 2 * half)) if is_neox else (slice(0, 2 * half, 2), slice(1, 2 * half, 2))
        low, high = (x[..., part].float() for part in pair)
        x[..., pair[0]], x[..., pair[1]] = (low * cos - high * sin).to(x.dtype), (high * cos + low * sin).to(x.dtype)


MODULES = {
    "flashinfer": {"__version__": "0.7.2", "__path__": []},
    "flashinfer.rope": {"apply_rope_with_cos_sin_cache_inplace": apply_rope_with_cos_sin_cache_inplace},
}


def install(monkeypatch):
    """Put the stand-in where an import finds it."""
    for name, content in MODULES.items():
        module = ModuleType(name)
        vars(module).update(content)
        monkeypatch.setitem(sys.modules, name, module)
