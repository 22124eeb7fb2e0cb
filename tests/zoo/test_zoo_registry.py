"""Looking networks up by name: options, errors, examples, and that nothing is imported too early."""

from __future__ import annotations

import copy
import json
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from takifugu import zoo
from takifugu.errors import TakifuguError, UsageError

SMALL: dict[str, dict[str, Any]] = {
    "vgg19-cifar10": {"width": 0.0625, "depths": (1, 1, 1, 1, 1), "classes": 7, "in_channels": 1},
    "resnet18-cifar10": {"width": 4, "blocks": (1, 1, 1, 1), "classes": 7, "in_channels": 1},
    "resnet50-imagenet": {"width": 4, "blocks": (1, 1, 1, 1), "classes": 7, "in_channels": 1},
    "wide-resnet50-2-imagenet": {"width": 4, "blocks": (1, 2, 1, 1), "classes": 7, "in_channels": 1},
    "lstm-wikitext2": {"vocabulary": 30, "hidden": 8, "layers": 1, "dropout": 0.0},
    "transformer-multi30k": {
        "vocabulary": 30,
        "width": 8,
        "heads": 2,
        "layers": 2,
        "feed_forward": 12,
        "dropout": 0.0,
        "pad": 3,
        "max_length": 40,
    },
}


def test_names() -> None:
    assert zoo.names() == (
        "vgg19-cifar10",
        "resnet18-cifar10",
        "resnet50-imagenet",
        "wide-resnet50-2-imagenet",
        "lstm-wikitext2",
        "transformer-multi30k",
    )
    assert set(SMALL) == set(zoo.names())


def test_import_is_light() -> None:
    code = (
        "import sys; from takifugu import zoo; zoo.names(); zoo.where('lstm-wikitext2')('lstm', None); "
        "assert 'torch' not in sys.modules; zoo.build('lstm-wikitext2', vocabulary=3, hidden=2); "
        "assert 'torch' in sys.modules; assert 'takifugu.zoo.vgg' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


@pytest.mark.parametrize("name", zoo.names())
def test_example_runs_through_the_model(name: str) -> None:
    model = zoo.build(name, **SMALL[name]).eval()
    inputs = zoo.example(name, batch_size=2, **SMALL[name])
    output = model(*inputs)
    logits = output[0] if isinstance(output, tuple) else output
    expected = {"lstm-wikitext2": (35, 2, 30), "transformer-multi30k": (2, 32, 30)}.get(name, (2, 7))
    assert logits.shape == expected
    assert logits.dtype == torch.float32
    assert logits.isfinite().all()


@pytest.mark.parametrize("name", zoo.names())
def test_example_is_fixed_and_leaves_the_generator_alone(name: str) -> None:
    before = torch.get_rng_state()
    first, second = zoo.example(name), zoo.example(name)
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))
    assert all(tensor.unique().numel() > 1 for tensor in first)


def test_example_has_its_own_options() -> None:
    (image,) = zoo.example("resnet50-imagenet", 2, image_size=64, width=8)
    assert image.shape == (2, 3, 64, 64)
    (tokens,) = zoo.example("lstm-wikitext2", 4, length=5, vocabulary=9)
    assert tokens.shape == (5, 4)
    assert int(tokens.max()) < 9
    source, target = zoo.example("transformer-multi30k", 3, length=12, vocabulary=9, pad=4, max_length=7)
    assert source.shape == target.shape == (3, 7)
    assert not (source == 4).any()
    assert int(source.max()) < 9


@pytest.mark.parametrize("name", zoo.names())
def test_builder_is_remembered(name: str) -> None:
    model = zoo.build(name, **SMALL[name])
    builder = model._takifugu_builder
    assert builder["zoo"] == name
    assert set(builder["options"]) == set(SMALL[name])
    again = json.loads(json.dumps(builder))
    assert again == builder
    rebuilt = zoo.build(again["zoo"], **again["options"])
    rebuilt.load_state_dict(model.state_dict())
    assert copy.deepcopy(model)._takifugu_builder == builder


def test_only_given_options_are_remembered() -> None:
    with torch.device("meta"):
        model = zoo.build("resnet18-cifar10", classes=3)
    assert model._takifugu_builder == {"zoo": "resnet18-cifar10", "options": {"classes": 3}}


