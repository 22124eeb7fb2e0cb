"""WikiText-2, word by word, for language models."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from takifugu.errors import DataError, UsageError
from takifugu.zoo.datasets import provided

NAME = "wikitext-2"
END, UNKNOWN = "<eos>", "<unk>"


@dataclass(frozen=True, eq=False)
class Language:
    words: tuple[str, ...]
    """The vocabulary: a word's number is its place."""
    train: Tensor
    validation: Tensor
    test: Tensor
    """The text as words' numbers, one long list."""


def load_language(
    folder: str | Path | None = None, *, vocabulary: int | None = None, limit: int | None = None
) -> Language:
    """All three parts, with an end mark after each line, as the usual baselines read them.

    Args:
        folder: where data sets lie; the default is the cache folder, and what is missing there is fetched.
        vocabulary: keep this many words, the most frequent of the training part; all others become `<unk>`.
            None keeps the words of all parts (33,278). Perplexities compare only at the same vocabulary.
        limit: use only this many words from the beginning of the training part.
    """
    place = provided(NAME, folder)
    train, validation, test = (_read(place / f"{part}.txt") for part in ("train", "valid", "test"))
    if limit is not None:
        if limit < 1:
            raise UsageError(f"limit: {limit} words of WikiText-2; use at least 1")
        train = train[:limit]
    words = _vocabulary((train, validation, test), vocabulary)
    number = {word: i for i, word in enumerate(words)}
    return Language(words, *(_numbers(part, number) for part in (train, validation, test)))


def _read(path: Path) -> list[str]:
    try:
        with path.open(encoding="utf-8") as file:
            words = list(_words(file))
    except FileNotFoundError:
        raise DataError(
            f"{path} is missing: put train.txt, valid.txt and test.txt (the word-level wiki.*.tokens) into "
            f"{path.parent}, or name another folder with --data-dir or TAKIFUGU_DATA"
        ) from None
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); get the file again") from None
    if not words:
        raise DataError(f"{path}: is empty; get the file again")
    return words


def _words(lines: Iterable[str]) -> Iterator[str]:
    for line in lines:
        yield from line.split()
        yield END


def _vocabulary(parts: tuple[list[str], ...], most: int | None) -> tuple[str, ...]:
    if most is None:
        return tuple(dict.fromkeys(word for part in parts for word in part))
    if most < 2:
        raise UsageError(f"vocabulary: {most} words; use at least 2, for {END} and {UNKNOWN}")
    # Words that are equally frequent stay in the order they come in.
    counted = Counter(parts[0])
    frequent = [word for word, _ in counted.most_common() if word not in (END, UNKNOWN)]
    return (END, UNKNOWN, *frequent[: most - 2])


def _numbers(words: list[str], number: dict[str, int]) -> Tensor:
    unknown = number.get(UNKNOWN, 0)
    found = (number.get(word, unknown) for word in words)
    return torch.from_numpy(np.fromiter(found, dtype=np.int64, count=len(words)))
