from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from takifugu.errors import StructureError
from takifugu.structure import LayerSpec, Structure

counts = st.integers(1, 4096)
specs = st.builds(
    LayerSpec,
    name=st.text(min_size=1, max_size=12),
    kind=st.sampled_from(["linear", "conv2d", "lstm"]),
    scheme=st.sampled_from(["uv", "kxk-1x1"]),
    rank=st.dictionaries(st.text(min_size=1, max_size=5), counts, min_size=1, max_size=3),
    shapes=st.dictionaries(st.text(min_size=1, max_size=5), st.lists(counts, min_size=1, max_size=4).map(tuple), min_size=1),
)  # fmt: skip
structures = st.lists(specs, max_size=4, unique_by=lambda spec: spec.name).map(lambda s: Structure(tuple(s)))


@settings(max_examples=100, deadline=None)
@given(structures)
def test_json_round_trip_keeps_content_and_id(structure: Structure) -> None:
    again = Structure.from_json(structure.to_json())
    assert again == structure
    assert again.id == structure.id
    assert Structure.from_json(structure.to_json(indent=2)).id == structure.id
    assert hash(again) == hash(structure)


LINEAR = LayerSpec("fc", "linear", "uv", {"weight": 4}, {"weight": (8, 16)})


def test_the_id_is_the_contents() -> None:
    ids = {
        Structure().id,
        Structure((LINEAR,)).id,
        Structure((LayerSpec("fc", "linear", "uv", {"weight": 5}, {"weight": (8, 16)}),)).id,
        Structure((LayerSpec("fd", "linear", "uv", {"weight": 4}, {"weight": (8, 16)}),)).id,
        Structure((LINEAR, LayerSpec("g", "linear", "uv", {"weight": 4}, {"weight": (8, 16)}, tie="fc"))).id,
    }
    assert len(ids) == 5
    # A change of the format would orphan every file out there: the id of a known structure is pinned.
    assert Structure((LINEAR,)).id == "45312418abee390b"


def test_order_of_ranks_does_not_matter() -> None:
    one = LayerSpec("a", "attention", "uv", {"q": 1, "k": 2}, {"w": (2, 2)})
    two = LayerSpec("a", "attention", "uv", {"k": 2, "q": 1}, {"w": (2, 2)})
    assert Structure((one,)).id == Structure((two,)).id


def test_look_up() -> None:
    structure = Structure((LINEAR,))
    assert "fc" in structure
    assert structure["fc"] is LINEAR
    assert structure.get("nothing") is None
    assert (len(structure), list(structure), structure.is_dense) == (1, [LINEAR], False)
    assert Structure().is_dense


def test_files(tmp_path) -> None:
    Structure((LINEAR,)).save(tmp_path / "s.json")
    assert Structure.load(tmp_path / "s.json") == Structure((LINEAR,))
    with pytest.raises(StructureError, match="cannot read structure"):
        Structure.load(tmp_path / "absent.json")
    with pytest.raises(StructureError, match="cannot write structure"):
        Structure((LINEAR,)).save(tmp_path / "absent" / "s.json")


def broken(**changes: object) -> str:
    layer = {**LINEAR.to_dict(), **changes}
    return json.dumps(
        {"format": "takifugu.structure/1", "layers": [{k: v for k, v in layer.items() if v != "gone"}]}
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("not json", "not valid JSON"),
        ("[]", "expected an object, got list"),
        ('{"format": "other"}', "structure.format: expected 'takifugu.structure/1', got 'other'"),
        ('{"format": "takifugu.structure/1", "layers": 3}', "structure.layers: expected a list"),
        ('{"format": "takifugu.structure/1", "layers": [], "x": 1}', "unknown field 'x'"),
        ('{"format": "takifugu.structure/1", "layers": [4]}', r"structure.layers\[0\]: expected an object"),
        (broken(rank={"weight": 0}), r"structure.layers\[0\].rank: expected positive integers"),
        (broken(rank={"weight": True}), r"rank: expected positive integers"),
        (broken(rank={}), r"rank: expected positive integers"),
        (broken(shapes={"weight": [2.5]}), r"shapes: expected lists of positive integers"),
        (broken(name=""), r"name: expected a non-empty string"),
        (broken(kind="gone"), r"kind: expected a non-empty string, got None"),
        (broken(tie=4), r"tie: expected a layer name"),
        (broken(extra=1), r"unknown field 'extra'"),
        (broken(tie="absent"), "is tied to 'absent', which must be listed before it"),
    ],
)
def test_bad_text(text: str, message: str) -> None:
    with pytest.raises(StructureError, match=message):
        Structure.from_json(text)


def test_a_layer_twice() -> None:
    with pytest.raises(StructureError, match="layer 'fc' is listed twice"):
        Structure((LINEAR, LINEAR))


def test_no_torch_needed() -> None:
    code = "import sys, takifugu.structure; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