@pytest.mark.parametrize("name", zoo.names())
def test_same_seed_same_weights(name: str) -> None:
    models = []
    for _ in range(2):
        torch.manual_seed(5)
        models.append(zoo.build(name, **SMALL[name]))
    first, second = (model.state_dict() for model in models)
    assert all(torch.equal(first[key], second[key]) for key in first)


@pytest.mark.parametrize("name", ["vgg19-cifar10", "resnet18-cifar10", "transformer-multi30k"])
def test_compiles_as_one_graph(name: str) -> None:
    torch._dynamo.reset()
    model = zoo.build(name, **SMALL[name]).eval()
    inputs = zoo.example(name, batch_size=2, **SMALL[name])
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(*inputs), model(*inputs))


@pytest.mark.parametrize("call", [zoo.build, zoo.where, zoo.example])
def test_unknown_name(call: Any) -> None:
    with pytest.raises(
        UsageError, match=r"unknown zoo network 'resnet18'; did you mean 'resnet18-cifar10'"
    ) as caught:
        call("resnet18")
    assert all(name in str(caught.value) for name in zoo.names())
    with pytest.raises(TakifuguError, match="unknown zoo network None; there are vgg19-cifar10"):
        call(None)


@pytest.mark.parametrize("call", [zoo.build, zoo.example])
def test_unknown_option(call: Any) -> None:
    with pytest.raises(
        UsageError,
        match=r"resnet18-cifar10: unknown option 'widht'; did you mean 'width'\?; accepted: blocks, classes",
    ):
        call("resnet18-cifar10", widht=3)


def test_the_builder_has_no_image_size() -> None:
    with pytest.raises(UsageError, match="unknown option 'image_size'"):
        zoo.build("vgg19-cifar10", image_size=32)


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("vgg19-cifar10", {"width": 0}, "vgg19-cifar10: option 'width' must be a number above 0, got 0"),
        ("vgg19-cifar10", {"width": float("nan")}, "'width' must be a number above 0, got nan"),
        ("vgg19-cifar10", {"width": "wide"}, "'width' must be a number above 0, got 'wide'"),
        ("vgg19-cifar10", {"dropout": 1.0}, "'dropout' must be at least 0 and below 1, got 1.0"),
        ("vgg19-cifar10", {"depths": (2, 2)}, r"'depths' must list 5 whole numbers, got \(2, 2\)"),
        ("resnet18-cifar10", {"width": 1.5}, "'width' must be a whole number of at least 1, got 1.5"),
        ("resnet18-cifar10", {"classes": True}, "'classes' must be a whole number of at least 1, got True"),
        ("resnet18-cifar10", {"blocks": 2}, "'blocks' must list 4 whole numbers, got 2"),
        (
            "resnet50-imagenet",
            {"blocks": (3, 4, 0, 3)},
            r"'blocks\[2\]' must be a whole number of at least 1",
        ),
        ("wide-resnet50-2-imagenet", {"in_channels": -1}, "'in_channels' must be a whole number"),
        (
            "lstm-wikitext2",
            {"layers": 0},
            "lstm-wikitext2: option 'layers' must be a whole number of at least 1",
        ),
        ("lstm-wikitext2", {"dropout": -0.1}, "'dropout' must be at least 0 and below 1, got -0.1"),
        (
            "transformer-multi30k",
            {"width": 10, "heads": 4},
            r"transformer-multi30k: option 'width' \(10\) must be divisible by option 'heads' \(4\)",
        ),
        ("transformer-multi30k", {"pad": 9521}, r"'pad' \(9521\) must be below option 'vocabulary' \(9521\)"),
        ("transformer-multi30k", {"pad": -1}, "'pad' must be a whole number of at least 0, got -1"),
        (
            "transformer-multi30k",
            {"vocabulary": 1},
            "'vocabulary' must be a whole number of at least 2, got 1",
        ),
    ],
)
def test_bad_options(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        zoo.build(name, **options)


@pytest.mark.parametrize("name", zoo.names())
def test_bad_batch_size(name: str) -> None:
    with pytest.raises(
        UsageError, match=rf"{name}: option 'batch_size' must be a whole number of at least 1"
    ):
        zoo.example(name, batch_size=0)


def test_the_choice_is_plain_data() -> None:
    where = zoo.where("lstm-wikitext2")
    assert where == zoo.where("lstm-wikitext2")
    assert repr(where) == "PaperChoice(network='lstm-wikitext2')"
    layer = nn.Identity()
    assert where("lstm", layer)
    assert pickle.loads(pickle.dumps(where))("lstm", layer)  # noqa: S301
