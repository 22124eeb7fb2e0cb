from __future__ import annotations

import dataclasses
import gc
import itertools
import json
import math
import signal
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import small_fleet
import torch
from safetensors.torch import load_file

import takifugu as tk
from takifugu.engine.policies import Policy, baselines
from takifugu.engine.setting import Setting
from takifugu.engine.simulate import simulate
from takifugu.engine.world import NO_SPREAD, Spread, World
from takifugu.errors import RunError
from takifugu.plan.fleet import Fleet
from takifugu.plan.plan import Decision
from takifugu.plan.problem import Problem
from takifugu.train.cooperative import cooperative_round
from takifugu.train.round import Samples
from takifugu.zoo import small

UNREACHABLE = {"loss": 0.001}


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def carry_out(
    setting: Setting, policy: Policy, path: Path, **options: Any
) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    result = simulate(policy, setting, setting.folder(path, policy, **options))
    return result, lines(path / "rounds.jsonl")


def files(path: Path) -> dict[str, bytes]:
    """All that a run leaves, without the notes of having been resumed."""
    found = {}
    for file in sorted(p for p in path.rglob("*") if p.is_file()):
        data = file.read_bytes()
        if file.name == "events.jsonl":
            kept = [line for line in data.splitlines(keepends=True) if b'"resumed"' not in line]
            data = b"".join(kept)
        found[str(file.relative_to(path))] = data
    return found


SWITCHING = [("dense", None)] * 3 + [("r0.25", None)] * 3


# ---- the clock ------------------------------------------------------------------------------------------


def test_in_the_profiles_world_the_clock_keeps_the_plans_word(tmp_path: Path) -> None:
    """Switch, windows that make it wait, halves of nodes, idle power, overheads: all as the plan says."""
    data = small_fleet.problem_dict(target=UNREACHABLE)
    data["nodes"][1]["available"] = [[0.0, 3.0], [20.0, 40.0]]
    setting = small_fleet.setting(data, tmp_path)
    rounds = [
        ("dense", {0: 120, 1: 70}),
        ("dense", {0: 60, 2: 160, 3: 90}),
        ("r0.25", {1: 140, 4: 200}),
        ("r0.25", None),
    ]
    policy = small_fleet.policy(setting.problem, rounds)
    plan = policy.plan
    assert plan.rounds[2].start_s == 20.0  # it waits
    data["target"]["deadline_s"] = plan.time_s * 1.001
    setting = small_fleet.setting(data, tmp_path)
    policy = small_fleet.policy(setting.problem, rounds)
    result, rows = carry_out(setting, policy, tmp_path / "run")
    assert len(rows) == 4
    for row, planned in zip(rows, plan.rounds, strict=True):
        for key in ("start_s", "time_s", "energy_j"):
            assert row[key] == pytest.approx(getattr(planned, key), rel=1e-9), (row["round"], key)
            assert row["predicted"][key] == getattr(planned, key)
    assert result["time_s"] == pytest.approx(plan.time_s, rel=1e-9)
    assert result["energy_j"] == pytest.approx(plan.energy_j, rel=1e-9)
    assert [row["switched"] for row in rows] == [False, False, True, False]
    events = lines(tmp_path / "run" / "events.jsonl")
    assert [(e["event"], e["round"]) for e in events] == [("switch", 3), ("wait", 3), ("stopped", 4)]
    assert "past the deadline" in result["reason"]


