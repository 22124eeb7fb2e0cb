from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from takifugu import zoo
from takifugu.errors import UsageError
from takifugu.lowrank.choice import choose
from takifugu.lowrank.surgery import apply_
from takifugu.train import models
from takifugu.train import recipe as recipes
from takifugu.train.methods import method_for
from takifugu.train.tasks import check_data

PAPER = {
    "vgg19-cifar10": (20_560_330, 8_370_634),
    "resnet18-cifar10": (11_173_834, 3_336_138),
    "resnet50-imagenet": (25_557_032, 15_202_344),
    "wide-resnet50-2-imagenet": (68_883_240, 40_047_400),
    # torch's LSTM has two biases a gate: 12,000 parameters more than the paper's.
    "lstm-wikitext2": (85_974_278, 67_974_278),
    "transformer-multi30k": (48_978_432, 26_696_192),
}


@pytest.mark.parametrize("name", recipes.names())
def test_every_recipe_names_what_exists(name: str) -> None:
    recipe = recipes.load(name)
    assert recipe.about
    check_data(recipe.data.name)
    method_for(recipe.method)
    with torch.device("meta"):
        models.build(recipe.model.name, recipe.model.options, {}, 0, "model.name")


@pytest.mark.parametrize("name", PAPER)
def test_the_papers_recipes_give_the_papers_counts(name: str) -> None:
    recipe = recipes.load(name)
    with torch.device("meta"):
        model = models.build(recipe.model.name, recipe.model.options, {}, 0, "model.name")
    dense, low_rank = PAPER[name]
    assert sum(p.numel() for p in model.parameters()) == dense
    if name in ("vgg19-cifar10", "resnet18-cifar10"):  # tests/zoo counts the large ones
        model = models.build(recipe.model.name, recipe.model.options, {}, 0, "model.name")
        apply_(model, choose(model, rank=recipe.method["rank"], where=zoo.where(name)))
        assert sum(p.numel() for p in model.parameters()) == low_rank


def test_fields_are_overridden(tmp_path: Path) -> None:
    recipe = recipes.load(
        "resnet18-cifar10-small",
        ["data.batch_size=64", "optimizer.lr = 1e-2", "precision=fp32", "model.options.width=8"],
    )
    assert (recipe.data.batch_size, recipe.optimizer["lr"], recipe.precision) == (64, 0.01, "fp32")
    assert recipe.model.options == {"width": 8}
    assert recipe.optimizer["momentum"] == 0.9
    dense = recipes.load("resnet18-cifar10-small", ["method.kind=dense"])
    assert dense.method == {"kind": "dense"}
    assert dense.sha256 == recipes.load("resnet18-cifar10-small-dense").sha256
    assert dense.sha256 != recipe.sha256


def test_the_order_of_overrides_does_not_matter() -> None:
    one = recipes.load("resnet18-cifar10-dense", ["method.kind=warm-start", "method.warmup=3"])
    other = recipes.load("resnet18-cifar10-dense", ["method.warmup=3", "method.kind=warm-start"])
    assert one.method == other.method == {"kind": "warm-start", "warmup": 3}


