from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from takifugu.errors import DataError, TakifuguError, UsageError
from takifugu.lowrank.choice import choose
from takifugu.train import partition
from takifugu.train.workload import Workload

TABLE: dict[str, Any] = {
    "model": "takifugu.zoo.small:cnn",
    "model_options": {"width": 4},
    "data": "digits",
    "partition": {"kind": "dirichlet", "alpha": 0.3},
    "batch_size": 16,
    "optimizer": {"kind": "sgd", "lr": 0.05},
    "validation": 0.2,
    "seed": 3,
}


def _labels(count: int, classes: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, count)


@settings(max_examples=60, deadline=None)
@given(
    kind=st.sampled_from(["iid", "dirichlet"]),
    nodes=st.integers(1, 9),
    count=st.integers(30, 300),
    classes=st.integers(1, 6),
    alpha=st.sampled_from([0.01, 0.3, 100.0]),
    seed=st.integers(0, 5),
    data=st.data(),
)
def test_shares_have_their_sizes_and_never_overlap(
    kind: str, nodes: int, count: int, classes: int, alpha: float, seed: int, data: st.DataObject
) -> None:
    names = [f"n{i}" for i in range(nodes)]
    sizes = data.draw(st.dictionaries(st.sampled_from(names), st.integers(1, count // nodes)))
    options = {"alpha": alpha} if kind == "dirichlet" else {}
    labels = _labels(count, classes, seed)
    request = partition.Request(labels, names, sizes, seed, options)
    found = partition.share_out(kind, request)
    places = np.concatenate(list(found.values()))
    assert len(np.unique(places)) == len(places)
    assert all(len(found[name]) == size for name, size in sizes.items())
    if len(sizes) < nodes:
        assert len(places) == count  # those that do not say share the rest
    # Sizes that were found, given back, share out the same: what is profiled is what is run.
    again = partition.share_out(
        kind, partition.Request(labels, names, {n: len(p) for n, p in found.items()}, seed, options)
    )
    assert all(np.array_equal(found[name], again[name]) for name in names)


def test_a_small_alpha_skews_the_labels() -> None:
    labels = _labels(4000, 10, 0)
    names = [f"n{i}" for i in range(8)]

    def skew(alpha: float) -> float:
        request = partition.Request(labels, names, {}, 0, {"alpha": alpha})
        found = partition.share_out("dirichlet", request)
        mixes = np.array([np.bincount(labels[found[n]], minlength=10) / len(found[n]) for n in names])
        return float(np.abs(mixes - mixes.mean(axis=0)).sum(axis=1).mean() / 2)

    assert skew(0.1) > skew(1.0) > skew(100.0)
    assert skew(0.1) > 0.5
    assert skew(1000.0) < 0.05


def test_writers_stay_together() -> None:
    who = np.repeat(np.arange(20), np.arange(5, 25))
    request = partition.Request(_labels(len(who), 10, 0), ["a", "b", "c"], {}, 1, writers=who)
    found = partition.share_out("writers", request)
    owners = [set(who[places]) for places in found.values()]
    assert sum(map(len, owners)) == 20
    assert set.union(*owners) == set(range(20))
    sizes = [len(places) for places in found.values()]
    assert sum(sizes) == len(who)
    assert max(sizes) - min(sizes) < 25
    with pytest.raises(DataError, match="21 nodes cannot share 20 writers"):
        partition.share_out(
            "writers", partition.Request(request.labels, [str(i) for i in range(21)], {}, 1, writers=who)
        )


@settings(max_examples=40, deadline=None)
@given(
    count=st.integers(10, 400), classes=st.integers(1, 8), share=st.floats(0.1, 0.9), seed=st.integers(0, 9)
)
def test_the_validation_set_is_stratified(count: int, classes: int, share: float, seed: int) -> None:
    labels = _labels(count, classes, seed)
    train, held = partition.validation_split(labels, share, seed)
    assert sorted([*train, *held]) == list(range(count))
    assert len(held) == round(share * count)
    for label in range(classes):
        assert abs((labels[held] == label).sum() - share * (labels == label).sum()) < 1


def test_digits_end_to_end() -> None:
    pytest.importorskip("sklearn")
    workload = Workload.from_dict(TABLE)
    train, validation, classes = workload.load()
    assert (len(train), len(validation), classes) == (1438, 359, 10)
    shares = workload.shares(["a", "b", "c"], [100, None, 200])
    assert [len(share) for share in shares.values()] == [100, 1138, 200]
    assert sum(shares["b"].histogram(10)) == 1138
    mixed = {tuple(image.flatten().tolist()) for share in shares.values() for image in share.inputs}
    held = [tuple(image.flatten().tolist()) for image in validation.inputs]
    assert not mixed & set(held)
    some, other = workload.build(), Workload.from_dict(TABLE).build()
    assert all(torch.equal(a, b) for a, b in zip(some.parameters(), other.parameters(), strict=True))
    assert workload.build()(validation.inputs[:2]).shape == (2, 10)


def test_a_model_is_sized_by_the_data() -> None:
    pytest.importorskip("sklearn")
    zoo = Workload.from_dict({**TABLE, "model": "resnet18-cifar10", "model_options": {"width": 4}})
    assert zoo.build()(torch.zeros(2, 1, 8, 8)).shape == (2, 10)
    assert zoo.where(zoo.build())("layer2.0.conv1", None)
    mlp = Workload.from_dict({**TABLE, "model": "takifugu.zoo.small:mlp", "model_options": {"depth": 1}})
    assert mlp.build()(torch.zeros(2, 1, 8, 8)).shape == (2, 10)


def test_first_and_output_layer_stay_dense_unless_named() -> None:
    pytest.importorskip("sklearn")
    mlp = {**TABLE, "model": "takifugu.zoo.small:mlp", "model_options": {}}
    for low_rank, wanted in (([], {"3"}), (["*"], {"1", "3", "5"}), (["3"], {"3"})):
        workload = Workload.from_dict({**mlp, "low_rank": low_rank})
        model = workload.build()
        structure = choose(model, 0.25, workload.where(model))
        assert {spec.name for spec in structure} == wanted


def test_limit_takes_a_stratified_part() -> None:
    pytest.importorskip("sklearn")
    train, validation, _ = Workload.from_dict({**TABLE, "limit": 500}).load()
    assert len(train) + len(validation) == 500
    counts = np.array(train.histogram(10)) + validation.histogram(10)
    assert counts.min() >= 47


def test_own_data_and_own_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine_for_workload.py").write_text(
        "import torch\n"
        "def data():\n    return torch.randn(60, 1, 8, 8), torch.arange(60) % 4\n"
        "def broken():\n    return torch.zeros(3)\n"
        "def floats():\n    return torch.zeros(3, 1), torch.zeros(3)\n"
        "def model(inputs, classes):\n    return torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(inputs, classes))\n"
        "def not_a_model():\n    return 3\n"
    )
    monkeypatch.chdir(tmp_path)
    own = {**TABLE, "data": "mine_for_workload:data", "model": "mine_for_workload:model", "model_options": {}}
    workload = Workload.from_dict(own)
    assert workload.build()(workload.load().train.inputs).shape == (48, 4)
    for change, message in [
        ({"data": "mine_for_workload:broken"}, "must return two tensors"),
        ({"data": "mine_for_workload:floats"}, "labels must be"),
        ({"model": "mine_for_workload:not_a_model"}, "gave a int, not a torch.nn.Module"),
        ({"model": "mine_for_workload:modle"}, "has no 'modle'; did you mean 'model'"),
        ({"model_options": {"depth": 3}}, "cannot be built"),
    ]:
        with pytest.raises(TakifuguError, match=message):
            Workload.from_dict({**own, **change}).build()


def test_files_of_the_nodes(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    for name, count in (("a", 12), ("b", 30), ("held", 20)):
        labels = np.arange(count) % 3
        np.savez(tmp_path / f"{name}.npz", inputs=rng.normal(size=(count, 1, 8, 8)), labels=labels)
    table = {k: v for k, v in TABLE.items() if k != "data"}
    table["partition"] = {"kind": "files", "pattern": "{name}.npz", "validation": "held.npz"}
    workload = Workload.from_dict(table, base=tmp_path)
    shares = workload.shares(["a", "b"], {"a": 12})
    assert [len(s) for s in shares.values()] == [12, 30]
    assert shares["a"].inputs.dtype == torch.float32
    assert len(workload.load().validation) == 20
    with pytest.raises(DataError, match="node 'a': samples = 13, but .*a.npz has 12"):
        workload.shares(["a"], {"a": 13})
    with pytest.raises(DataError, match="node 'c': .*c.npz is missing"):
        workload.shares(["c"])
    with pytest.raises(DataError, match="part of a path"):
        workload.shares(["../a"])
    (tmp_path / "junk.npz").write_bytes(b"PK\x03\x04 not a zip")
    np.savez(tmp_path / "pickled.npz", inputs=np.array([{}], dtype=object), labels=np.array([1]))
    np.savez(tmp_path / "other.npz", inputs=np.zeros((4, 2)), labels=np.zeros(4, int))
    np.savez(tmp_path / "uneven.npz", inputs=np.zeros((4, 2)), labels=np.zeros(3, int))
    np.savez(tmp_path / "half.npz", inputs=np.zeros((4, 2)))
    for name, message in [
        ("junk", "cannot be read"),
        ("pickled", "cannot be read"),
        ("other", "expected"),
        ("uneven", "4 inputs and 3 labels"),
        ("half", "must hold inputs and labels"),
    ]:
        with pytest.raises(DataError, match=f"node '{name}': .*{message}"):
            workload.shares([name])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modle": 1}, "workload.modle: is not known; did you mean 'model'"),
        ({"model": 3}, "workload.model: 3 is not a zoo network"),
        ({"batch_size": True}, "workload.batch_size: True is not"),
        ({"batch_size": 0}, "workload.batch_size: 0 is not at least 1"),
        ({"validation": 1.0}, "workload.validation: 1.0 is not between"),
        ({"data": "mnits"}, "unknown data set 'mnits'; did you mean 'mnist'"),
        ({"partition": {"kind": "idd"}}, "partition.kind: 'idd' is not known; did you mean 'iid'"),
        ({"partition": {"kind": "iid", "alpha": 1}}, "partition.alpha: iid has no such option"),
        ({"partition": {"kind": "writers"}}, "needs data = 'mnist'"),
        ({"partition": {"kind": "files"}}, "partition.pattern"),
        ({"partition": {"kind": ["iid"]}}, r"partition.kind: \['iid'\] is not known"),
        (
            {"partition": {"kind": "files", "pattern": "{name}.npz", "validation": 3}},
            "partition.validation: 3 is not a path",
        ),
        ({"optimizer": {"kind": ["sgd"], "lr": 0.1}}, r"workload.optimizer.kind: \['sgd'\] is not known"),
        ({"seed": 2**70}, "workload.seed: 1180591620717411303424 is not between"),
        ({"optimizer": {"kind": "sgd"}}, "workload.optimizer.lr: is missing"),
        ({"low_rank": "a"}, "workload.low_rank: 'a' is not a list"),
        ({"seed": -1}, "workload.seed: -1"),
        ({"limit": 0}, "workload.limit"),
        ({"weights": "fleets"}, "workload.weights: 'fleets' is not known; did you mean 'fleet'"),
    ],
)
def test_wrong_tables(change: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Workload.from_dict({**TABLE, **change})


def test_own_data_that_wants_arguments_is_told() -> None:
    with pytest.raises(DataError, match=r"'json:dumps' cannot be called: dumps\(\) missing"):
        Workload.from_dict({**TABLE, "data": "json:dumps"}).load()


def test_what_is_missing() -> None:
    for name in ("model", "data", "batch_size", "optimizer"):
        with pytest.raises(UsageError, match=f"workload.{name}: is missing"):
            Workload.from_dict({k: v for k, v in TABLE.items() if k != name})
    with pytest.raises(UsageError, match="there is no .workload."):
        Workload.from_dict(None)
    with pytest.raises(UsageError, match="neither a zoo network"):
        Workload.from_dict({**TABLE, "model": "resnet"}).build()


def test_impossible_shares_name_the_node() -> None:
    labels = _labels(50, 3, 0)
    for names, sizes, message in [
        (["a", "b"], {"a": 40, "b": 20}, "ask for 60 samples, and there are 50 .*'a'"),
        (["a"], {"a": 0}, "node 'a': samples = 0"),
        ([], {}, "no nodes"),
        (["a", "a"], {}, "one name"),
    ]:
        with pytest.raises(DataError, match=message):
            partition.share_out("iid", partition.Request(labels, names, sizes, 0))
    who = np.repeat([1, 2], 25)
    with pytest.raises(DataError, match="node 'b': samples = 24, but its share of the data is 25"):
        partition.share_out("writers", partition.Request(labels, ["a", "b"], {"b": 24}, 0, writers=who))
    with pytest.raises(UsageError, match="partition.alpha: 0 is not"):
        partition.share_out("dirichlet", partition.Request(labels, ["a"], {}, 0, {"alpha": 0}))
    with pytest.raises(DataError, match="both need some"):
        partition.validation_split(labels, 0.001, 0)
