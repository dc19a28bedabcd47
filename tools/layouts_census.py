"""Which of a trainer's layouts generate with the weights that it trains: each layout with each kind of model.

    python tools/layouts_census.py                                    prints the table
    python tools/layouts_census.py --cells "TP2;EP2 with MLA"         some of its rows and cells
    python tools/layouts_census.py --write | --check                  renews docs/layouts_census.md, or compares

The page has a table of each megatron-core that the tool was run with, and the cells that were not run stay.

A cell is a run of two or four gloo ranks. Two trainers of Megatron's own loop have equal weights and equal batches. One
of them generates before, between and after two steps. The other one is its twin, which never meets an engine.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import re
import sys
import tempfile
import tomllib
import warnings
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from census_page import SAME, Outcome, add_arguments, finish, reasons, table_of, tried

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "layouts_census.md"
TP, PP, EP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size"
ETP, CP, VPP = "expert_tensor_parallel_size", "context_parallel_size", "virtual_pipeline_model_parallel_size"
SP = {TP: 2, "sequence_parallel": True}
CHUNKS = {PP: 2, VPP: 2, "overlap_p2p_comm": True, "batch_p2p_comm": False}
LATENT = {
    "multi_latent_attention": True,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_head_dim": 16,
    "qk_pos_emb_head_dim": 16,
    "v_head_dim": 16,
    "num_query_groups": 4,
}
FSDP2, MEGATRON_FSDP = "FSDP2", "Megatron-FSDP"
STEPS = 2
NUM_PROMPTS, LENGTH = 4, 48
"""Prompts of each data-parallel rank; positions that the twin's forward pads each of them to."""
NUM_TOKENS = 10


@dataclass(frozen=True, kw_only=True)
class Layout:
    """sizes: fields of the config, of which those that end in _size are also the sizes of groups."""

    ranks: int = 2
    sizes: dict[str, Any] = field(default_factory=dict)
    overlaps: bool = False
    """The distributed optimizer reduces gradients and gathers parameters in overlap."""
    fsdp: str = ""
    """FSDP2 (torch's) or MEGATRON_FSDP over data- and context-parallel ranks; "": Megatron's DDP."""

    @property
    def groups(self) -> dict[str, int]:
        return {name: size for name, size in self.sizes.items() if name.endswith("_size")}

    @property
    def needs_experts(self) -> bool:
        return EP in self.sizes or ETP in self.sizes


LAYOUTS: dict[str, Layout] = {
    "TP2": Layout(sizes={TP: 2}),
    "TP2, sequence parallel": Layout(sizes=SP),
    "PP2": Layout(sizes={PP: 2}),
    "PP2, two chunks": Layout(sizes=CHUNKS),
    "EP2": Layout(sizes={EP: 2}),
    "TP2, ETP2": Layout(sizes=SP | {ETP: 2}),
    "TP2 x EP2, ETP1": Layout(sizes=SP | {EP: 2, ETP: 1}),
    "CP2": Layout(sizes={CP: 2}),
    "DP2": Layout(),
    "DP2, overlapped": Layout(overlaps=True),
    "FSDP2": Layout(fsdp=FSDP2),
    "CP2, FSDP2": Layout(sizes={CP: 2}, fsdp=FSDP2),
    "Megatron-FSDP": Layout(fsdp=MEGATRON_FSDP),
    "CP2, Megatron-FSDP": Layout(sizes={CP: 2}, fsdp=MEGATRON_FSDP),
    "EP2, Megatron-FSDP": Layout(sizes={EP: 2}, fsdp=MEGATRON_FSDP),
    "TP4": Layout(ranks=4, sizes=SP | {TP: 4}),
    "PP4": Layout(ranks=4, sizes={PP: 4}),
    "EP4": Layout(ranks=4, sizes={EP: 4}),
    "CP4": Layout(ranks=4, sizes={CP: 4}),
    "TP2 x PP2": Layout(ranks=4, sizes=SP | {PP: 2}),
    "TP2 x PP2, two chunks": Layout(ranks=4, sizes=SP | CHUNKS),
    "TP2 x CP2": Layout(ranks=4, sizes=SP | {CP: 2}),
    "TP2 x EP2": Layout(ranks=4, sizes=SP | {EP: 2}),
    "TP2 x DP2, overlapped": Layout(ranks=4, sizes=SP, overlaps=True),
    "TP2 x FSDP2": Layout(ranks=4, sizes=SP, fsdp=FSDP2),
    "PP2 x CP2": Layout(ranks=4, sizes={PP: 2, CP: 2}),
    "PP2 x EP2": Layout(ranks=4, sizes={PP: 2, EP: 2}),
    "PP2, two chunks, x EP2": Layout(ranks=4, sizes=CHUNKS | {EP: 2}),
    "PP2 x DP2, overlapped": Layout(ranks=4, sizes={PP: 2}, overlaps=True),
    "EP2 x DP2, overlapped": Layout(ranks=4, sizes={EP: 2}, overlaps=True),
    "CP2 x EP2": Layout(ranks=4, sizes={CP: 2, EP: 2}),
    "CP2 x DP2, overlapped": Layout(ranks=4, sizes={CP: 2}, overlaps=True),
}
KINDS = ("GPT", "MoE", "hybrid", "MLA")