def test_a_round_is_what_became_of_its_members(tmp_path: Path) -> None:
    """Times and energies of rounds with faults, recomputed from the formulas and the world's true nodes."""
    data = small_fleet.problem_dict(target={**UNREACHABLE, "max_rounds": 12, "deadline_s": 1e6})
    problem = Problem.from_dict(data)
    world = World.draw(problem, 4, Spread(), dropout=0.15, slowdown=0.25)
    setting = small_fleet.setting(data, tmp_path, world)
    policy = small_fleet.policy(setting.problem, [("dense", None)] * 12)
    _, rows = carry_out(setting, policy, tmp_path / "run")
    members = lines(tmp_path / "run" / "nodes.jsonl")
    seen = {member["status"] for member in members}
    assert seen == {"ok", "slow", "dropped"}
    planned = policy.plan.rounds[0].time_s
    for row in rows:
        mine = [m for m in members if m["round"] == row["round"]]
        back = [m for m in mine if m["status"] != "dropped"]
        slowest = max(m["time_s"] for m in back)
        if len(back) < len(mine):
            slowest = max(slowest, 1.5 * (planned - 0.1))
        assert row["time_s"] == pytest.approx(slowest + 0.1, rel=1e-12)
        energy = 0.5
        for member in mine:
            node = world.nodes[member["node"]]
            work = 20_000.0 * member["samples"] * node.joules_per_flop
            radio = 2 * 13_736.0 * node.joules_per_byte
            if member["status"] == "dropped":
                assert member["energy_j"] == pytest.approx(work + radio / 2, rel=1e-12)
                assert member["train_loss"] is None
            else:
                waiting = node.idle_watts * (slowest - member["time_s"])
                assert member["energy_j"] == pytest.approx(work + radio + waiting, rel=1e-12)
            energy += member["energy_j"]
        assert row["energy_j"] == pytest.approx(energy, rel=1e-12)
        assert (row["members"], row["dropped"]) == (5, 5 - len(back))
        assert row["samples"] == sum(m["samples"] for m in back)
        assert row["bytes"] == 13_736.0 * (2 * len(back) + len(mine) - len(back))
    assert rows[-1]["total"]["energy_j"] == pytest.approx(sum(r["energy_j"] for r in rows), rel=1e-12)
    assert all(later["start_s"] == before["end_s"] for before, later in itertools.pairwise(rows))


def test_who_missed_their_window_stays_away(tmp_path: Path) -> None:
    """The plan has node-0 just in time; the true fleet is late, and node-0's window is over."""
    data = small_fleet.problem_dict(target={**UNREACHABLE, "max_rounds": 3})
    problem = Problem.from_dict(data)
    length = small_fleet.policy(problem, [("dense", None)]).plan.time_s
    late = Spread(speed=0.0, link=0.0, energy=0.0, bias=0.5)
    worlds = (World.draw(problem, seed, late, 0.0, 0.0) for seed in range(20))
    world = next(w for w in worlds if w.nodes["node-4"].flops_per_s < 0.7 * problem.nodes[4].flops_per_s)
    true = max(world.outcome(1, node.name, "dense", node.samples).time_s for node in problem.nodes) + 0.1
    closes = max(3.01 * length, true + 1.01 * length)
    assert closes < 2 * true + length
    data["nodes"][0]["available"] = [[0.0, closes]]
    setting = small_fleet.setting(data, tmp_path, world)
    policy = small_fleet.policy(setting.problem, [("dense", None)] * 3)
    result, rows = carry_out(setting, policy, tmp_path / "run")
    assert [row["members"] for row in rows] == [5, 5, 4]
    absent = [e for e in lines(tmp_path / "run" / "events.jsonl") if e["event"] == "absent"]
    assert [(e["round"], e["node"]) for e in absent] == [(3, "node-0")]
    assert result["rounds"] == 3


def test_nobody_left_ends_the_run(tmp_path: Path) -> None:
    data = small_fleet.problem_dict(target=UNREACHABLE)
    length = small_fleet.policy(Problem.from_dict(data), [("dense", None)]).plan.time_s
    for node in data["nodes"]:
        node["available"] = [[0.0, 2.01 * length]]
    setting = small_fleet.setting(data, tmp_path)
    policy = small_fleet.policy(setting.problem, [("dense", None)] * 2)
    result, rows = carry_out(setting, policy, tmp_path / "run")
    assert len(rows) == 2
    assert "no node of the next round is available" in result["reason"]
    assert not result["reached"]


