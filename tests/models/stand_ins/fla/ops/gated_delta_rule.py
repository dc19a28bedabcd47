from __future__ import annotations

import torch


def chunk_gated_delta_rule(
    q, k, v, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False, cu_seqlens=None, **_
):
    """q, k [batch, tokens, heads, N], v [batch, tokens, heads, P], g and beta [batch, tokens, heads] -> as v."""
    assert cu_seqlens is None and initial_state is None and not use_qk_l2norm_in_kernel
    dtype = q.dtype
    q, k, v, g, beta = (part.float() for part in (q, k, v, g, beta))
    state = q.new_zeros(*q.shape[0:1], *q.shape[2:], v.shape[-1])
    out = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        error = v[:, t] - torch.einsum("bhn,bhnp->bhp", k[:, t], state)
        state = state + torch.einsum("bhn,bhp->bhnp", k[:, t], error * beta[:, t, :, None])
        out.append(torch.einsum("bhn,bhnp->bhp", q[:, t], state) * q.shape[-1] ** -0.5)
    return torch.stack(out, 1).to(dtype), None
