"""Which of Megatron-Bridge's text families are adopted, and which Hugging Face directories of theirs are served.

    make census                                          installs what is compared with, then prints the table
    python tools/census.py [--families llama,gemma2]     the same, of some families
    python tools/census.py --write | --check             renew docs/models_census.md, or compare with it (exits with 1)

Each family is built at tiny size by the settings of its recipe (`AutoBridge.to_megatron_provider`) with the weights of
a random transformers model, and then adopted as it is. A row counts if the model's own forward gives transformers' log
probabilities: a config that lost its fields builds another model. The directory of the same transformers model is
loaded as `megatron-infer generate DIRECTORY` does. Stand-ins of GPU packages (tests/models/stand_ins) compute in torch.
"""

from __future__ import annotations

import argparse
import json
import logging
import multiprocessing
import os
import re
import sys
import tempfile
import typing
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from census_families import FAMILIES, OUT_OF_SCOPE, SAME_FAMILY, Family
from census_page import Outcome, add_arguments, figure, finish, reasons, table_of, tried

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "models_census.md"
PACKAGES = Path(sys.prefix) / "census"
"""Where `make census` puts Megatron-Bridge and the megatron-core that it wants."""
CPU = {
    "use_cpu_initialization": True,
    "bf16": False,
    "fp16": False,
    "seq_length": 64,
    "gradient_accumulation_fusion": False,
    "masked_softmax_fusion": False,
    "apply_rope_fusion": False,
    "moe_permute_fusion": False,
    "moe_router_fusion": False,
    "cross_entropy_loss_fusion": False,
    "recompute_granularity": None,
    "recompute_modules": None,
    "moe_token_dispatcher_type": "alltoall",
    "moe_flex_dispatcher_backend": None,
    "moe_shared_expert_overlap": False,
}
"""Settings of a recipe that ask for a GPU, as a CPU has them; types besides."""
PROMPTS = [list(range(3, 23)), [7, 250, 9, 9, 31], [(5 * i + 2) % 256 for i in range(33)]]
NUM_TOKENS = 12
GUARD = 5e-4
"""Largest difference of log probabilities from transformers of a model that counts as the family."""
WAYS = ("live model", "its checkpoint", "directory", "torch_dist and back")
"""Columns of the table, each with an outcome."""


@dataclass
class Row:
    """A family. guard: the own forward's difference from transformers, or why there is none."""

    name: str
    guard: float | str = "not built"
    ways: dict[str, Outcome] = field(default_factory=dict)

    @property
    def is_guarded(self) -> bool:
        return isinstance(self.guard, float) and self.guard <= GUARD

    @property
    def cells(self) -> list[str]:
        guard = "-" if isinstance(self.guard, str) else figure(self.guard)
        form = " (form)" if FAMILIES[self.name].variant else ""
        mark = "" if isinstance(self.guard, str) or self.is_guarded else " (another model)"
        return [self.name + form, guard + mark, *(str(self.ways[way]) for way in WAYS)]


