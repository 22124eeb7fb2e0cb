"""`layer.weight` of a factorized layer: the product of its factors, formed when someone computes with it.

Much code only looks: Transformers' T5 reads `wo.weight.dtype` on every call, and forming the product
each time would slow every forward pass and be counted among the MACs. Like the dense parameter it
stands for, a view shows the values of the moment; unlike it, it cannot be changed, and says so.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from takifugu.errors import LayerError


class _Layer(Protocol):
    shapes: Any

    def factor_parameters(self) -> list[nn.Parameter]: ...

    def dense_weights(self) -> dict[str, Tensor]: ...


def weight_view(layer: _Layer, name: str) -> Tensor:
    """The layer's dense weight of that name, differentiable."""
    if torch.compiler.is_compiling():  # the compiler drops what is not used
        return layer.dense_weights()[name]
    return _View(layer, name)


class _View(Tensor):
    _layer: _Layer
    _name: str
    _detached: bool

    @staticmethod
    def __new__(cls, layer: _Layer, name: str, detached: bool = False) -> _View:
        like = layer.factor_parameters()[0]
        view: _View = Tensor._make_wrapper_subclass(
            cls,
            layer.shapes[name],
            dtype=like.dtype,
            device=like.device,
            requires_grad=like.requires_grad and torch.is_grad_enabled(),
        )
        view._layer, view._name, view._detached = layer, name, detached
        return view

    def __init__(self, layer: _Layer, name: str, detached: bool = False) -> None:
        super().__init__()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _LOOKS:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        target = next(iter((*args, *kwargs.values())))
        if func in _DETACHES and isinstance(target, _View):
            # A view again: those of a parameter share its memory, and people write through them.
            with torch.no_grad():
                return _View(target._layer, target._name, detached=True)
        for changed in (target if _changes(func) else None, kwargs.get("out")):
            if isinstance(changed, _View) and not (func is Tensor.requires_grad_ and changed._detached):
                raise LayerError(
                    f"{changed._name} of a {type(changed._layer).__name__} is the product of its factors and "
                    "cannot be changed; change the factors (factor_parameters()), or densify the model first"
                )
        args, kwargs = tree_map(_formed, (args, kwargs))
        return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        args, kwargs = tree_map(_formed, (args, kwargs or {}))
        return func(*args, **kwargs)


_LOOKS = {
    *(
        getattr(Tensor, attribute).__get__
        for attribute in ("dtype", "device", "shape", "ndim", "layout", "requires_grad", "is_cuda")
    ),
    *(
        getattr(Tensor, method)
        for method in ("size", "dim", "numel", "nelement", "element_size", "is_floating_point", "get_device")
    ),
    Tensor.__len__,
}
"""What can be answered without the values."""


_DETACHES = {getattr(Tensor, "data").__get__, Tensor.detach, torch.detach}  # noqa: B009


def _changes(func: Any) -> bool:
    name = getattr(func, "__name__", "")  # of `+=`, too, it is `add_`
    return name in ("__set__", "__setitem__") or (name.endswith("_") and not name.endswith("__"))


def _formed(value: Any) -> Any:
    if not isinstance(value, _View):
        return value
    weight = value._layer.dense_weights()[value._name]
    return weight.detach() if value._detached else weight
