"""From a model and a wish to a `Structure`. Looks, decides, touches nothing.

`survey` gives a verdict on every layer the user means, with the reason where one stays dense;
`choose` is the structure that follows.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from types import MappingProxyType
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.nn.parameter import is_lazy

from takifugu.errors import LayerError, RankError, UsageError, near_misses
from takifugu.lowrank import default_layers, probe
from takifugu.lowrank.candidates import Candidate, Verdict, Where, find, refusal, sharers, walk
from takifugu.lowrank.coverage import warn_if_little
from takifugu.lowrank.decompose import singular_values
from takifugu.lowrank.factorized import Factorized, Unfolding
from takifugu.lowrank.layers import SCHEMES
from takifugu.lowrank.ranks import (
    Budget,
    ByPattern,
    Fixed,
    Matrix,
    RankRule,
    Spectrum,
    Unit,
    rule_for,
    rule_of,
    with_least,
)
from takifugu.lowrank.speed import fastest
from takifugu.structure import LayerSpec, Structure

FASTEST = "fastest"


def choose(
    model: nn.Module,
    rank: Any = 0.25,
    where: Where = None,
    *,
    scheme: str | Mapping[str, str] | None = None,
    force: bool = False,
    rerank: bool = False,
    example_input: Any = None,
    only_if_faster: Any = None,
) -> Structure:
    """The structure that `factorize_` with the same arguments would give the model. Touches nothing."""
    verdicts = survey(
        model,
        rank,
        where,
        scheme=scheme,
        force=force,
        rerank=rerank,
        example_input=example_input,
        only_if_faster=only_if_faster,
    )
    warn_if_little(model, verdicts, where, stacklevel=2)
    return structure_from(model, verdicts)


def structure_from(model: nn.Module, verdicts: Sequence[Verdict]) -> Structure:
    """The verdicts' layers, and what is factorized already, in the order of the model's modules."""
    decided = {verdict.name: verdict.spec() for verdict in verdicts if verdict.rank is not None}
    present = present_structure(model)
    specs = (decided.get(name) or present.get(name) for name, _ in walk(model))
    return Structure(tuple(spec for spec in specs if spec is not None))


def present_structure(model: nn.Module) -> Structure:
    """The structure the model has now."""
    layers: list[LayerSpec] = []
    first_with: dict[int, str] = {}
    for name, module in walk(model):
        if isinstance(module, Factorized):
            key = id(module.factor_parameters()[0])
            layers.append(module.spec(name, tie=first_with.get(key)))
            first_with.setdefault(key, name)
    return Structure(tuple(layers))


def survey(
    model: nn.Module,
    rank: Any,
    where: Where = None,
    *,
    scheme: str | Mapping[str, str] | None = None,
    force: bool = False,
    rerank: bool = False,
    example_input: Any = None,
    only_if_faster: Any = None,
) -> list[Verdict]:
    """A verdict on every layer that `where` means. See `factorize_` for the arguments."""
    rule = rule_for(rank)
    check_examples(example_input, only_if_faster)
    example = only_if_faster if only_if_faster is not None else example_input
    default = where is None and not force
    candidates = default_layers.all_candidates(model) if default else find(model, where)
    schemes = _schemes(candidates, scheme)
    if FASTEST in schemes.values() and example is None:
        raise UsageError('scheme="fastest" measures on an example; pass example_input= as well')

    if default:
        open_, settled, ties = _sort_out_default(model, candidates, schemes, rule, example, rerank)
    else:
        open_, settled, ties = _sort_out(model, candidates, schemes, force=force, rerank=rerank)
    _check_patterns(rule, settled, {*open_, *ties})
    least = default_layers.LEAST_RANK if default else 1
    macs = _count_macs(model, open_, ties, example) if _counts_macs(rule) else _Macs()
    variants: dict[str, list[Verdict]] = {candidate.name: [] for candidate in open_}
    for wanted in _passes(open_, schemes):
        for verdict in _ranked(model, open_, wanted, rule, macs, force, least):
            if verdict not in variants[verdict.name]:
                variants[verdict.name].append(verdict)
    measure = only_if_faster is not None or FASTEST in schemes.values()
    timed = fastest(model, variants, example, against_dense=only_if_faster is not None) if measure else {}
    for candidate in open_:
        settled[candidate.name] = timed.get(candidate.name) or variants[candidate.name][0]
    for follower, leader in ties.items():
        settled[follower.name] = _follow(follower, settled[leader])
    return [settled[candidate.name] for candidate in candidates]


# ---- which layers are open to choice -----------------------------------------------------------------


def _schemes(candidates: Sequence[Candidate], wish: str | Mapping[str, str] | None) -> dict[str, str]:
    """The scheme each layer is to have: the one asked for if its kind knows it, else its default."""
    by_pattern = check_schemes(wish)
    names = [candidate.name for candidate in candidates]
    for pattern in by_pattern:
        if not fnmatch.filter(names, pattern):
            raise UsageError(f"scheme pattern {pattern!r} matches no layer{near_misses(pattern, names)}")
    schemes = {}
    for candidate in candidates:
        wanted = next((s for p, s in by_pattern.items() if fnmatch.fnmatchcase(candidate.name, p)), None)
        layer = candidate.layer
        known_here = (*layer.schemes, *layer.named_schemes, FASTEST) if len(layer.schemes) > 1 else ()
        schemes[candidate.name] = wanted if wanted in known_here and wanted else candidate.layer.schemes[0]
    return schemes


def check_examples(example_input: Any, only_if_faster: Any) -> None:
    """Raise if a flag is given where an input for the model is meant."""
    for name, example in (("example_input", example_input), ("only_if_faster", only_if_faster)):
        if isinstance(example, bool):
            fix = f"{name}=torch.randn(8, 64)" if example else "leave it out"
            raise UsageError(
                f"{name}= takes an example input, not {example}; "
                + (f"pass a batch as the model gets it, such as {fix}" if example else fix)
            )


def check_schemes(wish: str | Mapping[str, str] | None) -> Mapping[str, str]:
    """The schemes asked for, by pattern; an unknown one is an error."""
    by_pattern = wish if isinstance(wish, Mapping) else {"*": wish} if wish is not None else {}
    for scheme in by_pattern.values():
        if scheme not in (*SCHEMES, FASTEST):
            known = ", ".join(map(repr, (*SCHEMES, FASTEST)))
            raise UsageError(f"unknown scheme {scheme!r}{near_misses(str(scheme), SCHEMES)}; one of {known}")
    return by_pattern


Sorted = tuple[list[Candidate], dict[str, Verdict], dict[Candidate, str]]
"""Open candidates, those settled as they are, and those tied to an open one."""


def _sort_out_default(
    model: nn.Module,
    candidates: Sequence[Candidate],
    schemes: Mapping[str, str],
    rule: RankRule,
    example: Any,
    rerank: bool,
) -> Sorted:
    """Sort out the candidates by the rule of `where=None`; see `default_layers`."""
    # A rank for one layer by its full name is as explicit as where= is.
    named = set(rule.rules) if isinstance(rule, ByPattern) else set()
    kept = {candidate.name: default_layers.EMBEDDING for candidate in default_layers.embeddings(candidates)}
    first, last = default_layers.ends(model, candidates, example)
    if last is not None:
        kept[last] = default_layers.OUTPUT
    kept = {name: reason for name, reason in kept.items() if name not in named}

    def sort_out(kept: Mapping[str, str]) -> Sorted:
        return _sort_out(model, candidates, schemes, kept=kept, force=False, rerank=rerank)

    sorted_out = sort_out(kept)
    if first is None or first == last or first in named:
        return sorted_out
    without_first = sort_out({**kept, first: default_layers.FIRST})
    open_, settled, _ = without_first
    remains = open_ or any(
        isinstance(v.candidate.module, Factorized) and name not in (first, last)
        for name, v in settled.items()
    )
    return without_first if remains else sorted_out


def _check_patterns(rule: RankRule, settled: Mapping[str, Verdict], others: Collection[Candidate]) -> None:
    """Raise `RankError` for a rank pattern that matches only layers which stay as they are."""
    for pattern in rule.rules if isinstance(rule, ByPattern) else ():
        if any(fnmatch.fnmatchcase(candidate.name, pattern) for candidate in others):
            continue
        for name, verdict in settled.items():
            if fnmatch.fnmatchcase(name, pattern):
                raise RankError(
                    f"rank pattern {pattern!r} matches only layers that stay as they are; {name!r}: "
                    f"{verdict.reason}"
                )


def _sort_out(
    model: nn.Module,
    candidates: Sequence[Candidate],
    schemes: Mapping[str, str],
    *,
    force: bool,
    rerank: bool,
    kept: Mapping[str, str] = MappingProxyType({}),
) -> Sorted:
    """Split the candidates. `kept` gives the reasons of those that the default rule leaves dense."""
    open_: list[Candidate] = []
    settled: dict[str, Verdict] = {}
    for candidate in candidates:
        scheme = schemes[candidate.name]
        reason = refusal(candidate, candidate.layer.schemes[0] if scheme == FASTEST else scheme)
        if reason is None and candidate.name in kept:
            reason = default_layers.reason_for(candidate, kept[candidate.name])
        if reason is None and isinstance(candidate.module, Factorized) and not rerank:
            ranks = ", ".join(map(str, dict.fromkeys(candidate.module.rank.values())))
            reason = f"already factorized (rank {ranks}); pass rerank=True to change it"
        if reason is None and isinstance(candidate.module, Factorized):
            reason = candidate.module.rerank_obstacle()
        if reason is None and not force and not isinstance(candidate.module, Factorized):
            weights = candidate.layer.weights_of(candidate.module).values()
            if not any(weight.requires_grad for weight in weights):
                reason = "frozen (requires_grad=False); force=True factorizes it all the same"
        if reason is None:
            open_.append(candidate)
        else:
            settled[candidate.name] = Verdict(candidate, scheme, reason=reason)
    ties = _ties(model, open_, settled, schemes)
    return [c for c in open_ if c.name not in settled and c not in ties], settled, ties


TIEABLE = ({"linear", "embedding"}, {"conv1d"}, {"conv2d"}, {"conv3d"}, {"transformers_conv1d"})


def _ties(
    model: nn.Module, open_: Sequence[Candidate], settled: dict[str, Verdict], schemes: Mapping[str, str]
) -> dict[Candidate, str]:
    """Weights held by several modules: all of them go low-rank together, or none does."""
    by_name = {candidate.name: candidate for candidate in open_}
    shared, present = sharers(model), present_structure(model)
    ties: dict[Candidate, str] = {}
    for candidate in open_:
        if isinstance(candidate.module, Factorized):
            leader = present[candidate.name].tie
            if leader is not None:
                ties[candidate] = leader
            continue
        for weight in candidate.layer.weights_of(candidate.module).values():
            holders = shared.get(id(weight), [])
            if not holders:
                continue
            group = [by_name[name] for name in holders if name in by_name]
            kinds = {member.layer.kind for member in group}
            outside = [name for name in holders if name not in by_name]
            if outside:
                reason = f"shares its weight with '{outside[0]}', which stays dense"
            elif not any(kinds <= together for together in TIEABLE):
                reason = f"shares its weight with '{next(n for n in holders if n != candidate.name)}'"
                reason += ", and layers of these kinds cannot share factors"
            elif len({schemes[member.name] for member in group if member.layer.kind != "embedding"}) > 1:
                reason = "shares its weight with a layer of another scheme"
            else:
                if group[0] is not candidate:
                    ties[candidate] = group[0].name
                continue
            settled[candidate.name] = Verdict(candidate, schemes[candidate.name], reason=reason)
    return ties


def _follow(follower: Candidate, leader: Verdict) -> Verdict:
    if leader.rank is None:
        return Verdict(
            follower, leader.scheme, reason=f"shares its weight with '{leader.name}': {leader.reason}"
        )
    return replace(leader, candidate=follower, tie=leader.name, dense_s=None, factorized_s=None)


# ---- which rank they get -----------------------------------------------------------------------------


def _passes(open_: Sequence[Candidate], schemes: Mapping[str, str]) -> list[dict[str, str]]:
    """The rule is asked once per scheme to try: once in general, once per scheme for 'fastest'."""
    tries = {c.name: c.layer.schemes if schemes[c.name] == FASTEST else (schemes[c.name],) for c in open_}
    most = max((len(options) for options in tries.values()), default=0)
    return [{name: options[min(i, len(options) - 1)] for name, options in tries.items()} for i in range(most)]


def _ranked(
    model: nn.Module,
    open_: Sequence[Candidate],
    schemes: Mapping[str, str],
    rule: RankRule,
    macs: _Macs,
    force: bool,
    least: int,
) -> list[Verdict]:
    """Ask the rule. `least` is the smallest rank that it may give; explicit integers are honoured."""
    verdicts: list[Verdict] = []
    matrices: list[Matrix] = []
    members: list[tuple[Candidate, list[Unfolding]]] = []
    for candidate in open_:
        dense = candidate.dense
        obstacle = candidate.layer.obstacle(dense, schemes[candidate.name])
        if obstacle is not None:
            verdicts.append(Verdict(candidate, schemes[candidate.name], reason=obstacle))
            continue
        unfoldings = candidate.layer.unfoldings(dense, schemes[candidate.name])
        if isinstance(rule, Budget) and schemes[candidate.name] not in ("uv", "kxk-1x1"):
            raise RankError(
                f"a budget cannot price the scheme {schemes[candidate.name]!r} of '{candidate.name}'; "
                "use the default scheme, or another rank rule"
            )
        own = [_matrix(candidate, unfolding, macs) for unfolding in unfoldings]
        price = rule_of(rule, candidate.name)
        if isinstance(price, Budget) and not all(price.affords(matrix, least) for matrix in own):
            reason = f"factors of rank {least} would cost more than the dense weight{_BELOW_LEAST}"
            verdicts.append(Verdict(candidate, schemes[candidate.name], reason=reason))
            continue
        members.append((candidate, unfoldings))
        matrices += own

    ranks = iter(with_least(rule, least)(matrices, _rest(model, [c for c, _ in members], macs)))
    by_matrix = {(matrix.layer, matrix.name): matrix for matrix in matrices}
    for candidate, unfoldings in members:
        given = {unfolding.name: next(ranks) for unfolding in unfoldings}
        scheme = schemes[candidate.name]
        chosen = {name: int(rank) for name, rank in given.items() if rank is not None}
        if len(chosen) < len(given):
            verdicts.append(Verdict(candidate, scheme, reason="the rank rule leaves it dense"))
            continue
        for name, count in chosen.items():
            matrix = by_matrix[candidate.name, name]
            if not 1 <= count <= matrix.limit:
                raise RankError(
                    f"rank {count} is not within 1..{matrix.limit} for {matrix.label}; correct the rule"
                )
        smallest = min(chosen.values())
        if smallest < least and not isinstance(rule_of(rule, candidate.name), Fixed):
            reason = f"its rank would be {smallest}, below {least}{_BELOW_LEAST}"
            verdicts.append(Verdict(candidate, scheme, reason=reason))
            continue
        verdicts.append(_unless_it_costs_more(candidate, scheme, chosen, force))
    return verdicts


_BELOW_LEAST = "; give an int as rank, or pass where= or force=True"


def _unless_it_costs_more(candidate: Candidate, scheme: str, rank: dict[str, int], force: bool) -> Verdict:
    dense = candidate.dense
    before = sum(weight.numel() for weight in candidate.layer.weights_of(dense).values())
    after = candidate.layer.factor_params(dense, scheme, rank)
    if after > before and not force:
        reason = f"its factors would cost more ({after:,} parameters) than the dense weight ({before:,})"
        return Verdict(candidate, scheme, reason=reason)
    return Verdict(candidate, scheme, rank)


def _matrix(candidate: Candidate, unfolding: Unfolding, macs: _Macs) -> Matrix:
    @cache
    def spectrum() -> Spectrum:
        values = singular_values(unfolding.unfold(checked_weights(candidate)))
        return np.asarray(values.numpy(), dtype=np.float64)

    weight = next(iter(candidate.layer.weights_of(candidate.dense).values()))
    return Matrix(
        layer=candidate.name,
        name=unfolding.name,
        m=unfolding.m,
        n=unfolding.n,
        count=unfolding.count,
        spectrum=spectrum,
        unit_cost={
            "params": 1.0,
            "macs": macs.per_parameter.get(candidate.name, 0.0),
            "bytes": float(weight.element_size()),
        },
        macs_per_rank=macs.per_rank.get(candidate.name, 0.0),
    )


def checked_weights(candidate: Candidate) -> dict[str, torch.Tensor]:
    """The layer's dense weights, or an error if they cannot be decomposed."""
    weights = candidate.weights()
    for name, weight in weights.items():
        if weight.device.type == "meta":
            raise LayerError(
                f"'{candidate.name}' is on the meta device and has no values to decompose; "
                "use a ratio or a count as rank, or load the model's weights first"
            )
        if not bool(torch.isfinite(weight).all()):
            raise LayerError(
                f"{name} of '{candidate.name}' contains NaN or infinity; training has diverged: go back to "
                "an earlier checkpoint, or leave the layer out with where="
            )
    return weights


