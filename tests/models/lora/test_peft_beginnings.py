"""How PEFT begins an adapter: what changes the base model is refused by name, and served as PEFT converts it."""

from __future__ import annotations

import copy
import json
from importlib.util import find_spec
from typing import Any, get_args, get_type_hints

import pytest
import torch
from hf_models import logits_of, random_model
from lora_cases import merged
from plain_forward import full_logits

from megatron_infer.errors import ModelError
from megatron_infer.models.loading.build_model import build_model
from megatron_infer.models.loading.sources import open_source
from megatron_infer.models.lora.peft import read_adapter
from megatron_infer.models.lora.peft_config import BASE_CHANGED, BASE_KEPT, PeftConfig

pytestmark = pytest.mark.skipif(find_spec("peft") is None, reason="needs the peft package")

TARGETS = ["q_proj", "v_proj", "up_proj"]
IDS = torch.randint(0, 131, (40,), generator=torch.Generator().manual_seed(1)).tolist()


def begun(init: Any, folder: Any) -> tuple[Any, Any]:
    """(the base model's directory, a model under PEFT whose adapter began so, before training)."""
    import peft

    model = random_model("llama")
    model.save_pretrained(folder / "base")
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=TARGETS, init_lora_weights=init)
    if init == "corda":
        pytest.importorskip("attr")  # of PEFT's module
        from peft.tuners.lora.corda import preprocess_corda

        config.corda_config = peft.tuners.lora.config.CordaConfig(corda_method="kpm")
        preprocess_corda(model, config, run_model=lambda: model(torch.tensor([IDS])))
    elif init == "lora_ga":
        from peft.tuners.lora.loraga import preprocess_loraga

        config.lora_ga_config = peft.LoraGAConfig()
        ids = torch.tensor([IDS])
        preprocess_loraga(model, config, lambda: model(ids, labels=ids).loss.backward())
    torch.manual_seed(1)
    return folder / "base", peft.get_peft_model(model, config).eval()


def train(wrapped: Any) -> None:
    torch.manual_seed(2)
    with torch.no_grad():
        for name, parameter in wrapped.named_parameters():
            if "lora_" in name:
                parameter += torch.randn_like(parameter) * 0.1


def error_of(base: Any, folder: Any, expected: torch.Tensor) -> float:
    """Largest difference of the logits from the expected ones."""
    source = open_source(base)
    model = build_model(source)
    adapter = read_adapter("one", folder, model, description=source.config())
    return float((full_logits(merged(model, adapter), IDS) - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize("init", [True, False, "gaussian", "orthogonal", "eva", "mica"])
def test_a_beginning_that_keeps_the_base_computes_as_in_peft(init: Any, tmp_path: Any) -> None:
    import peft

    base, wrapped = begun(init, tmp_path)
    train(wrapped)
    wrapped.save_pretrained(tmp_path / "adapter")
    reloaded = peft.PeftModel.from_pretrained(random_model("llama"), tmp_path / "adapter").eval()
    expected = logits_of(wrapped, IDS)
    assert (logits_of(reloaded, IDS) - expected).abs().max() < 1e-5 * expected.abs().max()
    assert error_of(base, tmp_path / "adapter", expected) < 1e-5


@pytest.mark.parametrize("init", ["pissa", "pissa_niter_4", "olora", "corda", "lora_ga"])
def test_a_beginning_that_changes_the_base_is_refused_and_served_as_converted(init: str, tmp_path: Any) -> None:
    base, wrapped = begun(init, tmp_path)
    initial, adapter = tmp_path / "initial", tmp_path / "adapter"
    wrapped.peft_config["default"].init_lora_weights = True  # as PEFT asks for
    wrapped.save_pretrained(initial)
    wrapped.peft_config["default"].init_lora_weights = init
    train(wrapped)
    wrapped.save_pretrained(adapter)
    expected = logits_of(wrapped, IDS)
    with pytest.raises(ModelError, match=rf"init_lora_weights='{init}'.*path_initial_model_for_weight_conversion"):
        error_of(base, adapter, expected)
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["init_lora_weights"] = True
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    assert error_of(base, adapter, expected) > 1e-3, "it goes with the base that PEFT has changed"
    changed = copy.deepcopy(wrapped).unload()
    changed.save_pretrained(tmp_path / "changed")
    assert error_of(tmp_path / "changed", adapter, expected) < 1e-5, "the second remedy"
    wrapped.save_pretrained(tmp_path / "converted", path_initial_model_for_weight_conversion=str(initial))
    assert error_of(base, tmp_path / "converted", expected) < 1e-4, "the first remedy"


def test_every_beginning_that_peft_knows_is_known_here() -> None:
    import peft

    hints = get_type_hints(peft.LoraConfig)["init_lora_weights"]
    known = {value for kind in get_args(hints) for value in get_args(kind)}
    assert len(known) >= 8
    for value in known | {"lora_ga", "PiSSA", "OLoRA"}:
        is_changed = value.lower().startswith(tuple(BASE_CHANGED))
        assert is_changed != (value in BASE_KEPT), value
        if is_changed:
            with pytest.raises(ModelError, match="changes the base model's weights"):
                PeftConfig({"lora_alpha": 8, "init_lora_weights": value})
        else:
            PeftConfig({"lora_alpha": 8, "init_lora_weights": value})
    with pytest.raises(ModelError, match=r"LoftQ changes the base.*serve the base that was trained on"):
        PeftConfig({"lora_alpha": 8, "init_lora_weights": "loftq"})
    with pytest.raises(ModelError, match="init_lora_weights='tomorrow' is not known here"):
        PeftConfig({"lora_alpha": 8, "init_lora_weights": "tomorrow"})
