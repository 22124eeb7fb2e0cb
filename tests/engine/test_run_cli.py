from __future__ import annotations

import json
import shlex
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import small_fleet

from takifugu.cli import Exit, main
from takifugu.cli.app import app
from takifugu.cli.run import run as run_command
from takifugu.report import units
from takifugu.report.page import page
from takifugu.report.read import read

EXACT = ("--spread", "0", "--dropout", "0", "--slowdown", "0")


def wire() -> None:
    names = {command.name or getattr(command.callback, "__name__", "") for command in app.registered_commands}
    if "run" not in names:
        app.command()(run_command)


@pytest.fixture(autouse=True)
def _wired() -> None:
    wire()


def takifugu(capsys: Any, *arguments: object) -> tuple[int, str, str]:
    code = main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def easy(tmp_path: Path) -> Path:
    """A problem that is planned in no time and met within three rounds."""
    return small_fleet.write_problem(
        tmp_path, small_fleet.problem_dict(target={"loss": 2.0, "max_rounds": 8})
    )


@pytest.fixture
def plan(easy: Path, capsys: Any) -> Path:
    path = easy.parent / "plan.json"
    assert main(["plan", str(easy), "-o", str(path), "--brief"]) == Exit.OK
    capsys.readouterr()
    return path


def test_a_problem_is_planned_run_and_compared(capsys, easy: Path, tmp_path: Path) -> None:
    out = tmp_path / "here"
    code, text, err = takifugu(capsys, "run", easy, "--out", out, "--baselines", "--seed", 1)
    assert code == Exit.OK, err
    table = text.splitlines()
    assert len(table) == 2 + 1 + 9
    assert table[1].split() == ["policy", "reached", "energy", "J", "time", "s", "loss", "rounds", "MB"]
    assert table[2].startswith("plan ")
    assert " yes " in table[2]
    for folder in (out, *(out / "baselines").iterdir()):
        names = {p.name for p in folder.iterdir()} - {"baselines"}
        assert names == {
            *("run.json", "problem.json", "plan.json", "result.json", "structures", "checkpoints"),
            *("rounds.jsonl", "nodes.jsonl", "events.jsonl", "plans"),
        }
    header = json.loads((out / "run.json").read_text())
    assert header["format"] == "takifugu.run/1"
    assert header["world"]["seed"] == 1
    assert header["command"].startswith(f"takifugu run {easy} --seed 1 ")
    assert header["sources"]["energy_j"] == "simulated"


def test_the_command_in_the_header_reproduces_the_run(capsys, easy: Path, tmp_path: Path) -> None:
    options = ("--only", "greedy-loss-per-joule", "--dropout", "0.3", "--seed", 4)
    assert takifugu(capsys, "run", easy, "--out", tmp_path / "one", *options)[0] == Exit.OK
    first = tmp_path / "one" / "baselines" / "greedy-loss-per-joule"
    command = json.loads((first / "run.json").read_text())["command"].split()
    assert command[0] == "takifugu"
    assert takifugu(capsys, *command[1:], "--out", tmp_path / "two")[0] == Exit.OK
    second = tmp_path / "two" / "baselines" / "greedy-loss-per-joule"
    for file in ("rounds.jsonl", "nodes.jsonl", "events.jsonl", "result.json", "run.json"):
        assert (first / file).read_bytes() == (second / file).read_bytes(), file
    assert not (tmp_path / "two" / "run.json").exists()


def test_a_plan_in_the_profiles_world_is_as_predicted(capsys, plan: Path, tmp_path: Path) -> None:
    code, text, _ = takifugu(capsys, "run", plan, "--out", tmp_path / "run", "--json", *EXACT)
    report = json.loads(text)
    assert report["format"] == "takifugu.results/1"
    result = report["results"]["plan"]
    assert code == (Exit.OK if result["reached"] else Exit.FAILED)
    rows = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    for row in rows:
        if row["predicted"]:
            assert row["time_s"] == pytest.approx(row["predicted"]["time_s"], rel=1e-9)


