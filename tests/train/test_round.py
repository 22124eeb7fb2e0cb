from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import takifugu as tk
from takifugu.errors import DataError, TrainingError, UsageError
from takifugu.train.cooperative import Mean, cooperative_round, member_seed
from takifugu.train.evaluation import evaluate
from takifugu.train.round import RoundSpec, Samples, step_count, train_round
from takifugu.zoo.small import cnn, mlp

SGD = {"kind": "sgd", "lr": 0.1, "momentum": 0.9}


def _data(count: int = 40, seed: int = 0) -> Samples:
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 3, (count,), generator=generator)
    inputs = torch.randn(count, 6, generator=generator) + labels[:, None]
    return Samples(inputs, labels)


def _same(some: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return some.keys() == other.keys() and all(torch.equal(some[k], other[k]) for k in some)


def test_it_is_plain_sgd() -> None:
    """Against a loop written out by hand."""
    data, model = _data(), mlp(inputs=6, classes=3, width=8)
    by_hand = copy.deepcopy(model)
    update = train_round(model, data, RoundSpec(16, SGD, passes=2), seed=5)

    optimizer = torch.optim.SGD(by_hand.parameters(), lr=0.1, momentum=0.9)
    shuffle = torch.Generator().manual_seed(5)
    losses = []
    for _ in range(2):
        for batch in torch.randperm(40, generator=shuffle).split(16):
            loss = nn.functional.cross_entropy(by_hand(data.inputs[batch]), data.labels[batch])
            losses += [float(loss.detach())] * len(batch)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
    assert _same(update.state, by_hand.state_dict())
    assert update.steps == 6
    assert update.samples == 40
    assert update.loss == pytest.approx(sum(losses) / len(losses))


def test_the_seed_decides_and_global_generators_are_left_alone() -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Dropout(0.5), nn.Linear(8, 3))
    spec = RoundSpec(8, SGD)
    states = []
    for seed in (1, 1, 2):
        torch.rand(3)  # whatever others draw makes no difference
        before = torch.get_rng_state()
        states.append(train_round(copy.deepcopy(model), _data(), spec, seed).state)
        assert torch.equal(before, torch.get_rng_state())
    assert _same(states[0], states[1])
    assert not _same(states[0], states[2])


def test_a_last_batch_of_one_joins_the_one_before() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    assert train_round(model, _data(33), RoundSpec(16, SGD), 0).steps == 2
    with pytest.raises(TrainingError, match="cannot train on a single sample"):
        train_round(model, _data(1), RoundSpec(16, SGD), 0)


def test_divergence_names_step_seed_and_rate() -> None:
    model = mlp(inputs=6, classes=3)
    with pytest.raises(
        TrainingError, match=r"at step \d+ \(seed 9, learning rate 1e\+30\); lower the learning"
    ):
        train_round(model, _data(), RoundSpec(8, {"kind": "sgd", "lr": 1e30}), 9)
    # One step: the loss was fine, the weights are not.
    data = _data(8)
    broken = Samples(data.inputs * 1e25, data.labels)
    with pytest.raises(TrainingError, match="not finite at step 1|is nan|is inf"):
        train_round(mlp(inputs=6, classes=3), broken, RoundSpec(8, {"kind": "sgd", "lr": 1e30}), 9)


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        ({"kind": "sdg", "lr": 0.1}, r"optimizer.kind: 'sdg' is not known; did you mean 'sgd'"),
        ({"lr": 0.1}, "optimizer.kind: None is not known"),
        ({"kind": "sgd"}, "optimizer.lr: is missing"),
        ({"kind": "sgd", "lr": -1}, "optimizer.lr: -1 is not a number above 0"),
        ({"kind": "sgd", "lr": True}, "optimizer.lr: True is not"),
        ({"kind": "sgd", "lr": 0.1, "betas": [0.9, 0.9]}, "optimizer.betas: sgd has no such option"),
        ({"kind": "adam", "lr": 0.1, "momentum": 0.9}, "optimizer.momentum: adam has no such option"),
        ({"kind": "adam", "lr": 0.1, "betas": [0.9]}, "optimizer.betas: .* two numbers"),
        ({"kind": "adam", "lr": 0.1, "betas": [0.9, 1.5]}, "Invalid beta"),
        ({"kind": "sgd", "lr": 0.1, "nesterov": True}, "Nesterov momentum requires"),
        ({"kind": "sgd", "lr": 0.1, "nesterov": 1}, "optimizer.nesterov: 1 is not true or false"),
    ],
)
def test_wrong_optimizers(optimizer: dict[str, object], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        RoundSpec(8, optimizer)


@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_other_optimizers_train(kind: str) -> None:
    model = mlp(inputs=6, classes=3)
    spec = RoundSpec(8, {"kind": kind, "lr": 0.01, "betas": [0.9, 0.99], "weight_decay": 0.01}, passes=5)
    before = evaluate(model, _data(200, 1)).loss
    train_round(model, _data(200), spec, 0)
    assert evaluate(model, _data(200, 1)).loss < before


def test_wrong_specs_and_samples() -> None:
    for batch_size in (0, True, 2.5):
        with pytest.raises(UsageError, match="batch_size"):
            RoundSpec(batch_size, SGD)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"\(3, 2\) inputs do not go with \(4,\) labels"):
        Samples(torch.zeros(3, 2), torch.zeros(4))
    with pytest.raises(TrainingError, match="no samples"):
        train_round(mlp(inputs=6), _data().take([]), RoundSpec(8, SGD), 0)
    with pytest.raises(DataError, match="no samples to evaluate"):
        evaluate(mlp(inputs=6), _data().take([]))


