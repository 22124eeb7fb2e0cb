"""`takifugu run`: carries a plan out in a simulation with real training, and the baselines beside it."""

from __future__ import annotations

import json
import math
import shlex
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from takifugu.engine.policies import Policy
    from takifugu.engine.setting import Setting
    from takifugu.plan.problem import Problem


def run(
    source: Annotated[Path, typer.Argument(help="A plan file, or a problem file, which is planned first.")],
    out: Annotated[
        Path | None, typer.Option(help="The run folder; default: the source's name + .run")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of the true fleet, its faults and the order of samples.")] = 0,
    averaging: Annotated[
        str | None, typer.Option(help="Of low-rank models: 'factors' or 'products'.")
    ] = None,
    baselines: Annotated[bool, typer.Option(help="Run every baseline too, to compare with.")] = False,
    only: Annotated[str | None, typer.Option(help="Run this policy alone: 'plan' or a baseline.")] = None,
    deadline: Annotated[
        float | None,
        typer.Option(help="When it must be done, in seconds; default: the plan's real deadline."),
    ] = None,
    replan: Annotated[
        bool, typer.Option(help="Plan the rest anew where reality and plan part; --no-replan: never.")
    ] = True,
    spread: Annotated[
        float, typer.Option(help="How far the fleet is from its profile: 1 is usual, 0 not at all.")
    ] = 1.0,
    dropout: Annotated[
        float, typer.Option(help="Share of rounds in which a node does not come back.")
    ] = 0.01,
    slowdown: Annotated[float, typer.Option(help="Share of rounds in which a node is slow.")] = 0.03,
    data_dir: Annotated[Path | None, typer.Option(help="Where the data sets lie.")] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with the run in the folder.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the results as JSON.")] = False,
) -> int:
    """Carry a plan out (real training, virtual clock); compare it with its prediction and with baselines."""
    from takifugu.cli import Exit
    from takifugu.cli.results import table
    from takifugu.engine.policies import PLAN, chosen
    from takifugu.errors import UsageError
    from takifugu.terminable import terminable

    wanted = None if only is None else chosen(only)
    if wanted not in (None, PLAN) and baselines:
        raise UsageError(f"--baselines and --only {wanted} exclude each other; keep one of the two")
    if not 0.0 <= spread <= 10.0:
        raise UsageError(f"--spread {spread:g} is not between 0 and 10; 1 is usual")
    if deadline is not None and not 0.0 < deadline < math.inf:
        raise UsageError(f"--deadline {deadline:g} is not a time; give seconds, or leave it out")
    out = Path(f"{source.stem}.run") if out is None else out
    world = {"spread": spread, "dropout": dropout, "slowdown": slowdown}
    options = [f"--seed {seed}", *(f"--{name} {value:g}" for name, value in world.items())]
    if averaging is not None:
        from takifugu.lowrank.averaging import check_how

        check_how(averaging)
        options.append(f"--averaging {averaging}")
    if deadline is not None:
        options.append(f"--deadline {deadline:g}")
    if not replan:
        options.append("--no-replan")
    if data_dir is not None:
        options.append(f"--data-dir {shlex.quote(str(data_dir))}")
    command = " ".join(["takifugu run", shlex.quote(str(source)), *options])
    same = command + (" --baselines" if baselines else "" if wanted is None else f" --only {wanted}")
    if resume and not out.exists():  # it may have been stopped while it planned, or be mistyped
        _say(f"{out}: there is no run yet; a new one begins")
    with terminable():
        try:
            problem, plan_file = _read(source, out if resume else None)
            # Before planning, which may take long: what cannot be run need not be planned.
            setting = _setting(
                problem, source, out if resume else None, seed, averaging, world, data_dir, deadline
            )
            policies = _policies(problem, plan_file, source, wanted, baselines, replan)
            if isinstance(policies, int):
                return policies
            results = _simulate(setting, policies, out, resume, command)
        except KeyboardInterrupt:
            _say(f"every whole round is kept; go on with: {same} --out {shlex.quote(str(out))} --resume")
            return Exit.INTERRUPTED
    if as_json:
        report = {"format": "takifugu.results/1", "run": str(out), "results": results}
        typer.echo(json.dumps(report, indent=1, allow_nan=False))
    else:
        for line in table(policies, results, problem.target_loss, setting.deadline_s):
            typer.echo(line)
    _say(f"run folder: {out}")
    return Exit.OK if results[policies[0].slug]["reached"] else Exit.FAILED


# ---- what is to be run ----------------------------------------------------------------------------------


def _read(source: Path, resumed: Path | None) -> tuple[Problem, dict[str, Any] | None]:
    """The problem, and the plan if there is one: the source itself, or what a run was started with."""
    from takifugu.errors import ProblemError
    from takifugu.plan.plan import FORMAT, read_plan
    from takifugu.plan.problem import Problem

    problem = Problem.load(source)
    text = source.read_text(encoding="utf-8-sig")
    if source.suffix == ".json" and json.loads(text).get("format") == FORMAT:
        data = read_plan(source)
        if data.get("problem_sha256") != problem.sha256:
            raise ProblemError(
                [f"{source}: its problem is not the one it was made for (problem_sha256); plan again"]
            )
        return problem, data
    if resumed is not None and (resumed / "run.json").is_file():
        from takifugu.engine.folder import RunFolder

        RunFolder.open(resumed)  # a damaged folder is told before the planning, which may take long
        data = read_plan(resumed / "plan.json")
        if data.get("problem_sha256") == problem.sha256:
            return problem, data
    return problem, None


def _policies(
    problem: Problem,
    plan_file: dict[str, Any] | None,
    source: Path,
    wanted: str | None,
    baselines: bool,
    replan: bool,
) -> list[Policy] | int:
    """The policies to carry out, the one that decides the exit code first; or an exit code."""
    from takifugu.cli import Exit
    from takifugu.engine import policies
    from takifugu.plan.solve import solve

    chosen: list[Policy] = []
    if wanted in (None, policies.PLAN):
        if plan_file is None:
            result = solve(problem, progress=_say)
            if result.stats.get("interrupted"):
                raise KeyboardInterrupt
            plan_file = result.to_dict()
        if plan_file.get("status") == "infeasible":
            reasons = plan_file.get("reasons") or ["no plan can meet the limits"]
            _say("infeasible: " + "; ".join(map(str, reasons)))
            return Exit.INFEASIBLE
        if plan_file.get("status") == "unknown" and not plan_file.get("rounds"):
            _say("there is no plan: the search ran out of time; plan again with a longer --time-limit")
            return Exit.FAILED
        chosen.append(policies.from_file(problem, plan_file, str(source), replan))
    if baselines or wanted not in (None, policies.PLAN):
        only = None if wanted in (None, policies.PLAN) else wanted
        chosen += policies.baselines(problem, only)
    if not chosen:
        _say(f"{wanted}: has no way to begin on this problem (it lacks versions, nodes or windows)")
        return Exit.FAILED
    return chosen


def _setting(
    problem: Problem,
    source: Path,
    resumed: Path | None,
    seed: int,
    averaging: str | None,
    world: Mapping[str, float],
    data_dir: Path | None,
    deadline_s: float | None,
) -> Setting:
    from takifugu.engine.folder import RunFolder
    from takifugu.engine.setting import AVERAGING, Setting, read_structures
    from takifugu.engine.world import Spread, World

    known = RunFolder.open(resumed) if resumed is not None and (resumed / "run.json").is_file() else None
    true = World.draw(problem, seed, Spread().times(world["spread"]), world["dropout"], world["slowdown"])
    structures = read_structures(problem, (source.parent, Path()), known)
    how = AVERAGING if averaging is None else averaging
    return Setting.of(
        problem, true, structures, seed, how, base=source.parent, data_dir=data_dir, deadline_s=deadline_s
    )


def _simulate(
    setting: Setting, policies: Sequence[Policy], out: Path, resume: bool, command: str
) -> dict[str, Mapping[str, Any]]:
    from takifugu.engine.policies import PLAN
    from takifugu.engine.simulate import simulate

    results: dict[str, Mapping[str, Any]] = {}
    for policy in policies:
        path = out if policy.slug == PLAN else out / "baselines" / policy.slug
        told = f"{command} --only {policy.slug}"
        folder = setting.folder(path, policy, resume, told)
        with _progress(policy) as progress:
            result = simulate(policy, setting, folder, progress)
        _say(f"{policy.slug}: {result['reason']} (round {result['rounds']}, loss {result['loss']:.4f})")
        results[policy.slug] = result
    return results


# ---- what is told ---------------------------------------------------------------------------------------


@contextmanager
def _progress(policy: Policy) -> Iterator[Any]:
    """A line that rewrites itself on a terminal; elsewhere a line now and then."""
    live, planned = sys.stderr.isatty(), len(policy.plan.rounds)

    def show(row: Mapping[str, Any]) -> None:
        number = row["round"]
        if live or number == 1 or number % 10 == 0:
            text = (
                f"{policy.slug}: round {number} of {planned} {row['version']} loss {row['loss']:.4f} "
                f"at {row['end_s']:,.1f} s, {row['total']['energy_j']:,.1f} J"
            )
            sys.stderr.write(f"\r\x1b[K{text}" if live else f"{text}\n")
            sys.stderr.flush()

    try:
        yield show
    finally:
        if live:
            sys.stderr.write("\r\x1b[K")


def _say(message: str) -> None:
    sys.stderr.write(f"{message}\n")