def prepare(packages: list[Path]) -> None:
    """Put `packages` and the stand-ins first on the path; nothing of megatron or transformers is imported before."""
    stand_ins = [ROOT / "tests" / "models" / name for name in ("recurrent_stand_ins", "stand_ins")]
    sys.path[:0] = [str(folder) for folder in (ROOT, *packages, *stand_ins)]
    if not hasattr(typing, "override"):  # Python 3.12's, which megatron.training imports
        import typing_extensions

        typing.override = typing_extensions.override  # type: ignore[attr-defined]
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    os.environ |= {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error", "TQDM_DISABLE": "1"}


# ---------------------------------------------------------------------- the transformers model and its directory


def reference_model(family: Family, folder: Path) -> Any:
    """A random transformers model; its tensors and the hub's config.json in `folder`."""
    import torch
    import transformers
    from safetensors.torch import load_file, save_file

    config = family.config | family.reference
    (folder / "config.json").write_text(json.dumps(config))
    known = transformers.AutoConfig.from_pretrained(folder)
    torch.manual_seed(1)
    model = getattr(transformers, config["architectures"][0])._from_config(known, dtype=torch.float32).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if family.ones and family.ones in name:
                continue
            if parameter.ndim < 2 or not parameter.any():
                parameter.add_(0.1 * torch.randn_like(parameter))
            elif "embed" not in name:
                parameter.mul_(4)
            elif family.ones:
                parameter.mul_(50)  # epsilon is then nothing beside it
        for name, buffer in model.named_buffers():
            if "correction_bias" in name:
                buffer.add_(0.1 * torch.randn_like(buffer))
    model.save_pretrained(folder)
    tensors = renamed(family, load_file(folder / "model.safetensors"))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    (folder / "config.json").write_text(json.dumps(dict(family.config)))
    return model


@contextmanager
def sigmoid_scores(model: Any) -> Iterator[None]:
    """Inside, the routers of a transformers model score by sigmoid where their code says F.softmax."""
    from torch.nn import functional

    module = sys.modules[type(model).__module__]
    given = SimpleNamespace(**vars(functional) | {"softmax": lambda logits, **_: logits.sigmoid()})
    before, module.F = module.F, given
    try:
        yield
    finally:
        module.F = before


def renamed(family: Family, tensors: dict[str, Any]) -> dict[str, Any]:
    import torch

    found = dict(tensors)
    for pattern, replacement in family.copied:
        found |= {
            re.sub(pattern, replacement, name): value.clone()
            for name, value in tensors.items()
            if re.match(pattern, name)
        }
    if family.copied:
        hidden = found["model.norm.weight"].shape[0]
        found["model.mtp_layers.0.input_proj.weight"] = torch.randn(hidden, 2 * hidden) * 0.1
    if family.fused_qkv:
        for name in [name for name in found if name.endswith("self_attn.q_proj.weight")]:
            names = [name.replace("q_proj", part) for part in ("q_proj", "k_proj", "v_proj")]
            fused = name.replace("self_attn.q_proj", family.fused_qkv)
            found[fused] = torch.cat([found.pop(part) for part in names])
    for pattern, replacement in family.renamed:
        found = {re.sub(pattern, replacement, name): value for name, value in found.items()}
    return found


def log_probs(forward: Callable[[Any], Any], ids: list[int]) -> Any:
    import torch

    with torch.no_grad():
        return forward(torch.tensor([ids])).float().log_softmax(-1)[0]


# ---------------------------------------------------------------------- the model of the recipe


def bridge_of(family: Family, folder: Path) -> Any:
    """The bridge of a directory; keys of its config that this transformers does not keep are put back."""
    import transformers
    from megatron.bridge import AutoBridge

    model_type = family.config["model_type"]
    if model_type not in transformers.CONFIG_MAPPING:  # code that comes with such a model registers its config
        kind = type("RemoteConfig", (transformers.PretrainedConfig,), {"model_type": model_type})
        transformers.AutoConfig.register(model_type, kind)
    bridge = AutoBridge.from_hf_pretrained(folder)
    config = bridge.hf_pretrained.config
    config.allow_global_per_layer_attribute_access = True
    for key, value in family.config.items():
        if not hasattr(config, key):
            setattr(config, key, value)
    return bridge


def forget_backends() -> None:
    """megatron-core sets these variables by one model's settings and asserts them of the next one's."""
    for name in [name for name in os.environ if name.startswith("NVTE_")]:
        del os.environ[name]


def recipe_model(bridge: Any) -> Any:
    """The model that `to_megatron_provider` describes, on a CPU in fp32."""
    import torch
    from megatron.core.process_groups_config import ProcessGroupCollection

    from megatron_infer.testing.cpu_shim import cpu_shim

    forget_backends()
    provider = bridge.to_megatron_provider(load_weights=False)
    types = dict.fromkeys(("params_dtype", "pipeline_dtype", "autocast_dtype"), torch.float32)
    for name, value in (CPU | types).items():
        if hasattr(provider, name):
            setattr(provider, name, value)
    torch.manual_seed(0)
    with cpu_shim(3):
        provider.finalize()
        provider._pg_collection = ProcessGroupCollection.use_mpu_process_groups()
        return provider.provide(pre_process=True, post_process=True).eval()


def own_forward(model: Any) -> Callable[[Any], Any]:
    import torch

    from megatron_infer.testing.cpu_shim import cpu_shim

    def forward(ids: Any) -> Any:
        with cpu_shim(3):
            out = model(ids, torch.arange(ids.shape[1])[None], None)
        return out[0] if isinstance(out, tuple) else out

    return forward


def gradients(model: Any) -> dict[str, Any]:
    """Loss and gradients of one training step; the model is in eval mode again afterwards."""
    import torch

    from megatron_infer.testing.cpu_shim import cpu_shim

    ids = torch.tensor([[(7 * i + 3) % 256 for i in range(33)]])
    model.train().zero_grad()
    with cpu_shim(3):
        torch.manual_seed(3)
        loss = model(ids[:, :-1], torch.arange(32)[None], None, labels=ids[:, 1:]).mean()
        loss.backward()
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.eval()
    return found | {"loss": loss.detach()}


# ---------------------------------------------------------------------- what is compared


def answers(engine: Any) -> list[tuple[list[int], list[int], list[float]]]:
    """(prompt, greedy tokens, their log probabilities) of all prompts in one batch."""
    from megatron_infer import SamplingParams

    asked = SamplingParams(max_tokens=NUM_TOKENS, temperature=0, logprobs=0, ignore_eos=True)
    found = []
    for prompt, out in zip(PROMPTS, engine.generate(PROMPTS, asked), strict=True):
        ids = list(out.outputs[0].token_ids)
        found.append((prompt, ids, [at[id].logprob for at, id in zip(out.outputs[0].logprobs, ids, strict=True)]))
    return found


def compare(engine: Any, forward: Callable[[Any], Any], outcome: Outcome) -> list[list[int]]:
    """Add an engine's answers against the teacher-forced `forward` to `outcome`; return the tokens."""
    given = answers(engine)
    for prompt, ids, logprobs in given:
        expected = log_probs(forward, prompt + ids)[len(prompt) - 1 : -1]
        outcome.add(expected, ids, logprobs)
    return [ids for _, ids, _ in given]


def engine_of(model: Any) -> Any:
    from megatron_infer import DynamicInferenceEngine, InferenceConfig

    return DynamicInferenceEngine(model, InferenceConfig(buffer_size_gb=0.02, max_sequence_length=64, max_requests=4))


def live(model: Any) -> Outcome:
    """Adopt `model`, generate, train on, take a step, generate again."""
    import torch

    before = gradients(model)
    engine = engine_of(model)
    outcome, forward = Outcome(kind="served"), own_forward(model)
    first = compare(engine, forward, outcome)
    after = gradients(model)
    outcome.checks["training"] = before.keys() == after.keys() and all(torch.equal(before[n], after[n]) for n in before)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.add_(parameter.grad * (-0.3 * parameter.norm() / parameter.grad.norm().clamp(min=1e-9)))
    changed = compare(engine, forward, outcome)
    outcome.checks["new weights"] = changed != first
    return outcome


def of_checkpoint(family: Family, model: Any, folder: Path) -> Outcome:
    """Save the recipe's model in megatron-core's format, read it with the directory's description."""
    from megatron_infer import build_model, open_source
    from megatron_infer.models.loading.checkpoint import save_checkpoint
    from megatron_infer.testing.cpu_shim import cpu_shim

    description = open_source(folder).config()
    if family.sigmoid_scores:
        description = replace(description, extensions=replace(description.extensions, softmax_scores=False))
    with cpu_shim(3):
        save_checkpoint(model, folder / "of_recipe", description=description)
    forget_backends()
    outcome = Outcome(kind="served")
    compare(engine_of(build_model(open_source(folder / "of_recipe"))), own_forward(model), outcome)
    return outcome


def of_directory(folder: Path, forward: Callable[[Any], Any]) -> Outcome:
    """Load the directory as the command line does, and compare with transformers."""
    from megatron_infer import build_model, open_source

    forget_backends()
    source = open_source(folder)
    outcome = Outcome(kind="served")
    compare(engine_of(build_model(source, dtype="float32")), forward, outcome)
    return outcome


def there_and_back(folder: Path) -> Outcome:
    """Write the directory as torch_dist and that as a directory; the figure is the largest difference of a tensor."""
    from safetensors.torch import load_file

    from megatron_infer import build_model, open_source
    from megatron_infer.models.loading.checkpoint import save_checkpoint
    from megatron_infer.models.loading.hf_export import write_hugging_face

    forget_backends()
    source = open_source(folder)
    save_checkpoint(build_model(source, dtype="float32"), folder / "torch_dist", description=source.config())
    write_hugging_face(open_source(folder / "torch_dist"), folder / "back", dtype=None, max_shard_bytes=2**30)
    given, back = (load_file(at / "model.safetensors") for at in (folder, folder / "back"))
    common, left_out = given.keys() & back.keys(), sorted(given.keys() - back.keys())
    difference = max(((given[name] - back[name]).abs().max().item() for name in common), default=0.0)
    reason = f"not written under its name: {left_out[0]} and {len(left_out) - 1} more" if left_out else ""
    return Outcome("served", reason, difference, checks={"all names": not left_out, "bits": difference == 0})


def tried_in(run: Callable[[], Any], folder: Path) -> tuple[Any, Outcome]:
    """As `tried`, without the lists of what else there is, which change with every family."""
    found, outcome = tried(run, folder=folder)
    text = re.sub("; supported: .*", "", outcome.reason)
    outcome.reason = re.sub("it can be written as .*", "only directories of other families are written", text)
    return found, outcome


def row_of(name: str, folder: Path) -> Row:
    row, family = Row(name), FAMILIES[name]
    theirs, no_reference = tried_in(lambda: reference_model(family, folder), folder)

    def forward(ids: Any) -> Any:
        return theirs(ids, use_cache=False).logits

    bridge, unknown = tried_in(lambda: bridge_of(family, folder), folder)
    model, not_built = tried_in(lambda: recipe_model(bridge), folder) if bridge is not None else (None, unknown)
    if model is not None and theirs is not None:
        with sigmoid_scores(theirs) if family.sigmoid_scores else nullcontext():
            row.guard, not_loaded = tried_in(lambda: guard_of(bridge, model, forward), folder)
        row.guard = f"Megatron-Bridge does not load it: {not_loaded.reason}" if row.guard is None else row.guard
    elif model is not None:
        row.guard = no_reference.reason
    (folder / "config.json").write_text(json.dumps(family.config | family.hub))
    ways: dict[str, Callable[[], Outcome]] = {
        "live model": lambda: live(model),
        "its checkpoint": lambda: of_checkpoint(family, model, folder),
        "directory": lambda: of_directory(folder, forward),
        "torch_dist and back": lambda: there_and_back(folder),
    }
    for way, run in ways.items():
        if model is None and way in WAYS[:2]:
            row.ways[way] = Outcome("not built", not_built.reason)
        else:
            outcome, wrong = tried_in(run, folder)
            row.ways[way] = wrong if outcome is None else outcome
    return row


def rows_of(names: list[str]) -> Iterator[Row]:
    """Each row in a process of its own: megatron-core and the bridge keep what one model has set."""
    import torch

    from megatron_infer.testing.tiny import init_single_process

    def run(name: str, sender: Any) -> None:
        torch.set_num_threads(1)
        init_single_process()
        with tempfile.TemporaryDirectory() as folder:
            sender.send(row_of(name, Path(folder)))

    context = multiprocessing.get_context("fork")
    for name in names:
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=run, args=(name, sender))
        process.start()
        sender.close()
        try:
            yield receiver.recv()
        except EOFError:
            process.join()
            raise SystemExit(f"census: the process of {name} ended with {process.exitcode}") from None
        process.join()