# ---- what it costs -----------------------------------------------------------------


def _counts_macs(rule: RankRule) -> bool:
    return isinstance(rule, Budget) and rule.unit == "macs"


@dataclass(frozen=True)
class _Macs:
    """What one forward pass on the example costs: in all, and per parameter of each layer up for choice."""

    total: float = 0.0
    per_parameter: Mapping[str, float] = field(default_factory=dict)
    per_rank: Mapping[str, float] = field(default_factory=dict)
    """What factors cost beyond that, per rank: a dense embedding is a lookup, its factors are a product."""


def _count_macs(
    model: nn.Module, open_: Sequence[Candidate], ties: Mapping[Candidate, str], example: Any
) -> _Macs:
    """Count all calls of each layer, and of the layers tied to it, which get the same factors."""
    if example is None:
        raise UsageError("a budget in MACs depends on the input; pass example_input= as well")
    groups = {c.name: [c, *(other for other, leader in ties.items() if leader == c.name)] for c in open_}
    members = [member for group in groups.values() for member in group]
    looked_up = [member.name for member in members if member.layer.kind == "embedding"]
    rows = _rows_looked_up(model, looked_up, example) if looked_up else {}
    counts = probe.macs(model, [member.name for member in members], example)
    per_parameter: dict[str, float] = {}
    per_rank: dict[str, float] = {}
    for leader, group in groups.items():
        missing = next((member.name for member in group if member.name not in counts), None)
        if missing is not None:
            raise UsageError(
                f"the example input does not reach '{missing}', so a budget in MACs cannot price it; "
                "leave it out with where="
            )
        if isinstance(group[0].module, Factorized):
            raise UsageError(
                f"'{leader}' is factorized already, so its dense MACs cannot be counted; densify the model "
                "first, or leave the layer out with where="
            )
        size = sum(weight.numel() for weight in group[0].layer.weights_of(group[0].module).values())
        per_parameter[leader] = sum(counts[member.name] for member in group) / size
        per_rank[leader] = sum(rows.get(m.name, 0) * m.dense.embedding_dim for m in group if m.name in rows)
    return _Macs(float(counts[""]), per_parameter, per_rank)


