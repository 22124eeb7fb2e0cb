from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import small_fleet
from hypothesis import given, settings
from hypothesis import strategies as st
from test_simulation import files, lines

from takifugu.engine import replan
from takifugu.engine.policies import Policy, baselines, from_file
from takifugu.engine.replan import Course, Replanner
from takifugu.engine.setting import Setting
from takifugu.engine.simulate import simulate
from takifugu.engine.state import State
from takifugu.engine.world import World
from takifugu.errors import RunError
from takifugu.lowrank.surgery import structure_of
from takifugu.plan.curves import step_one
from takifugu.plan.fleet import Fleet
from takifugu.plan.plan import replay
from takifugu.plan.problem import Problem
from takifugu.plan.solve import solve
from takifugu.plan.verify import verify
from takifugu.train.evaluation import Score

DEADLINE_S = 16.0


def hungry_when_fast(**target: Any) -> dict[str, Any]:
    """A fleet in which time costs energy, so that there is something to trade."""
    data = small_fleet.problem_dict(target=target)
    for i, node in enumerate(data["nodes"]):
        node.update(flops_per_s=6e6 / (1 + i), joules_per_flop=1e-6 / (1 + i) ** 1.5)
    return data


PROBLEM = Problem.from_dict(hungry_when_fast(loss=0.6, deadline_s=13.0, max_rounds=60))
FOUND = solve(PROBLEM, tolerance=0.0)
assert FOUND.plan is not None
PLAN = FOUND.plan
FIRST = Course(from_file(PROBLEM, FOUND.to_dict(), replans=True))
REPLANNER = Replanner(PROBLEM, Fleet.of(PROBLEM), DEADLINE_S, PLAN.energy_j)


def after(number: int, loss: float | None = None, late_s: float = 0.0) -> State:
    """After a round of the plan: as planned, or with another loss, or later."""
    row = PLAN.rounds[number - 1]
    end_s = PLAN.time_s if number == len(PLAN.rounds) else PLAN.rounds[number].start_s
    return standing(number, row.version, end_s + late_s, row.loss if loss is None else loss)


def standing(number: int, version: str, clock_s: float, loss: float) -> State:
    return State(number, version, clock_s, 0.0, 0.0, loss, 0.0, believed=loss)


def paper(course: Course, at: State) -> Any:
    """The rest of the first plan, carried out on paper from somewhere, by the planner's own replay."""
    here = dataclasses.replace(
        PROBLEM, start_version=at.version, start_loss=at.loss, start_time_s=at.clock_s, max_rounds=None
    )
    return replay(here, course.policy.plan.decisions[at.round - course.after :])


# ---- when ------------------------------------------------------------------------------------------------


def test_as_long_as_all_is_as_planned_the_plan_stays() -> None:
    assert len(PLAN.rounds) > 5
    for number in range(1, len(PLAN.rounds)):
        assert REPLANNER.course(FIRST, after(number)) is FIRST


def test_ahead_of_the_plan_the_rest_gets_cheaper() -> None:
    at = after(2, loss=PLAN.rounds[3].loss)
    course = REPLANNER.course(FIRST, at)
    assert course.after == 2
    enough = next(n for n, row in enumerate(paper(FIRST, at).rounds, 1) if row.loss <= PROBLEM.loss_limit)
    old_j = sum(row.energy_j for row in paper(FIRST, at).rounds[:enough])
    assert course.policy.plan.energy_j <= (1 - replan.WORTH) * old_j
    assert course.policy.plan.time_s <= PROBLEM.time_limit


def test_behind_it_the_rest_gets_faster_and_the_deadline_holds() -> None:
    at = after(4, late_s=0.8)
    assert paper(FIRST, at).time_s > PROBLEM.deadline_s + 0.5
    course = REPLANNER.course(FIRST, at)
    assert course.after == 4
    assert course.policy.plan.time_s <= PROBLEM.time_limit
    old, new = paper(FIRST, at), course.policy.plan
    per_second = (at.loss - new.loss) / (new.time_s - at.clock_s)
    assert per_second > (at.loss - old.loss) / (old.time_s - at.clock_s)


