"""`model.safetensors` of a training run opens with `takifugu.load(path)` alone, whatever the recipe."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_training import run, texts
from torch import nn

import takifugu as tk
from takifugu.errors import CheckpointError
from takifugu.lowrank.narrow import BUILDER
from takifugu.train import recipe as recipes
from takifugu.train.recipe import Recipe
from takifugu.train.tasks import task_for
from takifugu.train.tasks.base import Place

TINY: dict[str, dict[str, Any]] = {
    "takifugu.zoo.small:cnn": {},
    "vgg19-cifar10": {"width": 1 / 8, "depths": [1, 1, 1, 2, 1], "dropout": 0.1},
    "resnet18-cifar10": {"width": 8, "blocks": [1, 1, 1, 1]},
    "resnet50-imagenet": {"width": 8, "blocks": [1, 1, 1, 1]},
    "wide-resnet50-2-imagenet": {"width": 8, "blocks": [1, 1, 1, 1]},
    "lstm-wikitext2": {"hidden": 32, "dropout": 0.2},
    "transformer-multi30k": {"width": 32, "heads": 2, "feed_forward": 64, "layers": 2},
}
DATA: dict[str, dict[str, Any]] = {
    "wikitext-2": {"batch_size": 8, "limit": None},
    "multi30k": {"batch_size": 16, "limit": None, "options": {"vocabulary": 120}},
}
IMAGES: dict[str, Any] = {"name": "digits", "batch_size": 32, "validation": 0.2, "limit": 64, "options": {}}
METHODS: dict[str, dict[str, Any]] = {
    "dense": {},
    "low-rank": {},
    "warm-start": {"warmup": 1},
    "lottery-ticket": {"rounds": 1, "keep": 0.6},
    "early-bird": {"keep": 0.6, "latest": 1},
}


def tiny(name: str) -> Recipe:
    """The recipe with its own model, task, method and settings, but as small as they can be."""
    recipe = recipes.load(name).model_dump()
    recipe["epochs"], recipe["precision"] = 2, "fp32"
    recipe["model"]["options"] |= TINY[recipe["model"]["name"]]
    recipe["data"] |= DATA.get(recipe["data"]["name"], IMAGES)
    recipe["method"] |= METHODS[recipe["method"]["kind"]]
    return recipes.checked(recipe, name)


def scores(model: nn.Module, recipe: Recipe, data: Path) -> dict[str, float]:
    task = task_for(recipe, data, Place())
    model.eval()
    if recipe.channels_last:  # products are summed in another order there
        model.to(memory_format=torch.channels_last)
    with torch.no_grad():
        return task.scores(task.evaluate(model, "test"))


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return texts(tmp_path_factory.mktemp("texts"))


@pytest.mark.parametrize("name", recipes.names())
def test_the_model_of_every_recipe_opens_by_itself(name: str, data: Path, tmp_path: Path) -> None:
    recipe = tiny(name)
    result = run(recipe, tmp_path / "run", data=data)
    model = tk.load(tmp_path / "run" / "model.safetensors")
    assert scores(model, recipe, data) == pytest.approx(result["test"])
    kind, total = recipe.method["kind"], sum(p.numel() for p in model.parameters())
    if kind == "lottery-ticket":
        assert result["parameters"] < total
    else:
        assert result["parameters"] == total
    assert tk.structure_of(model).is_dense == (kind not in ("warm-start", "low-rank"))
    assert ("widths" in getattr(model, BUILDER)) == (kind == "early-bird")

    # What was loaded can be saved again, and is the same file.
    tk.save(model.to(memory_format=torch.contiguous_format), tmp_path / "again.safetensors")
    again = tk.load(tmp_path / "again.safetensors")
    assert getattr(again, BUILDER) == getattr(model, BUILDER)
    assert scores(again, recipe, data) == pytest.approx(result["test"])


def test_so_does_a_multilayer_perceptron_of_the_size_of_the_data(tmp_path: Path) -> None:
    recipe = recipes.load(
        "digits-small",
        ["epochs=1", "data.limit=64", "model.name=takifugu.zoo.small:mlp", "method.kind=dense"],
    )
    result = run(recipe, tmp_path / "run")
    model = tk.load(tmp_path / "run" / "model.safetensors")
    assert getattr(model, BUILDER)["options"] == {"classes": 10, "inputs": 64, "width": 32}
    assert scores(model, recipe, tmp_path) == pytest.approx(result["test"])


def network_of_ones_own(*, classes: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1),
        nn.BatchNorm2d(width),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(width, classes),
    )


def test_a_file_imports_nothing_of_the_users_but_says_what_to_build(tmp_path: Path) -> None:
    own = {"name": "test_trained_models:network_of_ones_own", "options": {"width": 16}}
    recipe = tiny("vgg19-cifar10-early-bird").model_copy()
    recipe = recipes.checked({**recipe.model_dump(), "model": own}, "test")
    result = run(recipe, tmp_path / "run")
    path = tmp_path / "run" / "model.safetensors"
    with pytest.raises(
        CheckpointError, match=r"'test_trained_models:network_of_ones_own', which is not part"
    ):
        tk.load(path)
    with pytest.raises(CheckpointError, match=r"with the options \(classes=10, width=16\)"):
        tk.load(path)
    # The network of full size is made as narrow as the file's.
    full = network_of_ones_own(classes=10, width=16)
    model = tk.load(path, full)
    assert sum(p.numel() for p in model.parameters()) == result["parameters"]
    assert scores(model, recipe, tmp_path) == pytest.approx(result["test"])


@pytest.mark.parametrize(
    ("widths", "message"),
    [
        ([3], "widths: expected sizes by layer name, got list"),
        ({"stage9.conv": [1, 1]}, "VGG has no layer 'stage9.conv'"),
        ({"pool": [1]}, "layer 'pool' is a MaxPool2d, whose channels cannot be cut"),
        ({"stage2.0.conv": [99, 1]}, r"layer 'stage2.0.conv' has sizes \[8, 4\] and cannot be narrowed to"),
        ({"stage2.0.conv": [0, 1]}, "cannot be narrowed to"),
        ({"stage2.0.conv": [True, 1]}, "cannot be narrowed to"),
        ({"stage2.0.conv": [3, 4]}, r"'stage2.0.conv.weight' has shape \(8, 4, 3, 3\) in"),
    ],
)
def test_widths_that_do_not_fit_change_nothing(widths: Any, message: str, tmp_path: Path) -> None:
    options = {"width": 1 / 16, "depths": [1] * 5}
    model = tk.zoo.build("vgg19-cifar10", **options)
    setattr(model, BUILDER, {**getattr(model, BUILDER), "widths": widths})
    tk.save(model, tmp_path / "m.safetensors")
    other = tk.zoo.build("vgg19-cifar10", **options)
    before = {name: value.clone() for name, value in other.state_dict().items()}
    for given in ((), (other,)):
        with pytest.raises(CheckpointError, match=message):
            tk.load(tmp_path / "m.safetensors", *given)
    assert all(torch.equal(value, before[name]) for name, value in other.state_dict().items())


@pytest.mark.parametrize("function", ["os:getcwd", "takifugu.zoo.small:_Block", ["a"], None])
def test_only_functions_of_the_fixed_list_are_called(function: Any, tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    setattr(model, BUILDER, {"function": function, "options": {}})
    tk.save(model, tmp_path / "m.safetensors")
    with pytest.raises(CheckpointError, match="is not part of takifugu and is not imported"):
        tk.load(tmp_path / "m.safetensors")