PRELOAD = (
    *("megatron.core.distributed", "megatron.core.optimizer", "megatron.core.pipeline_parallel"),
    *("megatron_infer.rl.session", "engine_ranks", "session_case", "trainers", "training_case"),
)
"""Imports that all cells share: half of what one costs."""


def prepare() -> None:
    """The tests' helpers and megatron-core without its warnings."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["pytest"]["ini_options"]
    sys.path[:0] = [str(ROOT), *(str(ROOT / folder) for folder in settings["pythonpath"])]
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.environ |= {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


# ---------------------------------------------------------------------- a cell on a rank


def settings_of(kind: str, layout: Layout) -> dict[str, Any]:
    """Fields of the config and arguments of the model; `pattern` of a hybrid one."""
    from training_case import EXPERTS

    common = {"init_method_std": 0.2, "position_embedding_type": "rope", "max_sequence_length": 128}
    if kind == "hybrid":
        divided = "M*|EM|*-|ME" if VPP in layout.sizes else "M*EM*-ME"
        return common | EXPERTS | {"pattern": divided, "mamba_num_groups": max(2, layout.sizes.get(TP, 1))}
    common |= {"num_layers": 4, "qk_layernorm": True}
    return common | (EXPERTS if kind != "GPT" else {}) | (LATENT if kind == "MLA" else {})


def chunks_of(kind: str, layout: Layout, weights: dict[str, Any]) -> list[Any]:
    """This rank's part of the model, as Megatron's get_model makes it, with the weights of the whole one."""
    from engine_ranks import take_part
    from gloo_ranks import stage_ends

    from megatron_infer.models.mcore_compat import parallel_state
    from megatron_infer.models.specs import gpt_spec
    from megatron_infer.testing.cpu_shim import cpu_shim
    from megatron_infer.testing.tiny import tiny_gpt, tiny_hybrid

    rank, stages = parallel_state.get_pipeline_model_parallel_rank(), layout.sizes.get(PP, 1)
    ends, number = stage_ends(rank, stages), layout.sizes.get(VPP, 1)
    chunks = []
    for place in range(number):
        vp_stage = place if number > 1 else None
        how: dict[str, Any] = {
            "pre_process": ends["pre_process"] and place == 0,
            "post_process": ends["post_process"] and place == number - 1,
        }
        if vp_stage is not None:
            how["vp_stage"] = vp_stage
        if kind != "hybrid":
            how["spec"] = lambda config, at=vp_stage: gpt_spec(config, pp_rank=rank, vp_stage=at)
        with cpu_shim(2):
            make = tiny_hybrid if kind == "hybrid" else tiny_gpt
            chunk = make(**settings_of(kind, layout), **layout.sizes, **how)
        take_part(chunk, weights)
        chunks.append(chunk)
    return chunks


class Fsdp2Trainer:
    """AdamW on a model whose layers and root are in FSDP2."""

    def __init__(self, model: Any) -> None:
        import torch
        from torch.distributed.device_mesh import DeviceMesh
        from torch.distributed.fsdp import fully_shard

        from megatron_infer.models.mcore_compat import parallel_state

        mesh = DeviceMesh.from_group(parallel_state.get_data_parallel_group(with_context_parallel=True), "cpu")
        self.tp = parallel_state.get_tensor_model_parallel_group()
        self.split = {name for name, one in model.named_parameters() if getattr(one, "sequence_parallel", False)}
        """Parameters that each tensor-parallel rank applies to its part of the positions."""
        for layer in model.decoder.layers:
            fully_shard(layer, mesh=mesh)
        self.model = fully_shard(model, mesh=mesh)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.02)

    def step(self, sequences: list[list[int]]) -> float:
        import torch

        found = backwards(self.model, sequences)
        for name, parameter in self.model.named_parameters():
            if name in self.split:
                torch.distributed.all_reduce(parameter.grad.to_local(), group=self.tp)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return found

    def reshard(self) -> None:
        self.model.reshard()


def megatron_fsdp_trainer(model: Any) -> Any:
    """One whose steps are of sequences."""
    from trainers import MegatronFsdpTrainer

    class Trainer(MegatronFsdpTrainer):
        def step(self, sequences: list[list[int]]) -> float:  # type: ignore[override]
            found = backwards(self.model, sequences)
            self.finish()
            return found

        def reshard(self) -> None:
            self.fsdp.all_gather_pipeline.reset()
            self.fsdp._replace_param_with_distributed_if_needed()

    return Trainer(model)


def backwards(model: Any, sequences: list[list[int]]) -> float:
    """The mean loss of each sequence, of which a context-parallel rank has its positions -> their sum."""
    import torch
    from session_case import own_positions

    from megatron_infer.testing.cpu_shim import cpu_shim

    model.train()
    found = 0.0
    for sequence in sequences:
        ids = torch.tensor([sequence])
        batch = {"ids": ids, "positions": torch.arange(len(sequence))[None], "labels": ids.roll(-1, 1)}
        ids, positions, labels = own_positions(batch).values()
        with cpu_shim(1):
            loss = model(ids, positions, None, labels=labels).mean()
            loss.backward()
        found += loss.item()
    return found


def trainer_of(chunks: list[Any], layout: Layout) -> Any:
    from trainers import MegatronTrainer

    if layout.fsdp:
        return (Fsdp2Trainer if layout.fsdp == FSDP2 else megatron_fsdp_trainer)(chunks[0])
    return MegatronTrainer(
        chunks if len(chunks) > 1 else chunks[0],
        distributed=bool(layout.sizes) or layout.overlaps,
        overlap=layout.overlaps,
    )


def step_of(trainer: Any, sequences: list[list[int]]) -> float:
    from training_case import megatron_step

    if hasattr(trainer, "reshard"):
        return trainer.step(sequences)
    return megatron_step(trainer, sequences, [[number] for number in range(len(sequences))])[0]


def parts_of(model: Any) -> list[Any]:
    return model if isinstance(model, list) else [model]


def own_forward(trainer: Any, sequences: list[list[int]]) -> list[Any]:
    """Logits of all positions of each sequence by Megatron's own schedule, without a cache; on ranks of the last stage.

    Each rank passes as many sequences as the others.
    """
    import torch
    from megatron.core import parallel_state, tensor_parallel
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from session_case import own_positions

    from megatron_infer.testing.cpu_shim import cpu_shim

    roots = parts_of(trainer.model)
    for root in roots:
        root.eval()
    cp, places = parallel_state.get_context_parallel_group(), torch.arange(LENGTH)[None]
    own = own_positions({"places": places})["places"]

    def whole(logits_BSV: torch.Tensor) -> torch.Tensor:
        if parallel_state.get_tensor_model_parallel_world_size() > 1:
            logits_BSV = tensor_parallel.gather_from_tensor_model_parallel_region(logits_BSV)
        logits_SV = logits_BSV[0].float()
        parts = [torch.empty_like(logits_SV) for _ in range(cp.size())]
        positions = [torch.empty_like(own[0]) for _ in range(cp.size())]
        torch.distributed.all_gather(parts, logits_SV.contiguous(), group=cp)
        torch.distributed.all_gather(positions, own[0].contiguous(), group=cp)
        return torch.cat(parts)[torch.cat(positions).argsort()]

    def forward_step(batches: Iterator[list[int]], model: Any) -> Any:
        sequence = next(batches)
        ids = torch.tensor([sequence + [0] * (LENGTH - len(sequence))])
        out = model(ids.gather(1, own), own, None)
        return out, lambda logits, **_: whole(logits)

    if hasattr(trainer, "reshard"):
        batches = iter(sequences)
        with torch.no_grad(), cpu_shim(1):
            found = [whole(forward_step(batches, trainer.model)[0]) for _ in sequences]
        trainer.reshard()
        return found
    config = roots[0].config
    config.variable_seq_lengths = False
    with torch.no_grad(), cpu_shim(4):
        return get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(sequences) for _ in roots] if len(roots) > 1 else iter(sequences),
            model=roots,
            num_microbatches=len(sequences),
            seq_length=LENGTH,
            micro_batch_size=1,
            forward_only=True,
            collect_non_loss_data=True,
        )


def rollout(session: Any, meter: Any, prompts: list[list[int]], outcome: Outcome) -> list[Any]:
    """Samples of this rank's prompts; the meter's figure is added to `outcome`."""
    from megatron_infer.config.sampling_params import SamplingParams
    from megatron_infer.testing.cpu_shim import cpu_shim

    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0)
    with session.generating() as roll:
        groups = roll.generate(prompts, params)
        with cpu_shim(4):
            report = meter.observe(groups)
    outcome.meter = max(outcome.meter or 0.0, report.figures.abs_diff_max)
    outcome.checks["meter"] = outcome.checks.get("meter", True) and not report.is_alarm
    return [group.samples[0] for group in groups]


def run_cell(kind: str, layout: Layout) -> Outcome:
    import torch
    from session_case import make_session
    from training_case import sequences_of

    from megatron_infer.models.mcore_compat import parallel_state, version
    from megatron_infer.rl.mismatch_meter import MismatchMeter

    torch.compiler.set_stance("force_eager")  # megatron-core compiles a function of its routers
    if kind == "hybrid" and VPP in layout.sizes and version() < (0, 19):
        return Outcome("not built", "megatron-core before 0.19 has no virtual stages of hybrid models")
    trainers, not_built = tried(lambda: [trainer_of(chunks, layout) for chunks in built(kind, layout)], folder=ROOT)
    if trainers is None:
        return Outcome("not built", not_built.reason)
    ours, twin = trainers
    outcome = Outcome(kind="served", checks={"training": True})
    session = make_session(ours.model, settings={"collective_timeout_s": 60}, meter=None)
    meter = MismatchMeter(session, share=1.0)
    replica = parallel_state.get_data_parallel_rank()
    prompts = sequences_of([7, 16, 25, 34][:NUM_PROMPTS], seed=100 + replica)
    drawn = []
    for step in range(STEPS + 1):
        samples = rollout(session, meter, prompts, outcome)
        drawn.append([sample.token_ids for sample in samples])
        logits = own_forward(twin, [sample.ids for sample in samples])
        assert len(logits) == (len(samples) if parallel_state.is_pipeline_last_stage(ignore_virtual=True) else 0)
        for sample, rows in zip(samples, logits, strict=False):  # none on stages before the last one
            first = len(sample.prompt_ids) - 1
            at = rows.log_softmax(-1)[first : first + NUM_TOKENS]
            outcome.add(at, sample.token_ids, sample.raw_logprobs)
        if step < STEPS:
            batch = sequences_of([16] * 4, seed=10 * step + replica)
            want, not_trained = tried(lambda batch=batch: step_of(twin, batch), folder=ROOT)
            if want is None:
                return Outcome("not trained", not_trained.reason)
            with session.training():
                outcome.checks["training"] &= step_of(ours, batch) == want
            session.update_weights()
    for trainer in trainers if layout.overlaps else ():
        for chunk in parts_of(trainer.model):
            chunk.disable_forward_pre_hook()  # gathers what the next forward would gather
    outcome.checks["training"] &= all(map(torch.equal, parameters_of(ours), parameters_of(twin)))
    outcome.checks["new weights"] = len({str(one) for one in drawn}) == STEPS + 1
    for group in {session.engine.rank_group, session.ranks}:
        group.lockstep.close()
    return outcome


def built(kind: str, layout: Layout) -> list[list[Any]]:
    """The chunks of the trainer that generates, and of its twin."""
    from engine_ranks import weights_of
    from gloo_ranks import new_groups

    from megatron_infer.testing.tiny import tiny_gpt, tiny_hybrid

    settings = settings_of(kind, layout)
    new_groups()
    if kind == "hybrid":
        whole = tiny_hybrid(**settings | {"pattern": settings["pattern"].replace("|", "")})
    else:
        whole = tiny_gpt(**settings)
    weights = weights_of(whole)
    new_groups(**layout.groups)
    return [chunks_of(kind, layout, weights) for _ in range(2)]


def parameters_of(trainer: Any) -> list[Any]:
    """Of this rank, those that FSDP2 shards as shards."""
    found = [one.detach() for chunk in parts_of(trainer.model) for one in chunk.parameters()]
    return [one.to_local() if hasattr(one, "to_local") else one for one in found]


def on_rank(rank: int, size: int, folder: Path, kind: str, name: str) -> None:
    prepare()
    from trainers import megatron_fsdp_on_cpu

    with megatron_fsdp_on_cpu() if LAYOUTS[name].fsdp == MEGATRON_FSDP else nullcontext():
        outcome, wrong = tried(lambda: run_cell(kind, LAYOUTS[name]), folder=folder)
    (folder / f"{rank}.json").write_text(json.dumps(asdict(wrong if outcome is None else outcome)))
    if outcome is None:
        sys.exit(1)  # the others wait for this rank


# ---------------------------------------------------------------------- the table


def cell_of(kind: str, name: str) -> Outcome:
    """A run of all ranks."""
    from gloo_ranks import run_on_ranks

    layout = LAYOUTS[name]
    with tempfile.TemporaryDirectory() as folder:
        _, ended = tried(lambda: run_on_ranks(on_rank, layout.ranks, Path(folder), kind, name), folder=Path(folder))
        found = [Outcome(**json.loads(file.read_text())) for file in sorted(Path(folder).glob("*.json"))]
    failed = [one for one in found if one.kind != "served"]
    own = [one for one in failed if "rank" not in one.reason.split(":")[0]]  # not what another rank's error caused
    for one in (*sorted(own, key=lambda one: one.kind != "refused"), *failed):
        return one
    if len(found) < layout.ranks:
        return Outcome(reason=ended.reason)
    whole = Outcome(kind="served", meter=max(one.meter or 0.0 for one in found))
    whole.difference = max(one.difference for one in found)
    whole.tokens_wrong = sum(one.tokens_wrong for one in found)
    whole.checks = {check: all(one.checks[check] for one in found) for check in found[0].checks}
    return whole


HEADER = ["layout", *KINDS]
SERVED = re.compile(r"(0|1e-\d) / (?:0|1e-\d)")
REASON = re.compile(rf"(.+? with (?:{'|'.join(KINDS)}))(, |: )")
SECTION = "## megatron-core "
INTRODUCTION = """# Census of layouts

