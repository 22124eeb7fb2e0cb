"""`takifugu profile` on real digits with a tiny network."""

from __future__ import annotations

import dataclasses
import json
import sys
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from takifugu.cli import Exit, main
from takifugu.errors import DataError, ProblemError, UsageError
from takifugu.measure.fitting import predict
from takifugu.plan.problem import Problem
from takifugu.structure import Structure
from takifugu.train import costs
from takifugu.train import pilots as pilots_module
from takifugu.train import profile as profile_module
from takifugu.train.pilots import subset_of, subsets
from takifugu.train.profile import Draft, Profile, rounds_to
from takifugu.train.round import Samples
from takifugu.zoo import datasets

pytest.importorskip("sklearn")

DRAFT = """
format = 1
[target]
loss = 1.5
deadline_s = 3600.0
max_rounds = 300
[data]
parts = 2
[workload]
model = "takifugu.zoo.small:mlp"
model_options = { width = 24, depth = 1 }
low_rank = ["1"]
data = "digits"
limit = 500
partition = { kind = "dirichlet", alpha = 1.0 }
batch_size = 16
optimizer = { kind = "sgd", lr = 0.3, momentum = 0.5 }
validation = 0.3
seed = 1
"""
NODE = """
[[nodes]]
name = "{name}"
flops_per_s = {flops}
joules_per_flop = 1e-9
up_bytes_per_s = 1e6
down_bytes_per_s = 1e6
latency_s = 0.02
joules_per_byte = 1e-7
"""
QUICK = ["--ranks", "0.5,0.2", "--rounds", "3", "--warmup", "2", "--curve-samples", "3"]


@pytest.fixture(autouse=True)
def _registered() -> None:
    from takifugu.cli.app import app
    from takifugu.cli.profile import profile

    if not any(group.name == "profile" for group in app.registered_groups):
        app.add_typer(profile, name="profile")


@pytest.fixture(autouse=True)
def _timed_briefly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "EACH_S", 0.01)
    monkeypatch.setattr(costs, "ERROR", 1.0)


@pytest.fixture
def draft(tmp_path: Path) -> Path:
    path = tmp_path / "draft.toml"
    nodes = [NODE.format(name=f"n{i}", flops=1e9 * (i + 1)) for i in range(5)]
    path.write_text(DRAFT + "".join(nodes))
    return path


def _untimed(path: Path) -> dict[str, Any]:
    """The problem without what a clock had a say in."""
    data = tomllib.loads(path.read_text())
    for switch in data["switches"]:
        assert switch.pop("time_s") > 0
        assert switch.pop("energy_j") > 0
    for node in data["nodes"]:
        node.pop("samples_per_s")
        node.pop("joules_per_sample")
    return data


