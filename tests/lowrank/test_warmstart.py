from __future__ import annotations

import copy
import io
import math
import subprocess
import sys

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW

import takifugu as tk
from takifugu.errors import LayerError, RankError, UsageError
from takifugu.lowrank.stability import StableRanks, stable_rank
from takifugu.lowrank.together import shares

X = torch.randn(64, 12, generator=torch.Generator().manual_seed(1))
Y = torch.randint(4, (64,), generator=torch.Generator().manual_seed(2))


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(12, 24), nn.ReLU(), nn.Linear(24, 24), nn.BatchNorm1d(24), nn.Linear(24, 4)
    )


def epoch_of(model: nn.Module, optimizer: torch.optim.Optimizer, epoch: int) -> float:
    order = torch.randperm(64, generator=torch.Generator().manual_seed(epoch))
    for batch in order.split(16):
        loss = nn.functional.cross_entropy(model(X[batch]), Y[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return loss.item()


def ranks(model: nn.Module) -> list[int]:
    return [spec.rank["weight"] for spec in tk.structure_of(model)]


def test_three_lines_in_a_plain_loop() -> None:
    model = net()
    optimizer = AdamW(model.parameters(), lr=1e-2)
    warm = tk.WarmStart(rank=0.25, warmup=3, where=["0", "2"])
    seen = []
    for epoch in range(6):
        model = warm(model, optimizer, epoch=epoch)
        seen.append(ranks(model))
        loss = epoch_of(model, optimizer, epoch)
    assert seen == [[], [], [], [3, 6], [3, 6], [3, 6]]
    assert warm.switched
    assert warm.report.at == 3
    assert str(warm.report).startswith("epoch 3: 2 layers factorized")
    assert "4 projected" in str(warm.report)
    assert loss < 1.4
    assert {p for g in optimizer.param_groups for p in g["params"]} == set(model.parameters())


def test_stages_go_down_and_up_again() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.05, momentum=0.9)
    warm = tk.WarmStart(where="2", stages=[(1, 0.5), (2, 0.25), (4, 0.4), (5, None)])
    seen = []
    for epoch in range(7):
        model = warm(model, optimizer, epoch=epoch)
        seen.append(ranks(model))
        epoch_of(model, optimizer, epoch)
    assert seen == [[], [12], [6], [6], [9], [], []]
    assert [r.layers is None for r in warm.reports] == [False, False, False, True]
    assert "dense again" in str(warm.reports[-1])


def test_missed_stages_are_made_up_for_by_the_latest() -> None:
    model = net()
    warm = tk.WarmStart(where="2", stages=[(1, 0.5), (2, 0.25)])
    warm(model, SGD(model.parameters(), lr=0.1), step=7)
    assert ranks(model) == [6]
    assert warm.switched


def test_a_failed_switch_leaves_model_and_optimizer_as_they_were() -> None:
    model = net()
    optimizer = AdamW(model.parameters())
    epoch_of(model, optimizer, 0)
    with torch.no_grad():
        model[2].weight[0, 0] = float("nan")
    modules, state = list(model.modules()), copy.deepcopy(optimizer.state_dict())
    warm = tk.WarmStart(rank=0.25, warmup=0, where="2")
    with pytest.raises(LayerError, match="weight of '2' contains NaN"):
        warm(model, optimizer, epoch=0)
    assert list(model.modules()) == modules
    assert optimizer.state_dict()["param_groups"] == state["param_groups"]
    assert not warm.switched


def test_a_switch_that_fails_late_is_undone() -> None:
    model = net()
    optimizer = AdamW(model.parameters())
    epoch_of(model, optimizer, 0)
    modules, state = list(model.modules()), copy.deepcopy(optimizer.state_dict())
    warm = tk.WarmStart(rank=0.25, warmup=0, where="2", state="calibrated")
    with pytest.raises(UsageError, match="needs gradients="):
        warm(model, optimizer, epoch=0)  # the layers were in place already
    assert list(model.modules()) == modules
    assert optimizer.state_dict()["param_groups"] == state["param_groups"]
    for key, entries in optimizer.state_dict()["state"].items():
        assert all(torch.equal(value, state["state"][key][name]) for name, value in entries.items())
    assert not warm.switched


def test_an_epoch_announced_twice_is_observed_once() -> None:
    model = net()
    optimizer = AdamW(model.parameters())
    warm = tk.WarmStart(rank="stable", warmup="auto")
    for epoch in (0, 1, 1):
        warm(model, optimizer, epoch=epoch)
    assert len(warm.followed.history) == 2


@pytest.mark.parametrize("stop_after", [1, 2, 3, 4])
def test_a_run_resumed_anywhere_goes_on_bit_for_bit(stop_after: int, tmp_path) -> None:
    def fresh() -> tuple[nn.Module, tk.WarmStart]:
        return net(), tk.WarmStart(rank=0.25, warmup=2, where=["0", "2"])

    def run(model, optimizer, scheduler, warm, start: int, stop: int) -> nn.Module:
        for epoch in range(start, stop):
            model = warm(model, optimizer, epoch=epoch)
            epoch_of(model, optimizer, epoch)
            scheduler.step()
        return model

    def rest(model: nn.Module):
        optimizer = AdamW(model.parameters(), lr=1e-2)
        return optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)

    model, warm = fresh()
    whole = run(model, *rest(model), warm, 0, 5)

    model, warm = fresh()
    optimizer, scheduler = rest(model)
    run(model, optimizer, scheduler, warm, 0, stop_after)
    tk.save(model, tmp_path / "m.safetensors")
    buffer = io.BytesIO()
    torch.save({"o": optimizer.state_dict(), "s": scheduler.state_dict(), "w": warm.state_dict()}, buffer)

    model, warm = fresh()
    tk.load(tmp_path / "m.safetensors", model)
    optimizer, scheduler = rest(model)
    buffer.seek(0)
    saved = torch.load(buffer, weights_only=True)
    optimizer.load_state_dict(saved["o"])
    scheduler.load_state_dict(saved["s"])
    warm.load_state_dict(saved["w"])
    resumed = run(model, optimizer, scheduler, warm, stop_after, 5)
    assert resumed.state_dict().keys() == whole.state_dict().keys()
    for name, value in whole.state_dict().items():
        assert torch.equal(resumed.state_dict()[name], value), name


