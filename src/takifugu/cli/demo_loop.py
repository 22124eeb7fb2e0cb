"""The whole loop on real digits: profile -> plan -> run the plan and every baseline -> one table, one page.

What it leaves is what the single commands leave, so that each step can be repeated or changed by hand:

    fleet.toml      the draft: the target, the workload, eight devices      cli/demo_fleet.toml with the seed
    pilots/         the pilots' rounds                                      takifugu profile model
    first-plan.json the plan by pilots of the thriftiest nodes              takifugu plan --reserve
    problem.toml    the draft with versions, curves and switches, by        takifugu profile model --like
                    pilots of the nodes that the first plan uses
    plan.json       the plan with its certificate                           takifugu plan --reserve
    run/            the plan carried out, and what was planned anew on      takifugu run --baselines
                    the way; the baselines beneath
    report.html     the page                                                takifugu report
    demo.json       the figures of the last screen
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from takifugu.cli.stages import stages
from takifugu.errors import UsageError

if TYPE_CHECKING:
    from takifugu.engine.policies import Policy
    from takifugu.engine.setting import Setting
    from takifugu.plan.problem import Problem
    from takifugu.plan.result import Result
    from takifugu.train.costs import Costs
    from takifugu.train.profile import Finding

FLEET = "demo_fleet.toml"
RUN_SEED = 1000
"""Added to the seed for the run: other batches than the pilots', or predicting would be remembering."""

SWITCH_S, SERVER_W = 0.2, 10.0
"""A switch and the server's power as assumed. A time measured here would differ from one call to the next,
and the plan with it."""

SPEEDUP_STEP = 0.05
"""Speeds of versions relative to dense are measured on this machine and rounded to this step: a second call
then mostly plans the same."""

RESERVE = 0.1
"""The share of the time that is kept for what differs from the profile: devices that are slow or drop out
make everyone wait, and training has its ups and downs. Baselines are planned with it, too."""

WORLD = {"spread": 1.0, "dropout": 0.01, "slowdown": 0.03}
"""How the true fleet differs from its profile: what `takifugu run` does by default."""


@dataclass(frozen=True)
class Effort:
    """How much is spent on pilots."""

    ratios: tuple[float, ...] = (0.25, 0.0625)
    rounds: int = 20
    warmup: int = 6
    amounts: tuple[float, ...] = (1.0, 0.6, 0.3)
    curve_samples: int = 20


QUICK = Effort(ratios=(0.25,), rounds=5, warmup=3, amounts=(1.0, 0.5), curve_samples=4)
QUICK_TARGET = "loss = 1.1\ndeadline_s = 14.0\nmax_rounds = 30"


def demo_loop(seed: int, folder: Path, as_json: bool, quick: bool = False) -> int:
    from takifugu.cli import Exit
    from takifugu.terminable import terminable

    with terminable(), _one_thread():
        try:
            done = _loop(seed, folder, QUICK if quick else Effort(), quick)
        except KeyboardInterrupt:
            sys.stderr.write(f"stopped; {folder}/ keeps what is done, the same command goes on from there\n")
            return Exit.INTERRUPTED
    if as_json:
        typer.echo(json.dumps(done.summary(), indent=1, allow_nan=False))
    else:
        for line in done.screen():
            typer.echo(line)
    return Exit.OK if done.results["plan"]["deadline_met"] else Exit.FAILED