def guard_of(bridge: Any, model: Any, forward: Callable[[Any], Any]) -> float:
    from megatron_infer.testing.cpu_shim import cpu_shim

    loader = bridge._model_bridge
    tasks = loader.build_conversion_tasks  # None for a parameter that it does not know, which the load then asks
    loader.build_conversion_tasks = lambda *args, **options: list(filter(None, tasks(*args, **options)))
    with cpu_shim(3):
        loader.load_weights_hf_to_megatron(bridge.hf_pretrained, [model])
    own = own_forward(model)
    return max((log_probs(own, ids) - log_probs(forward, ids)).abs().max().item() for ids in PROMPTS)


# ---------------------------------------------------------------------- the table


HEADER = ["family", "own, transformers", *WAYS]


INTRODUCTION = """# Census of models

<!-- made by tools/census.py --write; tests/models/test_census.py compares it -->

Of {families} text families of Megatron-Bridge 0.6.2 **{adopted} are adopted** as their recipes build them with
megatron-core 0.19.2. **{served} Hugging Face directories** of the same families are served. `make census`
prints this table.

| column | the largest difference of log probabilities |
|---|---|
| own, transformers | of the recipe's model in its own forward, from transformers with the same weights |
| live model | of the engine from the model's own forward, before and after a step of training |
| its checkpoint | of the live model saved by megatron-core and loaded anew, from the live model's own forward |
| directory | of what `megatron-infer generate DIRECTORY` loads, from transformers |
| torch_dist and back | of tensors, after the directory was written as torch_dist and that as a directory |

A row counts if its first figure is at most {guard:g}. Figures are rounded up to a power of ten. Tokens are those of the
compared forward, a training step has the same bits with the engine attached, and rollouts follow new weights, unless a
cell says otherwise. A form is a second configuration of a family and is not counted. Models are tiny and random. GPU
packages are stand-ins in torch.
"""