def test_a_run_may_have_until_later_than_planned(capsys, easy: Path, plan: Path, tmp_path: Path) -> None:
    """`plan --reserve` and `run --deadline`: late by the plan's problem, in time by what was wanted."""
    data = small_fleet.problem_dict(target={"loss": 2.0, "max_rounds": 8})
    time_s = json.loads(plan.read_text())["time_s"]
    data["target"]["deadline_s"] = 1.0001 * time_s
    tight = small_fleet.write_problem(tmp_path / "tight", data)
    assert main(["plan", str(tight), "-o", str(tmp_path / "tight" / "plan.json"), "--brief"]) == Exit.OK
    capsys.readouterr()
    slow = ("--slowdown", "1", "--dropout", "0", "--spread", "0")
    found = {}
    for out, more in (("short", ()), ("long", ("--deadline", "60"))):
        folder = tmp_path / out
        _, text, _ = takifugu(
            capsys, "run", tmp_path / "tight" / "plan.json", "--out", folder, *slow, *more, "--json"
        )
        found[out] = json.loads(text)["results"]["plan"]
        assert ("--deadline 60" in json.loads((folder / "run.json").read_text())["command"]) == bool(more)
    plain = tmp_path / "tight" / "plan.json"  # without --deadline it would be judged by another one
    code, _, err = takifugu(capsys, "run", plain, "--out", tmp_path / "long", *slow, "--resume")
    assert (code, "another target" in err) == (Exit.USAGE, True)
    assert found["long"]["reached"]
    assert found["long"]["time_s"] > 1.0001 * time_s
    assert found["long"]["deadline_met"]
    assert not found["short"]["deadline_met"]
    run = read(tmp_path / "long")
    assert (run.problem.deadline_s, run.problem.planned_for_s) == (60.0, pytest.approx(1.0001 * time_s))
    shown = page(run)
    assert "the rest is a reserve" in shown
    assert f"no plan within {units.duration(1.0001 * time_s)} needs less than" in shown
    assert read(tmp_path / "short").problem.planned_for_s is None


def test_a_run_has_all_the_time_of_a_plan_with_a_reserve(capsys, tmp_path: Path) -> None:
    """Without --deadline: the real deadline counts, and nodes stay until their windows really end."""
    data = small_fleet.problem_dict(target={"loss": 1.5, "max_rounds": 8, "deadline_s": 40.0})
    for node in data["nodes"]:
        node["available"] = [[0.0, 12.0]]
    path, plan = small_fleet.write_problem(tmp_path, data), tmp_path / "plan.json"
    assert main(["plan", str(path), "--reserve", "0.4", "-o", str(plan), "--brief"]) == Exit.OK
    planned = json.loads(plan.read_text())
    assert planned["time_s"] < 7.2 < 12.0  # what the windows were planned to be, and what they are
    capsys.readouterr()
    slow = ("--slowdown", "1", "--dropout", "0", "--spread", "0")
    takifugu(capsys, "run", plan, "--out", tmp_path / "run", *slow, "--no-replan")
    header = json.loads((tmp_path / "run" / "run.json").read_text())
    assert header["target"]["deadline_s"] == 40.0
    assert "--deadline" not in header["command"]
    rows = [json.loads(line) for line in (tmp_path / "run" / "rounds.jsonl").read_text().splitlines()]
    assert len(rows) == len(planned["rounds"])
    assert rows[-1]["start_s"] > 7.2  # late, but its nodes are still there
    assert [row["members"] for row in rows] == [len(row["nodes"]) for row in planned["rounds"]]
    assert (read(tmp_path / "run").problem.deadline_s, read(plan).problem.deadline_s) == (40.0, 40.0)
    # What is planned on the way may use the reserve of the windows, too.
    takifugu(capsys, "run", plan, "--out", tmp_path / "anew", *slow)
    plans = sorted((tmp_path / "anew" / "plans").iterdir())
    assert plans
    assert max(json.loads(p.read_text())["time_s"] for p in plans) > 7.2
    takifugu(capsys, "run", plan, "--out", tmp_path / "short", *slow, "--deadline", "8")
    assert json.loads((tmp_path / "short" / "run.json").read_text())["target"]["deadline_s"] == 8.0