def test_evaluation_does_not_depend_on_batches_or_change_the_model() -> None:
    model = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Dropout(0.5), nn.Linear(4, 3)).train()
    before = copy.deepcopy(model.state_dict())
    whole, pieces = evaluate(model, _data(), batch_size=100), evaluate(model, _data(), batch_size=7)
    assert whole.loss == pytest.approx(pieces.loss, rel=1e-6)
    assert whole.accuracy == pieces.accuracy
    assert model.training
    assert _same(before, model.state_dict())


# ---- a fleet's round -------------------------------------------------------------------------------------


def test_one_member_is_a_plain_round() -> None:
    model = cnn(width=4)
    alone = copy.deepcopy(model)
    images = Samples(torch.randn(20, 1, 8, 8), torch.arange(20) % 10)
    outcome = cooperative_round(model, {"a": images}, RoundSpec(8, SGD), 3, round_index=2)
    update = train_round(alone, images, RoundSpec(8, SGD), member_seed(3, 2, "a"))
    assert _same(model.state_dict(), update.state)
    assert outcome.loss == update.loss
    assert outcome.samples == 20


@settings(max_examples=10, deadline=None)
@given(order=st.permutations(["a", "b", "c"]))
def test_the_members_order_makes_no_difference(order: list[str]) -> None:
    data = {name: _data(10 + i, i) for i, name in enumerate("abc")}
    torch.manual_seed(0)
    start = mlp(inputs=6, classes=3)
    models = []
    for names in (["a", "b", "c"], order):
        model = copy.deepcopy(start)
        cooperative_round(model, [(name, data[name]) for name in names], RoundSpec(4, SGD), 0)
        models.append(model.state_dict())
    assert _same(*models)


def test_a_member_is_the_same_whoever_else_joins() -> None:
    data = {name: _data(12, i) for i, name in enumerate("ab")}
    model = mlp(inputs=6, classes=3)
    alone, both = copy.deepcopy(model), copy.deepcopy(model)
    one = cooperative_round(alone, {"a": data["a"]}, RoundSpec(4, SGD), 0)
    two = cooperative_round(both, data, RoundSpec(4, SGD), 0)
    assert one.members["a"] == two.members["a"]
    seeds = {member_seed(s, r, n) for s in range(3) for r in range(3) for n in "abc"}
    assert len(seeds) == 27


def _moved(before: dict[str, torch.Tensor], model: nn.Module) -> torch.Tensor:
    return torch.cat([(model.state_dict()[name] - start).flatten() for name, start in before.items()])


def test_a_round_moves_the_model_in_proportion_to_its_data() -> None:
    """Whoever sits out counts as unchanged: a quarter of the fleet's data goes a quarter of the way."""
    start = mlp(inputs=6, classes=3)
    before = copy.deepcopy(start.state_dict())
    data = {name: _data(12, i) for i, name in enumerate("ab")}
    moved = {}
    for fleet in (None, 24, 48, 96):
        model = copy.deepcopy(start)
        cooperative_round(model, data, RoundSpec(4, SGD), 0, mean=Mean(fleet))
        moved[fleet] = _moved(before, model)
    assert torch.equal(moved[24], moved[None])  # everyone is there: nothing changes
    assert torch.allclose(moved[48], moved[None] / 2, atol=1e-6)
    assert torch.allclose(moved[96], moved[None] / 4, atol=1e-6)
    with pytest.raises(TrainingError, match="used 24 samples out of 23"):
        cooperative_round(start, data, RoundSpec(4, SGD), 0, mean=Mean(23))
    assert _same(start.state_dict(), before)