def test_what_cannot_be_had_by_then_is_planned_into_the_reserve() -> None:
    at = standing(6, "r0.25", PROBLEM.deadline_s - 1.0, 0.75)
    course = REPLANNER.course(FIRST, at)
    assert PROBLEM.deadline_s < course.policy.plan.time_s <= DEADLINE_S


def test_a_deadline_earlier_than_planned_for_is_the_one_that_counts() -> None:
    hurried = dataclasses.replace(REPLANNER, deadline_s=PROBLEM.deadline_s - 1.0)
    course = hurried.course(FIRST, after(2))
    assert course.after == 2
    assert course.policy.plan.time_s <= (PROBLEM.deadline_s - 1.0) * (1 + 1e-9)


def test_where_nothing_does_any_more_it_goes_on_as_it_was() -> None:
    assert REPLANNER.course(FIRST, standing(2, "dense", PROBLEM.deadline_s - 1.0, 2.0)) is FIRST


def test_in_the_reserve_as_little_of_it_is_used_as_will_do() -> None:
    """Quick rounds that leave time for more; they have to promise twice the way that is seen to be left."""
    at = standing(2, "dense", PROBLEM.deadline_s + 1.0, 0.61)
    course = REPLANNER.course(FIRST, at)
    assert course.after == 2
    problem = Problem.from_dict(course.policy.file["problem"])
    assert problem.start_loss == pytest.approx(0.62)
    assert verify(problem.to_dict(), dict(course.policy.file)).ok
    left_s = DEADLINE_S - at.clock_s
    used = (problem.deadline_s - at.clock_s) / left_s
    assert used == pytest.approx(min(p for p in replan.RESERVE_PARTS if _can(at, problem, p * left_s)))
    assert used < 1.0


def _can(at: State, problem: Problem, seconds: float) -> bool:
    """Whether any plan does it in so many seconds."""
    return solve(dataclasses.replace(problem, deadline_s=at.clock_s + seconds)).plan is not None


def test_in_the_reserve_others_join_where_no_plan_does() -> None:
    at = standing(2, "dense", PROBLEM.deadline_s + 1.0, 1.5)
    given_up = REPLANNER.course(FIRST, at)
    assert (given_up.policy, given_up.after, given_up.planned) == (FIRST.policy, 0, 2)
    decision, predicted = given_up.at(3, at.loss)
    assert predicted is None
    assert decision in FIRST.policy.beyond(1, at.loss)
    # Once given up it stays so, and the rounds beyond it are counted on.
    assert REPLANNER.course(given_up, dataclasses.replace(at, round=3)) == given_up
    assert given_up.beyond(4, 1.0) == FIRST.policy.beyond(2, 1.0)


def test_a_plan_that_is_used_up_above_the_target_has_to_promise_twice_as_much() -> None:
    """Its curves promised too much. Planning one more small round, again and again, would go nowhere."""
    target = PROBLEM.target_loss
    end = after(len(PLAN.rounds) - 1, loss=target * 1.05)
    short = dataclasses.replace(FIRST, cut=end.round)
    course = REPLANNER.course(short, dataclasses.replace(end, believed=target))
    assert course.after == end.round
    problem = Problem.from_dict(course.policy.file["problem"])
    assert problem.start_loss == pytest.approx(target * 1.10)  # of what was seen, not of what is believed
    assert verify(problem.to_dict(), dict(course.policy.file)).ok


def test_the_same_team_goes_on_if_another_saves_little(monkeypatch: pytest.MonkeyPatch) -> None:
    end = after(len(PLAN.rounds) - 1, loss=PROBLEM.target_loss * 1.01)
    monkeypatch.setattr(replan, "LEAST", 1.0)
    course = REPLANNER.course(dataclasses.replace(FIRST, cut=end.round), end)
    assert course.after == end.round
    assert set(map(repr, course.policy.plan.decisions)) == {repr(PLAN.decisions[-1])}
    assert verify(course.policy.file["problem"], dict(course.policy.file)).ok


def test_nothing_changes_for_a_trifle(monkeypatch: pytest.MonkeyPatch) -> None:
    at = after(2, loss=PLAN.rounds[3].loss)
    assert REPLANNER.course(FIRST, at) is not FIRST
    monkeypatch.setattr(replan, "LEAST", 0.5)  # nothing that is left to pay is half of the whole
    assert REPLANNER.course(FIRST, at) is FIRST