def _loop(seed: int, folder: Path, effort: Effort, quick: bool) -> Done:
    from takifugu.engine import policies

    draft, pilots = _start(folder, seed, quick), Work()
    with stages() as show:
        with show.stage(
            "profile", "short real trainings, on all devices and on the thriftiest", 1.0
        ) as stage:
            wanted = _profile(draft, folder, effort, stage, pilots)
        with show.stage("plan", "a first plan: who is it that matters?") as stage:
            first = _plan(wanted.with_reserve(RESERVE), folder / "first-plan.json", stage)
        if first.plan is not None:
            with show.stage("profile", "the same on the devices of that plan", 1.0) as stage:
                wanted = _profile(draft, folder, effort, stage, pilots, first.to_dict())
        problem = wanted.with_reserve(RESERVE)
        with show.stage("plan", "the least energy, with a proof of how near it is") as stage:
            result = _plan(problem, folder / "plan.json", stage)
            if result.plan is None:
                raise UsageError(f"seed {seed} has no plan ({'; '.join(result.reasons)}); try another --seed")
            stage.at(0, "the baselines' plans")
            plan = policies.from_file(problem, result.to_dict(), replans=True)
            chosen = [plan, *policies.baselines(problem)]
        with show.stage("run", "real training: the plan and every baseline", float(len(chosen))) as stage:
            results = _run(problem, chosen, folder, seed + RUN_SEED, wanted.deadline_s, stage)
        with show.stage("report", "one page"):
            page = _page(folder)
    done = Done(wanted, problem.deadline_s, pilots.to_dict(), pilots.costs(), result, chosen, results, page)
    _write(folder / "demo.json", done.summary())
    return done


# ---- the steps ------------------------------------------------------------------------------------------


def fleet(seed: int = 0) -> str:
    """The draft of the demo's problem, as text."""
    text = files("takifugu.cli").joinpath(FLEET).read_text(encoding="utf-8")
    assert "\nseed = 0\n" in text
    return text.replace("\nseed = 0\n", f"\nseed = {seed}\n")


def _start(folder: Path, seed: int, quick: bool) -> Path:
    text = fleet(seed)
    if quick:
        head, _, rest = text.partition("[target]\n")
        text = f"{head}[target]\n{QUICK_TARGET}\n\n[round]{rest.partition('[round]')[2]}"
    draft = folder / "fleet.toml"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        draft.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"{folder}: cannot be written ({error.strerror}); choose another --folder") from None
    return draft


class Work:
    """What pilots took, each round counted once, and what they say of costs."""

    def __init__(self) -> None:
        self._samples: dict[tuple[str, int], int] = {}
        self._all = 1
        self._costs: Costs | None = None

    def add(self, found: Finding) -> None:
        pilots = found.profile.pilots
        self._samples |= {(pilots.keys[one.run], one.round): one.samples for one in found.result.rounds}
        self._all = sum(map(len, pilots.shares.values()))
        self._costs = found.costs

    def costs(self) -> Costs:
        """Of the versions, as the plan takes them."""
        assert self._costs is not None
        return self._costs

    def to_dict(self) -> dict[str, float]:
        """Rounds, and passes over the whole fleet's data."""
        return {"rounds": len(self._samples), "passes": sum(self._samples.values()) / self._all}


def _plan(problem: Problem, path: Path, stage: Any) -> Result:
    from takifugu.plan.solve import solve

    result = solve(problem, tolerance=0.01, progress=lambda text: stage.at(0, text))
    if result.stats.get("interrupted"):
        raise KeyboardInterrupt
    if result.plan is not None:
        _write(path, result.to_dict())
    return result


def _profile(
    draft: Path,
    folder: Path,
    effort: Effort,
    stage: Any,
    work: Work,
    like: Mapping[str, Any] | None = None,
) -> Problem:
    """The pilots, the curves, and the problem file. Of this machine's speed only the ratios between versions
    are in it."""
    from takifugu.plan.problem import Problem
    from takifugu.train.pilots import PilotRound
    from takifugu.train.profile import Draft, Profile

    ready = Profile.prepare(
        Draft.load(draft), effort.ratios, effort.rounds, effort.warmup, effort.amounts, like=like
    )
    total, seen = ready.pilots.total_rounds, 0

    def told(one: PilotRound) -> None:
        nonlocal seen
        seen += 1
        detail = f"pilot round {seen} of {total}: {one.version} on {one.share:.0%}, loss {one.loss_after:.3f}"
        stage.at(0.9 * seen / total, detail if seen < total else "fitting curves to the pilots")

    stage.at(0.0, "timing the versions on this machine")
    found = ready.run(folder / "pilots", told, effort.curve_samples)
    assert found.costs is not None  # the fleet file gives no speeds by version
    switches = tuple(replace(switch, time_s=SWITCH_S) for switch in found.result.switches)
    costs = found.costs.rounded(SPEEDUP_STEP)
    found = replace(found, result=replace(found.result, switches=switches), costs=costs)
    found.write(folder / "problem.toml", SERVER_W)
    work.add(found)
    return Problem.load(folder / "problem.toml")


