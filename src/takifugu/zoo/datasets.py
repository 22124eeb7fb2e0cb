"""Data sets by name: digits (of scikit-learn), mnist, fashion-mnist, cifar10, or the user's own function.

Files are looked for in a folder the user names, in `TAKIFUGU_DATA`, or in the user's cache folder. What is
missing is fetched into the cache folder, never into one the user named: there an error says which files
belong where. Room rules: this room knows no training, so a data set is two plain tensors and what is known
about them.
"""

from __future__ import annotations

import gzip
import math
import os
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from takifugu.errors import DataError, UsageError, near_misses
from takifugu.named import named
from takifugu.zoo import downloads, sites

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    Raw = tuple[NDArray[np.uint8], NDArray[np.int64]]

WRITERS = "mnist-writers"
_LARGEST_BYTES = 1 << 30
"""More than any file of these data sets has: a header that promises more is damaged."""


@dataclass(frozen=True)
class Facts:
    """What a model must know of the data: the shape of one input, and how many labels there are."""

    shape: tuple[int, ...]
    classes: int


@dataclass(frozen=True, eq=False)
class Dataset:
    inputs: Tensor
    labels: Tensor
    classes: int

    @property
    def facts(self) -> Facts:
        return Facts(tuple(self.inputs.shape[1:]), self.classes)


@dataclass(frozen=True, eq=False)
class RawImages:
    """Images as they are stored: a quarter of the memory, and what augmentation works on."""

    images: Tensor
    """Bytes, (N, channels, height, width)."""
    labels: Tensor
    classes: int
    mean: tuple[float, ...] = (0.0,)
    deviation: tuple[float, ...] = (1.0,)
    """Of each channel, once the images are divided by `scale`."""
    scale: float = 255.0

    @property
    def facts(self) -> Facts:
        return Facts(tuple(self.images.shape[1:]), self.classes)


@dataclass(frozen=True)
class _Source:
    facts: Facts
    files: Mapping[str, tuple[str, ...]]
    """By part: train, test."""
    read: Callable[[Path, tuple[str, ...]], Raw]
    mean: tuple[float, ...]
    deviation: tuple[float, ...]
    """Of each channel over the training images, scaled to 0..1: what networks are usually fed with."""


def names() -> tuple[str, ...]:
    return ("digits", *_SOURCES)


def data_folder(folder: str | Path | None = None) -> Path:
    """Where data sets lie: the folder given, else TAKIFUGU_DATA, else the user's cache folder."""
    if (chosen := _chosen_folder(folder)) is not None:
        return chosen
    cache = os.environ.get("XDG_CACHE_HOME")
    return (Path(cache) if cache else Path.home() / ".cache") / "takifugu"


def _chosen_folder(folder: str | Path | None) -> Path | None:
    if folder is not None:
        return Path(folder)
    chosen = os.environ.get("TAKIFUGU_DATA")
    return Path(chosen) if chosen else None


def provided(name: str, folder: str | Path | None = None) -> Path:
    """The folder of a data set's files. What is missing is fetched, unless the user named the folder."""
    if _chosen_folder(folder) is None:
        downloads.fetch(name, data_folder())
    return data_folder(folder) / sites.SITES[name].folder


def facts(name: str) -> Facts | None:
    """What is known of a data set without reading it; None for the user's own."""
    if name == "digits":
        return Facts((1, 8, 8), 10)
    if name in _SOURCES:
        return _SOURCES[name].facts
    if ":" in name:
        return None
    raise UsageError(
        f"unknown data set {name!r}{near_misses(name, names())}; there are {', '.join(names())}, "
        "or package.module:function"
    )


def load(name: str, folder: str | Path | None = None, part: str = "train") -> Dataset:
    """Inputs as float tensors, labels as whole numbers."""
    import torch

    _check(part)
    if facts(name) is None:
        return _own(name)
    raw = load_raw(name, folder, part)
    per_channel = (1, -1, 1, 1)
    mean = torch.tensor(raw.mean).view(per_channel)
    deviation = torch.tensor(raw.deviation).view(per_channel)
    # In place: the larger data sets fill hundreds of megabytes.
    inputs = raw.images.float()
    inputs.div_(raw.scale).sub_(mean).div_(deviation)
    return Dataset(inputs, raw.labels, raw.classes)


def load_raw(name: str, folder: str | Path | None = None, part: str = "train") -> RawImages:
    """Images as bytes, with what it takes to normalize them."""
    import torch

    _check(part)
    if facts(name) is None:
        raise UsageError(f"{name!r} is a function, which gives tensors and no raw images; use load")
    if name == "digits":
        return _digits(part)
    source = _SOURCES[name]
    images, labels = source.read(provided(name, folder), source.files[part])
    pixels = torch.from_numpy(images).reshape(-1, *source.facts.shape)
    return RawImages(pixels, torch.from_numpy(labels), source.facts.classes, source.mean, source.deviation)