def test_a_recipe_may_be_based_on_another(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('base = "digits-small"\nseed = 7\n[method]\nrank = 0.5\n')
    (tmp_path / "yours.toml").write_text('base = "mine.toml"\n[optimizer]\nkind = "adam"\nlr = 0.001\n')
    mine, yours = recipes.load(tmp_path / "mine.toml"), recipes.load(tmp_path / "yours.toml")
    given = recipes.load("digits-small")
    assert mine.method == {**given.method, "rank": 0.5}
    assert yours.optimizer == {"kind": "adam", "lr": 0.001}
    assert (yours.seed, yours.data) == (7, given.data)
    for circle in ("circle.toml", f"../{tmp_path.name}/circle.toml"):
        (tmp_path / "circle.toml").write_text(f'base = "{circle}"\n')
        with pytest.raises(UsageError, match="base: .* is not the name or the path of another recipe"):
            recipes.load(tmp_path / "circle.toml")


def test_inherited_fields_are_removed(tmp_path: Path) -> None:
    stages = "method.stages=[[1, 0.5], [2, 0.25]]"
    removed = ["method.rank=", "method.warmup = "]
    wanted = {"kind": "warm-start", "stages": [[1, 0.5], [2, 0.25]]}
    for overrides in ([*removed, stages], [stages, *removed], [*removed, *removed, stages]):
        assert recipes.load("digits-small", overrides).method == wanted
    (tmp_path / "a.toml").write_text(
        'base = "digits-small"\nunset = ["method.rank", "method.warmup", "schedule"]\n'
        "[method]\nstages = [[1, 0.5], [2, 0.25]]\n"
    )
    (tmp_path / "b.toml").write_text('base = "a.toml"\nunset = ["method.stages"]\n')
    first, second = recipes.load(tmp_path / "a.toml"), recipes.load(tmp_path / "b.toml")
    assert (first.method, first.schedule) == (wanted, {})
    assert second.method == {"kind": "warm-start"}
    # A field that is removed and given again has nothing of the old one.
    (tmp_path / "c.toml").write_text(
        'base = "digits-small"\nunset = ["optimizer"]\n[optimizer]\nkind = "sgd"\nlr = 1.0\n'
    )
    assert recipes.load(tmp_path / "c.toml").optimizer == {"kind": "sgd", "lr": 1.0}
    cleared = recipes.load("digits-small", ["method.warmup=", "method.kind=low-rank"])
    assert cleared.method == {"kind": "low-rank"}


@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (["epoch=3"], ["epoch: is not a field of a recipe; did you mean 'epochs'"]),
        (["epochs=0"], ["epochs: 0 is not valid; give a whole number of at least 1"]),
        (["precision=fp8"], ["precision: 'fp8' is not valid; give fp32, bf16 or fp16"]),
        (["data.batchsize=3"], ["data.batchsize: is not a field of a recipe; did you mean 'batch_size'"]),
        (["optimizer.kind=lion"], ["optimizer.kind: 'lion' is not known"]),
        (["schedule.kind=none"], ["schedule.kind: 'none' is not known"]),
        (
            ["epochs=x", "data.augment=3", "optimizer.lr=-1"],
            [
                "epochs: 'x' is not valid",
                "data.augment: 3 is not valid",
                "optimizer.lr: -1 is not a number above 0",
            ],
        ),
        (["epochs"], ["--set 'epochs': give field=value"]),
        (["epochs.a=1"], ["'epochs' is a value, not a table"]),
        (["method.rnk="], ["--set method.rnk=: the recipe does not set method.rnk", "did you mean 'rank'"]),
        (["methd.rank="], ["the recipe does not set methd, so", "did you mean 'method'"]),
        (["epochs.a="], ["the recipe does not set epochs.a, so there is nothing to remove"]),
        (["data.name="], ["data.name: is missing; give a data set by name"]),
        (["seed=1", "epochs=", "epochs=3"], ["--set epochs=3: epochs is removed as well"]),
        (
            ["method.stages=[[1, 0.5]]"],
            [
                "method.stages: `rank` and `stages` are mutually exclusive",
                "`warmup` and `stages` are mutually exclusive",
                "remove one with --set method.rank= --set method.warmup=, or unset = "
                '["method.rank", "method.warmup"]',
            ],
        ),
        (
            ["optimizer.kind=[1]", "schedule.kind={a=1}", "method.kind=[1]"],
            [
                f"{table}.kind: {odd} is not known"
                for table, odd in (("optimizer", "[1]"), ("schedule", "{'a': 1}"), ("method", "[1]"))
            ],
        ),
        (["method.svd=[1]"], ["method.svd: unknown svd [1]"]),
        (["clip_norm=inf"], ["clip_norm: inf is not a finite number"]),
        (["model.options.width=[1, nan]"], ["model.options.width.1: nan is not a finite number"]),
        (["model.options.born=2020-01-01"], ["model.options.born: 2020-01-01 is a date"]),
        (
            ["model.name=resnet19", "data.name=digit", "method.rank=0", "optimizer.lr=0"],
            [
                "model.name: 'resnet19' is neither a zoo network",
                "data.name: 'digit' is not known",
                "method.rank: rank 0 is less than 1",
                "optimizer.lr: 0 is not a number above 0",
            ],
        ),
    ],
)
def test_all_mistakes_are_told_at_once(overrides: list[str], messages: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        recipes.load("digits-small", overrides)
    for message in messages:
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("epochs = ", "is not valid TOML"),
        ("epochs = 3", "model: is missing; give the table"),
        ('base = "digits-small"\nseed = 2020-01-01', "seed: .* is not valid; give a whole number"),
        ('unset = ["epochs"]\nepochs = 3', "unset: removes fields of a base, and there is none"),
        ('base = "digits-small"\nunset = "epochs"', "unset: 'epochs' is not a list of fields"),
        (
            'base = "digits-small"\nunset = ["method.wamup"]',
            "unset 'method.wamup': the recipe does not set method.wamup.*did you mean 'warmup'",
        ),
        (b"\xff", "cannot be read"),
        (None, "cannot be read"),
    ],
)
def test_files_that_are_no_recipes(content: Any, message: str, tmp_path: Path) -> None:
    path = tmp_path / "a.toml"
    if content is not None:
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(UsageError, match=message):
        recipes.load(path)
    with pytest.raises(UsageError, match="there is no recipe 'digit-small'; did you mean 'digits-small'"):
        recipes.load("digit-small")