def test_a_target_out_of_reach_is_exit_1(capsys, plan: Path, tmp_path: Path) -> None:
    """The plan believes in its curves; the real loss does not follow."""
    data = small_fleet.problem_dict(target={"loss": 1.0, "deadline_s": 30.0, "max_rounds": 2})
    for version in data["versions"]:
        version["curve"]["rate"] = 5.0
    path = small_fleet.write_problem(tmp_path / "bold", data)
    code, text, err = takifugu(capsys, "run", path, "--out", tmp_path / "run")
    assert code == Exit.FAILED
    assert " no " in text.splitlines()[2]
    assert "the cap of 2 rounds" in err


def test_a_target_met_at_the_start_is_nothing_to_do(capsys, tmp_path: Path) -> None:
    path = small_fleet.write_problem(tmp_path, small_fleet.problem_dict(target={"loss": 5.0}))
    code, text, err = takifugu(capsys, "run", path, "--out", tmp_path / "run", "--json")
    result = json.loads(text)["results"]["plan"]
    assert (code, result["rounds"], result["energy_j"]) == (Exit.OK, 0, 0.0)
    assert "target met" in err


def test_a_plan_with_a_mark_in_front_is_read(capsys, plan: Path, tmp_path: Path) -> None:
    """Editors on Windows write one."""
    plan.write_text(plan.read_text(encoding="utf-8"), encoding="utf-8-sig")
    code, _, err = takifugu(capsys, "run", plan, "--out", tmp_path / "run", *EXACT)
    assert code == Exit.OK, err


def test_infeasible_is_exit_3(capsys, tmp_path: Path) -> None:
    path = small_fleet.write_problem(tmp_path, small_fleet.problem_dict(target={"deadline_s": 0.5}))
    code, _, err = takifugu(capsys, "run", path, "--out", tmp_path / "run")
    assert code == Exit.INFEASIBLE
    assert "infeasible" in err
    assert not (tmp_path / "run").exists()


def edited(path: Path, change: Any) -> Path:
    data = json.loads(path.read_text())
    change(data)
    path.write_text(json.dumps(data))
    return path


def _other_version(data: dict[str, Any]) -> None:
    data["rounds"][0]["version"] = "r0.26"


def _other_node(data: dict[str, Any]) -> None:
    data["rounds"][0]["nodes"] = {"node-9": 10}


def _too_many(data: dict[str, Any]) -> None:
    data["rounds"][0]["nodes"] = {"node-0": 9999}


def _other_problem(data: dict[str, Any]) -> None:
    data["problem"]["target"]["loss"] = 1.0


def _other_figures(data: dict[str, Any]) -> None:
    data["energy_j"] *= 2


def _nobody(data: dict[str, Any]) -> None:
    data["rounds"][0]["nodes"] = {}


def _version_list(data: dict[str, Any]) -> None:
    data["rounds"][0]["version"] = ["dense"]


def _no_number(data: dict[str, Any]) -> None:
    data["energy_j"] = float("nan")