def test_a_draft_becomes_a_problem_that_can_be_planned(
    draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "problem.toml"
    assert main(["profile", "model", str(draft), *QUICK, "-o", str(out)]) == Exit.OK
    said = capsys.readouterr()
    for part in ("version", "R2", "start loss", "label weight", "passes over all data"):
        assert part in said.out
    assert "pilot dense-0 round 3" in said.err

    problem = Problem.load(out)
    assert [v.name for v in problem.versions] == ["dense", "r0.5", "r0.2"]
    assert problem.total_samples == 350
    assert all(node.labels is not None and sum(node.labels) == node.samples for node in problem.nodes)
    assert problem.parts == 2
    assert 2.1 < problem.start_loss < 4 * 2.5
    assert {(s.source, s.target) for s in problem.switches} == {
        ("dense", "r0.5"),
        ("dense", "r0.2"),
        ("r0.5", "r0.2"),
    }
    assert all(s.loss_jump >= 0 for s in problem.switches)
    assert all(len(v.curve_samples) == 3 for v in problem.versions)
    for version in problem.versions[1:]:
        structure = Structure.load(tmp_path / str(version.structure))
        assert version.structure == f"structures/{structure.id}.json"
        assert version.payload_bytes < problem.versions[0].payload_bytes
    assert main(["plan", str(out), "--brief"]) == Exit.OK

    # Profiled, then profiled again as a problem: what was found shares the data out the same.
    again = tmp_path / "again.toml"
    text = out.read_text().replace(f"label_weight = {problem.label_weight!r}\n", "")
    (tmp_path / "as_draft.toml").write_text(text)
    assert main(["profile", "model", str(tmp_path / "as_draft.toml"), *QUICK, "-o", str(again)]) == Exit.OK
    assert _untimed(again) == _untimed(out)


def test_versions_are_priced_by_what_was_measured_here(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And measured once: a profile that goes on keeps the ratios."""
    own = 'name = "n1"\nsamples_per_s = { dense = 100.0, "r0.5" = 80.0, "r0.2" = 90.0 }\n'
    own += 'joules_per_sample = { dense = 1.0, "r0.5" = 1.1, "r0.2" = 1.2 }\n'
    draft.write_text(draft.read_text().replace('name = "n1"\n', own))
    out, by_flops = tmp_path / "problem.toml", tmp_path / "flops.toml"
    command = ["profile", "model", str(draft), *QUICK, "-o", str(out)]
    assert main(command) == Exit.OK
    told = capsys.readouterr().out
    (path,) = (tmp_path / "problem.pilots").glob("*/costs.json")
    kept = json.loads(path.read_text())
    assert kept["threads"] == torch.get_num_threads()
    ratio = kept["speedups"]["r0.2"]["measured"]
    assert f"r0.2 {ratio:.2f}" in " ".join(told.split())
    assert f"r0.2 {ratio:.2f} (+-" in out.read_text().partition("\n")[0]
    problem = Problem.load(out)
    dense, low = problem.versions[0], problem.versions[2]
    for node in problem.nodes:
        factor = node.sample_s(dense) / node.sample_s(low)
        assert node.sample_j(dense) / node.sample_j(low) == pytest.approx(
            1 / 1.2 if node.name == "n1" else factor
        )
        assert factor == pytest.approx(0.9 if node.name == "n1" else ratio)
        assert node.source == (None if node.name == "n1" else "estimated")
    assert problem.nodes[0].sample_s(dense) == pytest.approx(dense.train_flops_per_sample / 1e9)

    monkeypatch.setattr(profile_module, "time_steps", None)
    assert main(command) == Exit.OK  # the pilots and the ratios are there
    assert Problem.load(out).nodes == problem.nodes
    flops = ["profile", "model", str(draft), *QUICK, "-o", str(by_flops), "--costs", "flops"]
    assert main([*flops, "--pilots", str(tmp_path / "problem.pilots")]) == Exit.OK
    assert not Problem.load(by_flops).nodes[0].samples_per_s
    assert main([*flops[:-1], "flop"]) == Exit.USAGE
    capsys.readouterr()
    assert main(["plan", str(by_flops), "--brief"]) == Exit.OK
    assert "costs: assumed from FLOPs, not measured: speed relative to dense: r0.5" in capsys.readouterr().out


def test_interrupted_it_goes_on_and_ends_the_same(
    draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    straight, stopped = tmp_path / "straight.toml", tmp_path / "stopped.toml"
    assert main(["profile", "model", str(draft), *QUICK, "-o", str(straight)]) == Exit.OK
    real, trained = pilots_module.cooperative_round, []

    def interrupted_at(calls: int):
        count = [0]

        def one(*args: Any, **options: Any) -> Any:
            count[0] += 1
            if count[0] == calls:
                raise KeyboardInterrupt
            trained.append(options["round_index"])
            return real(*args, **options)

        return one

    for calls in (2, 5, 9):  # in the warm-up, at a branch's start, in the middle of one
        monkeypatch.setattr(pilots_module, "cooperative_round", interrupted_at(calls))
        command = ["profile", "model", str(draft), *QUICK, "-o", str(stopped)]
        assert main(command) == Exit.INTERRUPTED
        assert not stopped.exists()
        assert "goes on from there" in capsys.readouterr().err
    monkeypatch.setattr(pilots_module, "cooperative_round", interrupted_at(10**6))
    assert main(command) == Exit.OK
    ready = Profile.prepare(Draft.load(draft), (0.5, 0.2), rounds=3, warmup=2).pilots
    assert len(trained) == ready.total_rounds  # no round was trained twice
    assert _untimed(stopped) == _untimed(straight)

    # Nothing is left to do, and nothing changes: not even the times.
    before = stopped.read_bytes()
    assert main(command) == Exit.OK
    assert len(trained) == ready.total_rounds
    assert stopped.read_bytes() == before

    # A model that got lost is trained again, to the same end.
    lost = next(course.rounds for course in ready.courses if course.run == "r0.5-1")
    for path in (tmp_path / "stopped.pilots").glob(f"*/r0.5-1.*.{lost}.safetensors"):
        path.unlink()
    assert main(command) == Exit.OK
    assert len(trained) == ready.total_rounds + lost
    assert _untimed(stopped) == _untimed(straight)


def test_a_plan_starts_where_the_curves_meet_the_pilots_from_the_start(draft: Path, tmp_path: Path) -> None:
    text = (
        draft.read_text()
        .replace("batch_size = 16", "batch_size = 8")
        .replace("lr = 0.3, momentum = 0.5", "lr = 0.2")
    )
    draft.write_text(text)
    profile = Profile.prepare(Draft.load(draft), (0.5,), rounds=6, warmup=3)
    found = profile.run(tmp_path / "pilots", curve_samples=0)
    assert found.start_loss() >= found.fresh_loss() > 2.0
    for version, runs in (("dense", ("warmup", "dense-0")), ("r0.5", ("r0.5-fresh",))):
        rounds = [one for run in runs for one in found.result.rounds if one.run == run]
        assert [one.version for one in rounds] == [version] * 9
        assert all(one.share == 1.0 for one in rounds)
        arrived = predict(found.fits.versions[version].curve, found.start_loss(), [1.0] * 9)
        assert arrived[-1] == pytest.approx(rounds[-1].loss_after, rel=0.15)
    # What of a jump is made up for at once is not in the problem; more than was seen never is.
    (switch,) = found.problem(10.0)["switches"]
    (seen,) = found.result.switches
    assert 0.0 <= switch["loss_jump"] <= seen.loss_jump
    assert switch["loss_jump"] == pytest.approx(
        found.fits.versions["r0.5"].begun.switched
        - next(one for one in found.result.rounds if (one.run, one.round) == ("warmup", 3)).loss_after,
        abs=1e-9,
    )


def test_pilots_do_what_plans_do(draft: Path) -> None:
    """Versions from the start, small teams alone and then with everyone, a branch where a switch is."""
    ready = Profile.prepare(Draft.load(draft), (0.5,), rounds=4, warmup=2, amounts=(1.0, 0.5, 0.2)).pilots
    by_run = {course.run: course for course in ready.courses}
    everyone = set(ready.shares)
    for course in ready.courses:
        before = by_run.get(course.after)
        assert course.rounds_before == (before.rounds_before + before.rounds if before else 0)
        assert (before is None) == (course.begins == "fresh")
    assert by_run["r0.5-fresh"].rounds == 2 + 4 == by_run["warmup"].rounds + by_run["dense-0"].rounds
    assert (by_run["r0.5-0"].begins, by_run["r0.5-0"].after) == ("switched", "warmup")
    small = [one for one in ready.subsets() if set(one.nodes) != everyone]
    assert len(small) == 2
    for index, team in enumerate(small, start=1):
        for version in ("dense", "r0.5"):
            name = f"{version}-{index}"
            assert by_run[name].team == by_run[f"{name}-on"].team == team
            passes = (by_run[name].rounds + by_run[f"{name}-on"].rounds) * team.share
            assert passes == pytest.approx(4, abs=team.share / 2 + 1e-9)
            assert set(by_run[f"{name}-joined"].team.nodes) == everyone
            assert by_run[f"{name}-on-joined"].after == f"{name}-on"
    plain = dataclasses.replace(ready, weights="members")
    assert {c.rounds for c in plain.courses if c.run in ("dense-1", "dense-1-on")} == {2}
    assert plain.fingerprint() != ready.fingerprint()
    # Without pilots from the start everything branches from the warm-up.
    warm = dataclasses.replace(ready, fresh=0).courses
    assert {course.after for course in warm} == {"", "warmup"}
    assert len(warm) == 1 + 2 * 3


def test_other_code_has_other_pilots(draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "from torch import nn\n"
        "class Net(nn.Sequential):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x)\n"
        "def build(inputs, classes):\n"
        "    return Net(nn.Flatten(), nn.Linear(inputs, 24), nn.ReLU(), nn.Linear(24, classes))\n"
    )
    draft.write_text(
        draft.read_text()
        .replace("takifugu.zoo.small:mlp", "own_net:build")
        .replace("model_options = { width = 24, depth = 1 }\n", "")
    )

    def fingerprint(text: str) -> str:
        own = ModuleType("own_net")
        exec(text, vars(own))
        monkeypatch.setitem(sys.modules, "own_net", own)
        return Profile.prepare(Draft.load(draft), (0.5,)).pilots.fingerprint()

    before = fingerprint(code)
    assert fingerprint(code) == before
    assert fingerprint(code.replace("forward(x)", "forward(-x)")) != before  # the same weights and shapes


def test_small_teams_are_the_thriftiest(draft: Path) -> None:
    text = draft.read_text()
    for i, joules in enumerate((5e-9, 1e-9, 4e-9, 2e-9, 3e-9)):
        text = text.replace(
            f"{1e9 * (i + 1)}\njoules_per_flop = 1e-9", f"{1e9 * (i + 1)}\njoules_per_flop = {joules}"
        )
    draft.write_text(text.replace("joules_per_byte = 1e-7", "joules_per_byte = 0.0"))
    ready = Profile.prepare(Draft.load(draft), (0.5,), amounts=(1.0, 0.5, 0.2)).pilots
    assert ready.leading == ("n1", "n3", "n4", "n2", "n0")
    for team in ready.subsets()[1:]:
        assert set(team.nodes) == set(ready.leading[: len(team.nodes)])


def test_small_teams_are_those_of_a_plan(
    draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`--like PLAN`: its nodes first; and only runs that are new are trained."""
    real, trained = pilots_module.cooperative_round, []

    def counted(model: Any, members: Any, *args: Any, **options: Any) -> Any:
        trained.append(tuple(sorted(members)))
        return real(model, members, *args, **options)

    monkeypatch.setattr(pilots_module, "cooperative_round", counted)
    out, plan = tmp_path / "problem.toml", tmp_path / "plan.json"
    command = ["profile", "model", str(draft), *QUICK, "-o", str(out)]
    assert main(command) == Exit.OK
    everyone = ("n0", "n1", "n2", "n3", "n4")
    first, before = set(trained), out.read_text()
    rows = [{"version": "dense", "nodes": {name: 1}} for name in ("n2", "n4", "n2")]
    plan.write_text(json.dumps({"format": "takifugu.plan/1", "rounds": rows}))
    trained.clear()
    assert main([*command, "--like", str(plan)]) == Exit.OK
    like = Profile.prepare(Draft.load(draft), (0.5,), like={"rounds": rows}).pilots
    assert like.leading[:2] == ("n2", "n4")
    assert ("n2",) in trained or ("n2", "n4") in trained
    # Of everyone's rounds only those that join a new team: neither the warm-up nor any run after it.
    assert 0 < trained.count(everyone) < len(trained)
    assert {team for team in first if team != everyone}.isdisjoint(trained)
    assert out.read_text() != before
    trained.clear()
    assert main(command) == Exit.OK  # all of it is still there
    assert not trained
    assert out.read_text() == before

    plan.write_text(json.dumps({"format": "takifugu.plan/1", "rounds": [{"nodes": {"n9": 1}}]}))
    capsys.readouterr()
    assert main([*command, "--like", str(plan)]) == Exit.USAGE
    assert "node 'n9', which the draft does not have" in capsys.readouterr().err
    plan.write_text(json.dumps({"format": "takifugu.plan/1", "rounds": []}))
    assert main([*command, "--like", str(plan)]) == Exit.USAGE
    assert "has no rounds" in capsys.readouterr().err


def test_json(draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "p.toml"
    command = ["profile", "model", str(draft), *QUICK, "-o", str(out), "--json", "--averaging", "products"]
    assert main(command) == Exit.OK
    data = json.loads(capsys.readouterr().out)
    ready = Profile.prepare(Draft.load(draft), (0.5, 0.2), rounds=3, warmup=2).pilots
    assert data["pilot_rounds"] == ready.total_rounds
    assert data["start_loss"] >= data["fresh_loss"]
    assert data["pilot_passes"] == pytest.approx(
        sum(course.rounds * course.team.share for course in ready.courses), rel=0.01
    )
    assert set(data["versions"]) == {"dense", "r0.5", "r0.2"}
    assert len(data["switches"]) == 3
    assert all(0 <= s["loss_jump"] <= s["loss_jump_seen"] for s in data["switches"])
    seen = sum(course.rounds for course in ready.courses if course.version == "dense")
    assert 3 <= data["versions"]["dense"]["goodness"]["rounds"] <= seen  # without those before the fall


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (("loss = 1.5", "lost = 1.5"), "target.loss"),
        (('kind = "dirichlet"', 'kind = "dirichle"'), "did you mean 'dirichlet'"),
        (('model = "takifugu.zoo.small:mlp"', 'model = "takifugu.zoo.small:mpl"'), "has no 'mpl'"),
        (("latency_s = 0.02", "latency_s = -1.0"), "latency_s"),
        (("latency_s = 0.02", "samples = 1000\nlatency_s = 0.02"), "there are 350 to share out"),
        (("latency_s = 0.02", 'samples = "x"\nlatency_s = 0.02'), "is not a whole number"),
        (("[data]", '[start]\nversion = "r0.7"\n[data]'), "there is no version 'r0.7'"),
        (("parts = 2", "part = 2"), "data.part"),
        (("format = 1", "format = 1\nthing = 2"), "thing"),
        (("format = 1", "format = ="), "not valid TOML"),
        (("[workload]", "[work]"), "there is no [workload]"),
        (
            ("parts = 2", 'parts = 2\nlabel_weight = "high"'),
            "data.label_weight: must be a number, got 'high'",
        ),
        (
            ("parts = 2", "parts = 2\nlabel_weight = 5.0"),
            "data.label_weight: must be less than or equal to 1",
        ),
        (("format = 1", "format = 1\nstart = 3"), "start: is not a table; write [start]"),
        (("[data]", '[start]\nversion = ["dense"]\n[data]'), "there is no version ['dense']"),
    ],
)
def test_mistakes_are_found_before_the_pilots(
    draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], change: tuple[str, str], message: str
) -> None:
    text = draft.read_text()
    assert change[0] in text
    draft.write_text(text.replace(*change))
    assert main(["profile", "model", str(draft), "-o", str(tmp_path / "out.toml")]) == Exit.USAGE
    assert message in capsys.readouterr().err
    assert not list(tmp_path.glob("*.pilots"))