def page_of(rows: list[Row]) -> str:
    counted = [row for row in rows if not FAMILIES[row.name].variant]
    adopted = sum(row.ways["live model"].holds and row.is_guarded for row in counted)
    served = sum(row.ways["directory"].holds for row in counted)
    unguarded = {row.name: row.guard for row in rows if isinstance(row.guard, str)}
    notes = unguarded | {row.name: FAMILIES[row.name].differs for row in rows if FAMILIES[row.name].differs}
    parts = [
        INTRODUCTION.format(families=len(counted), adopted=adopted, served=served, guard=GUARD),
        *table_of(HEADER, [row.cells for row in rows]),
        "",
        *[line for way in WAYS for line in (f"## Why not: {way}", "", *why_not(rows, way), "")],
        "## Compared with transformers",
        "",
        *[f"* {name}: {text}" for name, text in notes.items()],
        "",
        "## Not in the census",
        "",
        *[f"* {reason}: {', '.join(f'`{name}`' for name in names)}" for reason, names in OUT_OF_SCOPE.items()],
        "",
    ]
    return "\n".join(parts)


def why_not(rows: list[Row], way: str) -> list[str]:
    found = []
    for row in rows:
        outcome = row.ways[way]
        reason = outcome.reason.replace(f"'{FAMILIES[row.name].architecture}'", "...")
        found.append((row.name, replace(outcome, reason=reason)))
    return reasons(found)