def _beyond_numbers(data: dict[str, Any]) -> None:
    data["time_s"] = 10**400


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_version_list, "round 1: the problem has no version ['dense']"),
        (_no_number, "says energy_j = nan, its rounds give"),
        (_beyond_numbers, "it was changed, plan again"),
        (_other_version, "round 1: the problem has no version 'r0.26'; did you mean 'r0.25'?"),
        (_other_node, "round 1: the problem has no node 'node-9'"),
        (_too_many, "node 'node-0' cannot use 9999 of 120 samples"),
        (_other_problem, "problem is not the one it was made for"),
        (_other_figures, "it was changed, plan again"),
        (_nobody, "no node takes part"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused(
    capsys, plan: Path, tmp_path: Path, change: Any, said: str
) -> None:
    code, _, err = takifugu(capsys, "run", edited(plan, change), "--out", tmp_path / "run")
    assert code == Exit.USAGE
    assert said in err
    assert not (tmp_path / "run").exists()


def _no_workload(data: dict[str, Any]) -> None:
    del data["workload"]


def _no_module(data: dict[str, Any]) -> None:
    data["workload"]["model"] = "no_such_module_anywhere:build"


def _too_many_samples(data: dict[str, Any]) -> None:
    data["nodes"][0]["samples"] = 100_000


def _no_structure(data: dict[str, Any]) -> None:
    data["versions"][1]["structure"] = "elsewhere.json"


def _structure_of_another(data: dict[str, Any]) -> None:
    data["workload"]["model_options"] = {"width": 48}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (_no_workload, "there is no [workload]"),
        (_no_module, "no_such_module_anywhere"),
        (_too_many_samples, "node-0"),
        (_no_structure, "version 'r0.25': there is no structure file 'elsewhere.json'"),
        (
            _structure_of_another,
            "version 'r0.25': its structure does not fit the model: layer '1' has weights",
        ),
    ],
)
def test_a_problem_that_cannot_be_run_is_exit_2(
    capsys, easy: Path, tmp_path: Path, change: Any, said: str
) -> None:
    code, _, err = takifugu(capsys, "run", edited(easy, change), "--out", tmp_path / "run")
    assert code == Exit.USAGE, err
    assert said in err


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--only", "plam"), "did you mean 'plan'?"),
        (("--averaging", "median"), "averaging 'median' is not known"),
        (("--dropout", "2"), "dropout 2 is not a share"),
        (("--spread", "-1"), "--spread -1"),
        (("--deadline", "0"), "--deadline 0 is not a time"),
        (("--deadline", "nan"), "--deadline nan is not a time"),
        (("--only", "fixed-warm-up", "--baselines"), "exclude each other"),
    ],
)
def test_wrong_options(capsys, easy: Path, tmp_path: Path, options: tuple[str, ...], said: str) -> None:
    code, _, err = takifugu(capsys, "run", easy, "--out", tmp_path / "run", *options)
    assert code == Exit.USAGE
    assert said in err


def test_structures_are_found_beside_the_plan_or_where_one_stands(
    capsys, plan: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    away = tmp_path / "away"
    away.mkdir()
    moved = plan.rename(away / "plan.json")
    code, _, err = takifugu(capsys, "run", moved, "--out", tmp_path / "no", *EXACT)
    assert code == Exit.USAGE
    assert "put the file beside the plan" in err
    monkeypatch.chdir(tmp_path)  # where r0.25.json lies
    assert takifugu(capsys, "run", moved, "--out", "yes", *EXACT)[0] in (Exit.OK, Exit.FAILED)


def test_a_run_is_not_overwritten_but_resumed(capsys, easy: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    first = takifugu(capsys, "run", easy, "--out", out)
    before = {p: p.read_bytes() for p in out.rglob("*") if p.is_file()}
    code, _, err = takifugu(capsys, "run", easy, "--out", out)
    assert code == Exit.USAGE
    assert "continue it with --resume" in err
    assert "there is no run yet" in takifugu(capsys, "run", easy, "--out", tmp_path / "r2", "--resume")[2]
    code, _, err = takifugu(capsys, "run", easy, "--out", out, "--resume", "--seed", 1)
    assert code == Exit.USAGE
    assert "another seed" in err
    (tmp_path / "r0.25.json").unlink()  # the run keeps its own
    again = takifugu(capsys, "run", easy, "--out", out, "--resume")
    assert again[:2] == first[:2]
    assert {p: p.read_bytes() for p in out.rglob("*") if p.is_file()} == before


def test_a_damaged_folder_is_named(capsys, easy: Path, tmp_path: Path) -> None:
    out = tmp_path / "run"
    takifugu(capsys, "run", easy, "--out", out)
    (out / "result.json").unlink()
    (out / "rounds.jsonl").write_text("nonsense\n" + (out / "rounds.jsonl").read_text())
    code, _, err = takifugu(capsys, "run", easy, "--out", out, "--resume")
    assert code == Exit.USAGE
    assert "rounds.jsonl line 1: is damaged" in err


def _lines(path: Path, change: Any) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for row in rows:
        change(row)
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))


