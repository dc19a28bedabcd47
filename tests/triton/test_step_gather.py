"""One launch gathers what a dozen of torch's calls do, bit for bit."""

from __future__ import annotations

import pytest
import torch

from megatron_infer.kernels.step_gather import StepTables, torch_gather

pytestmark = pytest.mark.triton


@pytest.mark.parametrize("num_tokens", [1, 16, 37])
@pytest.mark.parametrize("rotary_dim", [0, 6, 64])
def test_gathers_as_torch_does(num_tokens, rotary_dim, device, dtype):
    from megatron_infer.kernels.triton.step_gather import gather

    torch.manual_seed(num_tokens)
    num_rows, num_positions, block_size = 5, 90, 16
    max_blocks = -(-num_positions // block_size)
    angles = torch.randn(2, num_positions, rotary_dim).to(device, dtype) if rotary_dim else (None, None)
    tables = StepTables(
        torch.randint(2**27, (num_rows, max_blocks), dtype=torch.int32, device=device),
        torch.randint(2**31 - 1, (num_rows, num_positions), dtype=torch.int32, device=device),
        block_size,
        *angles,
    )
    # as in the step's buffer: what follows is another field
    position_T = torch.randint(num_positions, (num_tokens + 9,), dtype=torch.int32, device=device)[:num_tokens]
    row_T = torch.randint(num_rows, (num_tokens + 9,), dtype=torch.int32, device=device)[:num_tokens]
    for got, expected in zip(gather(position_T, row_T, tables), torch_gather(position_T, row_T, tables), strict=True):
        if expected is None:
            assert got is None
        else:
            assert got.dtype == expected.dtype and torch.equal(got, expected)