# ---- the training ---------------------------------------------------------------------------------------


def test_it_learns_and_stops_at_the_target(tmp_path: Path) -> None:
    data = small_fleet.problem_dict()
    problem = Problem.from_dict(data)
    setting = small_fleet.setting(data, tmp_path, World.draw(problem, 1))
    policy = small_fleet.policy(setting.problem, SWITCHING)
    result, rows = carry_out(setting, policy, tmp_path / "run")
    assert result["reached"]
    assert result["deadline_met"]
    assert rows[-1]["loss"] <= 0.6 < rows[-2]["loss"]
    assert result["start_loss"] == pytest.approx(math.log(10), abs=0.1)
    assert result["accuracy"] > 0.75
    assert result["planned_rounds"] == 6 < result["rounds"]
    assert [row["predicted"] is None for row in rows] == [False] * 6 + [True] * (len(rows) - 6)
    assert {row["version"] for row in rows[6:]} == {"r0.25"}
    events = lines(tmp_path / "run" / "events.jsonl")
    assert [e["round"] for e in events if e["event"] == "beyond_plan"] == [7]
    assert events[-1]["event"] == "target_met"
    # The checkpoint is the model that has this loss, in the structure of the version.
    model = tk.load(tmp_path / "run" / "checkpoints" / f"{len(rows)}.safetensors", setting.build())
    assert tk.structure_of(model) == setting.structures["r0.25"]
    with torch.no_grad():
        outputs = model.eval()(setting.validation.inputs)
    loss = torch.nn.functional.cross_entropy(outputs, setting.validation.labels)
    assert float(loss) == pytest.approx(result["loss"], rel=1e-5)


def test_the_averaging_asked_for_is_used(tmp_path: Path) -> None:
    truncations = {}
    for how in ("factors", "products"):
        data = small_fleet.problem_dict(target={**UNREACHABLE, "max_rounds": 2})
        setting = small_fleet.setting(data, tmp_path, averaging=how)
        policy = small_fleet.policy(setting.problem, [("r0.25", None)] * 2)
        _, rows = carry_out(setting, policy, tmp_path / how)
        truncations[how] = rows[0]["truncation"]
    # Recompression is the best of that rank, so never worse than the mean of the factors.
    assert 0 < truncations["products"] < truncations["factors"] < 0.5


def test_whoever_sits_out_counts_as_unchanged(tmp_path: Path) -> None:
    """One node of five: by the fleet's weights the server goes its part of the way, and run.json says so."""
    states = {}
    for weights in ("fleet", "members"):
        workload = {**small_fleet.WORKLOAD, "weights": weights}
        data = small_fleet.problem_dict(target={**UNREACHABLE, "max_rounds": 1}, workload=workload)
        setting = small_fleet.setting(data, tmp_path)
        policy = small_fleet.policy(setting.problem, [("dense", {0: 120})])
        carry_out(setting, policy, tmp_path / weights)
        states[weights] = load_file(tmp_path / weights / "checkpoints" / "1.safetensors")
        assert json.loads((tmp_path / weights / "run.json").read_text())["weights"] == weights
    part = 120 / sum(node.samples for node in setting.problem.nodes)
    for name, start in setting.build().state_dict().items():
        whole, moved = states["members"][name] - start, states["fleet"][name] - start
        assert torch.allclose(moved, part * whole, atol=1e-6)
        assert whole.abs().max() > 1e-3


