import torch

from fla.modules.l2norm import l2norm


def chunk_gated_delta_rule(
    q,
    k,
    v,
    g,
    beta,
    scale=None,
    initial_state=None,
    output_final_state=False,
    use_qk_l2norm_in_kernel=False,
    cu_seqlens=None,
    **_,
):
    """The recurrence, a token at a time. q, k: [B, T, heads, K]; v: [B, T, H, V]; g, beta: [B, T, H]."""
    assert cu_seqlens is None
    if use_qk_l2norm_in_kernel:
        q, k = l2norm(q), l2norm(k)
    dtype, num_heads = v.dtype, v.shape[2]
    q, k = (x.float().repeat_interleave(num_heads // x.shape[2], 2) for x in (q, k))
    v, g, beta = v.float(), g.float(), beta.float()
    q = q * (q.shape[-1] ** -0.5 if scale is None else scale)
    shape = q.shape[0], num_heads, q.shape[3], v.shape[3]
    state = q.new_zeros(shape) if initial_state is None else initial_state.float()
    outs = []
    for t in range(q.shape[1]):
        state = state * g[:, t, :, None, None].exp()
        change = (v[:, t] - torch.einsum("bhk,bhkv->bhv", k[:, t], state)) * beta[:, t, :, None]
        state = state + torch.einsum("bhk,bhv->bhkv", k[:, t], change)
        outs.append(torch.einsum("bhk,bhkv->bhv", q[:, t], state))
    return torch.stack(outs, 1).to(dtype), state if output_final_state else None
