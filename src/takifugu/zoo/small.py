"""Two small networks for workloads that should train in seconds: `takifugu.zoo.small:cnn` and `:mlp`.

Group norm instead of batch norm: it has no statistics of one node's data that averaging would have to mend.
"""

from __future__ import annotations

import itertools

from torch import Tensor, nn

from takifugu.zoo.options import require_counts


def cnn(*, in_channels: int = 1, classes: int = 10, width: int = 16) -> nn.Module:
    """Three 3x3 convolutions (width, 2 and 4 times that), halving the image twice, and a linear head."""
    require_counts(in_channels=in_channels, classes=classes, width=width)
    return nn.Sequential(
        _Block(in_channels, width),
        nn.MaxPool2d(2),
        _Block(width, 2 * width),
        nn.MaxPool2d(2),
        _Block(2 * width, 4 * width),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(4 * width, classes),
    )


def mlp(
    *, inputs: int = 784, classes: int = 10, width: int = 64, depth: int = 2, norm: bool = False
) -> nn.Module:
    """`depth` hidden layers of `width` units on the flattened input; with `norm`, a layer norm in each.

    A fresh network without it hesitates for some rounds, the longer the lower its rank: its signals fade.
    """
    require_counts(inputs=inputs, classes=classes, width=width, depth=depth)
    sizes = [inputs, *[width] * depth]
    hidden: list[nn.Module] = []
    for before, after in itertools.pairwise(sizes):
        hidden += [nn.Linear(before, after), *([nn.LayerNorm(after)] if norm else []), nn.ReLU()]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(width, classes))


class _Block(nn.Module):
    def __init__(self, in_channels: int, out_channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(in_channels, out_channels, 3, padding=1, bias=False)
        self.norm = nn.GroupNorm(1, out_channels)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.relu(self.norm(self.conv(x)))