def test_same_input_same_files(tmp_path: Path) -> None:
    data = small_fleet.problem_dict(target={**UNREACHABLE, "max_rounds": 4})
    world = World.draw(Problem.from_dict(data), 2, dropout=0.2, slowdown=0.2)
    runs = []
    for name, seed in (("one", 5), ("two", 5), ("other", 6)):
        torch.manual_seed(len(runs))  # what others drew must not matter
        setting = small_fleet.setting(data, tmp_path, world, seed=seed)
        policy = small_fleet.policy(setting.problem, SWITCHING)
        carry_out(setting, policy, tmp_path / name)
        runs.append(files(tmp_path / name))
    assert runs[0] == runs[1]
    assert runs[0]["rounds.jsonl"] != runs[2]["rounds.jsonl"]


def test_if_everyone_drops_out_the_model_stays(tmp_path: Path) -> None:
    data = small_fleet.problem_dict(target={**UNREACHABLE, "max_rounds": 2})
    world = World.draw(Problem.from_dict(data), 0, NO_SPREAD, dropout=1.0, slowdown=0.0)
    setting = small_fleet.setting(data, tmp_path, world)
    policy = small_fleet.policy(setting.problem, [("dense", None)] * 2)
    result, rows = carry_out(setting, policy, tmp_path / "run")
    assert {row["loss"] for row in rows} == {result["start_loss"]}
    assert [row["dropped"] for row in rows] == [5, 5]
    assert all(row["train_loss"] is None and row["samples"] == 0 for row in rows)
    assert result["energy_j"] > 0
    planned = policy.plan.rounds[0].time_s - 0.1
    assert rows[0]["time_s"] == pytest.approx(1.5 * planned + 0.1)
    kept = tk.load(tmp_path / "run" / "checkpoints" / "2.safetensors", setting.build()).state_dict()
    assert all(torch.equal(kept[name], tensor) for name, tensor in setting.build().state_dict().items())


def test_a_target_met_at_the_start_costs_nothing(tmp_path: Path) -> None:
    setting = small_fleet.setting(small_fleet.problem_dict(target={"loss": 5.0}), tmp_path)
    policy = small_fleet.policy(setting.problem, [("dense", None)])
    result, rows = carry_out(setting, policy, tmp_path / "run")
    assert (result["reached"], result["rounds"], result["energy_j"], rows) == (True, 0, 0.0, [])
    assert result["reason"] == "target met"


def test_an_empty_plan_whose_start_is_wrong_says_so(tmp_path: Path) -> None:
    data = small_fleet.problem_dict(start={"loss": 0.1})
    setting = small_fleet.setting(data, tmp_path)
    result, _ = carry_out(setting, small_fleet.policy(setting.problem, []), tmp_path / "run")
    assert not result["reached"]
    assert "correct it and plan again" in result["reason"]


def test_training_that_breaks_is_a_result_not_a_crash(tmp_path: Path) -> None:
    optimizer = {"kind": "sgd", "lr": 1e18}
    data = small_fleet.problem_dict(workload={"optimizer": optimizer})
    setting = small_fleet.setting(data, tmp_path)
    result, _ = carry_out(setting, small_fleet.policy(setting.problem, SWITCHING), tmp_path / "run")
    assert not result["reached"]
    assert result["reason"].startswith("training failed: node 'node-")


def test_parts_of_nodes_are_drawn_anew_each_round(tmp_path: Path) -> None:
    data = small_fleet.problem_dict(target={**UNREACHABLE, "max_rounds": 2})
    setting = small_fleet.setting(data, tmp_path)
    policy = small_fleet.policy(setting.problem, [("dense", {0: 60, 3: 180})] * 2)
    _, rows = carry_out(setting, policy, tmp_path / "run")
    assert [row["samples"] for row in rows] == [240, 240]
    from takifugu.engine.simulate import _Simulation

    simulation = _Simulation(policy, setting, setting.folder(tmp_path / "other", policy), None)
    first, second = (simulation._part("node-0", 60, number).inputs for number in (1, 2))
    assert len(first) == 60
    assert not torch.equal(first, second)
    own = {tuple(x.flatten().tolist()) for x in setting.shares["node-0"].inputs}
    assert {tuple(x.flatten().tolist()) for x in first} <= own
    assert torch.equal(first, simulation._part("node-0", 60, 1).inputs)


