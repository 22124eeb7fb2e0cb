"""VGG-19 and the ResNets, in small."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from takifugu import zoo

SMALL: dict[str, dict[str, Any]] = {
    "vgg19-cifar10": {"width": 0.125, "dropout": 0.0},
    "resnet18-cifar10": {"width": 8},
    "resnet50-imagenet": {"width": 8, "blocks": (1, 1, 1, 1), "classes": 10},
    "wide-resnet50-2-imagenet": {"width": 8, "blocks": (1, 1, 1, 1), "classes": 10},
}


@pytest.mark.parametrize("name", SMALL)
def test_learns_a_tiny_batch(name: str) -> None:
    torch.manual_seed(0)
    model = zoo.build(name, **SMALL[name])
    (images,) = zoo.example(name, 8, image_size=32)
    labels = torch.arange(8)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(15):
        loss = F.cross_entropy(model(images), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.5 * losses[0]


@pytest.mark.parametrize("name", SMALL)
@pytest.mark.parametrize("size", [8, 28, 32, 48])
def test_any_image_size(name: str, size: int) -> None:
    model = zoo.build(name, in_channels=1, **SMALL[name]).eval()
    (images,) = zoo.example(name, 2, in_channels=1, image_size=size)
    assert model(images).shape == (2, 10)


@pytest.mark.parametrize("name", SMALL)
def test_convolutions_start_kaiming_fan_out(name: str) -> None:
    torch.manual_seed(0)
    model = zoo.build(name, **SMALL[name])
    for layer in (module for module in model.modules() if isinstance(module, nn.Conv2d)):
        fan_out = layer.out_channels * math.prod(layer.kernel_size)
        if layer.weight.numel() > 1000:  # enough of them for a stable estimate
            assert float(layer.weight.detach().std()) == pytest.approx(math.sqrt(2 / fan_out), rel=0.1)


def test_no_convolution_has_a_bias() -> None:
    for name, options in SMALL.items():
        with torch.device("meta"):
            model = zoo.build(name, **options)
        assert all(module.bias is None for module in model.modules() if isinstance(module, nn.Conv2d))


def test_only_the_cifar_stem_lacks_a_norm() -> None:
    with torch.device("meta"):
        cifar, imagenet = zoo.build("resnet18-cifar10"), zoo.build("resnet50-imagenet")
    assert not hasattr(cifar, "bn1")
    assert imagenet.get_submodule("bn1").weight.shape == (64,)


def test_imagenet_names_and_shapes_are_torchvisions() -> None:
    with torch.device("meta"):
        state = zoo.build("wide-resnet50-2-imagenet").state_dict()
    expected = {
        "conv1.weight": (64, 3, 7, 7),
        "bn1.running_mean": (64,),
        "layer1.0.conv1.weight": (128, 64, 1, 1),
        "layer1.0.downsample.0.weight": (256, 64, 1, 1),
        "layer1.0.downsample.1.num_batches_tracked": (),
        "layer3.5.conv2.weight": (512, 512, 3, 3),
        "layer4.0.conv2.weight": (1024, 1024, 3, 3),
        "layer4.2.conv3.weight": (2048, 1024, 1, 1),
        "layer4.2.bn3.bias": (2048,),
        "fc.weight": (1000, 2048),
        "fc.bias": (1000,),
    }
    assert {key: tuple(state[key].shape) for key in expected} == expected
    # 53 convolutions with a norm of five tensors each, and the last Linear.
    assert len(state) == 53 * 6 + 2


def test_stride_is_on_the_3x3() -> None:
    with torch.device("meta"):
        block = zoo.build("resnet50-imagenet").get_submodule("layer2.0")
    strides = [block.get_submodule(name).stride for name in ("conv1", "conv2", "conv3", "downsample.0")]
    assert strides == [(1, 1), (2, 2), (1, 1), (2, 2)]


def test_channels_last_gives_the_same() -> None:
    torch.manual_seed(0)
    model = zoo.build("resnet18-cifar10", width=8).eval()
    (images,) = zoo.example("resnet18-cifar10", 2)
    expected = model(images)
    model = model.to(memory_format=torch.channels_last)
    torch.testing.assert_close(model(images.to(memory_format=torch.channels_last)), expected)
