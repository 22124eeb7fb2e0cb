"""Every step of a change is made to fail once, before and after its work: nothing may have changed."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fingerprint import Fingerprint, OptimizerFingerprint
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

import takifugu as tk
from takifugu.lowrank import averages, checkpoint, choice, fastpath, frames, report, surgery, warmstart

X = torch.randn(4, 16, generator=torch.Generator().manual_seed(1))


class Failure(BaseException):
    """Not an Exception: like an interrupt from the keyboard, it is not expected anywhere."""


class Net(nn.Module):
    """A norm, a tied weight, a module with two names and an encoder whose fast path is switched off."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(16, 16)
        self.alias = self.first
        self.tied = nn.Linear(16, 16)
        self.tied.weight = self.first.weight
        self.norm = nn.BatchNorm1d(16)
        self.encoder = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
        self.head = nn.Linear(16, 3)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.tied(torch.tanh(self.first(x))))
        return self.head(self.encoder(hidden[:, None])[:, 0])


WHERE = ["first", "tied", "encoder.*"]


def failing(target: Any, name: str, when: str, monkeypatch: pytest.MonkeyPatch, at: int = 1) -> list[int]:
    """Lets the step fail at its `at`-th call, before or after its work. Returns the list of calls."""
    original, calls = getattr(target, name), [0]

    def step(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == at and when == "before":
            raise Failure
        result = original(*args, **kwargs)
        if calls[0] == at:
            raise Failure
        return result

    monkeypatch.setattr(target, name, step)
    return calls


def check(
    change: Callable[[], Any], model: nn.Module, calls: list[int], at: int = 1, again: bool = True
) -> None:
    before = Fingerprint(model)
    with pytest.raises(Failure):
        change()
    assert calls[0] >= at, "the step was never reached"
    before.assert_same()
    if again:
        change()  # and the next attempt succeeds


FACTORIZE = [
    (surgery, "survey", 1),
    (surgery, "structure_from", 1),
    (surgery, "factor_report", 1),
    (surgery, "build_swaps", 1),
    (surgery, "check_references", 1),
    (surgery, "fill_", 1),
    (surgery.Swap, "fill_", 2),
    (report.FactorReport, "completed", 1),
    (report, "_sizes", 9),
    (report.probe, "macs", 2),
    (surgery, "commit_", 1),
    (fastpath, "update_", 1),
    (fastpath, "update_", 2),
]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("target", "name", "at"), FACTORIZE, ids=lambda v: getattr(v, "__name__", str(v)))
def test_factorize(target: Any, name: str, at: int, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    calls = failing(target, name, when, monkeypatch, at)
    check(lambda: tk.factorize_(model, 0.5, WHERE, example_input=X), model, calls, at)
    assert not tk.structure_of(model).is_dense


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("target", "name"),
    [(surgery, "build_swaps"), (surgery, "_rounding"), (surgery, "DensifyReport"), (fastpath, "update_")],
    ids=str,
)
def test_densify(target: Any, name: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    tk.factorize_(model, 0.5, WHERE)
    check(lambda: tk.densify_(model), model, failing(target, name, when, monkeypatch))
    assert tk.structure_of(model).is_dense


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(
    ("target", "name"), [(surgery, "build_swaps"), (surgery, "fill_"), (fastpath, "update_")], ids=str
)
def test_apply(target: Any, name: str, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    tk.factorize_(model, 0.5, WHERE)
    structure = choice.structure_from(model, choice.survey(model, 4, ["first", "tied"], rerank=True))
    check(lambda: tk.apply_(model, structure), model, failing(target, name, when, monkeypatch))
    assert tk.structure_of(model) == structure


# ---- loading ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("start", ["dense", "other", "meta"])
@pytest.mark.parametrize(
    "name", ["_read", "build_swaps", "_expected", "_check", "_check_ties", "commit_", "load"]
)
def test_load(name: str, start: str, when: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    torch.manual_seed(5)
    saved, path = Net(), tmp_path / "m.safetensors"
    tk.factorize_(saved, 0.5, WHERE)
    tk.save(saved, path)
    if start == "meta":
        with torch.device("meta"):
            model = Net()
        fingerprint: Callable[[], None] = _meta_fingerprint(model)
    else:
        model = Net()
        if start == "other":
            tk.factorize_(model, 4, ["first", "tied"], force=True)
        fingerprint = Fingerprint(model).assert_same
    if name == "load":
        failing(model, "load_state_dict", when, monkeypatch)
    else:
        failing(checkpoint, name, when, monkeypatch)
    with pytest.raises(Failure):
        tk.load(path, model)
    monkeypatch.undo()
    fingerprint()
    assert torch.equal(tk.load(path, model).eval()(X), saved.eval()(X))


def _meta_fingerprint(model: nn.Module) -> Callable[[], None]:
    before = [*map(id, model.modules())], [(id(p), p.device) for p in model.parameters()]

    def check() -> None:
        assert ([*map(id, model.modules())], [(id(p), p.device) for p in model.parameters()]) == before

    return check


def test_a_load_that_fails_half_way_gives_the_values_back(tmp_path: Path) -> None:
    class Picky(nn.Linear):
        def _load_from_state_dict(self, *args: Any) -> None:
            raise Failure

    saved = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Linear(16, 16))
    tk.factorize_(saved, 0.25, where="0")
    tk.save(saved, tmp_path / "m.safetensors")
    model = nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), Picky(16, 16))
    model(X)
    before = Fingerprint(model)
    with pytest.raises(Failure):
        tk.load(tmp_path / "m.safetensors", model)
    before.assert_same()


