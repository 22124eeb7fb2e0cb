"""Multi30k, English to German, with one byte-pair vocabulary for both languages.

The text keeps its capitals: German nouns have them, and so have the references. BLEU of text that was made
lower-case cannot be compared with BLEU of text as people write it.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import os
import tempfile
import zlib
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from takifugu.errors import DataError, UsageError
from takifugu.zoo.datasets import provided

NAME = "multi30k"
SOURCE, TARGET = "en", "de"
FILES = {"train": "train", "validation": "val", "test": "test_2016_flickr"}
SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
PAD, BEGIN, END, UNKNOWN = range(4)
FORMAT = "takifugu.bpe/1"


@dataclass(frozen=True, eq=False)
class Ragged:
    """Sentences of different lengths in one list."""

    flat: Tensor
    offsets: Tensor
    """Where each begins, and at last where the list ends."""

    @classmethod
    def of(cls, sentences: Sequence[Sequence[int]]) -> Ragged:
        lengths = torch.tensor([0, *map(len, sentences)])
        return cls(torch.tensor([token for s in sentences for token in s]), lengths.cumsum(0))

    def __len__(self) -> int:
        return len(self.offsets) - 1

    @property
    def lengths(self) -> Tensor:
        return self.offsets.diff()

    def padded(self, places: Tensor, pad: int = PAD) -> Tensor:
        """The sentences there (N, longest of them), filled up behind."""
        begin, lengths = self.offsets[places], self.lengths[places]
        steps = torch.arange(int(lengths.max()) if len(places) else 0)
        inside = steps < lengths[:, None]
        tokens = self.flat[(begin[:, None] + steps).clamp(max=len(self.flat) - 1)]
        return torch.where(inside, tokens, pad)


@dataclass(frozen=True, eq=False)
class Pairs:
    source: Ragged
    """Each with its end mark."""
    target: Ragged
    """Each with a mark for its beginning and its end."""
    references: tuple[str, ...]
    """The target sentences as people wrote them."""

    def __len__(self) -> int:
        return len(self.references)


@dataclass(frozen=True, eq=False)
class Translation:
    train: Pairs
    validation: Pairs
    test: Pairs
    tokenizer: Any
    """A `tokenizers.Tokenizer`."""

    @property
    def vocabulary(self) -> int:
        return int(self.tokenizer.get_vocab_size())

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """Token ids without marks."""
        return _encode(self.tokenizer, texts)

    def decode(self, sentences: Sequence[Sequence[int]]) -> list[str]:
        """Text; marks and padding are left out."""
        return list(self.tokenizer.decode_batch([list(s) for s in sentences], skip_special_tokens=True))


def load_translation(
    folder: str | Path | None = None, vocabulary: int = 9_521, *, limit: int | None = None
) -> Translation:
    """All three parts. The tokenizer is trained on the training part of both languages, and kept beside the
    data where that folder can be written to.

    Args:
        folder: where data sets lie; the default is the cache folder, and what is missing there is fetched.
        vocabulary: tokens, four special ones included. A corpus too small for them gives fewer.
        limit: use only this many pairs from the beginning of the training part; the tokenizer sees all.
    """
    if vocabulary <= len(SPECIAL):
        raise UsageError(f"vocabulary: {vocabulary} tokens; use more than the {len(SPECIAL)} special ones")
    if limit is not None and limit < 1:
        raise UsageError(f"limit: {limit} pairs of Multi30k; use at least 1")
    place = provided(NAME, folder)
    texts = {part: _read(place, file) for part, file in FILES.items()}
    tokenizer = _tokenizer(place, texts["train"], vocabulary)
    texts["train"] = (texts["train"][0][:limit], texts["train"][1][:limit])
    train, validation, test = (_pairs(tokenizer, *texts[part]) for part in FILES)
    return Translation(train, validation, test, tokenizer)


def _read(folder: Path, file: str) -> tuple[list[str], list[str]]:
    source, target = (_lines(folder / f"{file}.{language}") for language in (SOURCE, TARGET))
    if len(source) != len(target) or not source:
        raise DataError(
            f"{folder / file}: {len(source)} sentences in {SOURCE} and {len(target)} in {TARGET}; "
            "they must be as many, and some; get the files again"
        )
    return source, target


def _lines(path: Path) -> list[str]:
    try:
        # Not splitlines(): a sentence may hold characters that it takes for the end of a line.
        text = _text(path)
        return [line.strip() for line in text.removesuffix("\n").split("\n")] if text else []
    except FileNotFoundError:
        wanted = ", ".join(f"{file}.{language}" for file in FILES.values() for language in (SOURCE, TARGET))
        raise DataError(
            f"{path} is missing: put {wanted} (plain or .gz) into {path.parent}, "
            "or name another folder with --data-dir or TAKIFUGU_DATA"
        ) from None
    except (OSError, EOFError, zlib.error, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read ({error}); get the file again") from None


def _text(path: Path) -> str:
    """Of the file, or of the same name with .gz, as the site packs it."""
    packed = path.with_name(f"{path.name}.gz")
    if path.exists() or not packed.exists():
        return path.read_text(encoding="utf-8")
    with gzip.open(packed, "rt", encoding="utf-8") as file:
        return file.read()


def _pairs(tokenizer: Any, source: list[str], target: list[str]) -> Pairs:
    return Pairs(
        Ragged.of([[*ids, END] for ids in _encode(tokenizer, source)]),
        Ragged.of([[BEGIN, *ids, END] for ids in _encode(tokenizer, target)]),
        tuple(target),
    )


def _encode(tokenizer: Any, texts: Sequence[str]) -> list[list[int]]:
    return [found.ids for found in tokenizer.encode_batch(list(texts), add_special_tokens=False)]


# ---- the tokenizer ----------------------------------------------------------------------------------------


def _tokenizer(folder: Path, texts: tuple[list[str], list[str]], vocabulary: int) -> Any:
    """The kept one, if it was made of these very texts for this vocabulary; else a new one, which is kept."""
    try:
        from tokenizers import Tokenizer
    except ImportError:
        raise DataError("Multi30k is read with tokenizers; pip install 'takifugu[train]'") from None
    path = folder / f"bpe-{vocabulary}.json"
    made_of = hashlib.sha256("\n".join((*texts[0], *texts[1])).encode()).hexdigest()
    wanted = {"format": FORMAT, "vocabulary": vocabulary, "texts_sha256": made_of}
    kept = _kept(path, wanted)
    if kept is not None:
        return Tokenizer.from_str(kept)
    tokenizer = _trained(texts, vocabulary)
    content = tokenizer.to_str()
    # The folder may be somebody else's: then it is made anew each time, which takes a second or two.
    with suppress(OSError):
        _keep(path, {**wanted, "tokenizer_sha256": _sha256(content), "tokenizer": content})
    return tokenizer


def _kept(path: Path, wanted: dict[str, Any]) -> str | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
        content = found["tokenizer"]
        if any(found[name] != value for name, value in wanted.items()):
            return None
        return content if found["tokenizer_sha256"] == _sha256(content) else None
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None


def _keep(path: Path, content: dict[str, Any]) -> None:
    """Written beside and renamed: other processes see all of it or nothing."""
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}-")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump(content, file, ensure_ascii=False)
        os.replace(temporary, path)
    except BaseException:
        with suppress(OSError):
            os.unlink(temporary)
        raise


def _sha256(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def _trained(texts: tuple[list[str], list[str]], vocabulary: int) -> Any:
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE(unk_token=SPECIAL[UNKNOWN]))
    tokenizer.normalizer = normalizers.NFC()
    # A space belongs to the word behind it, and marks stand alone: decoded text reads as people write it.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Metaspace(), pre_tokenizers.Punctuation("isolated")]
    )
    tokenizer.decoder = decoders.Metaspace()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, special_tokens=list(SPECIAL), show_progress=False, min_frequency=2
    )
    tokenizer.train_from_iterator((line for side in texts for line in side), trainer)
    return tokenizer
