"""Problem files: what is read, and what each mistake says."""

import datetime
import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
from generator import small_problem

from takifugu.errors import ProblemError
from takifugu.plan.files import schema
from takifugu.plan.plan import read_plan
from takifugu.plan.problem import Problem


def broken(change: Any) -> tuple[str, ...]:
    data = small_problem(3, force=("labels", "windows"))
    data["switches"] = [{"from": "v0", "to": "v0", "time_s": 1.0, "energy_j": 0.0, "loss_jump": 0.0}][:0]
    change(data)
    with pytest.raises(ProblemError) as caught:
        Problem.from_dict(data)
    return caught.value.mistakes


def setting(*path: Any, value: Any) -> Any:
    def change(data: dict[str, Any]) -> None:
        here: Any = data
        for part in path[:-1]:
            here = here[part]
        here[path[-1]] = value

    return change


NAN = float("nan")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            setting("target", "loss", value=NAN),
            "target.loss: nan is not a finite number; give the loss to reach",
        ),
        (setting("target", "deadline_s", value=-1.0), "target.deadline_s: must be greater than 0, got -1.0"),
        (setting("target", "deadline_s", value="1 h"), "target.deadline_s: must be a number, got '1 h'"),
        (setting("target", "max_rounds", value=2.5), "target.max_rounds: must be a integer, got 2.5"),
        (
            setting("target", "deadlin_s", value=1.0),
            "target.deadlin_s: is not a field of the format; did you mean 'deadline_s'",
        ),
        (setting("colour", value=1), "colour: is not a field of the format"),
        (setting("format", value=2), "format: must be 1, got 2"),
        (setting("start", "version", value="v9"), "start.version: there is no version 'v9'"),
        (
            setting("nodes", 0, "flops_per_s", value=0.0),
            "nodes[0].flops_per_s: must be greater than 0, got 0.0",
        ),
        (setting("nodes", 0, "flops_per_s", value=True), "nodes[0].flops_per_s: must be a number, got True"),
        (
            setting("nodes", 0, "samples", value=0),
            "nodes[0].samples: must be greater than or equal to 1, got 0",
        ),
        (setting("nodes", 0, "labels", value=[1, 1, 1]), "nodes[0].labels: sums to 3, samples is"),
        (
            setting("nodes", 0, "samples_per_s", value={"x": 1.0}),
            "nodes[0].samples_per_s: there is no version 'x'",
        ),
        (
            setting("nodes", 0, "available", value=[[5.0, 2.0]]),
            "nodes[0].available[0]: ends at 2, not after its start 5",
        ),
        (setting("nodes", value=[]), "nodes: the fleet is empty"),
        (setting("versions", value=[]), "versions: is empty"),
        (
            setting("data", "label_weight", value=1.5),
            "data.label_weight: must be less than or equal to 1, got 1.5",
        ),
        (setting("data", "parts", value=0), "data.parts: must be greater than or equal to 1, got 0"),
        (
            setting("versions", 0, "curve", "kind", value="cubic"),
            "versions[0].curve.kind: must be 'exponential' or 'power'",
        ),
        (
            setting("versions", 0, "curve", "data_gain", value=-0.1),
            "versions[0].curve.data_gain: must be greater than or equal to 0",
        ),
        (
            setting("versions", 0, "curve", value={"kind": "exponential", "floor": 0.1, "rate": -1.0}),
            "versions[0].curve.rate: must be greater than 0, got -1.0; give above 0, or the loss",
        ),
        (
            setting(
                "versions", 0, "curve", value={"kind": "power", "floor": 0.1, "scale": 1.0, "exponent": 50.0}
            ),
            "versions[0].curve.exponent: must be less than or equal to 20, got 50.0; give between 0.05",
        ),
        (setting("switches", value=[{"from": "v0", "to": "zz"}]), "switches[0].to: there is no version 'zz'"),
        (setting("switches", value=[{"from": "v0", "to": "v0"}]), "switches[0]: leads from 'v0' to itself"),
        (
            setting("switches", value=[{"from": "v0"}]),
            "switches[0].to: is missing; add the name of a version",
        ),
        (setting("nodes_file", value="x.csv"), "nodes_file: given together with [[nodes]]"),
        (setting("nodes", 0, "samples", value=10**30), "nodes[0].samples: must be less than or equal to"),
        (
            setting("nodes", 0, "available", value=[[0, 10**400]]),
            "nodes[0].available[0][1]: must be a number",
        ),
        (
            setting("nodes", 0, "joules_per_flop", value=1e300),
            "nodes[0].joules_per_flop: 1e+300 is out of all proportion; check its unit",
        ),
        (
            setting("nodes", 0, "flops_per_s", value=1e-300),
            "nodes[0].flops_per_s: 1e-300 is out of all proportion; check its unit",
        ),
        (setting("workload", value={"a": {"b": [NAN]}}), "workload.a.b[0]: nan has no form in a plan file"),
        (
            setting("workload", value={"day": datetime.date(2020, 1, 1)}),
            "workload.day: datetime.date(2020, 1, 1) has no form in a plan file",
        ),
    ],
)
def test_each_mistake_names_its_place_and_its_fix(change: Any, message: str) -> None:
    assert any(m.startswith(message) for m in broken(change)), broken(change)


