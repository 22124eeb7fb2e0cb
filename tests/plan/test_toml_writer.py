from __future__ import annotations

import tomllib
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from takifugu.plan.problem import Problem
from takifugu.plan.toml_writer import toml

TEXT = st.text("aé\"\\\n\t\x00\x7f.='# ", max_size=6)
SCALARS = st.booleans() | st.integers(-(2**62), 2**62) | st.floats(allow_nan=False) | TEXT
VALUES = st.recursive(
    SCALARS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXT, inner, max_size=3),
    max_leaves=12,
)


@settings(deadline=None)
@given(st.dictionaries(TEXT, VALUES, max_size=5))
def test_what_is_written_reads_back(data: dict[str, object]) -> None:
    assert tomllib.loads(toml(data)) == data


def test_a_problem_survives(example: Path, tmp_path: Path) -> None:
    problem = Problem.load(example)
    path = tmp_path / "again.toml"
    path.write_text(toml(problem.to_dict()))
    assert Problem.load(path) == problem
    text = path.read_text()
    assert "[[versions]]" in text
    assert "[versions.curve]" in text


def test_none_is_left_out() -> None:
    assert toml({"a": None, "b": {"c": None, "d": 1}}) == "[b]\nd = 1\n"
