"""A per-token output is added in three files, and files, messages and ranks carry it without another line.

The test adds two to a copy of the package, by these edits and no others: `entropy`, a number per token, and `near`, the
ids within one nat of the likeliest. `token_output_case.py` then runs on the copy.
"""

from __future__ import annotations

import ast
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_infer.outputs import schema
from megatron_infer.outputs.token_outputs import TokenValues
from megatron_infer.scheduler.request import VersionSpan

ROOT = Path(__file__).parents[2]
EDITS: dict[str, tuple[tuple[str, str], ...]] = {
    "config/sampling_params.py": (
        (
            "    return_routing: bool = False\n",
            "    return_entropy: bool = False\n    return_near: bool = False\n    return_routing: bool = False\n",
        ),
    ),
    "runner/sampling/returned_details.py": (
        (
            "    return index, columns\n",
            '    if (flags & RETURNS["return_entropy"]).any():\n'
            '        columns["entropy"] = None\n'
            '    if (asked := np.flatnonzero(flags & RETURNS["return_near"])).size:\n'
            '        columns["near"] = np.full(len(rows), WHOLE, dtype=np.int64)\n'
            '        columns["near"][asked] = np.arange(len(asked))\n'
            "    return index, columns\n",
        ),
        (
            "    places = {key: places for key, places in plan.columns.items() if places is not None}\n",
            "    logprobs_AV = group.take(logits_SV).float().log_softmax(-1)\n"
            '    if "entropy" in plan.columns:\n'
            '        found["entropy"] = -(logprobs_AV.exp() * logprobs_AV).sum(-1)\n'
            '    if (near := plan.columns.get("near")) is not None:\n'
            "        asked = torch.from_numpy(np.flatnonzero(near >= 0))\n"
            '        found["near"] = pack_bits(logprobs_AV[asked] >= logprobs_AV[asked].amax(-1, keepdim=True) - 1.0)\n'
            "    places = {key: places for key, places in plan.columns.items() if places is not None}\n",
        ),
    ),
    "outputs/token_outputs.py": (
        (
            ')\n"""Their order is that of saved files."""\n',
            '    NumberOutput("entropy", "entropy", "return_entropy", ("float32",)),\n'
            '    IdSetOutput("near", "near", "return_near", ("int32",)),\n'
            ')\n"""Their order is that of saved files."""\n',
        ),
        (
            "    routing: np.ndarray | None = None\n",
            "    entropy: list[float] | None = None\n"
            "    near: TokenSupport | None = None\n"
            "    routing: np.ndarray | None = None\n",
        ),
    ),
}

ON_THE_COPY = """
import multiprocessing, sys
context = multiprocessing.get_context("forkserver")
context.set_forkserver_preload(["megatron_infer.engine.engine", "megatron_infer.testing.tiny", "pytest"])
main = "import pathlib, sys, token_output_case; token_output_case.main(pathlib.Path(sys.argv[1]))"
case = context.Process(target=exec, args=(main, {}))
case.start()
case.join()
sys.exit(case.exitcode)
"""
"""The case and its ranks are forks of one server: the copy is imported once."""


@pytest.mark.long
def test_two_outputs_added_in_three_files_arrive_everywhere(tmp_path):
    shutil.copytree(ROOT / "megatron_infer", tmp_path / "megatron_infer", ignore=shutil.ignore_patterns("__pycache__"))
    assert len(EDITS) <= 3
    for name, edits in EDITS.items():
        path = tmp_path / "megatron_infer" / name
        text = path.read_text()
        for before, after in edits:
            assert text.count(before) == 1, f"{name}: {before!r}"
            text = text.replace(before, after)
        path.write_text(text)
    docstring = ast.get_docstring(ast.parse((ROOT / "megatron_infer/outputs/token_outputs.py").read_text())) or ""
    assert set(re.findall(r"(?<![\w/])(?:[a-z_]+/)+[a-z_]+\.py", docstring)) - {
        "tests/contract/test_token_outputs.py"
    } == set(EDITS)
    paths = [tmp_path, *(ROOT / "tests" / name for name in ("contract", "distributed", "engine/outputs", "support"))]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, paths))}
    command = [sys.executable, "-c", ON_THE_COPY, str(tmp_path)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]


def test_what_carries_outputs_names_none_of_them():
    names = re.compile(r"\b(raw_logprobs|processed_logprobs|return_sampled_logprobs|return_support)\b|\.support\b")
    carriers = (
        "distributed engine/durable coordinator runner/parallel "
        "engine/requests runner/in_flight.py rl/sample_file.py rl/sample_codec.py"
    )
    package = ROOT / "megatron_infer"
    paths = [path for name in carriers.split() for path in (*(package / name).rglob("*.py"), package / name)]
    files = [path for path in paths if path.is_file()]
    assert len(files) > 30
    assert [str(path) for path in files if names.search(path.read_text())] == []


LAYOUT = {
    "TokenValues": ("dtype", "shape", "content", "counts", "vocab_size"),
    "Piece": (
        "index",
        "offset",
        "tokens",
        "text",
        "finish_reason",
        "stop_reason",
        "cumulative_logprob",
        "logprobs",
        "spans",
        "token_outputs",
    ),
    "Failure": ("kind", "message"),
    "VersionSpan": ("first_token", "policy_version", "kv_version_min", "kv_version_max", "adapter_version"),
}
"""The records that are arrays in files: a field is known by its place alone."""


def test_records_of_saved_files_are_laid_out_as_their_version_says():
    """A change here needs a higher SCHEMA, and a file of the version before among the files that tests refuse."""
    assert schema.SCHEMA == 2
    found = {kind.__name__: kind.__struct_fields__ for kind in (TokenValues, schema.Piece, schema.Failure)}
    assert found | {"VersionSpan": VersionSpan._fields} == LAYOUT
