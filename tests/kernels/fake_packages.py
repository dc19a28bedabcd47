"""Stand-ins for NVIDIA's packages in plain torch on a CPU: what the documentation promises, and no more.

They check what the real kernels check (dtypes, shapes, strides, devices of index arrays) so that a call which a GPU
would refuse fails here. Written from flashinfer 0.7.2 and flash-attn 3 of 2.8.3.
"""

from __future__ import annotations

import sys
from types import ModuleType, SimpleNamespace

import torch

from megatron_infer.kernels import optional_packages
from megatron_infer.kernels.base import AttendSpec
from megatron_infer.kernels.torch import torch_ref


def attend(q, pages, position, cache, *, scale, left):
    """By the definition, in float64: q [T, N, H], pages [T, W], position [T]; left: keys before its own, -1: all."""
    num_kv_heads, head_dim = cache[0].shape[2:]
    spec = AttendSpec(
        num_kv_heads=num_kv_heads,
        group_size=q.shape[1] // num_kv_heads,
        head_dim=head_dim,
        scale=scale,
        window=None if left < 0 else left + 1,
    )
    q_TKGH = q.unflatten(1, (num_kv_heads, -1))
    return torch_ref.attend(q_TKGH, pages.long(), position, torch.stack(cache), spec).flatten(1, 2).to(q.dtype)


def check_int32(*tensors):
    for tensor in tensors:
        assert tensor.dtype is torch.int32 and tensor.is_contiguous()


# flashinfer


class _Wrapper:
    def _begin(self, float_workspace_buffer, kv_layout, backend):
        assert float_workspace_buffer.dtype is torch.uint8 and not float_workspace_buffer.any()
        assert kv_layout == "NHD" and backend == "fa2"
        self.planned = self.buffers = None

    def _plan(self, q_indptr, kv_indptr, indices, last_page_len, **rest):
        check_int32(q_indptr, kv_indptr, indices, last_page_len)
        assert len(q_indptr) == len(kv_indptr) == len(last_page_len) + 1 and len(last_page_len) > 0
        assert kv_indptr[0] == q_indptr[0] == 0 and kv_indptr[-1] == len(indices)
        assert ((last_page_len >= 1) & (last_page_len <= rest["page_size"])).all()
        assert rest["q_data_type"] is rest["kv_data_type"]
        self.planned = SimpleNamespace(q_indptr=q_indptr, kv_indptr=kv_indptr, indices=indices, last=last_page_len)
        self.planned.rest = rest

    def run(self, q, paged_kv_cache, *, out):
        plan, rest = self.planned, self.planned.rest
        keys, values = paged_kv_cache
        heads = (rest["num_qo_heads"], rest["head_dim"])
        assert q.ndim == 3 and q.shape[1:] == heads and q.stride(-1) == 1 and q.dtype is rest["q_data_type"]
        assert keys.shape[1:] == (rest["page_size"], rest["num_kv_heads"], rest["head_dim"])
        assert keys.stride() == values.stride() and len(q) == plan.q_indptr[-1] == len(out)
        for row in range(len(plan.last)):
            pages = plan.indices[plan.kv_indptr[row] : plan.kv_indptr[row + 1]]
            length = (len(pages) - 1) * rest["page_size"] + int(plan.last[row])
            tokens = slice(int(plan.q_indptr[row]), int(plan.q_indptr[row + 1]))
            count = tokens.stop - tokens.start
            found = pages.expand(count, -1), torch.arange(length - count, length), paged_kv_cache
            out[tokens] = attend(q[tokens], *found, scale=rest["sm_scale"], left=rest["window_left"])
        return out


