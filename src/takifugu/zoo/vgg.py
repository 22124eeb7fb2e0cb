"""VGG-19 with batch norm for CIFAR-10.

Sixteen 3x3 convolutions in five stages and a classifier of two hidden Linears. The convolutions have
no bias, since batch norm would take it away again.
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn
from torch.nn import functional as F

from takifugu.zoo.options import (
    fixed_image,
    require_count_list,
    require_counts,
    require_dropout,
    require_scale,
)


class ConvBlock(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(out_channels)
        nn.init.kaiming_normal_(self.conv.weight, mode="fan_out", nonlinearity="relu")

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.norm(self.conv(x)), inplace=True)


class Classifier(nn.Module):
    def __init__(self, features: int, classes: int, dropout: float) -> None:
        super().__init__()
        self.hidden1 = nn.Linear(features, features)
        self.hidden2 = nn.Linear(features, features)
        self.last = nn.Linear(features, classes)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = F.relu(self.hidden1(self.dropout(x)), inplace=True)
        x = F.relu(self.hidden2(self.dropout(x)), inplace=True)
        logits: Tensor = self.last(x)
        return logits


class VGG(nn.Module):
    """Images (N, in_channels, height, width) to logits (N, classes)."""

    def __init__(
        self, channels: Sequence[int], depths: Sequence[int], classes: int, in_channels: int, dropout: float
    ) -> None:
        super().__init__()
        inputs = [in_channels, *channels[:-1]]
        self.stage1, self.stage2, self.stage3, self.stage4, self.stage5 = (
            nn.Sequential(*(ConvBlock(start if i == 0 else width, width) for i in range(depth)))
            for start, width, depth in zip(inputs, channels, depths, strict=True)
        )
        # Rounding up keeps a pixel where five halvings would leave none (8x8 digits, 28x28 clothes);
        # sizes divisible by 32 are not affected.
        self.pool = nn.MaxPool2d(2, ceil_mode=True)
        self.classifier = Classifier(channels[-1], classes, dropout)

    def forward(self, x: Tensor) -> Tensor:
        for stage in (self.stage1, self.stage2, self.stage3, self.stage4, self.stage5):
            x = self.pool(stage(x))
        # One pixel is left of a 32x32 image; the mean of the rest lets larger ones in.
        logits: Tensor = self.classifier(x.mean((2, 3)))
        return logits


def vgg19(
    *,
    width: float = 1.0,
    depths: Sequence[int] = (2, 2, 4, 4, 4),
    classes: int = 10,
    in_channels: int = 3,
    dropout: float = 0.5,
) -> VGG:
    """`width` multiplies every layer's channels; `depths` counts the convolutions of the five stages."""
    require_scale(width=width)
    require_count_list(5, depths=depths)
    require_counts(classes=classes, in_channels=in_channels)
    require_dropout(dropout=dropout)
    channels = [max(1, round(base * width)) for base in (64, 128, 256, 512, 512)]
    return VGG(channels, depths, classes, in_channels, dropout)


def image(batch_size: int, *, in_channels: int = 3, image_size: int = 32) -> tuple[Tensor]:
    require_counts(batch_size=batch_size, in_channels=in_channels, image_size=image_size)
    return (fixed_image((batch_size, in_channels, image_size, image_size)),)
