"""A small corpus that the test writes; Multi30k itself where it is on this machine."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from takifugu.errors import DataError, UsageError
from takifugu.zoo import datasets, translation
from takifugu.zoo.translation import BEGIN, END, PAD, UNKNOWN, Ragged, load_translation

pytest.importorskip("tokenizers")

ENGLISH = ["A man, young, sleeps.", "Two dogs run in the green grass.", 'A woman says "hello" - twice.']
GERMAN = [
    "Ein junger Mann schläft.",
    "Zwei Hunde laufen im grünen Gras.",
    'Eine Frau sagt "Hallo" - zweimal.',
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "multi30k").mkdir()
    for file, count in (("train", 30), ("val", 2), ("test_2016_flickr", 3)):
        for language, lines in (("en", ENGLISH), ("de", GERMAN)):
            chosen = [lines[i % 3] for i in range(count)]
            (tmp_path / f"multi30k/{file}.{language}").write_text("\n".join(chosen) + "\n", encoding="utf-8")
    return tmp_path


def test_sentences_come_back_as_they_were_written(folder: Path) -> None:
    data = load_translation(folder, vocabulary=120)
    assert [len(data.train), len(data.validation), len(data.test)] == [30, 2, 3]
    assert data.decode(data.encode(GERMAN + ENGLISH)) == GERMAN + ENGLISH
    assert data.test.references == tuple(GERMAN)
    rows = data.test.target.padded(torch.arange(3))
    assert data.decode(rows.tolist()) == GERMAN
    for row, length in zip(rows, data.test.target.lengths, strict=True):
        assert row[0] == BEGIN
        assert row[length - 1] == END
        assert (row[length:] == PAD).all()
        assert not (row[:length] == PAD).any()
    sources = data.test.source.padded(torch.tensor([1]))
    assert sources[0].tolist() == [*data.encode(ENGLISH[1:2])[0], END]


def test_one_vocabulary_of_the_size_asked_for(folder: Path) -> None:
    data = load_translation(folder, vocabulary=90)
    assert data.vocabulary == 90
    assert [data.tokenizer.id_to_token(i) for i in range(4)] == ["<pad>", "<bos>", "<eos>", "<unk>"]
    assert data.encode(["漢"])[0][-1] == UNKNOWN
    assert UNKNOWN not in data.encode([*ENGLISH, *GERMAN])[0]
    assert load_translation(folder, vocabulary=100_000).vocabulary < 1000  # there is not more to learn
    assert int(data.train.target.flat.max()) < 90


def test_a_limit_leaves_the_tokenizer_alone(folder: Path) -> None:
    whole, few = load_translation(folder, 100), load_translation(folder, 100, limit=4)
    assert len(few.train) == len(few.train.source) == len(few.train.target) == 4
    assert few.tokenizer.to_str() == whole.tokenizer.to_str()
    assert len(few.test) == 3


def test_the_tokenizer_is_the_same_in_another_process(folder: Path) -> None:
    here = load_translation(folder, 100).tokenizer.to_str()
    (folder / "multi30k/bpe-100.json").unlink()
    code = (
        "import sys; from takifugu.zoo.translation import load_translation as l;"
        "sys.stdout.buffer.write(l(sys.argv[1], 100).tokenizer.to_str().encode())"
    )
    there = subprocess.run([sys.executable, "-c", code, str(folder)], capture_output=True, check=True)
    assert there.stdout.decode() == here


def test_the_kept_tokenizer_is_used_only_if_it_fits(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained = []
    real = translation._trained
    monkeypatch.setattr(translation, "_trained", lambda *a: (trained.append(1), real(*a))[1])

    def trainings(vocabulary: int = 100) -> int:
        trained.clear()
        load_translation(folder, vocabulary)
        return len(trained)

    path = folder / "multi30k/bpe-100.json"
    assert [trainings(), trainings(), trainings(90), trainings(90)] == [1, 0, 1, 0]
    good = path.read_text(encoding="utf-8")
    kept = json.loads(good)
    for damaged in (
        good[:-30],
        "[]",
        json.dumps({**kept, "vocabulary": 90}),
        json.dumps({**kept, "format": "takifugu.bpe/0"}),
        json.dumps({**kept, "tokenizer": kept["tokenizer"].replace("<unk>", "<?>")}),
        json.dumps({**kept, "tokenizer": 5}),
    ):
        path.write_text(damaged, encoding="utf-8")
        assert trainings() == 1
        assert path.read_text(encoding="utf-8") == good
    with (folder / "multi30k/train.en").open("a") as file:
        file.write("One more.\n")
    with (folder / "multi30k/train.de").open("a") as file:
        file.write("Noch einer.\n")
    assert [trainings(), trainings()] == [1, 0]
    assert not [p for p in (folder / "multi30k").iterdir() if p.name.startswith(".")]


def test_a_folder_that_cannot_be_written_is_no_hindrance(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setattr(translation.os, "replace", refuse)
    assert load_translation(folder, 100).vocabulary == 100
    assert not list((folder / "multi30k").glob("*bpe*"))
    assert not list((folder / "multi30k").glob(".*"))


def test_packed_files_are_read_as_they_come(folder: Path) -> None:
    # What the message about a failed download tells people to put there.
    wanted = load_translation(folder, 100)
    for path in sorted((folder / "multi30k").glob("*.en")):
        path.with_name(f"{path.name}.gz").write_bytes(gzip.compress(path.read_bytes()))
        path.unlink()
    found = load_translation(folder, 100)
    assert torch.equal(found.train.source.flat, wanted.train.source.flat)
    packed = folder / "multi30k/val.en.gz"
    packed.write_bytes(packed.read_bytes()[:20])
    with pytest.raises(DataError, match=r"val\.en: cannot be read"):
        load_translation(folder, 100)


def test_mistakes(folder: Path) -> None:
    with pytest.raises(UsageError, match="vocabulary: 4 tokens"):
        load_translation(folder, 4)
    with pytest.raises(UsageError, match="limit: 0 pairs"):
        load_translation(folder, limit=0)
    (folder / "multi30k/val.en").write_text("One.\n")
    with pytest.raises(DataError, match="1 sentences in en and 2 in de"):
        load_translation(folder)
    for language in ("en", "de"):
        (folder / f"multi30k/val.{language}").write_text("")
    with pytest.raises(DataError, match="0 sentences in en and 0 in de; they must be as many, and some"):
        load_translation(folder)
    (folder / "multi30k/val.de").unlink()
    with pytest.raises(DataError, match=r"val\.de is missing: put train\.en, train\.de, val\.en"):
        load_translation(folder)


@given(st.lists(st.lists(st.integers(1, 9), min_size=1), min_size=1, max_size=6), st.data())
def test_ragged_lists_pad_to_the_longest_chosen(sentences: list[list[int]], data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, len(sentences) - 1), min_size=1, max_size=8))
    longest = max(len(sentences[p]) for p in places)
    wanted = [sentences[p] + [0] * (longest - len(sentences[p])) for p in places]
    assert Ragged.of(sentences).padded(torch.tensor(places)).tolist() == wanted


def test_the_real_corpus() -> None:
    data_folder = datasets.data_folder()
    if not (data_folder / "multi30k/train.en").is_file():
        pytest.skip(f"no Multi30k in {data_folder}")
    data = load_translation(data_folder)
    assert data.vocabulary == 9_521
    assert [len(data.train), len(data.validation), len(data.test)] == [29_000, 1_014, 1_000]
    assert data.decode(data.test.target.padded(torch.arange(1000)).tolist()) == list(data.test.references)
