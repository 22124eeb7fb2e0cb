"""Loaders on small files that the tests write themselves, and on what comes with scikit-learn."""

from __future__ import annotations

import errno
import gzip
import os
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from takifugu.errors import DataError, UsageError
from takifugu.zoo import augment, datasets, downloads


def _idx(array: np.ndarray) -> bytes:
    head = bytes([0, 0, 8, array.ndim]) + b"".join(int(n).to_bytes(4, "big") for n in array.shape)
    return head + array.astype(np.uint8).tobytes()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    rng = np.random.default_rng(0)
    images, labels = rng.integers(0, 256, (5, 28, 28)), np.array([3, 1, 4, 1, 9])
    (tmp_path / "mnist").mkdir()
    (tmp_path / "mnist/train-images-idx3-ubyte").write_bytes(_idx(images))
    (tmp_path / "mnist/train-labels-idx1-ubyte").write_bytes(_idx(labels))
    (tmp_path / "fashion-mnist").mkdir()
    for part in ("train", "t10k"):
        (tmp_path / f"fashion-mnist/{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(_idx(images)))
        (tmp_path / f"fashion-mnist/{part}-labels-idx1-ubyte.gz").write_bytes(gzip.compress(_idx(labels)))
    (tmp_path / "cifar-10-batches-bin").mkdir()
    for batch in range(1, 6):
        rows = rng.integers(0, 256, (2, 3073), dtype=np.uint8)
        rows[:, 0] = batch
        (tmp_path / f"cifar-10-batches-bin/data_batch_{batch}.bin").write_bytes(rows.tobytes())
    (tmp_path / "mnist-writers").mkdir()
    np.save(
        tmp_path / "mnist-writers/mnist_train_writer_hsf.npy", np.array([[1, 0], [2, 0], [1, 4]], np.int32)
    )
    return tmp_path


def test_idx_plain_and_packed(folder: Path) -> None:
    rng = np.random.default_rng(0)
    raw = rng.integers(0, 256, (5, 28, 28))
    for name, mean, deviation in (("mnist", 0.1307, 0.3081), ("fashion-mnist", 0.2860, 0.3530)):
        data = datasets.load(name, folder)
        assert data.inputs.shape == (5, 1, 28, 28)
        assert data.labels.tolist() == [3, 1, 4, 1, 9]
        assert data.facts == datasets.facts(name)
        wanted = (torch.tensor(raw, dtype=torch.float32)[:, None] / 255 - mean) / deviation
        torch.testing.assert_close(data.inputs, wanted)
    assert len(datasets.load("fashion-mnist", folder, part="test").labels) == 5


def test_cifar(folder: Path) -> None:
    data = datasets.load("cifar10", folder)
    assert data.inputs.shape == (10, 3, 32, 32)
    assert data.labels.tolist() == [1, 1, 2, 2, 3, 3, 4, 4, 5, 5]
    raw = np.frombuffer((folder / "cifar-10-batches-bin/data_batch_1.bin").read_bytes(), np.uint8)
    green = (raw[1 + 1024] - 123.0) / 62.1  # the first pixel of the second channel
    assert float(data.inputs[0, 1, 0, 0]) == pytest.approx(green, rel=1e-5)


def test_digits() -> None:
    pytest.importorskip("sklearn")
    data = datasets.load("digits")
    assert data.inputs.shape == (1797, 1, 8, 8)
    assert data.facts == datasets.facts("digits")
    with pytest.raises(DataError, match="no test part"):
        datasets.load("digits", part="test")


def test_writers_of_different_series_are_different_people(folder: Path) -> None:
    first, second, third = datasets.writers(folder)
    assert len({first, second, third}) == 3


def test_where_data_is_looked_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TAKIFUGU_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert datasets.data_folder() == tmp_path / "cache/takifugu"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert datasets.data_folder() == tmp_path / ".cache/takifugu"
    monkeypatch.setenv("TAKIFUGU_DATA", str(tmp_path / "env"))
    assert datasets.data_folder() == tmp_path / "env"
    assert datasets.data_folder("given") == Path("given")


def test_missing_files_are_named_with_their_place(folder: Path) -> None:
    (folder / "mnist/train-labels-idx1-ubyte").unlink()
    with pytest.raises(DataError, match=r"mnist/train-labels-idx1-ubyte is missing: put .* into .*mnist"):
        datasets.load("mnist", folder)
    with pytest.raises(DataError, match="data_batch_1.bin"):
        datasets.load("cifar10", folder / "nowhere")
    with pytest.raises(DataError, match="put the file mnist_train_writer_hsf.npy into"):
        datasets.writers(folder / "nowhere")


@pytest.mark.parametrize(
    ("file", "content", "message"),
    [
        ("mnist/train-images-idx3-ubyte", b"", "not an idx file"),
        ("mnist/train-images-idx3-ubyte", b"\x00\x00\x0d\x03" + bytes(20), "not an idx file"),
        (
            "mnist/train-images-idx3-ubyte",
            _idx(np.zeros((5, 28, 28)))[:-1],
            "promises 3920 bytes, and it has 3919",
        ),
        ("mnist/train-images-idx3-ubyte", _idx(np.zeros((5, 28, 28))) + b"x", "promises 3920 bytes"),
        ("mnist/train-images-idx3-ubyte", bytes([0, 0, 8, 3]) + b"\xff" * 12, "promises .* far too many"),
        (
            "mnist/train-images-idx3-ubyte",
            bytes([0, 0, 8, 3, 0, 16, 0, 0, 0, 16, 0, 0, 0, 0, 0, 9]),
            "far too many",
        ),
        ("mnist/train-images-idx3-ubyte", _idx(np.zeros((5, 9, 9))), "expected images of 28 x 28"),
        ("mnist/train-images-idx3-ubyte", _idx(np.zeros((4, 28, 28))), "do not belong together"),
        ("mnist/train-labels-idx1-ubyte", _idx(np.array([1, 2, 3, 4, 77])), "the label 77"),
        ("cifar-10-batches-bin/data_batch_3.bin", b"short", "not a batch"),
        ("cifar-10-batches-bin/data_batch_3.bin", b"", "not a batch"),
        ("mnist-writers/mnist_train_writer_hsf.npy", b"junk", "cannot be read"),
    ],
)
def test_damaged_files(folder: Path, file: str, content: bytes, message: str) -> None:
    (folder / file).write_bytes(content)
    read = (
        datasets.writers if "writer" in file else partial(datasets.load, file[:5].replace("cifar", "cifar10"))
    )
    with pytest.raises(DataError, match=message):
        read(folder)


def test_other_damage(folder: Path) -> None:
    path = folder / "fashion-mnist/train-images-idx3-ubyte.gz"
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(DataError, match="cannot be read"):
        datasets.load("fashion-mnist", folder)
    content = bytearray(gzip.compress(_idx(np.random.default_rng(0).integers(0, 256, (5, 28, 28)))))
    content[10:40] = b"\xff" * 30  # the stream, not its header
    path.write_bytes(content)
    with pytest.raises(DataError, match="cannot be read"):
        datasets.load("fashion-mnist", folder)
    np.save(folder / "mnist-writers/mnist_train_writer_hsf.npy", np.zeros(5))
    with pytest.raises(DataError, match="two columns of whole numbers"):
        datasets.writers(folder)
    with pytest.raises(UsageError, match="unknown data set 'cifar'; did you mean 'cifar10'"):
        datasets.load("cifar")
    with pytest.raises(UsageError, match="part 'validation'"):
        datasets.load("mnist", part="validation")


def test_a_folder_that_may_not_be_looked_into(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def forbidden(path: Path) -> bool:  # what pathlib does; a root user, who may all, could not see it
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

    monkeypatch.setattr(Path, "is_file", forbidden)
    with pytest.raises(
        DataError, match=r"train-images-idx3-ubyte: cannot be read \(Permission denied\).*--data-dir"
    ):
        datasets.load("mnist", folder)
    with pytest.raises(DataError, match=r"cannot be kept in .*\(Permission denied\).*--data-dir"):
        downloads.fetch("mnist", folder)


def single_numbers() -> tuple[torch.Tensor, torch.Tensor]:
    return torch.tensor(1.0), torch.tensor(1)


def test_a_function_that_gives_single_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets, "named", lambda name: single_numbers)
    with pytest.raises(DataError, match="'mine:numbers' gave single numbers"):
        datasets.load("mine:numbers")


PIXELS = np.arange(0, 240, 10).reshape(6, 1, 2, 2)
LABELS = np.array([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize(
    ("dtype", "expected", "values"),
    [
        (np.float64, torch.float32, PIXELS),
        (">f4", torch.float32, PIXELS),  # the other byte order
        (np.float16, torch.float32, PIXELS),
        (np.uint8, torch.float32, PIXELS / 255.0),  # pixels
        (np.int32, torch.int64, PIXELS),  # indices
        (np.uint16, torch.int64, PIXELS),
    ],
)
def test_a_function_may_return_numpy_arrays(
    monkeypatch: pytest.MonkeyPatch, dtype: Any, expected: torch.dtype, values: Any
) -> None:
    monkeypatch.setattr(
        datasets, "named", lambda name: lambda: (PIXELS.astype(dtype), LABELS.astype(np.uint8))
    )
    data = datasets.load("mine:arrays")
    assert data.inputs.dtype == expected
    assert torch.allclose(data.inputs.double(), torch.from_numpy(values).double(), rtol=1e-6)
    assert data.labels.dtype == torch.int64
    assert data.labels.tolist() == LABELS.tolist()
    assert data.facts == datasets.Facts((1, 2, 2), 3)


@pytest.mark.parametrize(
    ("found", "message"),
    [
        ((PIXELS.astype(str), LABELS), "inputs must be numbers, got an array of dtype <U"),
        ((PIXELS.astype(complex), LABELS), "inputs must be numbers, got an array of dtype complex128"),
        ((PIXELS > 10, LABELS), "inputs must be real numbers, got torch.bool"),
        ((PIXELS.tolist(), LABELS), "inputs must be a tensor or a NumPy array, got list"),
        ((PIXELS, LABELS.astype(float)), "labels must be a list of whole numbers from 0, got torch.float64"),
        ((PIXELS, LABELS - 1), "labels must be a list of whole numbers from 0"),
        ((PIXELS, np.eye(6, dtype=int)), r"labels must be a list .* of shape \(6, 6\)"),
        ((PIXELS, LABELS[:4]), "gave 6 inputs and 4 labels"),
        ((PIXELS, LABELS, LABELS), "must return two tensors or NumPy arrays"),
    ],
)
def test_a_function_that_returns_something_else(
    monkeypatch: pytest.MonkeyPatch, found: Any, message: str
) -> None:
    monkeypatch.setattr(datasets, "named", lambda name: lambda: found)
    with pytest.raises(DataError, match=f"'mine:arrays'.*{message}"):
        datasets.load("mine:arrays")


@pytest.mark.parametrize("name", ["mnist", "fashion-mnist", "cifar10", "digits"])
def test_raw_images_are_bytes_that_normalize_to_what_load_gives(folder: Path, name: str) -> None:
    if name == "digits":
        pytest.importorskip("sklearn")
    raw, data = datasets.load_raw(name, folder), datasets.load(name, folder)
    assert raw.images.dtype == torch.uint8
    assert raw.facts == data.facts == datasets.facts(name)
    assert torch.equal(raw.labels, data.labels)
    mean, deviation = (torch.tensor(t)[:, None, None] for t in (raw.mean, raw.deviation))
    assert torch.equal((raw.images / raw.scale - mean) / deviation, data.inputs)
    assert torch.equal(augment.normalize(raw.images, raw.mean, raw.deviation, raw.scale), data.inputs)


def test_which_have_a_test_part() -> None:
    assert [name for name in datasets.names() if not datasets.has_test(name)] == ["digits"]


def test_a_function_has_no_raw_images() -> None:
    with pytest.raises(UsageError, match="'some.module:function' is a function"):
        datasets.load_raw("some.module:function")
