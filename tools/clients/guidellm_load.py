"""GuideLLM, vLLM's load generator: chats at 4 at once and completions one by one, streamed; each must succeed."""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

RAN = "`run`, profile concurrent: chats streamed at 4 at once and completions one by one, none failed"
NUM_REQUESTS, NUM_TOKENS = 12, 8


def bytes_tokenizer(folder: str) -> None:
    """One token per byte, as the server's small model has."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={one: index for index, one in enumerate(alphabet)}, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=backend).save_pretrained(folder)


def options(url: str, folder: str, path: str, streams: int) -> dict[str, str]:
    """Those that `megatron-infer bench-serve` prints."""
    return {
        "--backend": f"kind=openai_http,target={url},request_format={path}",
        "--profile": f"kind=concurrent,streams={streams}",
        "--constraint": f"kind=max_requests,count={NUM_REQUESTS}",
        "--tokenizer": f"kind=hf_auto,model={folder}",
        "--data": f"kind=synthetic_text,prompt_tokens=64,output_tokens={NUM_TOKENS}",
    }


def run(url: str, folder: str, path: str, streams: int) -> list[dict]:
    report = Path(folder) / "report.json"
    asked = options(url, folder, path, streams) | {"--output": f"kind=json,path={report}"}
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-progress", "--disable-console"]
    done = subprocess.run([*command, *sum(asked.items(), ())], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    requests = json.loads(report.read_text())["benchmarks"][0]["requests"]
    assert not requests["errored"] and not requests["incomplete"], requests["errored"][:1]
    return requests["successful"]


def main(url: str) -> None:
    with tempfile.TemporaryDirectory() as folder:
        bytes_tokenizer(folder)
        for path, streams in (("/v1/chat/completions", 4), ("/v1/completions", 1)):
            replies = run(url, folder, path, streams)
            assert len(replies) == NUM_REQUESTS
            assert {one["output_metrics"]["text_tokens"] for one in replies} == {NUM_TOKENS}