def test_stable_rank_by_power_iteration() -> None:
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(30, 50, generator=generator) @ torch.diag(0.8 ** torch.arange(50))
    s = torch.linalg.svdvals(W.double())
    assert stable_rank(W) == pytest.approx(float(s.square().sum() / s[0] ** 2), rel=1e-3)
    assert stable_rank(torch.zeros(3, 3)) == 1.0


@pytest.mark.filterwarnings("ignore:no layer becomes low-rank:takifugu.errors.TakifuguWarning")
def test_auto_switches_when_the_stable_ranks_have_settled() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.05)
    warm = tk.WarmStart(rank="stable", warmup="auto", where=["0", "2"], settled=0.01)
    switched_at = None
    for epoch in range(30):
        model = warm(model, optimizer, epoch=epoch)
        if warm.switched and switched_at is None:
            switched_at = epoch
        if epoch < 6:  # train for a while, then stand still
            epoch_of(model, optimizer, epoch)
            for p in model.parameters():
                p.data += 0.15 * torch.randn_like(p) * p.data.std()
    assert switched_at == 8, "two epochs without change after the last one with"
    # As a share of the rank at the start, which counts as full.
    for name, layer in (("0", warm.report.layers.layers[0]), ("2", warm.report.layers.layers[1])):
        wanted = math.ceil(warm.followed.history[-1][f"{name}/weight"] - 1e-6)
        cost = {"0": 36, "2": 48}[name] * wanted
        if cost > {"0": 288, "2": 576}[name]:
            assert "would cost more" in layer.reason
        else:
            assert layer.rank["weight"] == pytest.approx(wanted, abs=1)


def test_following_survives_a_resume() -> None:
    model = net()
    one = StableRanks()
    one.observe(model, None)
    two = StableRanks()
    two.load_state_dict(one.state_dict())
    model[0].weight.data *= torch.rand_like(model[0].weight)
    one.observe(model, None)
    two.observe(model, None)
    assert one.history == two.history