def test_all_mistakes_at_once() -> None:
    def change(data: dict[str, Any]) -> None:
        data["target"]["loss"] = NAN
        data["start"]["version"] = "nope"
        data["nodes"][0]["samples"] = -4
        data["nodes"].append(dict(data["nodes"][0]))
        del data["target"]["deadline_s"]

    found = broken(change)
    for part in (
        "target.loss",
        "start.version",
        "nodes[0].samples",
        "is used twice",
        "target.deadline_s: is missing",
    ):
        assert any(part in m for m in found), (part, found)


def test_labels_are_needed_when_they_count() -> None:
    def change(data: dict[str, Any]) -> None:
        del data["nodes"][0]["labels"]

    assert any("nodes[0].labels: is missing, and label_weight is above 0" in m for m in broken(change))


def test_a_round_without_time_is_refused() -> None:
    data = small_problem(3)
    for version in data["versions"]:
        version["train_flops_per_sample"] = version["payload_bytes"] = 0.0
    for node in data["nodes"]:
        node["latency_s"] = 0.0
        node.pop("samples_per_s", None)
    with pytest.raises(ProblemError, match="would take no time"):
        Problem.from_dict(data)


def test_canonical_form_is_stable(example: Path) -> None:
    problem = Problem.load(example)
    again = Problem.from_dict(problem.to_dict())
    assert again == problem
    assert again.sha256 == problem.sha256
    assert json.loads(json.dumps(problem.to_dict())) == problem.to_dict()


@pytest.mark.parametrize("seed", range(12))
def test_round_trip(seed: int) -> None:
    problem = Problem.from_dict(small_problem(seed))
    assert Problem.from_dict(problem.to_dict()) == problem


def test_fleet_from_csv(tmp_path: Path, example: Path) -> None:
    data = tomllib.loads(example.read_text())
    nodes = data.pop("nodes")
    columns = list(dict.fromkeys(k for n in nodes for k in n))
    lines = [",".join(columns)]
    for node in nodes:
        cells = [
            json.dumps(node[c]) if isinstance(node.get(c), list) else str(node.get(c, "")) for c in columns
        ]
        lines.append(",".join('"' + c.replace('"', '""') + '"' for c in cells))
    (tmp_path / "fleet.csv").write_text("\n".join(lines))
    data["nodes_file"] = "fleet.csv"
    (tmp_path / "p.json").write_text(json.dumps(data))
    assert Problem.load(tmp_path / "p.json").nodes == Problem.load(example).nodes
    lines[2] = lines[2].replace('"5200"', '"many"')
    (tmp_path / "fleet.csv").write_text("\n".join(lines))
    with pytest.raises(ProblemError, match=r"fleet.csv line 3: samples: must be a integer, got 'many'"):
        Problem.load(tmp_path / "p.json")


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ProblemError, match="cannot be read"):
        Problem.load(tmp_path / "absent.toml")
    (tmp_path / "bad.toml").write_text("a = = 1")
    with pytest.raises(ProblemError, match="is not valid TOML"):
        Problem.load(tmp_path / "bad.toml")


def test_marks_and_line_ends_of_other_systems_are_read(tmp_path: Path, example: Path) -> None:
    text = "\ufeff" + example.read_text().replace("\n", "\r\n")
    (tmp_path / "p.toml").write_text(text, encoding="utf-8", newline="")
    assert Problem.load(tmp_path / "p.toml") == Problem.load(example)


def test_what_is_there_twice_is_refused(tmp_path: Path) -> None:
    data = small_problem(3)
    (tmp_path / "p.json").write_text(json.dumps(data).replace('"target": {', '"target": {"loss": 0.1, ', 1))
    with pytest.raises(ProblemError, match="the key 'loss' is there twice"):
        Problem.load(tmp_path / "p.json")
    del data["nodes"]
    (tmp_path / "fleet.csv").write_text("name,samples,samples\na,5,6\n")
    (tmp_path / "p.json").write_text(json.dumps({**data, "nodes_file": "fleet.csv"}))
    with pytest.raises(ProblemError, match=r"fleet.csv: has 2 columns 'samples'; keep one"):
        Problem.load(tmp_path / "p.json")


def test_files_nested_without_end_are_refused(tmp_path: Path) -> None:
    deep = "[" * 100_000
    for name, text in (("p.json", deep), ("p.toml", f"a = {deep}")):
        (tmp_path / name).write_text(text)
        with pytest.raises(ProblemError, match="is not valid"):
            Problem.load(tmp_path / name)
    with pytest.raises(ProblemError, match="is not valid JSON"):
        read_plan(tmp_path / "p.json")
    data = {**small_problem(3), "nodes_file": "fleet.csv"}
    del data["nodes"]
    (tmp_path / "q.json").write_text(json.dumps(data))
    (tmp_path / "fleet.csv").write_text(f"name,labels\na,{deep}\n")
    with pytest.raises(ProblemError, match="fleet.csv line 2: labels: must be a list"):
        Problem.load(tmp_path / "q.json")


def test_schema_names_every_field() -> None:
    text = json.dumps(schema())
    for field in ("deadline_s", "idle_watts", "loss_jump", "label_weight", "data_exponent", "nodes_file"):
        assert f'"{field}"' in text
