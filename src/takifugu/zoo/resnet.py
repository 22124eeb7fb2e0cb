"""ResNet-18 for CIFAR-10; ResNet-50 and WideResNet-50-2 for ImageNet.

Modules are named as torchvision names them, so its ImageNet weights load into the latter two.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F

from takifugu.zoo.options import fixed_image, require_count_list, require_counts


def _conv(in_channels: int, out_channels: int, kernel: int, stride: int = 1) -> nn.Conv2d:
    return nn.Conv2d(in_channels, out_channels, kernel, stride, padding=kernel // 2, bias=False)


def _shortcut(in_channels: int, out_channels: int, stride: int) -> nn.Module:
    if stride == 1 and in_channels == out_channels:
        return nn.Identity()
    return nn.Sequential(_conv(in_channels, out_channels, 1, stride), nn.BatchNorm2d(out_channels))


class BasicBlock(nn.Module):
    """Two 3x3 convolutions and a shortcut."""

    def __init__(self, in_channels: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, out_channels, 3, stride)
        self.bn1 = nn.BatchNorm2d(out_channels)
        self.conv2 = _conv(out_channels, out_channels, 3)
        self.bn2 = nn.BatchNorm2d(out_channels)
        self.downsample = _shortcut(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = self.bn2(self.conv2(out))
        return F.relu(out + self.downsample(x), inplace=True)


class Bottleneck(nn.Module):
    """1x1 down to `inner` channels, 3x3 there (with the stride), 1x1 up again, and a shortcut."""

    def __init__(self, in_channels: int, inner: int, out_channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = _conv(in_channels, inner, 1)
        self.bn1 = nn.BatchNorm2d(inner)
        self.conv2 = _conv(inner, inner, 3, stride)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3 = _conv(inner, out_channels, 1)
        self.bn3 = nn.BatchNorm2d(out_channels)
        self.downsample = _shortcut(in_channels, out_channels, stride)

    def forward(self, x: Tensor) -> Tensor:
        out = F.relu(self.bn1(self.conv1(x)), inplace=True)
        out = F.relu(self.bn2(self.conv2(out)), inplace=True)
        out = self.bn3(self.conv3(out))
        return F.relu(out + self.downsample(x), inplace=True)


class CifarResNet(nn.Module):
    """Basic blocks after a 3x3 stem. As in the paper's code, the stem has no batch norm."""

    def __init__(self, width: int, blocks: Sequence[int], classes: int, in_channels: int) -> None:
        super().__init__()

        def stage(index: int) -> nn.Sequential:
            before, here = width << max(0, index - 1), width << index
            first = BasicBlock(before, here, 1 if index == 0 else 2)
            return nn.Sequential(first, *(BasicBlock(here, here, 1) for _ in range(blocks[index] - 1)))

        self.conv1 = _conv(in_channels, width, 3)
        self.layer1, self.layer2, self.layer3, self.layer4 = map(stage, range(4))
        self.fc = nn.Linear(width << 3, classes)
        _initialize_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.conv1(x), inplace=True)
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


class ImagenetResNet(nn.Module):
    """Bottleneck blocks after a 7x7 stem; `widen` multiplies the channels inside the blocks."""

    def __init__(
        self, width: int, blocks: Sequence[int], classes: int, in_channels: int, widen: int = 1
    ) -> None:
        super().__init__()

        def stage(index: int) -> nn.Sequential:
            before = width if index == 0 else 4 * width << (index - 1)
            inner, out = widen * width << index, 4 * width << index
            first = Bottleneck(before, inner, out, 1 if index == 0 else 2)
            return nn.Sequential(first, *(Bottleneck(out, inner, out, 1) for _ in range(blocks[index] - 1)))

        self.conv1 = nn.Conv2d(in_channels, width, 7, stride=2, padding=3, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.maxpool = nn.MaxPool2d(3, stride=2, padding=1)
        self.layer1, self.layer2, self.layer3, self.layer4 = map(stage, range(4))
        self.fc = nn.Linear(4 * width << 3, classes)
        _initialize_(self)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(F.relu(self.bn1(self.conv1(x)), inplace=True))
        x = self.layer4(self.layer3(self.layer2(self.layer1(x))))
        logits: Tensor = self.fc(x.mean((2, 3)))
        return logits


def _initialize_(model: nn.Module) -> None:
    for module in model.modules():
        if isinstance(module, nn.Conv2d):
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")


def resnet18(
    *, width: int = 64, blocks: Sequence[int] = (2, 2, 2, 2), classes: int = 10, in_channels: int = 3
) -> CifarResNet:
    """`width`: channels of stage 1, doubled in each that follows; `blocks`: of the four stages."""
    _check(width, blocks, classes, in_channels)
    return CifarResNet(width, blocks, classes, in_channels)


def resnet50(
    *, width: int = 64, blocks: Sequence[int] = (3, 4, 6, 3), classes: int = 1000, in_channels: int = 3
) -> ImagenetResNet:
    """`width`: inner channels of stage 1, doubled in each that follows; `blocks`: of the four stages."""
    _check(width, blocks, classes, in_channels)
    return ImagenetResNet(width, blocks, classes, in_channels)


def wide_resnet50_2(
    *, width: int = 64, blocks: Sequence[int] = (3, 4, 6, 3), classes: int = 1000, in_channels: int = 3
) -> ImagenetResNet:
    """ResNet-50 whose bottlenecks are twice as wide inside; the options mean the same."""
    _check(width, blocks, classes, in_channels)
    return ImagenetResNet(width, blocks, classes, in_channels, widen=2)


def _check(width: Any, blocks: Any, classes: Any, in_channels: Any) -> None:
    require_counts(width=width, classes=classes, in_channels=in_channels)
    require_count_list(4, blocks=blocks)


def cifar_image(batch_size: int, *, in_channels: int = 3, image_size: int = 32) -> tuple[Tensor]:
    require_counts(batch_size=batch_size, in_channels=in_channels, image_size=image_size)
    return (fixed_image((batch_size, in_channels, image_size, image_size)),)


def imagenet_image(batch_size: int, *, in_channels: int = 3, image_size: int = 224) -> tuple[Tensor]:
    return cifar_image(batch_size, in_channels=in_channels, image_size=image_size)
