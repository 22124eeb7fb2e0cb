"""What `factorize_` and `densify_` tell: data first, a table when printed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from io import StringIO
from typing import Any

from torch import nn

from takifugu.lowrank import probe
from takifugu.lowrank.candidates import Verdict, Where
from takifugu.lowrank.experts import REASON, Experts, fused_experts
from takifugu.lowrank.factorized import Factorized
from takifugu.structure import Structure


@dataclass(frozen=True)
class LayerReport:
    """One layer: what it was, what it is, and why."""

    name: str
    kind: str
    scheme: str
    shapes: Mapping[str, tuple[int, ...]]
    rank: Mapping[str, int] | None
    """None: left as it is, for `reason`."""
    reason: str | None
    params_before: int
    params: int
    gradient_bytes_before: int
    gradient_bytes: int
    macs_before: int | None = None
    macs: int | None = None
    """Multiply-accumulates of one forward pass on the example input; None without one."""
    error: float | None = None
    """`||W - U V|| / ||W||`, Frobenius; None if the layer was not decomposed."""
    tie: str | None = None
    dense_s: float | None = None
    factorized_s: float | None = None


@dataclass(frozen=True)
class FactorReport:
    """All layers that were meant, and the whole model's totals."""

    structure: Structure
    layers: tuple[LayerReport, ...]
    params_before: int
    params: int
    payload_bytes_before: int
    payload_bytes: int
    """Parameters and buffers that travel."""
    gradient_bytes_before: int
    gradient_bytes: int
    macs_before: int | None = None
    macs: int | None = None

    @property
    def factorized(self) -> tuple[LayerReport, ...]:
        return tuple(layer for layer in self.layers if layer.rank is not None)

    @property
    def left_dense(self) -> tuple[LayerReport, ...]:
        return tuple(layer for layer in self.layers if layer.rank is None)

    def to_dict(self) -> dict[str, Any]:
        data = asdict(replace(self, structure=Structure()))
        data["structure"] = self.structure.to_dict()
        data["structure_id"] = self.structure.id
        return data

    def completed(self, model: nn.Module, errors: Mapping[str, float], example: Any) -> FactorReport:
        """The same report after the change: sizes of the new layers, errors, MACs."""
        macs = _macs(model, [layer.name for layer in self.layers], example)
        layers = []
        for layer in self.layers:
            params, gradient_bytes = _sizes(model.get_submodule(layer.name))
            layers.append(
                replace(
                    layer,
                    params=params,
                    gradient_bytes=gradient_bytes,
                    macs=macs.get(layer.name),
                    error=errors.get(layer.name),
                )
            )
        params, gradient_bytes = _sizes(model)
        return replace(
            self,
            layers=tuple(layers),
            params=params,
            payload_bytes=_payload(model),
            gradient_bytes=gradient_bytes,
            macs=macs.get(""),
        )

    def __str__(self) -> str:
        from rich.console import Console

        out = StringIO()
        Console(file=out, width=180, color_system=None).print(self.__rich__())
        return "\n".join(line.rstrip() for line in out.getvalue().rstrip().splitlines())

    def __rich__(self) -> Any:
        from rich.console import Group
        from rich.table import Table

        with_macs, with_times = self.macs is not None, any(layer.dense_s for layer in self.layers)
        table = Table(box=None, pad_edge=False)
        table.add_column("layer")
        table.add_column("kind")
        table.add_column("shape", justify="right")
        table.add_column("rank", justify="right")
        table.add_column("params", justify="right")
        if with_macs:
            table.add_column("MACs", justify="right")
        table.add_column("gradient bytes", justify="right")
        if with_times:
            table.add_column("ms dense/fact.", justify="right")
        table.add_column("error", justify="right")
        table.add_column("")
        for layer in self.layers:
            row = [layer.name, layer.kind, _shapes(layer), _ranks(layer)]
            row.append(_change(layer.params_before, layer.params))
            if with_macs:
                row.append(_change(layer.macs_before, layer.macs))
            row.append(_change(layer.gradient_bytes_before, layer.gradient_bytes))
            if with_times:
                row.append(_times(layer))
            row.append("" if layer.error is None else f"{layer.error:.3g}")
            note = f"tied to {layer.tie}" if layer.tie else layer.scheme if layer.kind[:4] == "conv" else ""
            row.append(f"left: {layer.reason}" if layer.reason else note)
            table.add_row(*row)
        return Group(table, self.summary())

    def summary(self) -> str:
        parts = [f"parameters {_change(self.params_before, self.params)}"]
        if self.macs is not None:
            parts.append(f"MACs {_change(self.macs_before, self.macs)}")
        parts.append(f"gradient bytes {_change(self.gradient_bytes_before, self.gradient_bytes)}")
        counts = f"{_layers(len(self.factorized))} factorized, {len(self.left_dense)} left as is"
        missing = "" if self.macs is not None else "; pass example_input= to count MACs"
        return f"{counts}: {', '.join(parts)}{missing}"