def _rows_looked_up(model: nn.Module, names: Sequence[str], example: Any) -> dict[str, int]:
    found: dict[str, int] = {}

    def visit(name: str, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        found[name] = found.get(name, 0) + (args[0] if args else kwargs["input"]).numel()

    probe.observe(model, names, example, visit, every_call=True)
    return found


def _own_weights(candidate: Candidate) -> list[nn.Parameter]:
    """Return the parameters of the model that a choice of rank replaces."""
    if isinstance(candidate.module, Factorized):
        return candidate.module.factor_parameters()
    return list(candidate.layer.weights_of(candidate.module).values())


def _rest(model: nn.Module, open_: Sequence[Candidate], macs: _Macs) -> dict[Unit, float]:
    """What everything costs that is not up for choice."""
    weights = [w for c in open_ for w in _own_weights(c)]
    all_ = [parameter for parameter in model.parameters() if not is_lazy(parameter)]
    chosen_macs = sum(
        macs.per_parameter.get(c.name, 0.0) * sum(w.numel() for w in c.layer.weights_of(c.dense).values())
        for c in open_
    )
    return {
        "params": float(sum(p.numel() for p in all_) - sum(w.numel() for w in weights)),
        "macs": macs.total - chosen_macs,
        "bytes": float(
            sum(p.numel() * p.element_size() for p in all_)
            - sum(w.numel() * w.element_size() for w in weights)
        ),
    }
