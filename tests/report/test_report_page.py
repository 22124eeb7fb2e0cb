from __future__ import annotations

import ast
import hashlib
import itertools
import json
import re
import subprocess
import sys
from base64 import b64decode
from html.parser import HTMLParser
from pathlib import Path

import pytest
from run_folder import dump, write_run

import takifugu
from takifugu.errors import UsageError
from takifugu.report import units
from takifugu.report.markup import script_json, tag
from takifugu.report.page import page
from takifugu.report.read import read, read_run
from takifugu.report.words import headline

NASTY = [
    "<script>alert(1)</script>",
    "</script><img src=x onerror=alert(2)>",
    "<a href='javascript:x'>n</a>",
    '%{x}&"',
]


class Tags(HTMLParser):
    """Elements and headings of a page, without what scripts and styles hold."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_every_text_from_files_is_escaped(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", names=NASTY, policy=NASTY[0], baselines=1)
    header = json.loads((folder / "run.json").read_text())
    dump(
        folder / "run.json",
        {**header, "command": NASTY[1], "world": {NASTY[0]: NASTY[1]}, "averaging": NASTY[2]},
    )
    with (folder / "events.jsonl").open("a") as file:
        file.write(json.dumps({"round": 1, "event": NASTY[0], "node": NASTY[1]}) + "\n")
    result = json.loads((folder / "result.json").read_text())
    dump(folder / "result.json", {**result, "reached": False, "reason": NASTY[0]})
    tags = Tags(page(read(folder)))
    names = [name for name, _ in tags.found]
    assert names.count("script") == 3
    assert "img" not in names
    assert "a" not in names
    assert NASTY[0] in "".join(tags.texts)
    figures = next(text for text in tags.texts if text.startswith('{"timeline"'))
    assert "<" not in figures
    labels = json.loads(figures)["timeline"]["data"][0]["customdata"]
    assert {row[1] for row in labels} <= {
        n.replace("&", "&amp;").replace("<", "&lt;").replace(">", "&gt;") for n in NASTY
    }


def test_the_page_needs_nothing_from_outside(folder: Path) -> None:
    text = page(read(folder))
    assert len(text.encode()) < 8_000_000
    tags = Tags(text)
    assert not [a for _, a in tags.found if "src" in a or "href" in a]
    assert "@import" not in text.split("</style>")[0]
    policy = next(a["content"] for _, a in tags.found if a.get("http-equiv") == "Content-Security-Policy")
    assert policy is not None
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    scripts = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    allowed = {b64decode(d) for d in re.findall(r"'sha256-([^']+)'", policy)}
    assert {hashlib.sha256(s.encode()).digest() for s in scripts} == allowed


def test_same_files_same_page(folder: Path) -> None:
    assert page(read(folder)) == page(read(folder))


def test_headings_go_down_one_by_one_and_charts_have_a_voice(folder: Path) -> None:
    tags = Tags(page(read(folder)))
    levels = [int(name[1]) for name, _ in tags.found if re.fullmatch(r"h[1-6]", name)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    plots = [a for _, a in tags.found if a.get("class") == "plot"]
    assert len(plots) == 5
    assert all(a["role"] == "img" and a["aria-label"] for a in plots)
    ids = [a["id"] for _, a in tags.found if "id" in a]
    assert len(ids) == len(set(ids))


def test_headline_of_a_run_that_reached(folder: Path) -> None:
    run = read_run(folder)
    words = headline(run)
    best = run.best_baseline
    assert best is not None
    share = 1 - run.energy_j / best.energy_j
    assert words.title.startswith(f"Loss 0.42 reached with {units.energy(run.energy_j)} in ")
    side = "less" if share > 0 else "more"
    assert words.title.endswith(f"{units.percent(share)} {side} energy than the best baseline.")
    assert any(
        f"3 of 3 baselines reached it in time, the best of them, “{best.name}”" in s for s in words.sentences
    )
    assert any("no plan needs less than" in s and f"0.8{units.SPACE}%" in s for s in words.sentences)


def test_headline_of_a_run_that_did_not_reach(tmp_path: Path) -> None:
    words = headline(read(write_run(tmp_path / "run", reached=False, baselines=0)))
    assert words.title.startswith("Loss 0.42 not reached: ")
    assert "the plan is exhausted" in words.sentences[0]


def test_rounds_beyond_the_plan_are_owned_up_to(folder: Path) -> None:
    assert not any("repeated" in s for s in headline(read(folder)).sentences)
    result = json.loads((folder / "result.json").read_text())
    dump(folder / "result.json", {**result, "rounds": 14, "planned_rounds": 6})
    assert (
        "The plan's 6 rounds were not enough: its last round was repeated 8 times."
        in headline(read(folder)).sentences
    )
    with (folder / "events.jsonl").open("a") as events:
        events.write(json.dumps({"round": 7, "time_s": 1.0, "event": "joined", "node": "<b>node</b>"}) + "\n")
    assert (
        "The plan's 6 rounds were not enough: its last team went on for 8 more, joined by <b>node</b>."
        in headline(read(folder)).sentences
    )
    assert "<b>node</b>" not in page(read(folder))


def test_plans_that_were_made_anew_are_told(folder: Path) -> None:
    result = json.loads((folder / "result.json").read_text())
    dump(folder / "result.json", {**result, "rounds": 14, "planned_rounds": 6})

    def told(**event: object) -> tuple[str, ...]:
        with (folder / "events.jsonl").open("a") as events:
            events.write(json.dumps({"time_s": 1.0, **event}) + "\n")
        return headline(read(folder)).sentences

    parted = "The run drifted from the plan; replanned"
    once = told(round=4, event="replanned", rounds=10, energy_j=1.0, until_s=9.0)
    assert f"{parted} once." in once
    assert not any("enough" in sentence for sentence in once)  # the new plan had these rounds
    assert f"{parted} 2 times." in told(round=6, event="replanned", rounds=6, energy_j=1.0, until_s=9.0)
    beyond = told(round=12, event="beyond_plan", loss=0.5)
    assert "The last plan was not enough: its last round was repeated 3 times." in beyond
    joined = told(round=13, event="joined", node="jetson")
    assert "The last plan was not enough: its last team went on for 3 more, joined by jetson." in joined
    assert "replanned 2 times" in page(read(folder))


def test_a_run_in_progress_says_so(tmp_path: Path) -> None:
    text = page(read(write_run(tmp_path / "run", finished=False, baselines=0)))
    assert "In progress: 4 of 6 planned rounds done" in text
    assert "There is no result.json yet" in text


def test_an_infeasible_plan_shows_its_reasons(folder: Path) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    nothing = dict.fromkeys(("energy_j", "lower_bound_j", "gap", "time_s", "loss"))
    proof = {"status": "infeasible", "rounds": [], "reasons": ["no <version> gets there"]}
    bounds = {"best_loss_by_deadline": 0.47, "earliest_time_to_loss_s": 7200.0}
    dump(folder / "none.json", {**plan, **nothing, **proof, **bounds})
    text = page(read(folder / "none.json"))
    assert "No plan reaches loss 0.42 within" in text
    assert "no &lt;version&gt; gets there" in text
    assert "is 0.47" in text
    assert f"2{units.SPACE}h at the earliest" in text


def test_a_plan_for_another_problem_is_pointed_out(folder: Path) -> None:
    plan = json.loads((folder / "plan.json").read_text())
    dump(folder / "plan.json", {**plan, "problem_sha256": "0" * 64})
    assert "the plan was made for another problem" in page(read(folder))


def test_ranks_come_from_the_structures(folder: Path) -> None:
    text = page(read(folder))
    assert (
        '<code>layer3.conv2</code></th><td>192\u00d7192\u00d73\u00d73</td><td><span class="quiet">dense'
        in text
    )
    assert 'style="--share:0.2500">48</span>' in text


def test_script_json_cannot_leave_its_element() -> None:
    text = script_json({"a": "</script><!-- \u2028 &"})
    assert not set(text) & set("<>&\u2028")
    assert json.loads(text) == {"a": "</script><!-- \u2028 &"}


def test_tag_escapes_text_and_attributes() -> None:
    assert tag("p", "<b>", aria_label='"x"').text == '<p aria-label="&quot;x&quot;">&lt;b&gt;</p>'


def test_report_imports_only_what_it_may() -> None:
    source = Path(takifugu.__file__).parent / "report"
    for path in source.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            names += [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            for name in names:
                assert name.split(".")[0] not in ("torch", "numpy"), f"{path} imports {name}"
                if name.startswith("takifugu."):
                    assert name.split(".")[1] in ("report", "structure", "errors", "numbers", "cost_notes"), (
                        f"{path} imports {name}"
                    )


def test_reporting_loads_no_torch(folder: Path) -> None:
    code = (
        "import sys; from takifugu.report.read import read; from takifugu.report.page import page; "
        "page(read(sys.argv[1])); sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code, str(folder)], check=False).returncode == 0


def test_without_plotly_it_says_what_to_install(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(UsageError, match=r"pip install 'takifugu\[report\]'"):
        page(read(folder))


@pytest.mark.parametrize(
    ("shown", "wanted"),
    [
        (units.energy(8493), "8.49 kJ"),
        (units.energy(0.0), "0 J"),
        (units.energy(999.9), "1,000 J"),
        (units.duration(59.94), "59.9 s"),
        (units.duration(429), "7 min 9 s"),
        (units.duration(3599.7), "1 h"),
        (units.duration(7260), "2 h 1 min"),
        (units.amount(10_400_000_000), "10.4 GB"),
        (units.percent(0.0841), "8.4 %"),
        (units.percent(-0.412), "41 %"),
        (units.percent(0.0001), "less than 0.1 %"),
        (units.deviation(97.0, 100.0), f"{units.MINUS}3.0 %"),
        (units.deviation(1.0, None), units.NOTHING),
        (units.loss(0.42), "0.42"),
        (units.loss(0.00012), "1.20e-04"),
    ],
)
def test_units(shown: str, wanted: str) -> None:
    assert shown.replace(units.SPACE, " ") == wanted


def test_whoever_reached_the_target_after_the_deadline_is_late(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run", baselines=3)
    first = read(folder).best_baseline
    assert first is not None
    for path in folder.rglob("result.json"):
        found = json.loads(path.read_text(encoding="utf-8"))
        if abs(found["energy_j"] - first.energy_j) < 1e-9:
            path.write_text(json.dumps({**found, "deadline_met": False}), encoding="utf-8")
    run = read(folder)
    assert run.best_baseline is not None
    assert run.best_baseline.name != first.name
    assert any("2 of 3 baselines reached it in time" in s for s in headline(run).sentences)
    assert ">late<" in page(run)

    own = json.loads((folder / "result.json").read_text(encoding="utf-8"))
    (folder / "result.json").write_text(json.dumps({**own, "deadline_met": False}), encoding="utf-8")
    words = headline(read(folder))
    assert words.title.startswith("Loss 0.42 reached too late: ")
    assert words.tone == "bad"


def test_the_page_says_what_versions_cost(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "run")
    assert "assumed from FLOPs, not measured: speed relative to dense" in page(read(folder))
    problem = json.loads((folder / "problem.json").read_text())
    for node in problem["nodes"]:
        node["samples_per_s"] = {version["name"]: 10.0 for version in problem["versions"]}
    dump(folder / "problem.json", problem)
    shown = page(read(folder))
    assert "assumed from FLOPs" not in shown
    assert "1.00 times the speed of dense by the nodes" in shown