def has_test(name: str) -> bool:
    """Whether the data set comes with a part for testing."""
    return name in _SOURCES


def _check(part: str) -> None:
    if part not in ("train", "test"):
        raise UsageError(f"part {part!r} of a data set; one of train, test")


def writers(folder: str | Path | None = None) -> NDArray[np.int64]:
    """Who wrote each of MNIST's 60,000 training digits (QMNIST's table: writer and series of forms)."""
    import numpy as np

    path = data_folder(folder) / WRITERS / "mnist_train_writer_hsf.npy"
    if not path.is_file():
        raise DataError(f"who wrote MNIST's digits is not known: put the file {path.name} into {path.parent}")
    try:
        table = np.load(path, allow_pickle=False)
    except (OSError, ValueError) as error:
        raise DataError(f"{path}: cannot be read ({error}); get the file again") from None
    if table.ndim != 2 or table.shape[1] != 2 or table.dtype.kind not in "iu":
        raise DataError(
            f"{path}: expected two columns of whole numbers (writer, series), got {table.dtype} "
            f"of shape {table.shape}; get the file again"
        )
    # A writer's number is unique only together with the series of forms.
    who, series = table.astype(np.int64).T
    return np.asarray(series * (who.max(initial=0) + 1) + who)


# ---- the data sets ----------------------------------------------------------------------------------------


def _own(name: str) -> Dataset:
    """The user's own function: it returns inputs and labels."""
    import torch

    function = named(name)
    try:
        found = function() if callable(function) else function
    except TypeError as error:  # as for models: most often a function that wants arguments
        raise DataError(f"{name!r} cannot be called: {error}") from error
    if not (isinstance(found, (tuple, list)) and len(found) == 2):
        raise DataError(
            f"{name!r} must return two tensors or NumPy arrays, inputs and labels; "
            f"it returned {type(found).__name__}"
        )
    inputs, labels = (_tensor(name, what, one) for what, one in zip(("inputs", "labels"), found, strict=True))
    if not inputs.dim() or not labels.dim():
        raise DataError(
            f"{name!r} gave single numbers; inputs and labels are lists, one entry for each sample"
        )
    if len(inputs) != len(labels) or not len(labels):
        raise DataError(f"{name!r} gave {len(inputs)} inputs and {len(labels)} labels; they must be as many")
    whole = labels.dtype in (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
    if not whole or labels.dim() != 1 or int(labels.min()) < 0:
        raise DataError(
            f"{name!r}: labels must be a list of whole numbers from 0, got {labels.dtype} "
            f"of shape {tuple(labels.shape)}"
        )
    return Dataset(model_inputs(inputs, repr(name)), labels.long(), int(labels.max()) + 1)


def _tensor(name: str, what: str, found: object) -> Tensor:
    """A tensor or NumPy array as a tensor; anything else is a `DataError`."""
    import numpy as np
    import torch

    if isinstance(found, torch.Tensor):
        return found.detach()
    if not isinstance(found, np.ndarray):
        raise DataError(
            f"{name!r}: {what} must be a tensor or a NumPy array, got {type(found).__name__}; "
            "convert it with numpy.asarray"
        )
    if found.dtype.kind not in "biuf":
        raise DataError(
            f"{name!r}: {what} must be numbers, got an array of dtype {found.dtype}; "
            "convert it, e.g. to float32"
        )
    if found.dtype.kind == "u" and found.dtype.itemsize > 1:  # torch computes with few unsigned types
        found = found.astype(np.int64)
    elif found.dtype.kind == "f" and found.dtype.itemsize > 8:
        found = found.astype(np.float64)
    # In the machine's byte order and contiguous: torch takes no other arrays.
    return torch.from_numpy(np.ascontiguousarray(found, dtype=found.dtype.newbyteorder("=")))


def model_inputs(inputs: Tensor, whose: str) -> Tensor:
    """Inputs in the type a network takes.

    Floating-point numbers become float32. Bytes are taken for pixels and become float32 from 0 to 1, as in
    torchvision's ToTensor. Other whole numbers become int64: they are indices, for embeddings.
    """
    import torch

    if inputs.is_floating_point():
        return inputs.float()
    if inputs.dtype == torch.uint8:
        return inputs.float().div_(255.0)
    if inputs.dtype in (torch.int8, torch.int16, torch.int32, torch.int64):
        return inputs.long()
    raise DataError(f"{whose}: inputs must be real numbers, got {inputs.dtype}; convert them to float32")


def _digits(part: str) -> RawImages:
    """1797 real handwritten digits of 8 x 8 pixels."""
    import torch

    if part != "train":
        raise DataError("digits has no test part; hold some of it back with [workload].validation")
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise DataError("digits come with scikit-learn; pip install 'takifugu[demo]'") from None
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.uint8)[:, None]
    return RawImages(images, torch.tensor(bunch.target, dtype=torch.long), 10, scale=16.0)


