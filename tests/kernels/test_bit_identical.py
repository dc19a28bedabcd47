"""Native attention gives a position the same bits however its sequence is cut into steps, whatever else is in them."""

from __future__ import annotations

import pytest
import torch
from cut_case import PROMPT, TOTAL, Sequences, cut
from torch import Tensor

from megatron_infer.kernels.base import AttendSpec
from megatron_infer.kernels.native.cpu_native import NativePagedAttention


def compute(
    sequences: Sequences, library, slices: list[tuple[int, int]], *, decode_from: int = TOTAL, beside: bool = False
) -> Tensor:
    """The first sequence in these slices, then one token a step from `decode_from` on -> [TOTAL, N*H]."""
    backend = NativePagedAttention(library, sequences.dtype)
    outs = []
    for i, (start, stop) in enumerate(slices):
        n = stop - start
        more = [(1, 37 * i, 37)] if beside and 37 * (i + 1) <= TOTAL else []
        outs.append(sequences.attend(backend, decode=[], slices=[(0, start, n), *more])[:n])
    for position in range(decode_from, TOTAL):
        outs.append(sequences.attend(backend, decode=[position], slices=[])[:1])
    return torch.cat(outs)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("window", "softcap"), [(None, None), (150, None), (300, 2.0)])
@pytest.mark.parametrize(("kv_heads", "group"), [(3, 3), (1, 20), (2, 1)])
@pytest.mark.parametrize("sinks", [False, True])
def test_a_position_has_the_same_bits_however_its_sequence_is_cut(
    native_library, dtype, window, softcap, kv_heads, group, sinks
):
    shape = {"num_kv_heads": kv_heads, "group_size": group, "head_dim": 64, "scale": 0.125}
    sinks_N = torch.linspace(-2, 4, kv_heads * group) if sinks else None
    spec = AttendSpec(
        **shape, window=window, rotary_dim=32, softcap=softcap, sinks=(lambda: sinks_N) if sinks else None
    )
    plain = Sequences(dtype, spec)
    want = compute(plain, native_library, [(0, PROMPT)], decode_from=PROMPT)
    ways = {
        "odd chunks": (cut(PROMPT, 7, 1, 1, 131, 1, 53), PROMPT),
        "one token a slice": (cut(PROMPT, 1), PROMPT),
        "all but the last prompt token cached": ([(0, PROMPT - 1), (PROMPT - 1, PROMPT)], PROMPT),
        "recomputed in one slice": ([(0, TOTAL)], TOTAL),
        "recomputed up to a token, then decoded": ([(0, 517)], 517),
        "recomputed in chunks across the prompt's end": (cut(TOTAL, 97), TOTAL),
        "recomputed in slices of 1": (cut(TOTAL, 1), TOTAL),
    }
    for threads, beside in ((1, False), (2, True)):
        torch.set_num_threads(threads)
        for name, (slices, decode_from) in ways.items():
            if beside and name == "recomputed in slices of 1":
                continue  # many steps; "one token a slice" has them beside other rows
            again = Sequences(dtype, spec)
            got = compute(again, native_library, slices, decode_from=decode_from, beside=beside)
            differing = (got != want).any(1).nonzero().flatten().tolist()
            assert not differing, f"{name}: other bits at positions {differing[:8]}"
            blocks = again.table[0].long()
            assert torch.equal(again.cache[:, :, blocks], plain.cache[:, :, blocks]), f"{name}: other keys or values"