def test_files_that_parse_but_lack_something_are_named(capsys, easy: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    takifugu(capsys, "run", easy, "--out", whole)
    cases: list[tuple[str, Any, bool]] = [
        (
            "run.json: 'versions' is missing",
            lambda d: edited(d / "run.json", lambda h: h.pop("versions")),
            True,
        ),
        ("result.json: 'reached' is missing", lambda d: (d / "result.json").write_text("{}"), True),
        ("last line lacks 'total'", lambda d: _lines(d / "rounds.jsonl", lambda r: r.pop("total")), False),
        (
            "round 'x' is not a number",
            lambda d: _lines(d / "events.jsonl", lambda r: r.update(round="x")),
            False,
        ),
    ]
    for number, (said, damage, done) in enumerate(cases):
        out = tmp_path / f"damaged-{number}"
        shutil.copytree(whole, out)
        if not done:
            (out / "result.json").unlink()
        damage(out)
        code, _, err = takifugu(capsys, "run", easy, "--out", out, "--resume")
        assert code == Exit.USAGE
        assert said in err


ENDLESS = """
import signal
import sys
# A shell that starts tests in the background has them ignore this signal, and children inherit that.
signal.signal(signal.SIGINT, signal.default_int_handler)
sys.path.insert(0, {tests!r})
import test_run_cli
from takifugu.cli import main
test_run_cli.wire()
sys.exit(main({arguments!r}))
"""


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGINT])
def test_interrupted_it_keeps_what_is_done_and_says_how_to_go_on(tmp_path: Path, how: signal.Signals) -> None:
    data = small_fleet.problem_dict(target={"loss": 0.001, "deadline_s": 1e7})
    path, out = small_fleet.write_problem(tmp_path / "my fleet", data), tmp_path / "a run"
    only = ("--only", "no-compression-all-nodes")
    arguments = ["run", str(path), "--out", str(out), *only]
    code = ENDLESS.format(tests=str(Path(__file__).parent), arguments=arguments)
    with subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        assert "round 1 " in process.stderr.readline()
        process.send_signal(how)
        rest = process.stderr.read()
    assert process.returncode == Exit.INTERRUPTED
    # The very command, but for the interpreter; a name with a space in it stays one word.
    advice = next(line for line in rest.splitlines() if "go on with: " in line).split("go on with: ")[1]
    words = shlex.split(advice)
    assert words[:3] == ["takifugu", "run", str(path)]
    assert words[words.index("--only") + 1] == only[1]
    assert words[words.index("--out") + 1] == str(out)
    assert words[-1] == "--resume"
    folder = out / "baselines" / "no-compression-all-nodes"
    rows = (folder / "rounds.jsonl").read_text().splitlines()
    assert rows
    assert (folder / "checkpoints" / f"{len(rows)}.safetensors").is_file()
    assert not (folder / "result.json").exists()


def test_help_needs_no_torch() -> None:
    code = (
        "import sys\nfrom takifugu.cli import main\nfrom takifugu.cli.app import app\n"
        "from takifugu.cli.run import run\n"
        "names = {c.name or c.callback.__name__ for c in app.registered_commands}\n"
        "'run' in names or app.command()(run)\n"
        "sys.exit(main(['run', '--help']) or 'torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=False, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "--averaging" in done.stdout