<!-- made by tools/layouts_census.py --write; tests/distributed/test_layouts_census.py compares it -->

Which of a trainer's layouts generate with the weights that it trains, by kind of model, on gloo ranks of a CPU.
`python tools/layouts_census.py` prints the table of the megatron-core that is installed.

| | |
|---|---|
| a cell | the largest difference of log probabilities from the twin's forward / the largest that the meter saw |
| the twin | a trainer with equal weights, batches and layout that never meets an engine |
| its forward | without a cache, by Megatron's own schedule, of the tokens that the rollout drew |
| training | Megatron's own step, or FSDP2 with AdamW; losses and weights after two steps have the bits of the twin's |
| rollouts | before, between and after the steps; each data-parallel rank has prompts of its own |

Tokens are those of the twin's forward, training has the twin's bits, and rollouts follow new weights, unless a
cell says otherwise. Figures are rounded up to a power of ten. Models are tiny and random, in fp32. All but GPT have
experts. A cell is empty where there are no experts to divide. Tensor-parallel ranks train with sequence parallelism,
but for "TP2" alone. "Overlapped" is the distributed optimizer, which reduces gradients and gathers parameters in
overlap. FSDP is over data- and context-parallel ranks. "ETP" is the tensor parallelism of experts, "two chunks" are
virtual stages. A table has the cells that were run with its megatron-core; others are empty.
megatron-core 0.20.0 is Megatron-LM at d98e8a64.
"""


@dataclass
class Section:
    """What the page says of one megatron-core."""

    rows: dict[str, dict[str, str]] = field(default_factory=dict)
    """Layout -> kind -> cell."""
    why: dict[str, str] = field(default_factory=dict)
    """Why a cell is not served, by "LAYOUT with KIND"."""

    def renew(self, name: str, outcomes: Mapping[str, Outcome]) -> None:
        self.rows[name] = self.rows.get(name, {}) | {kind: str(one) for kind, one in outcomes.items()}
        for kind, one in outcomes.items():
            self.why.pop(f"{name} with {kind}", None)
            if one.reason:
                self.why[f"{name} with {kind}"] = one.reason

    def lines(self, version: str) -> list[str]:
        rows = {name: self.rows[name] for name in LAYOUTS if name in self.rows}
        cells = [cell for row in rows.values() for cell in row.values()]
        served = [found for cell in cells if (found := SERVED.fullmatch(cell)) and float(found[1]) <= SAME]
        places = {f"{name} with {kind}": self.why.get(f"{name} with {kind}", "") for name in rows for kind in KINDS}
        why = reasons((name, Outcome(reason=reason)) for name, reason in places.items())
        return [
            SECTION + version,
            "",
            f"Of {len(cells)} pairs of a layout and a kind **{len(served)} are served**.",
            "",
            *table_of(HEADER, [line_of(name, row) for name, row in rows.items()]),
            "",
            *([*why, ""] if why else []),
        ]


def line_of(name: str, row: Mapping[str, object]) -> list[str]:
    return [name, *(str(row.get(kind, "")) for kind in KINDS)]


def read_page() -> dict[str, Section]:
    """Version of megatron-core -> what the page says of it."""
    found: dict[str, Section] = {}
    section = Section()
    for line in PAGE.read_text().splitlines() if PAGE.exists() else []:
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        if line.startswith(SECTION):
            section = found[line.removeprefix(SECTION)] = Section()
        elif cells and cells[0] in LAYOUTS:
            section.rows[cells[0]] = {kind: cell for kind, cell in zip(KINDS, cells[1:], strict=True) if cell}
        elif line.startswith("* "):
            names, rest = [], line[2:]
            while (name := REASON.match(rest)) is not None:
                names.append(name[1])
                rest = rest[name.end() :]
                if name[2] == ": ":
                    break
            section.why |= dict.fromkeys(names, rest)
    return found


def page_of(sections: Mapping[str, Section]) -> str:
    return "\n".join(
        [INTRODUCTION, *(line for version in sorted(sections) for line in sections[version].lines(version))]
    )


def asked(text: str | None) -> dict[str, list[str]]:
    """Layout -> kinds. Raises SystemExit for a name that is none."""
    whole = {
        name: [kind for kind in KINDS if kind != "GPT" or not layout.needs_experts] for name, layout in LAYOUTS.items()
    }
    if text is None:
        return whole
    found: dict[str, list[str]] = {}
    for cell in text.split(";"):
        name, _, kind = cell.partition(" with ")
        if name not in whole or (kind and kind not in whole[name]):
            raise SystemExit(f"layouts_census: no cell {cell!r}; layouts are {'; '.join(LAYOUTS)}; kinds {KINDS}")
        found.setdefault(name, []).extend([kind] if kind else whole[name])
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cells", help="LAYOUT or LAYOUT with KIND, with semicolons between them; default: all")
    add_arguments(parser, PAGE)
    options = parser.parse_args()
    cells = asked(options.cells)
    prepare()
    import gloo_ranks
    from megatron.core import __version__

    gloo_ranks.PRELOAD += PRELOAD
    sections = read_page()
    own = sections[__version__] = sections.get(__version__, Section()) if options.cells else Section()
    for name, kinds in cells.items():
        outcomes = {kind: cell_of(kind, name) for kind in kinds}
        own.renew(name, outcomes)
        print(table_of(HEADER, [line_of(name, own.rows[name])])[-1], flush=True)
        print(*reasons(outcomes.items()), sep="\n", flush=True)
    return finish(options, PAGE, page_of(sections))


if __name__ == "__main__":
    sys.exit(main())
