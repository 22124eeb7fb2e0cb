from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
import pytest
from run_folder import write_run

from takifugu.report.charts import charts, energy_chart, spent_by_node
from takifugu.report.drawing import Chart, short_names
from takifugu.report.read import read, read_run


def by_id(source: Any) -> dict[str, Chart]:
    return {chart.id: chart for chart in charts(source)}


def rows(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def unit_of(chart: Chart, axis: str) -> float:
    sizes = {
        "s": 1,
        "min": 60,
        "h": 3600,
        "J": 1,
        "kJ": 1e3,
        "MJ": 1e6,
        "B": 1,
        "kB": 1e3,
        "MB": 1e6,
        "GB": 1e9,
    }
    found = re.search(r"\((\w+)\)$", chart.layout[axis]["title"]["text"])
    assert found is not None
    return float(sizes[found[1]])


def test_a_run_has_these_charts_and_every_one_is_labelled(folder: Path) -> None:
    made = by_id(read(folder))
    assert list(made) == [
        "timeline",
        "loss-over-time",
        "loss-over-energy",
        "energy-by-node",
        "bytes-by-round",
    ]
    for chart in made.values():
        assert chart.title
        assert chart.label
        assert chart.layout["xaxis"]["title"]["text"]
        groups = {trace["legendgroup"] for trace in chart.data} - {"as planned"}
        assert {key.group for key in chart.keys} == groups


def test_plotly_accepts_every_figure(folder: Path) -> None:
    """Once the colour tokens, which are ours, are gone."""
    big = write_run(folder.parent / "big", nodes=45, rounds=12, baselines=1)
    for source in (read(folder), read(folder / "plan.json"), read(big)):
        for chart in charts(source):
            text = re.sub(
                r'"@[a-z0-9-]+(/[\d.]+)?"', '"#123456"', json.dumps([list(chart.data), chart.layout])
            )
            data, layout = json.loads(text)
            go.Figure(data=data, layout=layout)


def test_bars_of_the_timeline_are_the_members_of_the_rounds(folder: Path) -> None:
    chart = by_id(read(folder))["timeline"]
    rounds = {r["round"]: r for r in rows(folder / "rounds.jsonl")}
    wanted = {
        (m["node"], m["round"]): (rounds[m["round"]]["version"], rounds[m["round"]]["start_s"], m["time_s"])
        for m in rows(folder / "nodes.jsonl")
        if m["status"] != "dropped"
    }
    unit, found = unit_of(chart, "xaxis"), {}
    for trace in chart.data:
        if trace["type"] == "bar" and trace["legendgroup"].startswith("version "):
            for custom, base, length in zip(trace["customdata"], trace["base"], trace["x"], strict=True):
                found[custom[1], custom[0]] = (trace["name"], base * unit, length * unit)
    for key, (version, start_s, time_s) in wanted.items():
        assert found[key] == (version, pytest.approx(start_s), pytest.approx(time_s))


def test_losses_are_those_of_the_files(folder: Path) -> None:
    made = by_id(read(folder))
    plan = json.loads((folder / "plan.json").read_text())
    lines = rows(folder / "rounds.jsonl")
    over_time, over_energy = made["loss-over-time"], made["loss-over-energy"]
    for chart in (over_time, over_energy):
        traces = {trace["name"]: trace for trace in chart.data}
        assert traces["plan, actual"]["y"] == [2.30, *(line["loss"] for line in lines)]
        assert traces["predicted"]["y"] == [2.30, *(row["loss"] for row in plan["rounds"])]
        baselines = [t for t in chart.data if t["legendgroup"] in ("best baseline", "other baselines")]
        assert len(baselines) == 3
    actual = next(t for t in over_time.data if t["name"] == "plan, actual")
    ends = [0.0, *(line["end_s"] for line in lines)]
    assert [x * unit_of(over_time, "xaxis") for x in actual["x"]] == pytest.approx(ends)
    predicted = next(t for t in over_time.data if t["name"] == "predicted")
    assert predicted["x"][-1] * unit_of(over_time, "xaxis") == pytest.approx(plan["time_s"])
    predicted = next(t for t in over_energy.data if t["name"] == "predicted")
    assert predicted["x"][-1] * unit_of(over_energy, "xaxis") == pytest.approx(plan["energy_j"])


def test_energy_by_node_sums_to_the_run_s(folder: Path) -> None:
    run = read_run(folder)
    chart = by_id(run)["energy-by-node"]
    bars = [trace for trace in chart.data if trace["type"] == "bar"]
    total = sum(sum(trace["x"]) for trace in bars) * unit_of(chart, "xaxis")
    assert total == pytest.approx(run.energy_j, rel=1e-6)


def test_bytes_are_those_of_the_rounds(folder: Path) -> None:
    chart = by_id(read(folder))["bytes-by-round"]
    unit = unit_of(chart, "yaxis")
    found = {x: y * unit for trace in chart.data for x, y in zip(trace["x"], trace["y"], strict=True)}
    assert found == {r["round"]: pytest.approx(r["bytes"]) for r in rows(folder / "rounds.jsonl")}


def test_a_large_fleet_is_a_map_of_rounds_and_nodes(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", nodes=45, rounds=9, baselines=0)
    run = read_run(folder)
    chart = by_id(run)["timeline"]
    maps = [t for t in chart.data if t["legendgroup"].startswith("version ")]
    assert {t["type"] for t in maps} == {"heatmap"}
    taken = {
        (name, cell) for t in maps for name, row in zip(t["y"], t["z"], strict=True) for cell in row if cell
    }
    assert taken == {(m.node, m.round) for m in run.members}
    for trace in maps:
        assert trace["x"] == sorted(set(trace["x"]))
        assert all(len(row) == len(trace["x"]) - 1 for row in trace["z"])


def test_many_nodes_share_a_row_of_the_energy_chart(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "run", nodes=45, rounds=9, baselines=0))
    spent = spent_by_node(run)
    chart = energy_chart(run, spent)
    assert chart is not None
    labels = chart.data[0]["y"]
    assert len(labels) == 25
    assert labels[23] == "mean of 22 others"
    sums = sorted((sum(v.get(n, 0.0) for v in spent.values()) for n in run.problem.nodes), reverse=True)
    shown = sum(t["x"][23] for t in chart.data if t["type"] == "bar") * unit_of(chart, "xaxis")
    assert shown == pytest.approx(sum(sums[23:]) / 22)


def test_a_plan_alone_and_a_run_without_rounds_have_charts_too(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", finished=False, baselines=0)
    assert len(by_id(read(folder / "plan.json"))) == 5
    (folder / "rounds.jsonl").write_text("")
    (folder / "nodes.jsonl").write_text("")
    assert list(by_id(read(folder))) == ["loss-over-time", "loss-over-energy"]


def test_short_names_stay_apart_and_are_plain_text() -> None:
    names = ["a" * 40 + "1", "a" * 40 + "2", "b" * 20 + "x" + "c" * 20, "b" * 20 + "y" + "c" * 20, "<b>"]
    found = short_names(names)
    assert len(set(found.values())) == len(names)
    assert found["<b>"] == "&lt;b&gt;"
    assert all(len(label) <= 22 for label in found.values())