@settings(max_examples=40, deadline=None)
@given(
    number=st.integers(1, len(PLAN.rounds) - 1),
    loss=st.floats(0.3, 2.5),
    clock_s=st.floats(0.1, DEADLINE_S - 0.01),
)
def test_from_anywhere_a_new_plan_begins_there_verifies_and_is_no_dearer(
    number: int, loss: float, clock_s: float
) -> None:
    at = standing(number, PLAN.rounds[number - 1].version, clock_s, loss)
    course = REPLANNER.course(FIRST, at)
    if course.after == 0:
        return
    problem = Problem.from_dict(course.policy.file["problem"])
    start = (problem.start_version, problem.start_time_s, problem.max_rounds)
    assert start == (at.version, clock_s, 60 - number)
    late = clock_s >= PROBLEM.deadline_s
    assert problem.start_loss == pytest.approx(max(2 * loss - 0.6 if late else loss, 0.6), rel=2e-4)
    assert problem.deadline_s <= DEADLINE_S
    answer = verify(problem.to_dict(), dict(course.policy.file))
    assert answer.ok, answer
    assert course.policy.plan.loss <= PROBLEM.loss_limit
    old = paper(FIRST, at)
    if not late and old.loss <= PROBLEM.loss_limit and old.time_s <= PROBLEM.time_limit:
        enough = next(n for n, row in enumerate(old.rounds, 1) if row.loss <= PROBLEM.loss_limit)
        old_j = sum(row.energy_j for row in old.rounds[:enough])
        assert course.policy.plan.energy_j <= (1 - replan.WORTH) * old_j * (1 + 1e-9)


# ---- what is believed --------------------------------------------------------------------------------------


def test_a_part_of_a_surprise_is_believed() -> None:
    everyone = {i: node.samples for i, node in enumerate(PROBLEM.nodes)}
    expected = step_one(PROBLEM.versions[0].curve, 2.0, 1.0)
    assert REPLANNER.believed(2.0, "dense", "dense", everyone, expected) == pytest.approx(expected)
    halfway = REPLANNER.believed(2.0, "dense", "dense", everyone, expected + 0.3)
    assert halfway == pytest.approx(expected + replan.TRUST * 0.3)
    jumped = step_one(PROBLEM.versions[1].curve, 2.0 + 0.1, 1.0)
    assert REPLANNER.believed(2.0, "dense", "r0.25", everyone, jumped) == pytest.approx(jumped)
    assert REPLANNER.believed(2.0, "dense", "dense", {}, 2.0) == 2.0  # nobody came back