# ---- the switch -------------------------------------------------------------------------------------------

SWITCH = [
    (warmstart, "survey", 1),
    (warmstart, "factor_report", 1),
    (warmstart, "build_swaps", 1),
    (warmstart.Remembered, "__call__", 3),
    (averages.Average, "prepare_", 2),
    (averages.Average, "change_", 1),
    (averages.Average, "change_", 2),
    (averages, "commit_", 2),
    (frames, "commit_", 1),
    (report.FactorReport, "completed", 1),
    (frames, "carry_", 1),
    (frames.Bare, "_rebuilt", 1),
]


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize(("target", "name", "at"), SWITCH, ids=lambda v: getattr(v, "__name__", str(v)))
def test_switch(target: Any, name: str, at: int, when: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(X).square().mean().backward()
    optimizer.step()
    ema, plain = AveragedModel(model), copy.deepcopy(model)
    warm = tk.WarmStart(0.5, warmup=0, where=WHERE, example_input=X)

    def switch() -> nn.Module:
        return warm(model, optimizer, epoch=0, ema=[ema, plain])

    before = [Fingerprint(m) for m in (model, ema, plain)]
    optimizer_before = OptimizerFingerprint(optimizer)
    calls = failing(target, name, when, monkeypatch, at)
    with pytest.raises(Failure):
        switch()
    assert calls[0] >= at
    for fingerprint in before:
        fingerprint.assert_same()
    optimizer_before.assert_same()
    assert not warm.switched
    assert warm.reports == []
    monkeypatch.undo()
    switch()
    assert warm.switched
    assert tk.structure_of(model) == tk.structure_of(plain) == tk.structure_of(ema.module)


def test_gradients_and_statistics_come_back_when_calibration_fails() -> None:
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model(X).square().mean().backward()
    optimizer.step()
    warm = tk.WarmStart(0.5, warmup=0, where=WHERE, state="calibrated")
    passes = []

    def gradients() -> None:
        model(X).square().mean().backward()  # moves the norm's statistics
        passes.append(1)
        if len(passes) == 3:
            raise Failure

    before, optimizer_before = Fingerprint(model), OptimizerFingerprint(optimizer)
    with pytest.raises(Failure):
        warm(model, optimizer, epoch=0, gradients=gradients)
    before.assert_same()
    optimizer_before.assert_same()