@dataclass(frozen=True)
class DensifyReport:
    """How far each dense weight is from its factors' exact product (rounding to the weight's dtype)."""

    rounding: Mapping[str, float]

    @property
    def largest(self) -> float:
        return max(self.rounding.values())

    def to_dict(self) -> dict[str, Any]:
        return {"rounding": dict(self.rounding), "largest": self.largest}

    def __str__(self) -> str:
        worst = max(self.rounding, key=self.rounding.__getitem__)
        return (
            f"{_layers(len(self.rounding))} dense again; the weights equal the factors' products but for "
            f"rounding, relative {self.largest:.1e} at most ('{worst}')"
        )


def factor_report(
    model: nn.Module,
    verdicts: Sequence[Verdict],
    structure: Structure,
    example: Any,
    where: Where = None,
) -> FactorReport:
    """The report as it stands before the change. `where` is the user's: it may mean fused experts as well."""
    experts = fused_experts(model, where)
    macs = _macs(model, [*(v.name for v in verdicts), *(e.name for e in experts)], example)
    params, gradient_bytes = _sizes(model)
    return FactorReport(
        structure=structure,
        layers=(
            *(_layer(verdict, macs.get(verdict.name)) for verdict in verdicts),
            *(_experts(part, macs.get(part.name)) for part in experts),
        ),
        params_before=params,
        params=params,
        payload_bytes_before=_payload(model),
        payload_bytes=_payload(model),
        gradient_bytes_before=gradient_bytes,
        gradient_bytes=gradient_bytes,
        macs_before=macs.get(""),
        macs=macs.get(""),
    )


def _layer(verdict: Verdict, macs: int | None) -> LayerReport:
    candidate = verdict.candidate
    params, gradient_bytes = _sizes(candidate.module)
    if isinstance(candidate.module, Factorized):
        shapes = dict(candidate.module.shapes)
    else:
        try:
            shapes = {n: tuple(w.shape) for n, w in candidate.layer.weights_of(candidate.module).items()}
        except (AttributeError, RuntimeError):  # lazy or parametrized: refused, with the reason
            shapes = {}
    return LayerReport(
        name=verdict.name,
        kind=candidate.layer.kind,
        scheme=verdict.scheme,
        shapes=shapes,
        rank=None if verdict.rank is None else dict(verdict.rank),
        reason=verdict.reason,
        params_before=params,
        params=params,
        gradient_bytes_before=gradient_bytes,
        gradient_bytes=gradient_bytes,
        macs_before=macs,
        macs=macs,
        tie=verdict.tie,
        dense_s=verdict.dense_s,
        factorized_s=verdict.factorized_s,
    )


def _experts(experts: Experts, macs: int | None) -> LayerReport:
    params, gradient_bytes = _sizes(experts.module)
    return LayerReport(
        name=experts.name,
        kind="experts",
        scheme="",
        shapes={name: tuple(weight.shape) for name, weight in experts.weights.items()},
        rank=None,
        reason=REASON,
        params_before=params,
        params=params,
        gradient_bytes_before=gradient_bytes,
        gradient_bytes=gradient_bytes,
        macs_before=macs,
        macs=macs,
    )


def _sizes(module: nn.Module) -> tuple[int, int]:
    """Parameters, and bytes of their gradients."""
    from torch.nn.parameter import is_lazy

    parameters = [p for p in module.parameters() if not is_lazy(p)]
    learned = [p for p in parameters if p.requires_grad]
    return sum(p.numel() for p in parameters), sum(p.numel() * p.element_size() for p in learned)


def _payload(model: nn.Module) -> int:
    from torch.nn.parameter import is_lazy

    travelling = [t for t in (*model.parameters(), *model.buffers()) if not is_lazy(t)]
    return sum(t.numel() * t.element_size() for t in travelling)


def _macs(model: nn.Module, names: Sequence[str], example: Any) -> dict[str, int]:
    """MACs per layer, and of the whole model under the empty name; nothing without an example."""
    return {} if example is None else probe.macs(model, names, example)


def _layers(count: int) -> str:
    return f"{count} layer" if count == 1 else f"{count} layers"


def _change(before: int | None, after: int | None) -> str:
    if before is None or after is None:
        return "-"
    return f"{before:,}" if before == after else f"{before:,} -> {after:,}"


def _shapes(layer: LayerReport) -> str:
    shapes = ["x".join(map(str, shape)) for shape in layer.shapes.values()]
    return shapes[0] + (f" +{len(shapes) - 1}" if len(shapes) > 1 else "") if shapes else "?"


def _ranks(layer: LayerReport) -> str:
    return "-" if layer.rank is None else ",".join(map(str, dict.fromkeys(layer.rank.values())))


def _times(layer: LayerReport) -> str:
    if layer.dense_s is None or layer.factorized_s is None:
        return ""
    return f"{layer.dense_s * 1e3:.3g} / {layer.factorized_s * 1e3:.3g}"
