"""Adapters (PEFT, LoRA) are refused until they are merged: they would be lost, or factorized themselves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import takifugu as tk
from takifugu.errors import UsageError
from takifugu.lowrank.factorized import Factorized

X = torch.randn(3, 32, generator=torch.Generator().manual_seed(1))


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 32), nn.Linear(32, 4))


def switch(model: nn.Module) -> None:
    tk.WarmStart(0.25, warmup=3, where=lambda name, module: True)(
        model, torch.optim.SGD(model.parameters(), lr=0.1), epoch=0
    )


VERBS: dict[str, Callable[[nn.Module, Path], Any]] = {
    "factorize_": lambda model, path: tk.factorize_(model, 0.25),
    "factorize_ by name": lambda model, path: tk.factorize_(model, 0.25, where="*lora_A*", force=True),
    "choose": lambda model, path: tk.choose(model, 0.25),
    "apply_": lambda model, path: tk.apply_(model, tk.Structure()),
    "densify_": lambda model, path: tk.densify_(model),
    "save": lambda model, path: tk.save(model, path),
    "WarmStart": lambda model, path: switch(model),
}


@pytest.mark.parametrize("inside", [False, True], ids=["PeftModel", "base model"])
@pytest.mark.parametrize("factorized", [False, True])
@pytest.mark.parametrize("verb", VERBS)
def test_nothing_is_done_to_a_model_with_adapters(
    verb: str, factorized: bool, inside: bool, tmp_path: Path
) -> None:
    peft = pytest.importorskip("peft")
    base = net()
    targets = ["0", "2"]
    if factorized:
        tk.factorize_(base, 0.25, where=["0", "2"])
        targets = ["0.u", "2.v"]
    config = peft.LoraConfig(target_modules=targets, init_lora_weights=False)
    wrapped = peft.get_peft_model(base, config)
    model = wrapped.get_base_model() if inside else wrapped
    expected, modules = wrapped(X), list(wrapped.modules())
    place = "0.u" if factorized else "0"
    message = rf"'(base_model\.model\.)?{place}' has an adapter .*model = model.merge_and_unload\(\)"
    with pytest.raises(UsageError, match=message):
        VERBS[verb](model, tmp_path / "m.safetensors")
    assert list(wrapped.modules()) == modules
    assert torch.equal(wrapped(X), expected)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("factorized", [False, True])
def test_once_merged_everything_works(factorized: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    base = net()
    if factorized:
        tk.factorize_(base, 0.25, where=["0", "2"])
    config = peft.LoraConfig(
        target_modules=["0.u", "2.v"] if factorized else ["0", "2"], init_lora_weights=False
    )
    wrapped = peft.get_peft_model(base, config).eval()
    expected = wrapped(X)
    merged = wrapped.merge_and_unload()
    tk.save(merged, tmp_path / "m.safetensors")
    torch.testing.assert_close(tk.load(tmp_path / "m.safetensors", net())(X), expected)
    if factorized:
        tk.densify_(merged)
    torch.testing.assert_close(merged(X), expected)
    tk.factorize_(merged, 1.0, where=["0", "2"], force=True)
    torch.testing.assert_close(merged(X), expected, rtol=1e-4, atol=1e-5)


def test_loading_onto_a_model_with_adapters_is_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = net()
    tk.factorize_(model, 0.25, where=["0"])
    tk.save(model, tmp_path / "m.safetensors")
    wrapped = peft.get_peft_model(net(), peft.LoraConfig(target_modules=["0"], init_lora_weights=False))
    before = copy.deepcopy(wrapped.state_dict())
    with pytest.raises(UsageError, match="'0' has an adapter"):
        tk.load(tmp_path / "m.safetensors", wrapped.get_base_model())
    assert all(torch.equal(value, before[name]) for name, value in wrapped.state_dict().items())


def test_adapters_of_other_libraries_are_known_by_their_parts() -> None:
    class LoRALinear(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(32, 32))
            self.lora_a, self.lora_b = nn.Linear(32, 4, bias=False), nn.Linear(4, 32, bias=False)

        def forward(self, x: Tensor) -> Tensor:
            return x @ self.weight.mT + self.lora_b(self.lora_a(x))

    model = nn.Sequential(nn.Linear(32, 32), LoRALinear())
    with pytest.raises(UsageError, match="'1' has an adapter"):
        tk.factorize_(model, 0.25)
    assert not any(isinstance(module, Factorized) for module in model.modules())


def test_a_wrapper_without_anything_to_merge_names_the_way_out() -> None:
    class Wrapper(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()

    Wrapper.__module__ = "peft.peft_model"
    with pytest.raises(
        UsageError, match=r"wrapped in PEFT's Wrapper; use the model inside: .*get_base_model\(\)"
    ):
        tk.factorize_(Wrapper(), 0.25)
