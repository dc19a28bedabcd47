"""lm-eval through our server gives what it gives with its own `hf` backend: log likelihoods side by side.

    python tools/lm_eval_check.py [--model smollm2 | DIR] [--limit 1e-3]

Needs lm-eval with its api extra (pip install 'lm-eval[api]') and transformers. A GGUF model is written as an HF
directory first, with its tokenizer; both sides load that directory in float32. The tasks are a few questions and
texts in a file.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import tempfile
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools" / "bench")]

from serve_case import served  # noqa: E402

QUESTIONS = [
    ("The capital of France is", ["Paris", "London", "a river", "Berlin"], 0),
    ("Water freezes at", ["zero degrees Celsius", "fifty degrees Celsius", "noon"], 0),
    ("The opposite of hot is", ["warm", "cold", "heat", "burning"], 1),
    ("2 + 2 =", ["3", "4", "5", "22"], 1),
    ("The sun rises in the", ["east", "west", "north", "evening"], 0),
    ("A dog is a kind of", ["plant", "animal", "stone"], 1),
    ("import numpy as", ["np", "pd", "plt", "tf"], 0),
    ("Shakespeare wrote", ["Hamlet", "the Iliad", "Don Quixote", "Faust"], 0),
    ("The largest planet of the solar system is", ["Mars", "Jupiter", "Venus", "the Moon"], 1),
    ("Bees make", ["honey", "milk", "bread"], 0),
    ("日本の首都は", ["東京", "大阪", "京都"], 0),
    ("To be or not to be, that is the", ["question", "answer", "problem", "end"], 0),
]
TEXTS = [
    "Photosynthesis is the process by which plants turn light into sugar. It takes place in the leaves.",
    "def fibonacci(n):\n    return n if n < 2 else fibonacci(n - 1) + fibonacci(n - 2)\n",
    "It was a bright cold day in April, and the clocks were striking thirteen.",
]
CHOICE = """
task: small_choice
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/choice.jsonl}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{answer}}}}"
doc_to_choice: "{{{{choices}}}}"
metric_list: [{{metric: acc, aggregation: mean, higher_is_better: true}}]
"""
ROLLING = """
task: small_texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {folder}/texts.jsonl}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: word_perplexity}}]
"""


def write_tasks(folder: Path) -> None:
    items = [{"question": text, "choices": choices, "answer": right} for text, choices, right in QUESTIONS]
    (folder / "choice.jsonl").write_text("".join(json.dumps(one) + "\n" for one in items), encoding="utf-8")
    (folder / "texts.jsonl").write_text("".join(json.dumps({"text": one}) + "\n" for one in TEXTS), encoding="utf-8")
    (folder / "small_choice.yaml").write_text(CHOICE.format(folder=folder), encoding="utf-8")
    (folder / "small_texts.yaml").write_text(ROLLING.format(folder=folder), encoding="utf-8")


def write_model(model: str, folder: Path) -> Path:
    """An HF directory of a model, float32."""
    if Path(model).is_dir():
        return Path(model)
    from megatron_infer.models.loading.hf_export import write_hugging_face
    from megatron_infer.models.loading.sources import open_source

    write_hugging_face(open_source(model), folder, dtype="float32")
    return folder


def evaluate(backend: str, tasks: Path, **model_args: Any) -> dict[str, list[tuple[float, bool | None]]]:
    """Task -> (log likelihood, whether it is what greedy decoding says) of every request, in order."""
    import lm_eval
    from lm_eval.tasks import TaskManager

    names = ["small_choice", "small_texts"]
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    done = lm_eval.simple_evaluate(
        model=backend, model_args=model_args, tasks=names, task_manager=manager, log_samples=True, bootstrap_iters=0
    )
    found: dict[str, list[tuple[float, bool | None]]] = {}
    for name in names:
        for sample in sorted(done["samples"][name], key=lambda one: one["doc_id"]):
            for reply, *_ in sample["resps"]:
                pair = reply if isinstance(reply, (list, tuple)) else (reply, None)
                found.setdefault(name, []).append((float(pair[0]), pair[1]))
    print(f"{backend}: {json.dumps({name: done['results'][name] for name in names}, default=str)[:600]}")
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--limit", type=float, default=1e-3, help="largest difference allowed (default 1e-3)")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        tasks, folder = Path(name) / "tasks", Path(name) / "model"
        tasks.mkdir()
        write_tasks(tasks)
        model = write_model(args.model, folder)
        theirs = evaluate("hf", tasks, pretrained=str(model), dtype="float32", device="cpu", batch_size=1)
        options = ("--dtype", "float32", "--max-sequence-length", "512", "--buffer-size-gb", "0.3")
        with served(str(model), "--served-model-name", "checked", *options) as server:
            url = f"{server.url}/v1/completions"
            ours = evaluate(
                "local-completions", tasks, model="checked", base_url=url, tokenizer=str(model), max_length=512,
                num_concurrent=4, max_retries=1, tokenizer_backend="huggingface",
            )  # fmt: skip
    worst = 0.0
    for task, pairs in theirs.items():
        assert len(pairs) == len(ours[task]) and all(math.isfinite(value) for value, _ in ours[task]), ours[task]
        differences = [abs(a - b) for (a, _), (b, _) in zip(pairs, ours[task], strict=True)]
        greedy = sum(a == b for (_, a), (_, b) in zip(pairs, ours[task], strict=True))
        worst = max(worst, *differences)
        print(f"{task}: {len(pairs)} log likelihoods from {min(v for v, _ in pairs):.2f} to "
              f"{max(v for v, _ in pairs):.2f}, largest difference {max(differences):.2e}; greedy flags equal: "
              f"{greedy} of {len(pairs)}")  # fmt: skip
    print(f"largest difference {worst:.2e}, limit {args.limit:g}")
    return 0 if worst <= args.limit else 1


if __name__ == "__main__":
    sys.exit(main())