# ---- policies -------------------------------------------------------------------------------------------


def test_every_baseline_runs_even_where_it_must_miss(tmp_path: Path) -> None:
    data = small_fleet.problem_dict(target={"loss": 0.01, "deadline_s": 30.0, "max_rounds": 2})
    setting = small_fleet.setting(data, tmp_path)
    found = baselines(setting.problem)
    assert len(found) == len({policy.slug for policy in found}) == 9
    for policy in found:
        assert policy.file["status"] == "unknown"
        result, rows = carry_out(setting, policy, tmp_path / policy.slug)
        assert not result["reached"]
        assert len(rows) == 2
        assert rows[-1]["loss"] < result["start_loss"]


def test_cohorts_go_on_taking_turns_beyond_the_plan() -> None:
    problem = Problem.from_dict(small_fleet.problem_dict(target={"loss": 1.5, "deadline_s": 1e6}))
    policy = baselines(problem, "rotating-cohorts")[0]
    planned = len(policy.plan.rounds)
    assert policy.turns >= 2
    turns = [tuple(policy.at(planned + k)[0].used) for k in range(1, 2 * policy.turns + 1)]
    assert turns[: policy.turns] == turns[policy.turns :]
    assert len(set(turns)) == policy.turns
    assert set(turns) == {tuple(d.used) for d in policy.plan.decisions}
    fixed = baselines(problem, "no-compression-all-nodes")[0]
    assert fixed.at(10_000) == (fixed.plan.decisions[-1], None)


def test_a_small_team_that_ends_above_the_target_is_joined_by_the_thriftiest(tmp_path: Path) -> None:
    data = small_fleet.problem_dict(target={**UNREACHABLE, "max_rounds": 5})
    data["nodes"][2]["joules_per_flop"] = 1e-3  # the dearest by far
    data["versions"][1]["memory_bytes"] = 1e9
    data["nodes"][0]["memory_bytes"] = 1e8  # cannot hold the low-rank version
    setting = small_fleet.setting(data, tmp_path)
    problem = setting.problem
    sizes = [node.samples for node in problem.nodes]
    assert sizes == [120, 140, 160, 180, 200]
    policy = small_fleet.policy(problem, [("dense", None), ("r0.25", {1: 70})])
    # 70 samples, and 180 and 200 of the others, are not yet two thirds of 800: the dearest joins as well.
    assert policy.joined is not None
    assert dict(policy.joined.used) == {1: 70, 3: 180, 4: 200, 2: 160}
    assert policy.at(2)[0].used == {1: 70}
    assert policy.at(3) == policy.at(99) == (policy.joined, None)
    result, rows = carry_out(setting, policy, tmp_path / "run")
    assert [row["members"] for row in rows] == [5, 1, 4, 4, 4]
    assert result["planned_rounds"] == 2
    events = lines(tmp_path / "run" / "events.jsonl")
    joined = [(e["round"], e["node"]) for e in events if e["event"] == "joined"]
    assert joined == [(3, "node-2"), (3, "node-3"), (3, "node-4")]

    # Near the target another round like the last is tried first, once.
    assert policy.near == problem.loss_limit  # the last round's switch was to cost more than the round gained
    two = small_fleet.policy(problem, [("dense", {1: 70}), ("dense", {1: 70})])
    took_off = two.plan.rounds[0].loss - two.plan.rounds[1].loss
    assert two.near == pytest.approx(problem.loss_limit + took_off, rel=1e-12)
    assert policy.at(3, policy.near)[0].used == {1: 70}
    assert policy.at(3, policy.near * 1.001) == policy.at(4, policy.near) == (policy.joined, None)
    patient = dataclasses.replace(policy, near=10.0)
    result, rows = carry_out(setting, patient, tmp_path / "patient")
    assert [row["members"] for row in rows] == [5, 1, 1, 4, 4]
    events = lines(tmp_path / "patient" / "events.jsonl")
    assert [e["round"] for e in events if e["event"] == "beyond_plan"] == [3]
    assert [e["round"] for e in events if e["event"] == "joined"] == [4, 4, 4]

    # Where there is no time for all of them, the small team goes on alone.
    def round_s(decision: Decision) -> float:
        return Fleet.of(problem).round_cost(decision.version, decision.used).time_s

    alone = round_s(policy.plan.decisions[-1])
    assert round_s(policy.joined) > 2 * alone
    late = dataclasses.replace(setting, until_s=rows[2]["start_s"] + 1.5 * alone)
    result, rows = carry_out(late, policy, tmp_path / "late")
    assert [row["members"] for row in rows] == [5, 1, 1]
    assert "past the deadline" in result["reason"]

    # Enough is enough, a large team is repeated as it is, and a plan joined by others is another one to resume.
    most = small_fleet.policy(problem, [("dense", {3: 180, 4: 200})])
    assert most.joined is not None
    assert set(most.joined.used) == {0, 1, 3, 4}
    large = small_fleet.policy(problem, [("dense", {1: 140, 2: 160, 3: 180, 4: 200})])
    assert large.joined is None
    assert large.at(2) == (large.plan.decisions[-1], None)
    assert policy.sha256 != dataclasses.replace(policy, joined=None).sha256