def _find(folder: Path, wanted: tuple[str, ...]) -> list[Path]:
    found = []
    for name in wanted:
        try:
            path = next((p for p in (folder / name, folder / f"{name}.gz") if p.is_file()), None)
        except OSError as error:  # a folder that may not be looked into
            raise DataError(
                f"{folder / name}: cannot be read ({error.strerror}); mend the permissions, "
                "or name another folder with --data-dir or TAKIFUGU_DATA"
            ) from None
        if path is None:
            raise DataError(
                f"{folder / name} is missing: put {', '.join(wanted)} (plain or .gz) into {folder}, "
                "or name another folder with --data-dir or TAKIFUGU_DATA"
            )
        found.append(path)
    return found


def _content(path: Path, at_most: int) -> bytes:
    """The file's bytes, unpacked; never more than one beyond what is expected."""
    try:
        with path.open("rb") as raw:
            file = gzip.GzipFile(fileobj=raw) if path.suffix == ".gz" else raw
            return file.read(at_most + 1)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError(f"{path}: cannot be read ({error}); get the file again") from None


def _read_idx(folder: Path, files: tuple[str, ...]) -> Raw:
    """Yann LeCun's idx format: a magic number, the sizes, the bytes."""
    import numpy as np

    images_path, labels_path = _find(folder, files)
    images, labels = _idx(images_path, 3), _idx(labels_path, 1)
    if len(images) != len(labels):
        raise DataError(
            f"{images_path} has {len(images)} images, {labels_path} {len(labels)} labels; "
            "they do not belong together"
        )
    if images.shape[1:] != (28, 28):
        raise DataError(f"{images_path}: expected images of 28 x 28, got {images.shape[1:]}")
    return images, _labels(labels_path, labels.astype(np.int64))


def _idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    import numpy as np

    header = 4 + 4 * dimensions
    start = _content(path, header)[:header]
    if len(start) < header or start[:4] != bytes([0, 0, 8, dimensions]):
        raise DataError(f"{path}: is not an idx file of bytes in {dimensions} dimensions; get the file again")
    shape = tuple(int.from_bytes(start[i : i + 4], "big") for i in range(4, header, 4))
    size = math.prod(shape)
    if size > _LARGEST_BYTES:
        raise DataError(f"{path}: its header promises {size} bytes, far too many; get the file again")
    content = _content(path, header + size)
    if len(content) != header + size:
        raise DataError(
            f"{path}: its header promises {size} bytes, and it has {len(content) - header}; "
            "get the file again"
        )
    return np.frombuffer(bytearray(content), dtype=np.uint8, offset=header).reshape(shape)


def _read_cifar(folder: Path, files: tuple[str, ...]) -> Raw:
    """CIFAR-10's binary version: a byte for the label, 3072 for the image, red, green and blue."""
    import numpy as np

    rows = []
    for path in _find(folder, files):
        content = np.frombuffer(_content(path, 3073 * 10_000), dtype=np.uint8)
        if not len(content) or len(content) % 3073 or len(content) > 3073 * 10_000:
            raise DataError(f"{path}: is not a batch of CIFAR-10's binary version; get the file again")
        rows.append(content.reshape(-1, 3073))
    table = np.concatenate(rows)
    return np.ascontiguousarray(table[:, 1:]), _labels(folder, table[:, 0].astype(np.int64))


def _labels(path: Path, labels: NDArray[np.int64]) -> NDArray[np.int64]:
    if len(labels) and labels.max() > 9:
        raise DataError(f"{path}: has the label {labels.max()}, and there are ten from 0; get the file again")
    return labels


_IDX = {
    "train": ("train-images-idx3-ubyte", "train-labels-idx1-ubyte"),
    "test": ("t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"),
}
_CIFAR = {"train": tuple(f"data_batch_{i}.bin" for i in range(1, 6)), "test": ("test_batch.bin",)}

_SOURCES: Mapping[str, _Source] = {
    "mnist": _Source(Facts((1, 28, 28), 10), _IDX, _read_idx, (0.1307,), (0.3081,)),
    "fashion-mnist": _Source(Facts((1, 28, 28), 10), _IDX, _read_idx, (0.2860,), (0.3530,)),
    "cifar10": _Source(
        Facts((3, 32, 32), 10),
        _CIFAR,
        _read_cifar,
        (125.3 / 255, 123.0 / 255, 113.9 / 255),
        (63.0 / 255, 62.1 / 255, 66.7 / 255),
    ),
}
