from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from takifugu.train.fingerprint import model_sha256, samples_sha256
from takifugu.train.round import Samples

CODE = """
from __future__ import annotations

import functools

import torch
from torch import nn

SLOPE = 0.1


def bent(x):
    return torch.nn.functional.leaky_relu(x, SLOPE)  # a comment


@functools.lru_cache
def size():
    return 4


class Net(nn.Module):
    modes = ("a", "b")

    def __init__(self, scale=2.0, power=1):
        super().__init__()
        self.scale, self.power, self.act = scale, power, bent
        self.first, self.last = nn.Linear(3, size()), nn.Linear(size(), 2)

    def forward(self, x):
        if self.modes[0] in {"a", "b", "c", "d"}:
            x = self.act(self.first(x))
        return self._last(x) * self.scale**self.power

    def _last(self, x):
        return self.last(x)


def build():
    torch.manual_seed(0)
    return Net()
"""


def fingerprint(code: str, name: str = "users_own") -> str:
    module = ModuleType(name)
    exec(compile(code, f"{name}.py", "exec"), vars(module))
    return model_sha256(module.build(), module.build)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("return self._last(x) * self.scale", "return self._last(x) / self.scale"),
        ("return self.last(x)", "return self.last(x.abs())"),  # called by forward
        ("leaky_relu(x, SLOPE)", "elu(x, SLOPE)"),  # an attribute of the model
        ("SLOPE = 0.1", "SLOPE = 0.2"),
        ("scale=2.0", "scale=3.0"),
        ("power=1", "power=2"),
        ('modes = ("a", "b")', 'modes = ("e", "b")'),
        ("torch.manual_seed(0)", "torch.manual_seed(1)"),
        ("return 4", "return 5"),
        ("    return Net()", "    net = Net()\n    net.first.requires_grad_(False)\n    return net"),
    ],
)
def test_other_code_is_another_model(old: str, new: str) -> None:
    assert CODE.count(old) == 1
    assert fingerprint(CODE.replace(old, new)) != fingerprint(CODE)


def test_comments_and_lines_do_not_count() -> None:
    assert fingerprint(CODE) == fingerprint(CODE)
    assert fingerprint(CODE.replace("  # a comment", "\n\n")) == fingerprint(CODE)


def test_the_same_in_another_process(tmp_path: Path) -> None:
    """Also where a set of strings comes in another order."""
    (tmp_path / "users_own.py").write_text(CODE)
    script = "import users_own as m; from takifugu.train.fingerprint import model_sha256 as f; print(f(m.build(), m.build))"
    found = {
        subprocess.run(
            [sys.executable, "-c", script],
            cwd=tmp_path,
            env={"PYTHONHASHSEED": seed, "PYTHONPATH": ":".join([str(tmp_path), *sys.path])},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed in ("1", "2")
    }
    assert len(found) == 1


def test_every_value_of_the_data_counts() -> None:
    def of(inputs: Any, labels: Any) -> str:
        return samples_sha256(Samples(torch.tensor(inputs), torch.tensor(labels)))

    whole = of([[1.0, 2.0], [3.0, 4.0]], [0, 1])
    assert of([[1.0, 2.0], [3.0, 4.0]], [0, 1]) == whole
    assert of([[2.0, 1.0], [3.0, 4.0]], [0, 1]) != whole  # the same sum
    assert of([[1.0, 2.0], [3.0, 4.0]], [1, 0]) != whole
    half = Samples(torch.tensor([[1.0], [2.0]], dtype=torch.bfloat16), torch.tensor([0, 1]))
    assert samples_sha256(half) == samples_sha256(half)
