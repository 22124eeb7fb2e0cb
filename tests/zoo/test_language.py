"""A small corpus that the test writes; WikiText-2 itself where it is on this machine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch

from takifugu.errors import DataError, UsageError
from takifugu.zoo import datasets
from takifugu.zoo.language import Language, load_language

TEXT = {
    "train": " \n = A Title = \n the cat sat , the dog <unk> the mat . \n",
    "valid": " the bird sat . \n",
    "test": " a fish \n \n",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "wikitext-2").mkdir()
    for part, text in TEXT.items():
        (tmp_path / f"wikitext-2/{part}.txt").write_text(text)
    return tmp_path


def spelled(language: Language, part: str) -> list[str]:
    return [language.words[number] for number in getattr(language, part)]


def test_numbers_spell_the_text_with_its_line_ends(folder: Path) -> None:
    language = load_language(folder)
    for part, file in (("train", "train"), ("validation", "valid"), ("test", "test")):
        lines = TEXT[file].split("\n")[:-1]
        assert spelled(language, part) == [w for line in lines for w in [*line.split(), "<eos>"]]
        numbers = getattr(language, part)
        assert (numbers.dtype, numbers.dim()) == (torch.long, 1)
    # The words of all parts, in the order they first come in.
    assert language.words[:5] == ("<eos>", "=", "A", "Title", "the")
    assert {"bird", "fish"} < set(language.words)
    assert len(set(language.words)) == len(language.words) == 15


def test_a_smaller_vocabulary_keeps_the_frequent_words(folder: Path) -> None:
    language = load_language(folder, vocabulary=4)
    assert language.words == ("<eos>", "<unk>", "the", "=")
    assert spelled(language, "validation") == ["the", "<unk>", "<unk>", "<unk>", "<eos>"]
    assert len(load_language(folder, vocabulary=1000).words) == 12  # no more than there are in train


def test_a_limit_cuts_the_training_part_only(folder: Path) -> None:
    whole, part = load_language(folder), load_language(folder, limit=7)
    assert spelled(part, "train") == spelled(whole, "train")[:7]
    assert spelled(part, "test") == spelled(whole, "test")


def test_mistakes(folder: Path) -> None:
    with pytest.raises(UsageError, match="vocabulary: 1 words"):
        load_language(folder, vocabulary=1)
    with pytest.raises(UsageError, match="limit: 0 words"):
        load_language(folder, limit=0)
    (folder / "wikitext-2/test.txt").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(DataError, match=r"test\.txt: cannot be read"):
        load_language(folder)
    (folder / "wikitext-2/test.txt").write_bytes(b"")
    with pytest.raises(DataError, match=r"test\.txt: is empty"):
        load_language(folder)
    (folder / "wikitext-2/valid.txt").unlink()
    with pytest.raises(DataError, match=r"valid\.txt is missing: put train\.txt, valid\.txt and test\.txt"):
        load_language(folder)


def test_the_real_corpus_has_its_known_size() -> None:
    data = datasets.data_folder()
    if not (data / "wikitext-2/train.txt").is_file():
        pytest.skip(f"no WikiText-2 in {data}")
    began = time.process_time()
    language = load_language(data)
    assert time.process_time() - began < 3
    assert len(language.words) == 33_278
    assert [len(part) for part in (language.train, language.validation, language.test)] == [
        2_088_628,
        217_646,
        245_569,
    ]
    assert int(language.train.max()) < 33_278