@pytest.mark.parametrize("weights", ["normalized", "fleet"])
def test_nodes_of_unequal_size_move_the_model_by_their_data(weights: str) -> None:
    """Where every step goes equally far, a team's part of the way is its part of the data: if changes count
    by step. Counted by samples, whoever has three times the data goes nine times as far."""
    sizes = {"a": 12, "b": 4, "c": 36, "d": 22}
    data = {name: Samples(torch.ones(size, 6), torch.zeros(size).long()) for name, size in sizes.items()}
    spec = RoundSpec(4, {"kind": "sgd", "lr": 0.1}, loss=lambda outputs, _: outputs.mean())
    mean = Mean.of(weights, data, spec)
    start = torch.nn.Linear(6, 1)

    def way(*team: str) -> float:
        model = copy.deepcopy(start)
        cooperative_round(model, {name: data[name] for name in team}, spec, 0, mean=mean)
        return float((model.weight - start.weight).norm().detach())

    def part(power: int, *team: str) -> float:
        # of 22 samples in batches of 4 there are 6 steps, the last on 2
        steps = {name: -(-size // 4) for name, size in sizes.items()}
        worth = {name: sizes[name] * (steps[name] if power == 2 else 1) for name in sizes}
        return sum(worth[name] for name in team) / sum(worth.values())

    power = 1 if weights == "normalized" else 2
    for team in (("a",), ("b",), ("c",), ("d",), ("a", "b"), ("b", "c", "d"), tuple("abcd")):
        assert way(*team) / way(*"abcd") == pytest.approx(part(power, *team), rel=1e-4)


def test_nodes_of_equal_size_count_the_same_by_step_and_by_samples() -> None:
    data = {name: _data(12, i) for i, name in enumerate("abc")}
    models = []
    for weights in ("normalized", "fleet"):
        torch.manual_seed(0)
        model = mlp(inputs=6, classes=3)
        mean = Mean.of(weights, data, RoundSpec(4, SGD))
        cooperative_round(model, {"a": data["a"]}, RoundSpec(4, SGD), 0, mean=mean)
        models.append(model)
    for one, two in zip(models[0].parameters(), models[1].parameters(), strict=True):
        assert torch.allclose(one, two, atol=1e-7)


@pytest.mark.parametrize("samples", [1, 2, 4, 5, 8, 9, 10])
@pytest.mark.parametrize("batch_size", [1, 2, 4])
@pytest.mark.parametrize("passes", [1, 3])
def test_steps_are_counted_beforehand(samples: int, batch_size: int, passes: int) -> None:
    spec = RoundSpec(batch_size, SGD, passes)
    update = train_round(mlp(inputs=6, classes=3), _data(samples), spec, 0)
    assert step_count(samples, spec) == update.steps


def test_low_rank_products_move_in_proportion_too() -> None:
    """The exact mean of the products, with the server's own for the rest of the fleet."""
    torch.manual_seed(0)
    start = mlp(inputs=6, classes=3, width=16)
    tk.factorize_(start, rank=4, where=["1", "3"], force=True)
    trained = copy.deepcopy(start)
    cooperative_round(trained, {"a": _data(12)}, RoundSpec(4, SGD), 0)
    for how, close in (("products", 0.02), ("factors", 0.2)):
        model = copy.deepcopy(start)
        outcome = cooperative_round(model, {"a": _data(12)}, RoundSpec(4, SGD), 0, how, mean=Mean(36))
        for one, two, three in zip(_dense(start), _dense(trained), _dense(model), strict=True):
            exact = one + (two - one) / 3
            assert (three - exact).norm() <= close * (two - one).norm()
        assert 0 < outcome.truncation < 0.1


def _dense(model: nn.Module) -> list[torch.Tensor]:
    plain = copy.deepcopy(model)
    tk.densify_(plain)
    return [tensor for name, tensor in plain.state_dict().items() if name.endswith("weight")]


def test_a_failed_round_leaves_the_model_and_names_the_node() -> None:
    model = mlp(inputs=6, classes=3)
    before = copy.deepcopy(model.state_dict())
    broken = Samples(torch.full((8, 6), float("nan")), torch.zeros(8, dtype=torch.long))
    with pytest.raises(TrainingError, match="node 'b', round 4: the loss is nan at step 1"):
        cooperative_round(model, {"a": _data(), "b": broken}, RoundSpec(4, SGD), 0, round_index=4)
    assert _same(before, model.state_dict())
    with pytest.raises(TrainingError, match="without members"):
        cooperative_round(model, {}, RoundSpec(4, SGD), 0)
    with pytest.raises(TrainingError, match="twice"):
        cooperative_round(model, [("a", _data()), ("a", _data())], RoundSpec(4, SGD), 0)