def test_stopped_while_others_join_it_goes_on_bit_for_bit(tmp_path: Path) -> None:
    data = small_fleet.problem_dict(target={**UNREACHABLE, "max_rounds": 6})
    setting = small_fleet.setting(data, tmp_path)
    policy = small_fleet.policy(setting.problem, [("dense", {0: 60}), ("dense", {0: 60})])
    assert policy.joined is not None
    whole = setting.folder(tmp_path / "whole", policy)
    simulate(policy, setting, whole)

    def stop(row: Mapping[str, Any]) -> None:
        if row["round"] == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        simulate(policy, setting, setting.folder(tmp_path / "parts", policy), stop)
    simulate(policy, setting, setting.folder(tmp_path / "parts", policy, resume=True))
    assert files(tmp_path / "parts") == files(tmp_path / "whole")


# ---- going on -------------------------------------------------------------------------------------------

KILLED = """
import os, signal, sys
from pathlib import Path
sys.path.insert(0, {tests!r})
from takifugu import durable
from test_simulation import kill_run
write, when, log = durable.append, {when!r}, {log!r}
def die():
    os.kill(os.getpid(), signal.SIGKILL)
def mortal(path, rows):
    rows = list(rows)
    due = path.name == log and rows and rows[0]["round"] == {round}
    if due and when == "before":
        die()
    if due and when == "torn":
        with path.open("a") as file:
            file.write('{{"round": {round}, "versi')
        die()
    write(path, rows)
    if due:
        die()
durable.append = mortal
kill_run(Path({folder!r}))
"""


def kill_run(folder: Path) -> None:
    """Seven rounds over a switch, with faults."""
    data = small_fleet.problem_dict(target={**UNREACHABLE, "max_rounds": 7})
    world = World.draw(Problem.from_dict(data), 2, dropout=0.1, slowdown=0.2)
    setting = small_fleet.setting(data, folder, world, seed=3, averaging="products")
    policy = small_fleet.policy(setting.problem, SWITCHING)
    run = setting.folder(folder / "run", policy, resume=True)
    simulate(policy, setting, run)