def test_labels_that_are_not_those_of_the_data_are_refused(draft: Path) -> None:
    counted = {node["name"]: node["labels"] for node in Profile.prepare(Draft.load(draft), (0.5,)).nodes}
    text, line = draft.read_text(), 'name = "n1"\n'
    draft.write_text(text.replace(line, f"{line}labels = {counted['n1']}\n"))
    assert Profile.prepare(Draft.load(draft), (0.5,)).nodes[1]["labels"] == counted["n1"]
    moved = [counted["n1"][0] + 1, counted["n1"][1] - 1, *counted["n1"][2:]]
    for wrong in (moved, counted["n1"][:3], [*counted["n1"], 0], 3):
        draft.write_text(text.replace(line, f"{line}labels = {wrong}\n"))
        with pytest.raises(ProblemError, match=r"nodes 'n1' labels: .* in the file, .* in the node's data"):
            Profile.prepare(Draft.load(draft), (0.5,))


def test_whole_numbers_for_a_network_without_embedding_are_explained(
    draft: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets, "named", lambda name: lambda: (np.ones((60, 64), int), np.arange(60) % 3))
    draft.write_text(draft.read_text().replace('data = "digits"\nlimit = 500', 'data = "mine:whole"'))
    with pytest.raises(DataError, match=r"does not take inputs of torch.int64 .*return them as float32"):
        Profile.prepare(Draft.load(draft), (0.5,))