def _run(
    problem: Problem, chosen: Sequence[Policy], folder: Path, seed: int, deadline_s: float, stage: Any
) -> dict[str, Mapping[str, Any]]:
    from takifugu.engine.policies import PLAN
    from takifugu.engine.setting import Setting, read_structures
    from takifugu.engine.simulate import simulate
    from takifugu.engine.world import Spread, World

    world = World.draw(problem, seed, Spread().times(WORLD["spread"]), WORLD["dropout"], WORLD["slowdown"])
    setting = Setting.of(
        problem, world, read_structures(problem, (folder,)), seed, base=folder, deadline_s=deadline_s
    )
    options = " ".join(f"--{name} {value:g}" for name, value in WORLD.items())
    command = f"takifugu run {folder / 'plan.json'} --seed {seed} {options}"
    _put_aside_what_is_of_another_run(setting, chosen, folder)
    results: dict[str, Mapping[str, Any]] = {}
    for place, policy in enumerate(chosen):
        planned = len(policy.plan.rounds)
        path = folder / "run" if policy.slug == PLAN else folder / "run" / "baselines" / policy.slug

        def told(
            row: Mapping[str, Any], place: int = place, policy: Policy = policy, of: int = planned
        ) -> None:
            share = min(row["round"] / of, 0.99)
            detail = f"{policy.slug}: round {row['round']} ({of} planned), loss {row['loss']:.3f}"
            stage.at(place + share, detail)

        stage.at(place, f"{policy.slug}: begins")
        run_folder = setting.folder(path, policy, resume=True, command=f"{command} --only {policy.slug}")
        results[policy.slug] = simulate(policy, setting, run_folder, told)
    return results


def _put_aside_what_is_of_another_run(setting: Setting, chosen: Sequence[Policy], folder: Path) -> None:
    """Another seed or release left its run here: it is moved out of the way, not deleted, not mixed up."""
    from takifugu.engine.folder import RunFolder
    from takifugu.engine.policies import PLAN
    from takifugu.errors import RunError

    run = folder / "run"
    try:
        for policy in chosen:
            path = run if policy.slug == PLAN else run / "baselines" / policy.slug
            if (path / "run.json").exists():
                RunFolder.open(path).check_same(setting.header(policy))
    except RunError:
        number = 1
        while (aside := folder / f"run.{number}").exists():
            number += 1
        run.rename(aside)
        sys.stderr.write(f"the run of another seed or release is now {aside}\n")


def _page(folder: Path) -> Path:
    from takifugu.report.page import page
    from takifugu.report.read import read

    path = folder / "report.html"
    path.write_text(page(read(folder / "run")), encoding="utf-8")
    return path