@pytest.mark.parametrize(
    ("when", "log", "round"),
    [
        ("before", "nodes.jsonl", 1),  # the first checkpoint is there, nothing else
        ("after", "nodes.jsonl", 4),  # the round of the switch
        ("torn", "rounds.jsonl", 5),
        ("after", "rounds.jsonl", 3),  # the switch is next
    ],
)
def test_killed_at_any_moment_it_goes_on_bit_for_bit(
    tmp_path: Path, when: str, log: str, round: int, uninterrupted: Path
) -> None:
    here = str(Path(__file__).parent)
    code = KILLED.format(tests=here, folder=str(tmp_path), when=when, log=log, round=round)
    died = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert died.returncode == -signal.SIGKILL, died.stderr
    assert not (tmp_path / "run" / "result.json").exists()
    kill_run(tmp_path)
    assert files(tmp_path / "run") == files(uninterrupted / "run")


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("whole")
    kill_run(folder)
    assert len(lines(folder / "run" / "rounds.jsonl")) == 7
    return folder


def test_stopped_after_every_round_it_is_still_the_same_run(tmp_path: Path, uninterrupted: Path) -> None:
    class Enough(Exception):
        pass

    data = small_fleet.problem_dict(target={**UNREACHABLE, "max_rounds": 7})
    world = World.draw(Problem.from_dict(data), 2, dropout=0.1, slowdown=0.2)
    setting = small_fleet.setting(data, tmp_path, world, seed=3, averaging="products")
    policy = small_fleet.policy(setting.problem, SWITCHING)

    def stop(row: dict[str, Any]) -> None:
        raise Enough

    for _ in range(7):
        with pytest.raises(Enough):
            simulate(policy, setting, setting.folder(tmp_path / "run", policy, resume=True), stop)
    result = simulate(policy, setting, setting.folder(tmp_path / "run", policy, resume=True))
    assert files(tmp_path / "run") == files(uninterrupted / "run")
    assert result == json.loads((uninterrupted / "run" / "result.json").read_text())
    resumed = [e for e in lines(tmp_path / "run" / "events.jsonl") if e["event"] == "resumed"]
    assert [e["round"] for e in resumed] == [1, 2, 3, 4, 5, 6, 7]


def test_a_models_layout_in_memory_makes_no_difference(tmp_path: Path) -> None:
    """Files know no strides; a model in another layout would round differently after it was loaded."""

    class Enough(Exception):
        pass

    def stop(row: dict[str, Any]) -> None:
        raise Enough

    def build() -> torch.nn.Module:
        torch.manual_seed(0)
        return small.cnn(width=4).to(memory_format=torch.channels_last)  # type: ignore[call-overload]

    data = small_fleet.problem_dict(target={**UNREACHABLE, "max_rounds": 3})
    shape = small_fleet.setting(data, tmp_path)
    structures = {"dense": tk.Structure(), "r0.25": tk.choose(build(), 0.5)}
    setting = dataclasses.replace(shape, build=build, structures=structures)
    policy = small_fleet.policy(setting.problem, [("dense", {0: 60}), ("r0.25", {0: 60}), ("r0.25", {1: 70})])
    carry_out(setting, policy, tmp_path / "whole")
    for _ in range(3):
        with pytest.raises(Enough):
            simulate(policy, setting, setting.folder(tmp_path / "run", policy, resume=True), stop)
    carry_out(setting, policy, tmp_path / "run", resume=True)
    assert files(tmp_path / "run") == files(tmp_path / "whole")


def test_every_round_draws_its_own_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def spy(*arguments: Any, round_index: int, **options: Any) -> Any:
        seen.append(round_index)
        return cooperative_round(*arguments, round_index=round_index, **options)

    monkeypatch.setattr("takifugu.engine.simulate.cooperative_round", spy)
    data = small_fleet.problem_dict(target={**UNREACHABLE, "max_rounds": 3})
    setting = small_fleet.setting(data, tmp_path)
    carry_out(setting, small_fleet.policy(setting.problem, [("dense", {0: 60})]), tmp_path / "run")
    assert seen == [1, 2, 3]


