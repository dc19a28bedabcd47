import torch
import torch.nn.functional as F


def mamba_chunk_scan_combined(
    x,
    dt,
    A,
    B,
    C,
    chunk_size,
    D=None,
    z=None,
    dt_bias=None,
    initial_states=None,
    seq_idx=None,
    dt_softplus=False,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    **_,
):
    """The recurrence, a token at a time. x: [b, l, h, p]; dt: [b, l, h]; B, C: [b, l, groups, n]."""
    assert seq_idx is None
    dtype, num_heads = x.dtype, x.shape[2]
    x, dt = x.float(), dt.float()
    B, C = (m.float().repeat_interleave(num_heads // m.shape[2], 2) for m in (B, C))
    if dt_bias is not None:
        dt = dt + dt_bias
    if dt_softplus:
        dt = F.softplus(dt)
    dt = dt.clamp(*dt_limit)
    shape = x.shape[0], num_heads, x.shape[3], B.shape[3]
    state = x.new_zeros(shape) if initial_states is None else initial_states.float()
    outs = []
    for t in range(x.shape[1]):
        added = torch.einsum("bh,bhp,bhn->bhpn", dt[:, t], x[:, t], B[:, t])
        state = state * (dt[:, t] * A).exp()[..., None, None] + added
        outs.append(torch.einsum("bhpn,bhn->bhp", state, C[:, t]))
    out = torch.stack(outs, 1)
    if D is not None:
        out = out + x * (D if D.ndim == 2 else D[:, None])
    if z is not None:
        out = out * F.silu(z.float())
    return (out.to(dtype), state) if return_final_states else out.to(dtype)


def mamba_split_conv1d_scan_combined(
    zxbcdt,
    conv1d_weight,
    conv1d_bias,
    dt_bias,
    A,
    D,
    chunk_size,
    initial_states=None,
    seq_idx=None,
    dt_limit=(0.0, float("inf")),
    return_final_states=False,
    activation="silu",
    rmsnorm_weight=None,
    rmsnorm_eps=1e-6,
    outproj_weight=None,
    outproj_bias=None,
    headdim=None,
    ngroups=1,
    norm_before_gate=True,
):
    assert rmsnorm_weight is None and outproj_weight is None and not return_final_states
    num_heads, channels = A.shape[0], conv1d_weight.shape[0]
    width = num_heads * headdim
    num_states = (channels - width) // (2 * ngroups)
    z, xbc, dt = zxbcdt.split([width, channels, num_heads], -1)
    padded = F.pad(xbc.transpose(1, 2), (conv1d_weight.shape[-1] - 1, 0))
    xbc = F.silu(F.conv1d(padded, conv1d_weight[:, None], conv1d_bias, groups=channels).transpose(1, 2))
    x, B, C = xbc.split([width, ngroups * num_states, ngroups * num_states], -1)
    out = mamba_chunk_scan_combined(
        x.unflatten(-1, (num_heads, headdim)),
        dt,
        A,
        B.unflatten(-1, (ngroups, num_states)),
        C.unflatten(-1, (ngroups, num_states)),
        chunk_size,
        D=D,
        z=z.unflatten(-1, (num_heads, headdim)),
        dt_bias=dt_bias,
        initial_states=initial_states,
        seq_idx=seq_idx,
        dt_softplus=True,
        dt_limit=dt_limit,
    )
    return out.flatten(-2)
