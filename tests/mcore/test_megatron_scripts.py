"""Scripts of Megatron-LM and NeMo-RL run unchanged on this engine, and draw the tokens that it draws itself."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
from ports import free_port

from megatron_infer.models.loading.sources import open_source

HERE = Path(__file__).parent
ON_CPU = HERE.parents[1] / "examples" / "megatron_lm" / "on_cpu.py"
MEGATRON, NEMO = os.environ.get("MEGATRON_LM", ""), os.environ.get("NEMO_RL", "")
PROMPTS = ["1 2 3", "4 5", "9 8 7 6"]
IDS = [[int(word) for word in prompt.split()] for prompt in PROMPTS]
MODEL = """--num-layers 2 --hidden-size 32 --num-attention-heads 4 --seq-length 128 --max-position-embeddings 128
--micro-batch-size 1 --transformer-impl local --position-embedding-type rope --normalization RMSNorm --swiglu
--disable-bias-linear --distributed-backend gloo --use-cpu-initialization --no-persist-layer-norm --no-rope-fusion
--no-bias-swiglu-fusion --no-masked-softmax-fusion --no-gradient-accumulation-fusion --ckpt-format torch
--init-method-std 0.5""".split()
NULL = ["--tokenizer-type", "NullTokenizer", "--vocab-size", "127"]
ENGINE = """--inference-dynamic-batching-buffer-size-gb 0.05 --inference-dynamic-batching-block-size 16
--inference-max-seq-length 96""".split()
ASKED = ["--incoming-requests-per-sec", "-1", "--num-tokens-to-generate", "8", "--return-log-probs"]
ASKED += ["--skip-prompt-log-probs", "--prompts", *PROMPTS]
ADVANCED = "examples/inference/advanced/gpt_dynamic_inference"
SUSPENDS = ["--suspend-resume-interval"]

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(not MEGATRON, reason="MEGATRON_LM is not the path of a checkout of Megatron-LM"),
]


def command(ranks: int, *arguments: str | Path) -> list[str]:
    start = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    return [*start, str(ON_CPU), *map(str, arguments)]


def environment(**more: str) -> dict[str, str]:
    path = [MEGATRON, NEMO, str(ON_CPU.parents[2]), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": ":".join(filter(None, path)), **more}


def run(ranks: int, *arguments: str | Path, **more: str) -> str:
    done = subprocess.run(
        command(ranks, *arguments),
        env=environment(**more),
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=1000,
    )
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """(tensor parallel size, tokenizer's arguments) -> the checkpoint of a random model, its tokens for IDS."""
    made: dict[tuple[int, tuple[str, ...]], tuple[Path, list[list[int]]]] = {}

    def of(tensor: int, tokenizer: list[str]) -> tuple[Path, list[list[int]]]:
        key = tensor, tuple(tokenizer)
        if key not in made:
            path = tmp_path_factory.mktemp("checkpoint")
            arguments = [*MODEL, *tokenizer, "--tensor-model-parallel-size", str(tensor)]
            arguments += ["--save", str(path), "--save-interval", "1000"]
            text = run(tensor, HERE / "checkpoint_script.py", *arguments, PROMPTS=json.dumps(IDS))
            made[key] = path, json.loads(text.split("tokens:")[1].splitlines()[0])
        return made[key]

    return of


@pytest.mark.parametrize(
    ("script", "ranks", "tensor", "options"),
    [
        ("examples/inference/offline_inference.py", 1, 1, []),
        ("examples/inference/offline_inference.py", 1, 1, ["--use-coordinator"]),
        ("examples/inference/offline_inference.py", 1, 1, ["--use-coordinator", "--async-mode"]),
        (f"{ADVANCED}.py", 1, 1, [*SUSPENDS, "4"]),
        (f"{ADVANCED}.py", 2, 2, [*SUSPENDS, "4"]),
        (f"{ADVANCED}_with_coordinator.py", 2, 1, [*SUSPENDS, "2"]),
        (f"{ADVANCED}_with_coordinator.py", 2, 2, [*SUSPENDS, "2"]),
    ],
)
def test_a_script_of_inference_draws_the_engines_tokens(saved, tmp_path, script, ranks, tensor, options):
    checkpoint, expected = saved(tensor, NULL)
    path = tmp_path / "out.json"
    arguments = [*MODEL, *NULL, *ENGINE, *ASKED, *options, "--tensor-model-parallel-size", str(tensor)]
    arguments += ["--load", str(checkpoint), "--output-path", str(path)]
    run(ranks, "-m", "megatron_infer.mcore", Path(MEGATRON) / script, *arguments)
    results = [one for one in json.loads(path.read_text()).values() if isinstance(one, dict)]
    assert {one["input_prompt"]: one["generated_tokens"] for one in results} == dict(
        zip(PROMPTS, expected, strict=True)
    )
    for one in results:
        # this script does not pass --skip-prompt-log-probs on
        of_prompt = len(one["input_prompt"].split()) - 1 if script.endswith("_with_coordinator.py") else 0
        assert len(one["logprobs"]) == 8 + of_prompt and max(one["logprobs"]) < 0


def answers_of_a_server(script: str, checkpoint: Path) -> list[list[int]]:
    """Tokens of a server's answers to IDS."""
    port = free_port()
    arguments = [*MODEL, *NULL, *ENGINE, "--load", checkpoint, "--host", "127.0.0.1", "--port", port]
    server = subprocess.Popen(
        command(1, "-m", "megatron_infer.mcore", Path(MEGATRON) / script, *arguments),
        env=environment(),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        body = {"prompt": IDS, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        request = urllib.request.Request(
            f"http://127.0.0.1:{port}/v1/completions", json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        for _ in range(600):
            try:
                with urllib.request.urlopen(request, timeout=60) as reply:
                    choices = json.load(reply)["choices"]
                break
            except OSError:
                assert server.poll() is None
                time.sleep(1)
    finally:
        server.terminate()  # torchrun passes it on to its ranks, which are sessions of their own
        server.wait(120)
    return [[int(word) for word in one["text"].split()] for one in choices]


def test_the_server_of_the_high_level_api_answers(saved):
    checkpoint, expected = saved(1, NULL)
    assert answers_of_a_server("examples/inference/launch_inference_server.py", checkpoint) == expected


def test_the_text_generation_server_answers(saved):
    """The script runs the model in bf16: tokens are the greedy ones of megatron-core's own forward in bf16, or, where
    two logits are next to each other in bf16, either of them."""
    checkpoint, _ = saved(1, NULL)
    answers = answers_of_a_server("tools/run_dynamic_text_generation_server.py", checkpoint)
    assert [len(answer) for answer in answers] == [8, 8, 8]
    pairs = json.dumps(list(zip(IDS, answers, strict=True)))
    text = run(1, HERE / "forward_script.py", *MODEL, *NULL, "--load", checkpoint, "--bf16", ANSWERS=pairs)
    assert "dtype: torch.bfloat16" in text
    steps = json.loads(text.split("steps:")[1].splitlines()[0])
    assert max(map(max, steps)) <= 2, steps


@pytest.mark.parametrize(("ranks", "served"), [(1, False), (2, False), (1, True)])
def test_megatron_rl_generates_over_http_and_keeps_its_ledger(saved, tmp_path, ranks, served):
    open_source("smollm2").tokenizer().save(tmp_path)
    tokenizer = ["--tokenizer-type", "HuggingFaceTokenizer", "--tokenizer-model", str(tmp_path)]
    checkpoint, _ = saved(1, tokenizer)
    arguments = [*MODEL, *tokenizer, *ENGINE, "--load", checkpoint]
    more = {"HTTP_PORT": str(free_port())}
    if served:
        more |= {"SERVED": "1", "MEGATRON_RL_INFERENCE_SERVER_PORT": str(free_port())}
    text = run(ranks, "-m", "megatron_infer.mcore", HERE / "rl_script.py", *arguments, **more)
    assert all(f"rank {rank} done" in text for rank in range(ranks))


@pytest.mark.skipif(not NEMO, reason="NEMO_RL is not the path of a checkout of NeMo-RL")
def test_nemo_rls_megatron_backend_prepares_generates_sleeps_and_wakes():
    assert "as the engine itself" in run(1, "-m", "megatron_infer.mcore", HERE / "nemo_script.py")
