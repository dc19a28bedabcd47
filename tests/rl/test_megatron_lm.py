"""examples/megatron_lm: the lines fit scripts of Megatron-LM, which then generate and train as they did."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[2] / "examples" / "megatron_lm"
CHECKOUT = os.environ.get("MEGATRON_LM", "")
STAND_IN = """
import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core import parallel_state
from megatron_infer.testing.tiny import tiny_gpt
_SEQUENCE_LENGTH = 64
def get_train_data_iterator(): return iter(lambda: torch.randint(0, 128, (2, 9)), None)
torch.cuda.set_device(0)
torch.distributed.init_process_group(backend="nccl", device_id=0)
parallel_state.initialize_model_parallel(2)
if True:
    assert torch.cuda.current_device() == torch.device("cpu") and not torch.cuda.is_available()
    gpt_model = tiny_gpt(vocab_size=128, max_sequence_length=64)
    optim = torch.optim.Adam(gpt_model.parameters())
    train_iterator: Iterator = get_train_data_iterator()
    for iteration in range(2):
        tokens = next(train_iterator)
        places = torch.arange(8).expand(2, 8)
        loss = gpt_model(tokens[:, :-1], places, None, labels=tokens[:, 1:]).mean()
        optim.zero_grad()
        loss.backward()
        optim.step()
"""
PRETRAIN = """--num-layers 2 --hidden-size 64 --num-attention-heads 4 --seq-length 64 --max-position-embeddings 64
--micro-batch-size 2 --global-batch-size 4 --train-iters 4 --eval-iters 1 --eval-interval 2 --lr 1e-3
--lr-decay-style constant --mock-data --tokenizer-type NullTokenizer --vocab-size 127 --distributed-backend gloo
--use-cpu-initialization --transformer-impl local --no-gradient-accumulation-fusion --no-persist-layer-norm
--no-bias-gelu-fusion --no-rope-fusion --position-embedding-type rope --attention-dropout 0 --hidden-dropout 0
--log-interval 1"""
LAYOUTS = (
    "--tensor-model-parallel-size 2",
    "--pipeline-model-parallel-size 2",
    "--pipeline-model-parallel-size 2 --num-layers 4 --num-layers-per-virtual-pipeline-stage 1",
    "--num-experts 4 --expert-model-parallel-size 2 --moe-token-dispatcher-type allgather",
    "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
)


def with_lines(script: Path, to: Path) -> Path:
    to.write_text(subprocess.check_output([sys.executable, EXAMPLES / "add_lines.py", script], text=True))
    return to


def on_cpu(script: Path, *arguments: str) -> str:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(EXAMPLES / "on_cpu.py"), str(script), *arguments]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, timeout=300)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.long
def test_a_loop_with_the_lines_generates_with_the_weights_of_each_step(tmp_path):
    script = tmp_path / "run_simple_mcore_train_loop.py"
    script.write_text("from typing import Iterator\n" + STAND_IN.lstrip())
    printed = re.findall(r"Iteration (\d): \[(\d+(?:, \d+)*)\]", on_cpu(with_lines(script, tmp_path / "loop.py")))
    assert [iteration for iteration, _ in printed].count("1") == 2
    assert all(len(tokens.split(",")) == 8 for _, tokens in printed)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("pretrain_gpt.py", "", "the script has 0 lines 'from model_provider import model_provider', and not one"),
        ("run_simple_mcore_train_loop.py", STAND_IN * 2, "2 lines 'from megatron.core.distributed"),
        ("train_rl.py", "", "known are pretrain_gpt.py, run_simple_mcore_train_loop.py"),
        ("pretrain_gpt.py", None, "No such file"),
    ],
)
def test_a_script_that_the_lines_do_not_fit_is_refused(name, content, message, tmp_path):
    script = tmp_path / name
    if content is not None:
        script.write_text(content)
    done = subprocess.run([sys.executable, EXAMPLES / "add_lines.py", script], capture_output=True, text=True)
    assert done.returncode == 1 and message in done.stderr and not done.stdout


@pytest.mark.slow
@pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM is not the path of a checkout of Megatron-LM")
@pytest.mark.parametrize("layout", LAYOUTS, ids=("tp", "pp", "vpp", "ep", "overlapped"))
def test_megatron_lm_pretrains_as_without_the_lines(layout):
    script = Path(CHECKOUT) / "pretrain_gpt.py"
    arguments = [*PRETRAIN.split(), *layout.split()]
    ours = with_lines(script, Path(CHECKOUT) / "pretrain_and_generate.py")
    without, text = on_cpu(script, *arguments), on_cpu(ours, *arguments)
    losses = [re.findall(r"lm loss: \S+ .* grad norm: \S+", one) for one in (without, text)]
    generated = re.findall(r"^\[\d+(?:, \d+){7}\]$", text, re.M)
    assert losses[0] == losses[1] and len(losses[0]) == 4
    assert len(set(generated)) == len(generated) == 4


@pytest.mark.slow
@pytest.mark.skipif(not CHECKOUT, reason="MEGATRON_LM is not the path of a checkout of Megatron-LM")
def test_megatron_lms_simple_loop_generates(tmp_path, monkeypatch):
    path = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, (CHECKOUT, path))))  # a wheel lacks what is compiled
    loop = with_lines(Path(CHECKOUT) / "examples" / "run_simple_mcore_train_loop.py", tmp_path / "loop.py")
    assert len(re.findall(r"Iteration \d: \[\d+(?:, \d+){7}\]", on_cpu(loop))) == 10
