"""A hybrid directory served by the whole engine gives the tokens of transformers, from Python and from the command."""

from __future__ import annotations

import json
import random
import sys
from pathlib import Path

import pytest
import torch
from hf_models import random_model
from vocabularies import byte_level

sys.path.append(str(Path(__file__).parents[2] / "tools" / "bench"))

import peers

from megatron_infer.cli.main import main
from megatron_infer.config.inference import InferenceConfig
from megatron_infer.config.sampling_params import SamplingParams
from megatron_infer.engine.llm import LLM

CONFIG = InferenceConfig(
    buffer_size_gb=0.1,
    block_size_tokens=16,
    max_sequence_length=256,
    max_requests=16,
    max_tokens=64,
    enable_chunked_prefill=True,
)
CASES = ["mamba2_biases", "mamba2_limits", "nemotron_h_time_step", "nemotron_h_experts", "bamba", "granite_experts"]


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_and_logprobs_equal_transformers(case, tmp_path):
    """Chunked prompts and decodes of 12 requests at once, against transformers' forward over each whole sequence."""
    reference = random_model(case)
    reference.save_pretrained(tmp_path)
    rng = random.Random(4)
    prompts = [[rng.randrange(131) for _ in range(rng.randint(1, 90))] for _ in range(12)]
    llm = LLM(str(tmp_path), config=CONFIG, dtype="float32", threads=1)
    params = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, logprobs=0)
    for prompt, output in zip(prompts, llm.generate(prompts, params), strict=True):
        ours = output.outputs[0].token_ids
        with torch.inference_mode():
            logits = reference(torch.tensor([prompt + ours]), use_cache=False).logits[0, len(prompt) - 1 : -1]
        assert logits.argmax(-1).tolist() == ours
        expected = logits.log_softmax(-1)
        for i, (token, entry) in enumerate(zip(ours, output.outputs[0].logprobs, strict=True)):
            assert abs(entry[token].logprob - float(expected[i, token])) < 1e-4


def test_plan_and_generate_take_a_hybrid_directory(tmp_path, capsys):
    tokenizer = byte_level()
    reference = random_model("nemotron_h", vocab_size=tokenizer.vocab_size)
    reference.save_pretrained(tmp_path)
    tokenizer.save(tmp_path)
    assert main(["plan", str(tmp_path), "--dtype", "float32", "--memory-gb", "8", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["model"]["num_parameters"] == sum(parameter.numel() for parameter in reference.parameters())
    assert report["model"]["num_attention_layers"] == 1
    assert report["model"]["state"]["num_layers"] == 3
    assert report["model"]["state"]["ssm_shape"] == [8, 8, 16]
    options = ["--dtype", "float32", "--threads", "1", "--buffer-size-gb", "0.05", "--max-sequence-length", "128"]
    command = ["generate", str(tmp_path), "--prompt", "hello", "--raw", "--temperature", "0", "--max-tokens", "5"]
    assert main([*command, *options, "--ignore-eos"]) == 0
    prompt = tokenizer.encode("hello")
    ids = list(prompt)
    with torch.inference_mode():
        for _ in range(5):
            ids.append(int(reference(torch.tensor([ids]), use_cache=False).logits[0, -1].argmax()))
    answer = tokenizer.decode(ids[len(prompt) :])
    assert answer
    assert answer in capsys.readouterr().out


@pytest.mark.long
@pytest.mark.parametrize("case", ["mamba2", "bamba"])
def test_transformers_is_measured_with_hybrids(case, tmp_path):
    """Which has no scaled dot product attention for a model without attention."""
    random_model(case).save_pretrained(tmp_path)
    report = tmp_path / "report.json"
    sizes = "--num-requests 3 --input-len 5:20 --output-len 4 --rounds 1 --dtype float32 --vs transformers".split()
    assert peers.run(peers.parse_args([str(tmp_path), *sizes, "--json", str(report)])) == 0
    assert set(json.loads(report.read_text())["engines"]) == {"megatron_infer", "transformers"}
