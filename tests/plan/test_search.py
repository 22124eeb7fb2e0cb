"""The compiled label search against the same search in plain Python, written from what it promises."""

import math
from dataclasses import dataclass, replace

import numpy as np
import pytest
from generator import small_problem

from takifugu.plan import search as module
from takifugu.plan import ways as tables
from takifugu.plan.compiled import labels
from takifugu.plan.curves import Curve, Floats
from takifugu.plan.problem import Problem
from takifugu.plan.search import Layer, Search
from takifugu.plan.solve import Solver
from takifugu.plan.ways import start_table

Label = tuple[int, float, float, float]
"""Version, energy, clock, loss"""


@dataclass(frozen=True)
class Stairs:
    """A curve that is not built in: losses are rounded up to hundredths."""

    base: Curve

    def step(self, loss: Floats, share: Floats) -> Floats:
        return np.minimum(np.ceil(self.base.step(loss, share) * 100 - 1e-9) / 100, loss)


def beats(a: Label, b: Label) -> bool:
    return a[0] == b[0] and all(x <= y for x, y in zip(a[1:], b[1:], strict=True))


def plain(problem: Problem, solver: Solver, rounds: int) -> tuple[list[set[Label]], float]:
    """Layer after layer: labels that none beats, of this or an earlier layer; and the least energy."""
    index = problem.version_index
    ways = [(v, v, 0.0, 0.0, 0.0) for v in range(len(problem.versions))]
    ways += [(index[s.source], index[s.target], s.energy_j, s.time_s, s.loss_jump) for s in problem.switches]
    layer = [(index[problem.start_version], 0.0, problem.start_time_s, problem.start_loss)]
    seen: list[Label] = []
    layers, best = [], math.inf
    for _ in range(rounds):
        children: list[Label] = []
        arrived = math.inf
        for version, energy, clock, loss in layer:
            for source, target, joules, seconds, jump in ways:
                options = solver.all_options[target]
                if source != version or options is None:
                    continue
                table = start_table(options)
                after = problem.versions[target].curve.step(np.array(loss + jump), options.share)
                for k, now in enumerate(after.tolist()):
                    start = clock + seconds
                    if table is not None:
                        spans = zip(table[0][k], table[1][k], strict=True)
                        start = min((max(start, a) for a, b in spans if max(start, a) <= b), default=math.inf)
                    end, spent = start + options.time_s[k], energy + joules + options.energy_j[k]
                    if end > problem.time_limit or (source == target and now >= loss):
                        continue
                    if now <= problem.loss_limit:
                        arrived = min(arrived, spent)
                    else:
                        children.append((target, spent, end, now))
        best = min(best, arrived)
        children = [c for c in dict.fromkeys(children) if c[1] < best]
        layer = [c for c in children if not any(beats(o, c) for o in [*children, *seen] if o != c)]
        layer = [c for c in layer if c not in seen]
        seen += layer
        layers.append(set(layer))
    return layers, best


def beaten(row: Floats, others: Floats, place: int | None = None) -> bool:
    """Whether some other row is as good; of its equals in its own list (it is at `place`) only those before it."""
    as_good = (others[:, 0] == row[0]) & (others[:, 1:] <= row[1:]).all(axis=1)
    if place is not None:
        same = (others == row).all(axis=1) & (np.arange(len(others)) >= place)
        as_good &= ~same
    return bool(as_good.any())


def rounded(rows: set[Label]) -> list[Label]:
    return sorted((v, round(e, 9), round(c, 9), round(x, 9)) for v, e, c, x in rows)


@pytest.mark.parametrize("stairs", [False, True])
@pytest.mark.parametrize("seed", range(8300, 8310))
def test_layers_are_those_of_plain_python(seed: int, stairs: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = Problem.from_dict(small_problem(seed, most_plans=3e4))
    if stairs:
        problem = replace(
            problem, versions=tuple(replace(v, curve=Stairs(v.curve)) for v in problem.versions)
        )
        monkeypatch.setattr(module, "_BLOCK", 40)  # several calls for a layer,
        monkeypatch.setattr(tables, "_MOST", 60)  # and tables that are forgotten
    solver = Solver(problem, 0.0, None, lambda _: None)
    rounds = min(problem.max_rounds or 3, 3)
    problem = replace(problem, max_rounds=rounds)
    layers: list[set[Label]] = []

    def note(layer: Layer) -> None:
        columns = (layer.version, layer.energy, layer.clock, layer.loss)
        layers.append({(int(v), float(e), float(c), float(x)) for v, e, c, x in zip(*columns, strict=True)})

    found = Search(problem, solver.all_options, None, observe=note).run()
    expected, best = plain(problem, solver, rounds)
    assert found.energy_j == pytest.approx(best, rel=1e-12)
    layers += [set() for _ in range(rounds - len(layers))]
    # A cutoff that falls within a layer leaves some labels that it would not let in at the layer's end.
    for mine, theirs in zip(layers, expected, strict=True):
        missing = set(rounded(theirs)) - set(rounded({x for x in mine if x[1] < best * (1 + 1e-12)}))
        assert not {x for x in missing if x[1] < best}
        assert not {x for x in rounded(mine) if x[1] < best} - set(rounded(theirs))


@pytest.mark.parametrize("whole", [True, False])
@pytest.mark.parametrize("seed", range(6))
def test_selection_is_by_definition(seed: int, whole: bool) -> None:
    """With ties and without; enough labels for the first look, and an archive."""
    rng = np.random.default_rng(seed)
    archive = (np.zeros(3, dtype=np.int64), np.zeros((3, 0)))
    seen = np.zeros((0, 4))
    for count in (40, 3600, 900):
        values = rng.integers(0, 25, (3, count)).astype(float) if whole else rng.random((3, count))
        values[2] = np.ceil(values[2] * 10) / 10 if seed % 2 else values[2]
        numbers = np.stack([rng.integers(0, 2, count), np.arange(count), np.zeros(count, dtype=np.int64)])
        kept, archive = labels.select(2, (numbers, values), archive)
        rows = np.concatenate([numbers[:1], values]).T
        best = [i for i in range(count) if not beaten(rows[i], seen) and not beaten(rows[i], rows, i)]
        assert kept.tolist() == best
        left = [row for row in seen if not beaten(row, rows[best])]
        seen = np.concatenate([np.array(left).reshape(-1, 4), rows[best]])
        assert sorted(archive[1].T.tolist()) == sorted(seen[:, 1:].tolist())


def test_a_known_table_changes_nothing() -> None:
    problem = Problem.from_dict(small_problem(8301, most_plans=3e4))
    problem = replace(problem, versions=tuple(replace(v, curve=Stairs(v.curve)) for v in problem.versions))
    problem = replace(problem, max_rounds=3)
    options = Solver(problem, 0.0, None, lambda _: None).all_options
    first = Search(problem, options, None)
    alone = first.run()
    again = Search(problem, options, None, ways=first._ways).run()
    assert again == alone
