"""The demo, in a short form: the same steps, fewer pilots, a nearer target."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from takifugu.cli import Exit, main
from takifugu.cli.demo_loop import fleet
from takifugu.engine.policies import slugs
from takifugu.measure.machine import Turns
from takifugu.train import profile
from takifugu.train.costs import StepTimes

pytest.importorskip("sklearn")
pytest.importorskip("plotly")


def demo(folder: Path, *more: str) -> int:
    return main(["demo", "--quick", "--folder", str(folder), *more])


@pytest.fixture(scope="module", autouse=True)
def _same_speeds_each_time() -> Iterator[None]:
    """What was timed differs from one call to the next; here it must not."""
    times = Turns({"dense": [1.2] * 5, "r0.25": [1.0] * 5})
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(profile, "time_steps", lambda *_: StepTimes(times, 8, 32, 1))
        yield


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("demo") / "d"
    assert demo(folder) == Exit.OK, "the plan missed the target or the deadline; see demo.json in the folder"
    return folder


def figures(folder: Path) -> dict:
    found = json.loads((folder / "demo.json").read_text(encoding="utf-8"))
    found.pop("page")
    return found


def test_the_plan_and_every_baseline_are_run_and_compared(done: Path) -> None:
    found = figures(done)
    assert set(found["results"]) == {"plan", *slugs()}
    for slug, result in found["results"].items():
        folder = done / "run" if slug == "plan" else done / "run" / "baselines" / slug
        assert json.loads((folder / "result.json").read_text(encoding="utf-8")) == result
        assert result["rounds"] > 0
        assert result["energy_j"] > 0
        assert set(result["predicted"]) == {"energy_j", "time_s", "loss"}
    assert 0 <= found["plan"]["gap"] <= 0.01


def test_the_page_is_there_and_needs_nothing_else(done: Path) -> None:
    page = (done / "report.html").read_text(encoding="utf-8")
    assert not re.search(r"<(script|img|link|iframe)[^>]+(src|href)=", page)
    for slug, name in slugs().items():
        assert name in page, slug


def test_the_same_numbers_again_and_on_the_screen(done: Path, tmp_path: Path, capsys) -> None:
    assert demo(tmp_path / "again", "--json") == Exit.OK
    out = json.loads(capsys.readouterr().out)
    out.pop("page")
    again = figures(tmp_path / "again")
    assert out == again == figures(done)
    assert again["results"]["plan"]["reached"]
    assert again["results"]["plan"]["deadline_met"]

    assert demo(tmp_path / "again") == Exit.OK  # all there already: only told
    screen = capsys.readouterr().out
    for slug in ("plan", *slugs()):
        assert re.search(rf"^  {slug} +(yes|late|no) ", screen, re.MULTILINE), slug
    assert "proven" in screen
    assert str(tmp_path / "again" / "report.html") in screen


def test_interrupted_it_goes_on_to_the_same_numbers(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    from takifugu.train import cooperative
    from takifugu.train.round import train_round

    calls = 0

    def stopped_at(limit: int):
        def train(*arguments, **more):
            nonlocal calls
            calls += 1
            if calls == limit:
                raise KeyboardInterrupt
            return train_round(*arguments, **more)

        return train

    # Once in the middle of the pilots, once in the middle of a baseline.
    for limit in (60, 420):
        calls = 0
        monkeypatch.setattr(cooperative, "train_round", stopped_at(limit))
        assert demo(tmp_path / "d") == Exit.INTERRUPTED
        assert "goes on from there" in capsys.readouterr().err
        assert not (tmp_path / "d" / "demo.json").exists()
    monkeypatch.undo()
    assert demo(tmp_path / "d") == Exit.OK
    assert figures(tmp_path / "d") == figures(done)


def test_a_run_of_another_seed_is_put_aside(
    done: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys
) -> None:
    from takifugu.train import cooperative

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    folder = tmp_path / "d"
    shutil.copytree(done, folder)
    header = folder / "run" / "run.json"
    header.write_text(json.dumps({**json.loads(header.read_text()), "seed": 7}))
    monkeypatch.setattr(cooperative, "train_round", stop)  # the pilots are there; a new run begins
    assert demo(folder) == Exit.INTERRUPTED
    assert f"the run of another seed or release is now {folder / 'run.1'}" in capsys.readouterr().err
    for log in ("rounds.jsonl", "nodes.jsonl"):
        assert (folder / "run.1" / log).read_bytes() == (done / "run" / log).read_bytes()
        assert (folder / "run" / log).read_bytes() == b""


def test_a_plan_that_misses_is_a_failure(done: Path, tmp_path: Path, capsys) -> None:
    folder = tmp_path / "d"
    shutil.copytree(done, folder)
    result = folder / "run" / "result.json"
    missed = {**json.loads(result.read_text()), "reached": False, "deadline_met": False}
    result.write_text(json.dumps(missed))  # of a finished run: it is only told
    assert demo(folder) == Exit.FAILED


def test_of_what_was_timed_here_the_problem_has_ratios_only(done: Path) -> None:
    import tomllib

    problem = tomllib.loads((done / "problem.toml").read_text(encoding="utf-8"))
    assert {switch["time_s"] for switch in problem["switches"]} == {0.2}
    dense = problem["versions"][0]["train_flops_per_sample"]
    for node in problem["nodes"]:
        assert node["source"] == "estimated"
        assert node["samples_per_s"]["dense"] == pytest.approx(node["flops_per_s"] / dense)
        assert node["samples_per_s"]["r0.25"] / node["samples_per_s"]["dense"] == pytest.approx(1.2)


def test_the_page_and_the_screen_say_what_versions_cost(done: Path, capsys) -> None:
    demo(done)
    screen = capsys.readouterr().out
    assert "COSTS    measured on this machine, relative to dense: r0.25 1.20 (by FLOPs 1.83)" in screen
    page = (done / "report.html").read_text(encoding="utf-8")
    assert "r0.25: 1.20 times the speed of dense by the nodes" in page
    assert "1.83 times by FLOPs" in page


def test_the_fleet_is_part_of_the_package_and_knows_its_seed() -> None:
    assert "\nseed = 7\n" in fleet(7)
    assert fleet(0).count("[[nodes]]") == 8


def test_options_of_the_switch_alone_are_refused(capsys) -> None:
    assert main(["demo", "--epochs", "4"]) == Exit.USAGE
    assert "--epochs belongs to `takifugu demo --switch`" in capsys.readouterr().err
