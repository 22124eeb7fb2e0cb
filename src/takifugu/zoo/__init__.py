"""The six networks of the Pufferfish paper, by name, and the layers it makes low-rank in each.

    model = zoo.build("resnet18-cifar10")
    small = zoo.build("resnet18-cifar10", width=8, blocks=(1, 1, 1, 1))
    tk.factorize_(model, rank=0.25, where=zoo.where("resnet18-cifar10"))

Importing this package is light: torch is loaded when a network or an example input is asked for.
"""

from __future__ import annotations

from takifugu.zoo.registry import build, example, names, where

__all__ = ["build", "example", "names", "where"]