def test_wrong_options(draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for options, message in [
        (["--ranks", "a,b"], "--ranks 'a,b' is not a list of numbers"),
        (["--ranks", "2.0"], "rank ratio 2 is not"),
        (["--amounts", "1,0"], "are not all above 0"),
        (["--rounds", "1", "--warmup", "1"], "a curve, which needs three rounds"),
        (["--averaging", "median"], "averaging 'median' is not known"),
        (["--watts", "0"], "--watts 0 is not above 0"),
        (["-o", str(tmp_path / "no/where.toml")], "does not exist"),
    ]:
        assert main(["profile", "model", str(draft), *options]) == Exit.USAGE
        assert message in capsys.readouterr().err
    assert main(["profile", "model", str(tmp_path / "none.toml")]) == Exit.USAGE
    assert "cannot be read" in capsys.readouterr().err
    draft.write_text(DRAFT)
    assert main(["profile", "model", str(draft)]) == Exit.USAGE
    assert "at least one [[nodes]]" in capsys.readouterr().err


def test_nodes_from_a_file_and_a_damaged_folder(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "draft.toml").write_text(DRAFT.replace("format = 1", 'format = 1\nnodes_file = "fleet.csv"'))
    (tmp_path / "fleet.csv").write_text(
        "name,flops_per_s,joules_per_flop,up_bytes_per_s,down_bytes_per_s,latency_s,joules_per_byte,samples\n"
        "a,1e9,1e-9,1e6,1e6,0.1,1e-7,\nb,2e9,1e-9,1e6,1e6,0.1,1e-7,100\n"
    )
    out = tmp_path / "out.toml"
    command = ["profile", "model", str(tmp_path / "draft.toml"), "-o", str(out), "--rounds", "2"]
    command += ["--curve-samples", "0", "--ranks", "0.5", "--warmup", "1", "--amounts", "1,0.3"]
    assert main(command) == Exit.OK
    assert [node.samples for node in Problem.load(out).nodes] == [250, 100]
    (listing,) = (tmp_path / "out.pilots").glob("*/pilots.jsonl")
    listing.write_text('{"what": "round"}\n')
    capsys.readouterr()
    assert main(command) == Exit.USAGE
    assert "is damaged" in capsys.readouterr().err


def test_this_machine_as_a_node(draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "problem.toml"
    quick = ["--rounds", "3", "--warmup", "1", "--ranks", "0.5", "--amounts", "1"]
    assert main(["profile", "model", str(draft), *quick, "-o", str(out)]) == Exit.OK
    capsys.readouterr()
    timed = ["--budget-s", "0.01", "--watts", "10", "--link-bytes-per-s", "5e5"]
    assert main(["profile", "node", str(out), "--name", "n2", *timed]) == Exit.OK
    said = capsys.readouterr()
    assert "samples/s" in said.err
    assert "Energy: estimated, 10 W" in said.out
    (entry,) = tomllib.loads(said.out)["nodes"]
    assert entry["source"] == "estimated"
    assert set(entry["samples_per_s"]) == {"dense", "r0.5"}
    for version, speed in entry["samples_per_s"].items():
        assert entry["joules_per_sample"][version] == pytest.approx(10 / speed)
    assert entry["up_bytes_per_s"] == 5e5
    # It takes the place of the node it is named after.
    data = tomllib.loads(out.read_text())
    data["nodes"][2] = entry
    assert Problem.from_dict(data).nodes[2].samples == Problem.load(out).nodes[2].samples

    file = tmp_path / "node.toml"
    assert (
        main(["profile", "node", str(draft), *timed, "--ranks", "0.5", "-o", str(file), "--json"]) == Exit.OK
    )
    told = json.loads(capsys.readouterr().out)
    assert told["node"] == tomllib.loads(file.read_text())["nodes"][0]
    assert told["steps"]["dense"]["count"] >= 5
    assert told["steps"]["dense"].keys() >= {"error", "spread"}
    assert told["threads"] == torch.get_num_threads()
    assert f"Measured with {torch.get_num_threads()} thread" in file.read_text()
    assert main(["profile", "node", str(draft), "--watts", "-1"]) == Exit.USAGE


# ---- the parts ---------------------------------------------------------------------------------------------


def _shares(histograms: list[list[int]]) -> dict[str, Samples]:
    found = {}
    for index, counts in enumerate(histograms):
        labels = torch.repeat_interleave(torch.arange(len(counts)), torch.tensor(counts))
        found[f"n{index}"] = Samples(torch.zeros(len(labels), 1), labels)
    return found


def test_a_node_is_not_given_what_no_problem_may_hold(
    draft: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for option in ("--latency-s", "--joules-per-byte"):
        for value in ("-1", "nan", "inf"):
            assert main(["profile", "node", str(draft), "--budget-s", "0.01", option, value]) == Exit.USAGE
            assert f"{option} {value} is not 0 or above" in capsys.readouterr().err
    text = draft.read_text()
    for versions, message in [
        ("versions = 3", "versions: is not a list of tables"),
        ('versions = [{ name = "dense", train_flops_per_sample = "x" }]', "versions: each needs a name"),
        ('versions = [{ name = "dense", train_flops_per_sample = 1.0, structure = 3 }]', "3 is not a path"),
    ]:
        draft.write_text(text.replace("format = 1", f"format = 1\n{versions}"))
        assert main(["profile", "node", str(draft), "--budget-s", "0.01"]) == Exit.USAGE
        assert message in capsys.readouterr().err


def test_subsets_have_about_the_amounts_and_say_how_balanced_they_are() -> None:
    rng = np.random.default_rng(0)
    shares = _shares([rng.integers(0, 40, 4).tolist() for _ in range(12)])
    total = sum(map(len, shares.values()))
    for amounts in ([1.0, 0.5, 0.25], [0.7], [0.5, 0.5, 0.5, 1.0]):
        found = subsets(shares, 4, amounts, seed=3)
        assert len(found) == len(amounts)
        assert len({one.nodes for one in found}) == len(found)
        for amount, one in zip(sorted(amounts, reverse=True), found, strict=True):
            assert one.share == pytest.approx(amount, abs=0.1)
            assert one.share == sum(len(shares[name]) for name in one.nodes) / total
            assert one == subset_of(shares, 4, one.nodes)
        assert found == subsets(shares, 4, amounts, seed=3)
    turns = subsets(shares, 4, [0.5, 0.5], seed=3)
    assert turns[0].imbalance < turns[1].imbalance
    # The least amount is ill balanced, however many there are.
    for amounts in ([1.0, 0.5, 0.25], [1.0, 0.25], [0.25]):
        least = subsets(shares, 4, amounts, seed=3)[-1]
        assert least.imbalance > subsets(shares, 4, [0.25, 0.25], seed=3)[0].imbalance


def test_imbalance_is_the_total_variation() -> None:
    shares = _shares([[10, 0], [0, 30]])
    assert subset_of(shares, 2, ["n0"]).imbalance == pytest.approx(0.75)
    assert subset_of(shares, 2, ["n0", "n1"]).imbalance == 0.0
    assert [one.nodes for one in subsets(_shares([[5, 5]]), 2, [1.0, 0.5], 0)] == [("n0",)]
    with pytest.raises(DataError, match="no nodes"):
        subsets({}, 2, [1.0], 0)


def test_rounds_to_a_target() -> None:
    from takifugu.plan.curves import Exponential

    curve = Exponential(floor=0.0, data_gain=0.0, data_exponent=0.5, rate=float(np.log(2)))
    assert rounds_to(curve, 2.0, 0.3, 10) == 3
    assert rounds_to(curve, 2.0, 2.0, 10) == 0
    assert rounds_to(curve, 2.0, 0.3, 2) is None


def test_pilots_refuse_nonsense() -> None:
    from takifugu.train.pilots import Pilots

    with pytest.raises(UsageError, match="pilots of 0 rounds"):
        Pilots(torch.nn.Linear(1, 1), (), {}, None, 1, None, 0, rounds=0)  # type: ignore[arg-type]