def test_shares_are_even_and_the_same_everywhere() -> None:
    assert shares([5, 9, 1, 4], 2) == [1, 0, 0, 1]
    assert shares([1, 1, 1, 1], 2) == [0, 1, 0, 1]
    costs = [i * i % 17 + 1 for i in range(40)]
    owners = shares(costs, 4)
    loads = [sum(c for c, o in zip(costs, owners, strict=True) if o == p) for p in range(4)]
    assert max(loads) <= sum(costs) / 4 + max(costs)
    assert shares([], 3) == []


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: tk.WarmStart(rank=0), RankError, "rank 0 is less than 1"),
        (lambda: tk.WarmStart(warmup=-1), UsageError, "a stage at -1"),
        (lambda: tk.WarmStart(warmup="soon"), UsageError, "a stage at 'soon'"),
        (lambda: tk.WarmStart(stages=[]), UsageError, "give a list of pairs"),
        (lambda: tk.WarmStart(stages=5), UsageError, "give a list of pairs"),
        (
            lambda: tk.WarmStart(stages=[(3, 0.5), (2, 0.25)]),
            UsageError,
            "stages must come in order, but 2 follows 3",
        ),
        (lambda: tk.WarmStart(stages=[("auto", 0.5), (9, 0.2)]), UsageError, "decides about one switch"),
        (lambda: tk.WarmStart(state="keep"), UsageError, "unknown way 'keep'"),
        (lambda: tk.WarmStart(svd="fast"), UsageError, "unknown svd 'fast'"),
        (lambda: tk.WarmStart(stages=[5, 10]), UsageError, "a stage 5; use pairs of when and rank"),
        (lambda: tk.WarmStart(exmaple_input=X), UsageError, "did you mean 'example_input'"),
        (
            lambda: tk.WarmStart(scheme="tuker2"),
            UsageError,
            "unknown scheme 'tuker2'; did you mean 'tucker2'",
        ),
        (lambda: tk.WarmStart().load_state_dict({}), UsageError, "not the state of a WarmStart"),
    ],
)
def test_mistakes_show_before_training(make, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        make()


def test_counting_in_one_unit() -> None:
    model = net()
    optimizer = SGD(model.parameters(), lr=0.1)
    warm = tk.WarmStart(warmup=5, where="2")
    with pytest.raises(UsageError, match="either epoch= or step="):
        warm(model, optimizer)
    warm(model, optimizer, epoch=0)
    with pytest.raises(UsageError, match="called with step= after epoch="):
        warm(model, optimizer, step=1)


def test_the_slow_parts_of_torch_are_loaded_by_who_needs_them() -> None:
    code = (
        "import sys, takifugu as tk, takifugu.lowrank.weight_decay; tk.WarmStart; "
        "sys.exit(any(name in sys.modules for name in "
        "('torch.distributed.fsdp', 'torch.distributed.tensor', 'lightning', 'transformers')))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_a_second_model_does_not_stay_dense_without_a_word() -> None:
    warm = tk.WarmStart(warmup=1, where="2")
    one, other = net(), net()
    optimizers = [SGD(model.parameters(), lr=0.1) for model in (one, other)]
    warm(one, optimizers[0], epoch=0)
    warm(other, optimizers[1], epoch=0)
    warm(one, optimizers[0], epoch=1)
    with pytest.raises(UsageError, match="use a WarmStart for each model"):
        warm(other, optimizers[1], epoch=1)
    warm(one, optimizers[0], epoch=2)


def test_a_state_from_after_the_switch_wants_a_model_from_after_the_switch() -> None:
    model = net()
    warm = tk.WarmStart(warmup=0, where="2")
    warm(model, SGD(model.parameters(), lr=0.1), epoch=0)
    resumed = tk.WarmStart(warmup=0, where="2")
    resumed.load_state_dict(warm.state_dict())
    fresh = net()
    with pytest.raises(UsageError, match="load the model first"):
        resumed(fresh, SGD(fresh.parameters(), lr=0.1), epoch=1)
    tk.apply_(fresh, tk.structure_of(model))
    assert resumed(fresh, SGD(fresh.parameters(), lr=0.1), epoch=1) is fresh


@pytest.mark.parametrize("default", [torch.device("meta"), torch.float64], ids=str)
def test_following_does_not_depend_on_torchs_defaults(default) -> None:
    """A user's torch.set_default_device("cuda"), say; a meta device is one that a processor has, too."""
    W = torch.randn(20, 10)
    wanted = stable_rank(W)
    if isinstance(default, torch.dtype):
        torch.set_default_dtype(default)
        try:
            assert stable_rank(W) == wanted
        finally:
            torch.set_default_dtype(torch.float32)
    else:
        with default:
            assert stable_rank(W) == wanted


@pytest.mark.parametrize(
    ("options", "model_of", "message"),
    [
        ({"where": "lyer"}, net, "where='lyer' matches no layer"),
        ({"where": []}, net, "where= is an empty list"),
        ({"hook": object()}, net, "hook= is attached to DistributedDataParallel"),
        ({}, lambda: nn.DataParallel(net()), "wrapped in DataParallel"),
        ({}, lambda: nn.Sequential(nn.ReLU(), nn.BatchNorm1d(3)), "no layer that can be factorized"),
    ],
)
def test_what_fails_in_any_case_fails_before_training(options: dict, model_of, message: str) -> None:
    model = model_of()
    optimizer = SGD([nn.Parameter(torch.zeros(1))], lr=0.1)
    with pytest.raises(UsageError, match=message):
        tk.WarmStart(warmup=10, **options)(model, optimizer, epoch=0)
