"""Adapters that are loaded, unloaded and replaced while clients stream from them: every reply against offline answers.

    taskset -c 0,1 python tools/bench/lora_soak.py [--changes 300] [--clients 64] [--json FILE]

A server of SmolLM2 in bf16 with 3 slots. CLIENTS clients, each with one streamed request after the other, draw one of 6
names or the base model; meanwhile CHANGES loads, unloads and replacements (running requests keep their keys and values,
or recompute them, by chance) go on at all names at once. A reply names the adapter versions that drew its tokens.
One version: its tokens must be those of an offline engine with that content. Several: an offline engine begins with the
first content, replaces it after as many tokens, and so on; of a version that drew none of its tokens a reply says
nothing but that the number is missing. Memory (RSS) of the engine's process is sampled.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import torch
from cases.adapters import write_adapter
from serve_case import events, quantile, served
from serve_soak import Memory

from megatron_infer import LLM, LoRAConfig, SamplingParams

NAMES = [f"n{index}" for index in range(6)]
NUM_CONTENTS, NUM_SLOTS, NUM_PROMPTS, RANK = 12, 3, 8, 16
Segments = tuple[tuple[int, int, str], ...]
"""(first token, content, what running requests did when it came) of each version that drew a part of a reply."""


@dataclass
class Found:
    replies: list[tuple[int, str, list[int], list[tuple[int, int]]]] = field(default_factory=list)
    """(prompt, name or "", tokens, (first token, version) of each span)."""
    lost: list[str] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    loads: list[float] = field(default_factory=list)
    changes: dict[str, int] = field(default_factory=dict)
    late: int = 0
    """Calls of an adapter that came after it was unloaded: 404."""
    busy: int = 0
    """Unloads that were refused as requests used the adapter."""


class Soak:
    def __init__(self, url: str, root: Path, prompts: list[list[int]], num_tokens: int) -> None:
        self.url, self.root, self.prompts, self.num_tokens = url, root, prompts, num_tokens
        self.found, self.ended = Found(), asyncio.Event()
        self.open: set[str] = set()
        """Names that clients may draw."""
        self.history: dict[str, list[tuple[int, str]]] = {name: [] for name in NAMES}
        """Name -> (content, what running requests do) of each of its versions, from 1 on."""
        self.random = random.Random(0)

    async def client(self, number: int) -> None:
        draw = random.Random(number)
        while not self.ended.is_set():
            name = draw.choice(["", *sorted(self.open)])
            prompt = draw.randrange(len(self.prompts))
            body = {"prompt": self.prompts[prompt], "max_tokens": self.num_tokens, "temperature": 0, "stream": True}
            body |= {"ignore_eos": True, "return_token_ids": True} | ({"model": name} if name else {})
            tokens: list[int] = []
            spans, last = None, None
            try:
                async for event in events(self.url, body, 0.0, 1 << 16):
                    if "error" in event:
                        raise ValueError(event["error"]["message"])
                    for choice in event["choices"]:
                        tokens += choice["token_ids"] or []
                        spans = choice.get("version_spans") or spans
                        now = time.perf_counter()
                        if last is not None:
                            self.found.gaps.append(now - last)
                        last = now
            except (OSError, EOFError, ValueError) as error:
                if " 404 " in str(error) and name not in self.open:  # unloaded before the call arrived
                    self.found.late += 1
                    continue
                self.found.lost.append(f"{name}: {type(error).__name__}: {error}")
                continue
            if len(tokens) != self.num_tokens or spans is None:
                self.found.lost.append(f"{name}: {len(tokens)} tokens, spans {spans}")
                continue
            versions = [(span["first_token"], span.get("adapter_version", 0)) for span in spans]
            self.found.replies.append((prompt, name, tokens, versions))

    async def change(self, http: httpx.AsyncClient, name: str, content: int) -> str:
        """Load, replace or unload one -> what was done."""
        is_loaded, began = name in self.open, time.perf_counter()
        if is_loaded and self.random.random() < 0.4:
            self.open.discard(name)
            while True:
                reply = await http.post("/v1/unload_lora_adapter", json={"lora_name": name})
                if reply.status_code != 409:
                    break
                self.found.busy += 1
                await asyncio.sleep(0.2)
            assert reply.status_code == 200, reply.text
            return "unloads"
        running = self.random.choice(["keep", "recompute"])
        body = {"lora_name": name, "lora_path": f"c{content}", "load_inplace": is_loaded, "running": running}
        versions = self.history[name]
        if not is_loaded or versions[-1][0] != content:
            versions.append((content, running))
        reply = await http.post("/v1/load_lora_adapter", json=body)
        assert reply.status_code == 200, reply.text
        self.found.loads.append(time.perf_counter() - began)
        self.open.add(name)
        return "replacements" if is_loaded else "loads"

    async def changes(self, http: httpx.AsyncClient, name: str, count: int) -> None:
        for _ in range(count):
            done = await self.change(http, name, self.random.randrange(NUM_CONTENTS))
            self.found.changes[done] = self.found.changes.get(done, 0) + 1
            await asyncio.sleep(0.2)

    async def run(self, clients: int, changes: int) -> None:
        async with httpx.AsyncClient(base_url=self.url, timeout=120.0) as http:
            running = [asyncio.create_task(self.client(number)) for number in range(clients)]
            await asyncio.gather(*(self.changes(http, name, changes // len(NAMES)) for name in NAMES))
            self.ended.set()
            await asyncio.gather(*running)

    def segments(self, name: str, spans: list[tuple[int, int]]) -> Segments:
        """A span ends where the weights or the adapter change. Where a version between two spans drew nothing, the
        request has started over, whatever its load said of running requests."""
        found: list[tuple[int, int, str]] = []
        last = None
        for first, version in spans:
            content, running = self.history[name][version - 1] if name else (-1, "keep")
            if last is None or version != last:
                is_next = last is None or version == last + 1
                found.append((first, content, running if is_next else "recompute"))
            last = version
        return ((0, found[0][1], "keep"), *found[1:])


def offline(folders: list[Path], cases: list[tuple[list[int], Segments]], num_tokens: int) -> list[list[int]]:
    """The tokens of each (prompt, segments), 16 at a time, each with an adapter name of its own."""
    lora = LoRAConfig(max_loras=16, max_rank=RANK)
    llm = LLM("smollm2", config={"max_requests": 16, "buffer_size_gb": 0.25, "lora": lora, "overlap": False})
    engine, found = llm.engine, []
    for group in _batched(cases, 16):
        ids, drawn = {}, {}
        for index, (prompt, segments) in enumerate(group):
            adapter = None if segments[0][1] < 0 else f"o{index}"
            if adapter is not None:
                engine.load_adapter(adapter, folders[segments[0][1]], replace=True)
            params = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, adapter=adapter)
            ids[engine.add_request({"prompt_token_ids": prompt}, params)] = index
        left = {index: list(segments[1:]) for index, (_, segments) in enumerate(group)}
        now = {index: segments[0][1] for index, (_, segments) in enumerate(group)}
        while engine.has_unfinished():
            for output in engine.step():
                index = ids[output.request_id]
                drawn[index] = output.outputs[0].token_ids
                if left[index] and len(drawn[index]) == left[index][0][0]:
                    _, content, running = left[index].pop(0)
                    if content == now[index]:  # versions in between drew nothing
                        engine.load_adapter(f"o{index}", folders[content - 1], replace=True)
                    engine.load_adapter(f"o{index}", folders[content], replace=True, running=running)
                    now[index] = content
        found += [drawn[index] for index in range(len(group))]
    return found


def _batched(values: list[Any], size: int) -> list[list[Any]]:
    return [values[first : first + size] for first in range(0, len(values), size)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--changes", type=int, default=300)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, 40000, (NUM_PROMPTS, 24), generator=generator).tolist()
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        model = LLM("smollm2", config={"buffer_size_gb": 0.05}).engine.model
        folders = [write_adapter(root / f"c{index}", model, RANK, index) for index in range(NUM_CONTENTS)]
        typed = ["--max-loras", str(NUM_SLOTS), "--max-lora-rank", str(RANK), "--lora-root", folder]
        typed += ["--max-requests", "64", "--max-sequence-length", "256", "--buffer-size-gb", "0.25"]
        with served("smollm2", *typed) as server:
            soak, memory = Soak(server.url, root, prompts, args.tokens), Memory(server)
            memory.start()
            began = time.perf_counter()
            asyncio.run(soak.run(args.clients, args.changes))
            seconds = time.perf_counter() - began
            memory.ending.set()
            memory.join()
        found = soak.found
        given = [(prompts[one[0]], soak.segments(one[1], one[3])) for one in found.replies]
        cases = sorted({(tuple(prompt), segments) for prompt, segments in given})
        answers = dict(zip(cases, offline(folders, [(list(p), s) for p, s in cases], args.tokens), strict=True))
    right = [answers[tuple(prompt), segments] for prompt, segments in given]
    wrong = [(one, tokens) for one, tokens in zip(found.replies, right, strict=True) if one[2] != tokens]
    result = {
        "seconds": round(seconds, 1),
        "changes": found.changes | {"unloads refused as in use": found.busy},
        "replies": len(found.replies),
        "of several versions": sum(len(segments) > 1 for _, segments in given),
        "different offline runs": len(cases),
        "wrong": len(wrong),
        "lost": len(found.lost),
        "calls after an unload (404)": found.late,
        "load ms": {"median": round(1e3 * statistics.median(found.loads)), "most": round(1e3 * max(found.loads))},
        "between tokens, ms": {f"p{share}": round(1e3 * quantile(found.gaps, share / 100)) for share in (50, 99, 100)},
        "MiB": memory.report(),
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} cores, load {os.getloadavg()[0]:.1f}",
    }
    print(json.dumps(result, indent=1))
    for text in (*found.lost[:5], *wrong[:5]):
        print(text)
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    return 1 if found.lost or wrong else 0


if __name__ == "__main__":
    sys.exit(main())