def test_what_a_team_shows_for_lack_of_labels_is_not_believed() -> None:
    """Node 0 has one label only, of two; the others have both alike. They sum up to nearly as many of each."""
    nodes = tuple(
        dataclasses.replace(
            n, labels=(n.samples, 0) if i == 0 else (n.samples // 2, n.samples - n.samples // 2)
        )
        for i, n in enumerate(PROBLEM.nodes)
    )
    problem = dataclasses.replace(PROBLEM, nodes=nodes)
    knows = dataclasses.replace(REPLANNER, problem=problem, fleet=Fleet.of(problem))
    for who, believed in (([0], False), ([1, 2], True), (range(len(nodes)), True)):
        used = {i: nodes[i].samples for i in who}
        share = knows.fleet.round_cost(0, used).share
        expected = step_one(problem.versions[0].curve, 2.0, share)
        above = knows.believed(2.0, "dense", "dense", used, expected + 0.3)
        assert above == pytest.approx(expected + (replan.TRUST * 0.3 if believed else 0.0))
        below = knows.believed(2.0, "dense", "dense", used, expected - 0.1)
        assert below == pytest.approx(expected - replan.TRUST * 0.1)  # good news is believed of all
        # Where nothing is known of labels, what is seen has to do.
        assert REPLANNER.believed(2.0, "dense", "dense", used, expected + 0.3) > expected


# ---- in a run --------------------------------------------------------------------------------------------


def run_setting(folder: Path) -> tuple[Setting, Policy]:
    """A true fleet unlike its profile, and curves that promise too little at first, too much later."""
    data = hungry_when_fast(loss=1.0, deadline_s=14.0, max_rounds=40)
    world = World.draw(Problem.from_dict(data), 2, dropout=0.05, slowdown=0.1)
    setting = small_fleet.setting(data, folder, world, seed=3, deadline_s=20.0)
    result = solve(setting.problem, tolerance=0.01)
    return setting, from_file(setting.problem, result.to_dict(), replans=True)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    setting, policy = run_setting(folder)
    simulate(policy, setting, setting.folder(folder / "run", policy))
    return folder / "run"


def test_a_run_keeps_its_plans_and_tells_of_them(whole: Path) -> None:
    rows, events = lines(whole / "rounds.jsonl"), lines(whole / "events.jsonl")
    result = json.loads((whole / "result.json").read_text())
    assert result["deadline_met"]
    plans = sorted(int(p.stem) for p in (whole / "plans").glob("*.json"))
    assert plans
    assert result["replans"] == plans
    told = [e for e in events if e["event"] == "replanned"]
    assert [e["round"] - 1 for e in told] == plans
    for made in plans:
        file = json.loads((whole / "plans" / f"{made}.json").read_text())
        assert verify(file["problem"], file).ok
        start = file["problem"]["start"]
        row = rows[made - 1]
        assert (start["version"], start["time_s"]) == (row["version"], row["end_s"])
        # The round after it is the new plan's first, as far as its members were there.
        first = file["rounds"][0]
        assert rows[made]["version"] == first["version"]
        assert rows[made]["members"] <= len(first["nodes"])
        assert rows[made]["predicted"]["loss"] == first["loss"]
        assert rows[made]["plan_after"] == made


def test_stopped_after_every_round_it_makes_the_same_plans(tmp_path: Path, whole: Path) -> None:
    class Enough(Exception):
        pass

    def stop(row: Mapping[str, Any]) -> None:
        raise Enough

    setting, policy = run_setting(tmp_path)
    for _ in lines(whole / "rounds.jsonl"):
        with pytest.raises(Enough):
            simulate(policy, setting, setting.folder(tmp_path / "run", policy, resume=True), stop)
    simulate(policy, setting, setting.folder(tmp_path / "run", policy, resume=True))
    assert files(tmp_path / "run") == files(whole)


def test_a_plan_of_a_round_that_does_not_count_is_forgotten(
    tmp_path: Path, whole: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed between the new plan and the line of the round it was made after."""

    class Killed(Exception):
        pass

    made = int(min((whole / "plans").glob("*.json"), key=lambda p: int(p.stem)).stem)
    setting, policy = run_setting(tmp_path)
    run = setting.folder(tmp_path / "run", policy)
    add = type(run).add_round

    def dies(self: Any, row: Mapping[str, Any], *rest: Any) -> None:
        if row["round"] == made:
            raise Killed
        add(self, row, *rest)

    with monkeypatch.context() as patched:
        patched.setattr(type(run), "add_round", dies)
        with pytest.raises(Killed):
            simulate(policy, setting, run)
    assert run.plans() == [made]
    simulate(policy, setting, setting.folder(tmp_path / "run", policy, resume=True))
    assert files(tmp_path / "run") == files(whole)


def test_a_damaged_plan_is_named(tmp_path: Path, whole: Path) -> None:
    class Enough(Exception):
        pass

    made = [int(p.stem) for p in (whole / "plans").glob("*.json")]

    def stop(row: Mapping[str, Any]) -> None:
        if row["round"] == min(made) + 1:
            raise Enough

    setting, policy = run_setting(tmp_path)
    with pytest.raises(Enough):
        simulate(policy, setting, setting.folder(tmp_path / "run", policy), stop)
    path = tmp_path / "run" / "plans" / f"{min(made)}.json"
    kept = path.read_text()
    for damage, said in (
        (kept[: len(kept) // 2], "is not valid JSON"),
        (json.dumps({**json.loads(kept), "energy_j": 1.0}), "says energy_j = 1.0"),
    ):
        path.write_text(damage)
        with pytest.raises(RunError, match=said) as caught:
            simulate(policy, setting, setting.folder(tmp_path / "run", policy, resume=True))
        assert str(path) in str(caught.value)
        assert "put the file back" in str(caught.value)
    path.write_text(kept)
    simulate(policy, setting, setting.folder(tmp_path / "run", policy, resume=True))
    assert files(tmp_path / "run") == files(whole)


def test_only_the_plan_is_planned_anew_and_only_if_wanted(tmp_path: Path) -> None:
    setting, policy = run_setting(tmp_path)
    assert not any(one.replans for one in baselines(setting.problem))
    still = dataclasses.replace(policy, replans=False)
    result = simulate(still, setting, setting.folder(tmp_path / "still", still))
    assert result["replans"] == []
    rows = lines(tmp_path / "still" / "rounds.jsonl")
    planned = [(r.version, r.loss) for r in policy.plan.rounds]
    assert [(r["version"], r["predicted"]["loss"]) for r in rows if r["predicted"]] == planned[: len(rows)]
    with pytest.raises(RunError, match="was started with another replan"):
        setting.folder(tmp_path / "still", policy, resume=True)


# ---- curves that start above the fresh loss ------------------------------------------------------------------


def test_a_loss_below_a_curve_that_stands_for_hesitation_is_not_believed() -> None:
    everyone = {i: node.samples for i, node in enumerate(PROBLEM.nodes)}
    expected = step_one(PROBLEM.versions[0].curve, 4.0, 1.0)
    assert expected > 2.3
    assert REPLANNER.believed(4.0, "dense", "dense", everyone, 2.2, fresh=2.3) == expected
    worse = REPLANNER.believed(4.0, "dense", "dense", everyone, expected + 1.0, fresh=2.3)
    assert worse == pytest.approx(expected + replan.TRUST)
    expected = step_one(PROBLEM.versions[0].curve, 2.3, 1.0)
    below = REPLANNER.believed(2.3, "dense", "dense", everyone, expected - 0.5, fresh=2.3)
    assert below == pytest.approx(expected - replan.TRUST * 0.5)


def test_with_a_tight_deadline_a_slow_fleet_is_noticed_from_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The network hesitates as the curves say it does: they start at 4.0, the fresh model at 2.3. Nodes are
    slower than their profile. Whoever takes 2.3 for the curves' loss believes to be rounds ahead."""
    data = hungry_when_fast(loss=0.6, deadline_s=16.0, max_rounds=60)
    data["start"]["loss"] = 4.0
    problem = Problem.from_dict(data)
    slower = {
        node.name: dataclasses.replace(node, flops_per_s=node.flops_per_s / SLOWER) for node in problem.nodes
    }
    world = dataclasses.replace(World.as_profile(problem), nodes=slower)
    setting = small_fleet.setting(data, tmp_path, world)
    policy = from_file(setting.problem, solve(setting.problem, tolerance=0.01).to_dict(), replans=True)
    hidden = Hidden(problem)
    monkeypatch.setattr("takifugu.engine.simulate.cooperative_round", hidden.train)
    monkeypatch.setattr("takifugu.engine.simulate.evaluate", hidden.evaluate)
    result = simulate(policy, setting, setting.folder(tmp_path / "run", policy))
    assert hidden.rounds > 5
    assert result["replans"]
    assert result["deadline_met"]


SLOWER = 1.05


class Hidden:
    """Training that does what the curves say, except that the fresh loss is lower than their start."""

    def __init__(self, problem: Problem) -> None:
        self.problem, self.loss, self.rounds = problem, problem.start_loss, 0

    def train(self, model: Any, members: Mapping[str, Any], *_: Any, **__: Any) -> Any:
        version = self.problem.versions[int(not structure_of(model).is_dense)]
        share = sum(map(len, members.values())) / self.problem.total_samples
        self.loss, self.rounds = step_one(version.curve, self.loss, share), self.rounds + 1
        return SimpleNamespace(members={}, loss=self.loss, truncation=0.0)

    def evaluate(self, *_: Any) -> Score:
        return Score(min(self.loss, 2.3 - 0.05 * self.rounds), 0.5)