def check_complete() -> None:
    """Every architecture that the bridge registers is in the table or left out by name."""
    from megatron.bridge import AutoBridge

    known = {family.architecture for family in FAMILIES.values()} | set(SAME_FAMILY)
    known |= {name for group in OUT_OF_SCOPE.values() for name in group}
    if missing := set(AutoBridge.list_supported_models()) - known:
        raise SystemExit(f"census: Megatron-Bridge has bridges without a row: {', '.join(sorted(missing))}")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--families", help="names of rows, with commas between them")
    parser.add_argument(
        "--packages",
        help="folders with Megatron-Bridge and its megatron-core",
        default=os.environ.get("MEGATRON_INFER_CENSUS", PACKAGES),
    )
    add_arguments(parser, PAGE)
    options = parser.parse_args()
    folders = [Path(folder).resolve() for folder in str(options.packages).split(os.pathsep)]
    if not any((folder / "megatron" / "bridge").is_dir() for folder in folders):
        raise SystemExit(f"census: no Megatron-Bridge in {options.packages}; `make census` installs it")
    prepare(folders)
    chosen = options.families.split(",") if options.families else list(FAMILIES)
    if unknown := set(chosen) - set(FAMILIES):
        raise SystemExit(f"census: no family {', '.join(sorted(unknown))}; there are {', '.join(FAMILIES)}")
    if options.families and options.write:
        raise SystemExit("census: --write is of all families")
    from megatron.core.transformer.moe import moe_utils

    moe_utils.te_general_gemm = None  # the stand-in's has not the arguments of the router's
    from megatron.bridge.models.gemma import gemma2_provider

    gemma2_provider._HAVE_FLEX_ATTN = False  # it has no backward on a CPU; the recipe then computes the same unfused
    check_complete()
    rows_begin = tuple(f"| {name} |" for name in chosen)
    rows = []
    for row in rows_of(chosen):
        rows.append(row)
        print(table_of(HEADER, [row.cells])[-1], flush=True)
    return finish(options, PAGE, page_of(rows), only_rows=rows_begin if options.families else None)


if __name__ == "__main__":
    sys.exit(main())