def test_a_damaged_checkpoint_costs_a_round_and_changes_nothing(tmp_path: Path, uninterrupted: Path) -> None:
    kill_run(tmp_path)
    run = tmp_path / "run"
    (run / "result.json").unlink()
    newest = run / "checkpoints" / "7.safetensors"
    newest.write_bytes(newest.read_bytes()[:-100])
    kill_run(tmp_path)
    assert files(run) == files(uninterrupted / "run")
    resumed = next(e for e in lines(run / "events.jsonl") if e["event"] == "resumed")
    assert resumed["round"] == 6
    assert "7.safetensors" in resumed["notes"][0]


def test_another_run_is_not_continued_here(tmp_path: Path) -> None:
    kill_run(tmp_path)
    data = small_fleet.problem_dict(target={**UNREACHABLE, "max_rounds": 7})
    setting = small_fleet.setting(data, tmp_path, seed=3, averaging="products")
    policy = small_fleet.policy(setting.problem, SWITCHING)
    with pytest.raises(RunError, match="was started with another world"):
        setting.folder(tmp_path / "run", policy, resume=True)
    with pytest.raises(RunError, match="holds a run already"):
        setting.folder(tmp_path / "run", policy)


def test_a_run_does_not_continue_with_other_data(tmp_path: Path) -> None:
    setting = small_fleet.setting(small_fleet.problem_dict(target=UNREACHABLE), tmp_path)
    policy = small_fleet.policy(setting.problem, SWITCHING)
    setting.folder(tmp_path / "run", policy)
    setting.folder(tmp_path / "run", policy, resume=True)
    for whose, changed in (
        ("node 'node-2'", {"shares": {**setting.shares, "node-2": _one_pixel(setting.shares["node-2"])}}),
        (r"the server \(validation\)", {"validation": _one_pixel(setting.validation)}),
    ):
        with pytest.raises(RunError, match=f"the data of {whose} have changed .*another --out"):
            dataclasses.replace(setting, **changed).folder(tmp_path / "run", policy, resume=True)


def _one_pixel(samples: Samples) -> Samples:
    """The same number of samples and the same sum, one pair of pixels exchanged."""
    inputs = samples.inputs.clone()
    flat = inputs.view(len(inputs), -1)
    other = int((flat[0] != flat[0, 0]).nonzero()[0])
    flat[0, 0], flat[0, other] = samples.inputs.view(len(inputs), -1)[0, other], flat[0, 0].clone()
    return Samples(inputs, samples.labels)


# ---- memory ---------------------------------------------------------------------------------------------


def test_memory_stays_flat(tmp_path: Path) -> None:
    """As many tensors are alive after twenty rounds as after five, and one model is all there is."""
    data = small_fleet.problem_dict(target={**UNREACHABLE, "deadline_s": 1e6, "max_rounds": 20})
    setting = small_fleet.setting(data, tmp_path)
    policy = small_fleet.policy(setting.problem, [("r0.25", None)])
    alive: list[int] = []

    def count(row: dict[str, Any]) -> None:
        if row["round"] % 5 == 0:
            gc.collect()
            alive.append(sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects()))

    simulate(policy, setting, setting.folder(tmp_path / "run", policy), count)
    assert len(alive) == 4
    assert len(set(alive)) == 1
    assert len(list((tmp_path / "run" / "checkpoints").iterdir())) == 2


# ---- what does not fit ----------------------------------------------------------------------------------


def test_a_node_without_its_samples_is_named(tmp_path: Path) -> None:
    setting = small_fleet.setting(small_fleet.problem_dict(), tmp_path)
    few = {**setting.shares, "node-2": setting.shares["node-2"].take([0, 1])}
    with pytest.raises(RunError, match="node 'node-2' has 2 samples, the problem says 160"):
        dataclasses.replace(setting, shares=few)
    del few["node-2"]
    with pytest.raises(RunError, match="node 'node-2' has no share"):
        dataclasses.replace(setting, shares=few)
