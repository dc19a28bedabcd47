"""linear_backend: the named backend runs and is in the start-up table, or the engine says why it cannot."""

from __future__ import annotations

import pytest
import torch

from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.engine import DynamicInferenceEngine
from megatron_infer.errors import ConfigError
from megatron_infer.kernels.native.cpu_native import PANELS
from megatron_infer.kernels.packing import ONEDNN
from megatron_infer.kernels.select import choose
from megatron_infer.testing.tiny import tiny_gpt


def engine_with(model, backend):
    config = InferenceConfig(buffer_size_gb=0.01, max_sequence_length=64, linear_backend=backend)
    return DynamicInferenceEngine(model, config)


def row_of(kernels):
    return next(row for row in kernels.rows if row.operation == "linear")


def test_vendor_and_native_answer_alike_and_are_in_the_table():
    model = tiny_gpt(vocab_size=128, init_method_std=0.2)
    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0, prompt_logprobs=0)
    found = {}
    for backend, name in (("native", PANELS), ("vendor", ONEDNN.name)):
        try:
            engine = engine_with(model, backend)
        except ConfigError as error:
            pytest.skip(str(error))
        row = row_of(engine.kernels)
        assert row.chosen == name and engine.kernels.packed.layout.name == name and engine.kernels.packed.num_bytes
        assert name in engine.kernels.table()
        (output,) = engine.generate([[5, 6, 7, 8]], params)
        scores = [next(iter(entry.values())).logprob for entry in output.prompt_logprobs[1:]]
        found[backend] = output.outputs[0].token_ids, torch.tensor(scores)
    assert row.reasons == {PANELS: "linear_backend=vendor"}
    assert found["native"][0] == found["vendor"][0]
    torch.testing.assert_close(found["native"][1], found["vendor"][1], atol=1e-4, rtol=0)


@pytest.mark.parametrize(
    ("backend", "dtype", "device", "message"),
    [
        ("vendor", torch.float64, "cpu", "linear_backend='vendor', but oneDNN cannot run: no prepacked linear for"),
        ("native", torch.float64, "cpu", "linear_backend='native', but: needs float32 or bfloat16"),
        ("native", torch.float32, "cuda", "linear_backend='native', but: runs on a CPU, the model is on cuda"),
    ],
)
def test_a_backend_that_cannot_run_says_why(backend, dtype, device, message):
    with pytest.raises(ConfigError, match=message):
        choose(device, dtype, specs=(), block_size=16, linear=backend)


def test_on_a_gpu_vendor_is_cublas():
    from megatron_infer.kernels.select import _choose_linear

    row, packed = _choose_linear(torch.device("cuda"), torch.bfloat16, None, None, "vendor", "")
    assert row.chosen == "torch (cuBLAS)" and not packed.num_bytes