class Decode(_Wrapper):
    def __init__(
        self,
        float_workspace_buffer,
        kv_layout="NHD",
        use_cuda_graph=False,
        use_tensor_cores=False,
        paged_kv_indptr_buffer=None,
        paged_kv_indices_buffer=None,
        paged_kv_last_page_len_buffer=None,
        backend="auto",
    ):
        self._begin(float_workspace_buffer, kv_layout, backend)
        self.use_tensor_cores = use_tensor_cores
        given = (paged_kv_indptr_buffer, paged_kv_indices_buffer, paged_kv_last_page_len_buffer)
        assert use_cuda_graph == all(map(torch.is_tensor, given)) == any(map(torch.is_tensor, given))
        if use_cuda_graph:
            check_int32(*given)
            assert len(paged_kv_indptr_buffer) == len(paged_kv_last_page_len_buffer) + 1
            self.buffers = given

    def reset_workspace_buffer(self, float_workspace_buffer, int_workspace_buffer):
        assert int_workspace_buffer.dtype is torch.uint8 and int_workspace_buffer.data_ptr() % 16 == 0

    def run(self, q, paged_kv_cache, *, out):
        """A captured launch repeats what its first plan decided, and reads the pages that the last one left."""
        if self.buffers is None:
            return super().run(q, paged_kv_cache, out=out)
        (indptr, pages, last), rest = self.buffers, self.planned.rest
        most = torch.arange(len(pages))
        index = pages[(indptr[:-1, None] + most).clamp(max=len(pages) - 1).long()]
        position = (indptr.diff() - 1) * rest["page_size"] + last - 1
        return out.copy_(attend(q, index, position, paged_kv_cache, scale=rest["sm_scale"], left=rest["window_left"]))

    def plan(
        self,
        indptr,
        indices,
        last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim,
        page_size,
        *,
        window_left=-1,
        q_data_type,
        kv_data_type,
        sm_scale,
    ):
        more = {"window_left": window_left, "sm_scale": sm_scale, "q_data_type": q_data_type}
        more["kv_data_type"] = kv_data_type
        group = num_qo_heads // num_kv_heads
        assert self.use_tensor_cores or group in (1, 2, 3, 4, 8)
        heads = {"num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim}
        q_indptr = torch.arange(len(indptr), dtype=torch.int32)
        if self.buffers is not None:
            offsets, pages, last = self.buffers
            assert len(last_page_len) == len(last), "the batch size is fixed in CUDA-graph mode"
            assert len(indices) <= len(pages), "more pages than the buffer holds"
            offsets.copy_(indptr)
            pages[: len(indices)].copy_(indices)
            last.copy_(last_page_len)
        self._plan(q_indptr, indptr, indices, last_page_len, page_size=page_size, **heads, **more)


class Prefill(_Wrapper):
    def __init__(self, float_workspace_buffer, kv_layout="NHD", *, backend="auto"):
        self._begin(float_workspace_buffer, kv_layout, backend)

    def plan(
        self,
        qo_indptr,
        paged_kv_indptr,
        paged_kv_indices,
        paged_kv_last_page_len,
        num_qo_heads,
        num_kv_heads,
        head_dim_qk,
        page_size,
        *,
        causal=False,
        sm_scale,
        window_left=-1,
        q_data_type,
        kv_data_type,
    ):
        assert causal
        more = {"window_left": window_left, "sm_scale": sm_scale, "q_data_type": q_data_type}
        more["kv_data_type"] = kv_data_type
        heads = {"num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim_qk}
        pages = (paged_kv_indptr, paged_kv_indices, paged_kv_last_page_len)
        self._plan(qo_indptr, *pages, page_size=page_size, **heads, **more)


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


# flash-attn


def flash_attn_3_with_kvcache(
    q,
    k_cache,
    v_cache,
    *,
    cache_seqlens,
    page_table,
    cu_seqlens_q=None,
    max_seqlen_q=None,
    softmax_scale,
    causal=False,
    window_size=(-1, -1),
    num_splits=0,
):
    """Its launches follow from shapes alone, as the real one's do: reads no number from a tensor."""
    assert (
        causal
        and num_splits in (0, 1)
        and q.dtype in optional_packages.HALF
        and q.stride(-1) == 1
        and q.shape[-1] % 8 == 0
    )
    check_int32(cache_seqlens, page_table)
    left, right = window_size
    assert (left, right) == (-1, -1) or (left >= 0 and right == 0)
    one_each = cu_seqlens_q is None
    if one_each:
        cu_seqlens_q = torch.arange(len(q) + 1, dtype=torch.int32)
        q = q.squeeze(1)
    else:
        assert max_seqlen_q >= 1
    check_int32(cu_seqlens_q)
    assert len(page_table) == len(cache_seqlens) == len(cu_seqlens_q) - 1
    token = torch.arange(len(q))
    row = torch.bucketize(token, cu_seqlens_q[1:].long(), right=True)
    no_row = row == len(cache_seqlens)
    row = row.clamp(max=len(cache_seqlens) - 1)
    position = (cache_seqlens[row] - cu_seqlens_q[1:][row]).long() + token
    index = page_table[row]
    index = torch.where(torch.arange(index.shape[1]) * k_cache.shape[1] <= position[:, None], index, 0)
    out = attend(q, index, position, (k_cache, v_cache), scale=softmax_scale, left=left)
    out = out.masked_fill(no_row[:, None, None], torch.nan)  # what no row writes is whatever memory held
    return out[:, None] if one_each else out


MODULES = {
    "flashinfer": {"__version__": "0.7.2", "__path__": []},
    "flashinfer.decode": {"BatchDecodeWithPagedKVCacheWrapper": Decode},
    "flashinfer.prefill": {"BatchPrefillWithPagedKVCacheWrapper": Prefill},
    "flashinfer.rope": {"apply_rope_with_cos_sin_cache_inplace": apply_rope_with_cos_sin_cache_inplace},
    "flash_attn_interface": {"flash_attn_with_kvcache": flash_attn_3_with_kvcache},
}


def install(monkeypatch, *packages):
    """Put the stand-ins of these packages where an import finds them."""
    for name, content in MODULES.items():
        if name.split(".")[0] in packages:
            module = ModuleType(name)
            vars(module).update(content)
            monkeypatch.setitem(sys.modules, name, module)
