"""Everything about a model and its optimizer that must be the same before and after."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Fingerprint:
    """Every object, value and flag of a model that a probe could change."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.taken = self._take()
        self.values = {name: t.detach().clone() for name, t in self._tensors()}

    def _tensors(self) -> list[tuple[str, Tensor]]:
        state = [*self.model.named_parameters(remove_duplicate=False)]
        return [*state, *self.model.named_buffers(remove_duplicate=False)]

    def _take(self) -> Any:
        return (
            [
                (name, id(module), type(module), module.training)
                for name, module in self.model.named_modules()
            ],
            [
                (name, id(t), t.device, t.dtype, t.requires_grad, id(t.grad), t.data_ptr())
                for name, t in self._tensors()
            ],
            [
                (key, [*value.items()] if isinstance(value, dict) else value)
                for module in self.model.modules()
                for key, value in vars(module).items()
                if key not in ("_parameters", "_buffers", "_modules") and not isinstance(value, Tensor)
            ],
            [sorted(vars(module)) for module in self.model.modules()],
        )

    def assert_same(self) -> None:
        assert self._take() == self.taken
        for name, tensor in self._tensors():
            assert torch.equal(tensor.detach(), self.values[name]), name


class OptimizerFingerprint:
    """The very parameters, options and state tensors an optimizer holds."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer
        self.taken = self._take()
        self.values = [t.clone() for t in self._tensors()]

    def _tensors(self) -> list[Tensor]:
        held = [value for state in self.optimizer.state.values() for value in state.values()]
        return [value for value in held if isinstance(value, Tensor)]

    def _take(self) -> Any:
        groups = [{**g, "params": [id(p) for p in g["params"]]} for g in self.optimizer.param_groups]
        state = {id(p): {key: id(v) for key, v in s.items()} for p, s in self.optimizer.state.items()}
        return groups, state

    def assert_same(self) -> None:
        assert self._take() == self.taken
        assert all(torch.equal(a, b) for a, b in zip(self._tensors(), self.values, strict=True))