# ---- what is told ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Done:
    problem: Problem
    planned_for_s: float
    """Its deadline less the reserve."""
    pilots: Mapping[str, float]
    """Their rounds, and their work in passes over the whole fleet's data."""
    costs: Costs
    """Of the versions, measured on this machine."""
    plan: Result
    policies: Sequence[Policy]
    results: Mapping[str, Mapping[str, Any]]
    page: Path

    def summary(self) -> dict[str, Any]:
        best = self._best_baseline()
        return {
            "format": "takifugu.demo/1",
            "target": {"loss": self.problem.target_loss, "deadline_s": self.problem.deadline_s},
            "planned_for_s": self.planned_for_s,
            "pilots": dict(self.pilots),
            "speedups": {
                name: {"measured": one.measured, "flops": one.flops}
                for name, one in self.costs.speedups.items()
            },
            "plan": {
                "energy_j": self.plan.energy_j,
                "lower_bound_j": self.plan.lower_bound_j,
                "gap": self.plan.gap,
            },
            "results": self.results,
            "best_baseline": best,
            "saved_against_best_baseline": None if best is None else self._saved(best),
            "problem_sha256": self.plan.problem.sha256,
            "page": str(self.page),
        }

    def screen(self) -> Iterator[str]:
        from takifugu.cli.results import table
        from takifugu.plan.report import table as plan_table
        from takifugu.plan.samples import sample_count

        problem, plan = self.problem, self.plan.plan
        assert plan is not None
        images = problem.total_samples
        yield ""
        yield (
            f"WANTED   loss {problem.target_loss:g} within {problem.deadline_s:g} s, for the least energy; "
            f"{len(problem.nodes)} devices own {images:,} real digits"
        )
        yield (
            f"PROFILE  {len(problem.versions)} versions of the network in {self.pilots['rounds']} "
            f"short rounds, as much work as {self.pilots['passes']:.0f} passes over all data"
        )
        ratios = [
            f"{name} {one.measured:.2f} (by FLOPs {one.flops:.2f})"
            for name, one in self.costs.speedups.items()
        ]
        yield f"COSTS    measured on this machine, relative to dense: {', '.join(ratios)} times the speed"
        yield ""
        gap, bound = 100 * (self.plan.gap or 0.0), self.plan.lower_bound_j or 0.0
        yield (
            f"PLAN     predicted by curves and profiles: {plan.energy_j:,.1f} J in {plan.time_s:.1f} s; "
            f"proven for the same predicted figures: no plan within {self.planned_for_s:g} s needs less than "
            f"{bound:,.1f} J (gap {gap:.2f}%). The rest of the {problem.deadline_s:g} s is a reserve."
        )
        if (held := self.plan.samples_reached) is not None:
            yield f"  It reaches the target in {held} of {sample_count(problem)} samples of the curves."
        yield from (f"  {line}" for line in plan_table(self.plan))
        used = {name for row in plan.rounds for name in row.nodes}
        idle = [node.name for node in problem.nodes if node.name not in used]
        if all(row.version == problem.versions[0].name for row in plan.rounds):
            yield "  at these costs no low-rank version pays: the plan stays dense"
        yield f"  never asked: {', '.join(idle)}" if idle else "  every device is asked at some time"
        yield ""
        yield (
            "RUN      real training, devices that differ from their profile; in brackets what was predicted "
            "(the bound above is on predicted energy, actual energy may be lower)"
        )
        lines = list(table(self.policies, self.results, problem.target_loss, problem.deadline_s, short=True))
        yield from (f"  {line}" for line in lines[1:])
        if anew := len(self.results["plan"]["replans"]):
            times = "once" if anew == 1 else f"{anew} times"
            yield f"  The run drifted from the plan; replanned {times} (run/plans/)."
        yield ""
        yield self._verdict()
        yield f"The page: {self.page}"

    def _verdict(self) -> str:
        own = self.results["plan"]
        if not own["deadline_met"]:
            missed = "late" if own["reached"] else f"at loss {own['loss']:.3f}"
            return f"The plan MISSED the target ({missed}): {own['reason']}."
        if (best := self._best_baseline()) is None:
            return f"Only the plan met the target in time: {own['energy_j']:.1f} J."
        saved, other = self._saved(best), self.results[best]["energy_j"]
        if saved < 0:
            return f"{best} needed less than the plan: {other:.1f} J against {own['energy_j']:.1f} J."
        plain = self.results.get("no-compression-all-nodes")
        against = ""
        if plain is not None and plain["deadline_met"]:
            less = 1 - own["energy_j"] / plain["energy_j"]
            against = f"; {less:.0%} less than all devices without compression"
        met = sum(r["deadline_met"] for slug, r in self.results.items() if slug != "plan")
        of = (
            f"{best}, the best of {met} baselines that made it"
            if met > 1
            else f"{best}, the only baseline to make it"
        )
        if saved < 0.005:
            return f"The plan needed as little energy as {of}{against}."
        return f"The plan needed {saved:.0%} less energy than {of}{against}."

    def _best_baseline(self) -> str | None:
        """Of those that met the target in time, the one that needed least."""
        met = {
            slug: r["energy_j"] for slug, r in self.results.items() if slug != "plan" and r["deadline_met"]
        }
        return min(met, key=lambda slug: met[slug], default=None)

    def _saved(self, baseline: str) -> float:
        return float(1 - self.results["plan"]["energy_j"] / self.results[baseline]["energy_j"])


@contextmanager
def _one_thread() -> Iterator[None]:
    """Sums over several threads come out in another order, and the numbers with them."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _write(path: Path, data: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=1, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
