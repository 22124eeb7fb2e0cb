from __future__ import annotations

import copy
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn

import takifugu as tk
from takifugu.errors import CheckpointError
from takifugu.lowrank import checkpoint


def net() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Flatten(), nn.Linear(16 * 36, 32), nn.Linear(32, 4)
    )


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def saved(tmp_path: Path) -> tuple[nn.Module, Path]:
    model = net()
    model(X)  # moves the running statistics
    tk.factorize_(model, 0.25, where=tk.everything)
    tk.save(model, tmp_path / "m.safetensors")
    return model.eval(), tmp_path / "m.safetensors"


def assert_unchanged_by(model: nn.Module, path: Path, message: str) -> None:
    before, modules = copy.deepcopy(model.state_dict()), list(model.modules())
    with pytest.raises(CheckpointError, match=message):
        tk.load(path, model)
    assert list(model.modules()) == modules
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[k], before[k]) for k in before)


def test_a_fresh_dense_model_becomes_the_saved_one(saved) -> None:
    model, path = saved
    fresh = tk.load(path, net()).eval()
    assert tk.structure_of(fresh) == tk.structure_of(model)
    assert torch.equal(fresh(X), model(X))


def test_it_loads_over_any_structure(saved) -> None:
    model, path = saved
    other = net()
    tk.factorize_(other, 0.5, where=["0", "3"])
    assert torch.equal(tk.load(path, other).eval()(X), model(X))
    dense = net()
    tk.save(dense, path)
    again = tk.load(path, model)
    assert tk.structure_of(again).is_dense
    assert torch.equal(again.eval()(X), dense.eval()(X))


def test_the_file_is_as_small_as_the_model_and_has_the_structure_in_its_header(saved) -> None:
    model, path = saved
    payload = sum(t.numel() * t.element_size() for t in model.state_dict().values())
    assert payload < path.stat().st_size < payload + 4096
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    header = json.loads(metadata["takifugu"])
    assert header["format"] == "takifugu.model/1"
    assert tk.Structure.from_dict(header["structure"]) == tk.structure_of(model)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
def test_dtypes_come_back(dtype: torch.dtype, tmp_path: Path) -> None:
    model = net().to(dtype)
    tk.factorize_(model, 0.25, where=tk.everything)
    tk.save(model, tmp_path / "m.safetensors")
    fresh = tk.load(tmp_path / "m.safetensors", net().to(dtype))
    assert all(
        torch.equal(a, b)
        for a, b in zip(fresh.state_dict().values(), model.state_dict().values(), strict=True)
    )


def test_a_lossy_load_is_refused_a_widening_one_is_not(saved) -> None:
    model, path = saved
    assert_unchanged_by(
        net().bfloat16(), path, "is torch.float32 in .* which would lose digits; convert the model first"
    )
    wide = tk.load(path, net().double()).eval()
    torch.testing.assert_close(wide(X.double()).float(), model(X), rtol=1e-4, atol=1e-5)


def test_a_model_on_meta_gets_the_weights(saved) -> None:
    model, path = saved
    with torch.device("meta"):
        hollow = net()
    loaded = tk.load(path, hollow).eval()
    assert torch.equal(loaded(X), model(X))
    # In memory of their own, laid out as torch does it, not somewhere in the file's.
    assert all(tensor.data_ptr() % 64 == 0 for tensor in loaded.state_dict().values())


def test_a_zoo_network_needs_no_model(tmp_path: Path) -> None:
    model = tk.zoo.build("resnet18-cifar10", width=8)
    tk.factorize_(model, 0.25, where=tk.zoo.where("resnet18-cifar10"))
    tk.save(model, tmp_path / "m.safetensors")
    loaded = tk.load(tmp_path / "m.safetensors").eval()
    x = torch.randn(1, 3, 32, 32)
    assert torch.equal(loaded(x), model.eval()(x))


def test_without_a_builder_a_model_is_asked_for(saved) -> None:
    with pytest.raises(CheckpointError, match="does not say how its model is built; pass one"):
        tk.load(saved[1])


@pytest.mark.parametrize("keep", [0, 4, 100, 0.5, 0.999])
def test_truncated(saved, keep: float) -> None:
    _, path = saved
    data = path.read_bytes()
    path.write_bytes(data[: int(keep * len(data)) if isinstance(keep, float) else keep])
    assert_unchanged_by(net(), path, "is damaged or not a safetensors file")


def test_flipping_any_bit_is_noticed(saved) -> None:
    _, path = saved
    data = path.read_bytes()
    for position in [9, 60, len(data) // 3, len(data) // 2, len(data) - 1]:
        path.write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        assert_unchanged_by(net(), path, "damaged|hash|not written by|has been changed|another model")


def rewrite(path: Path, **changes: object) -> None:
    with safe_open(path, framework="pt") as file:
        header, tensors = (
            json.loads(file.metadata()["takifugu"]),
            {k: file.get_tensor(k) for k in list(file.keys())},
        )
    header = {k: v for k, v in {**header, **changes}.items() if v != "gone"}
    if header.get("sha256") == "again":  # someone who knows how
        header["sha256"] = checkpoint._digest(tensors, header)
    save_file(tensors, path, metadata={"takifugu": json.dumps(header)})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"structure": tk.Structure().to_dict()}, "does not match its own hash"),
        ({"builder": {"zoo": "vgg19-cifar10"}}, "does not match its own hash"),
        ({"sha256": "0" * 64}, "does not match its own hash"),
        ({"sha256": "gone"}, r"lacks \['sha256'\] in its header"),
        ({"shared": {"0.u.bias": "absent"}}, "does not match its own hash"),
        ({"format": "pt"}, "was not written by takifugu.save"),
        ({"shared": {"0.u.bias": ["x"]}, "sha256": "again"}, "names tensors it does not hold"),
    ],
)
def test_tampered_headers(saved, changes: dict[str, str], message: str) -> None:
    rewrite(saved[1], **changes)
    assert_unchanged_by(net(), saved[1], message)


def test_foreign_files(tmp_path: Path) -> None:
    assert_unchanged_by(net(), tmp_path / "absent.safetensors", "there is no file")
    (tmp_path / "text").write_text("hello, this is not a model")
    assert_unchanged_by(net(), tmp_path / "text", "is damaged or not a safetensors file")
    save_file(net().state_dict(), tmp_path / "other.safetensors")
    assert_unchanged_by(net(), tmp_path / "other.safetensors", "was not written by takifugu.save")
    torch.save(net().state_dict(), tmp_path / "pickle.pt")
    assert_unchanged_by(net(), tmp_path / "pickle.pt", "is damaged or not a safetensors file")


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (lambda: nn.Sequential(*list(net())[:4]), "made for another model: Sequential has no layer '4'"),
        (
            lambda: nn.Sequential(*net(), nn.BatchNorm1d(4)),
            "made for another model: it lacks '5.weight' and 4 more",
        ),
        (
            lambda: nn.Sequential(nn.Conv2d(3, 16, 3), nn.ReLU(), *list(net())[2:]),
            "it has '1.bias' and 4 more, unknown",
        ),
        (lambda: nn.Sequential(nn.Conv2d(3, 16, 5), *list(net())[1:]), r"\(16, 3, 5, 5\).* in this model"),
        (lambda: nn.Sequential(nn.Conv2d(3, 16, 3, bias=False), *list(net())[1:]), "unknown to the model"),
        (
            lambda: nn.Sequential(*list(net())[:1], nn.BatchNorm2d(17), *list(net())[2:]),
            r"shape \(16,\) in .* and \(17,\) here",
        ),
    ],
)
def test_another_model_is_refused_and_left_alone(saved, other, message: str) -> None:
    assert_unchanged_by(other(), saved[1], message)


def test_saving_where_it_cannot_be_done(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="the folder .* does not exist"):
        tk.save(net(), tmp_path / "nowhere" / "m.safetensors")
    with (
        torch.device("meta"),
        pytest.raises(CheckpointError, match="on the meta device and has no values to save"),
    ):
        tk.save(net(), tmp_path / "m.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_a_failed_save_leaves_the_old_file(saved, monkeypatch: pytest.MonkeyPatch) -> None:
    from takifugu.lowrank import checkpoint

    model, path = saved
    before = path.read_bytes()

    def full_disk(tensors, name, metadata):
        Path(name).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(checkpoint, "save_file", full_disk)
    with pytest.raises(CheckpointError, match="No space left on device"):
        tk.save(model, path)
    assert path.read_bytes() == before
    assert [p.name for p in path.parent.iterdir()] == [path.name]


def test_a_saved_file_has_the_usual_permissions(saved, tmp_path: Path) -> None:
    (tmp_path / "usual").touch()
    assert saved[1].stat().st_mode == (tmp_path / "usual").stat().st_mode


def test_same_model_same_bytes(saved, tmp_path: Path) -> None:
    model, path = saved
    tk.save(model, tmp_path / "again.safetensors")
    assert (tmp_path / "again.safetensors").read_bytes() == path.read_bytes()


def test_options_of_a_builder_that_are_none(tmp_path: Path) -> None:
    tk.save(tk.zoo.build("resnet18-cifar10", width=2), tmp_path / "m.safetensors")
    rewrite(tmp_path / "m.safetensors", builder={"zoo": "resnet18-cifar10", "options": [2]}, sha256="again")
    with pytest.raises(CheckpointError, match="does not say how its model is built"):
        tk.load(tmp_path / "m.safetensors")


def test_two_tensors_do_not_become_one(tmp_path: Path) -> None:
    """The last one read would win, and the model would be another one."""
    tk.save(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), tmp_path / "untied.safetensors")
    tied = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6))
    tied[1].weight = tied[0].weight
    assert_unchanged_by(tied, tmp_path / "untied.safetensors", "'0.weight' and '1.weight' are one tensor in")
    with torch.no_grad():
        tied[0].weight[0, 0] = torch.nan  # which is not equal to itself
    tk.save(tied, tmp_path / "tied.safetensors")
    assert tk.load(tmp_path / "tied.safetensors", tied) is tied


def test_a_type_that_torch_promotes_with_nothing(tmp_path: Path) -> None:
    model, other = nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))
    model.register_buffer("codes", torch.ones(3).to(torch.uint16))
    other.register_buffer("codes", torch.zeros(3, dtype=torch.int32))
    tk.save(model, tmp_path / "m.safetensors")
    assert_unchanged_by(
        other, tmp_path / "m.safetensors", "'codes' is torch.uint16 in .* and torch.int32 here"
    )


# ---- power failures ---------------------------------------------------------------------------------------


def test_the_file_is_on_disk_before_it_takes_the_others_place(tmp_path: Path, monkeypatch) -> None:
    path, log = tmp_path / "m.safetensors", []
    fsync, replace = os.fsync, os.replace

    def traced_fsync(handle: int) -> None:
        place = Path(os.readlink(f"/proc/self/fd/{handle}"))
        log.append(("fsync", "folder" if place == tmp_path else place.suffix, path.exists()))
        fsync(handle)

    def traced_replace(source: Path, target: Path) -> None:
        assert Path(source).stat().st_size > 0
        log.append(("replace", Path(target).name, path.exists()))
        replace(source, target)

    monkeypatch.setattr(os, "fsync", traced_fsync)
    monkeypatch.setattr(os, "replace", traced_replace)
    tk.save(net(), path)
    assert log == [
        ("fsync", ".partial", False),
        ("replace", "m.safetensors", False),
        ("fsync", "folder", True),
    ]


@pytest.mark.parametrize("step", ["write", "fsync", "replace"])
@pytest.mark.parametrize("error", [OSError(28, "no space left on device"), KeyboardInterrupt()], ids=repr)
def test_a_crash_while_saving_leaves_the_old_file(
    step: str, error: BaseException, saved, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, path = saved
    old = path.read_bytes()

    def crash(*args: object, **options: object) -> None:
        if step == "write":  # half a file is there by then
            Path(args[1]).write_bytes(b"half")  # type: ignore[arg-type]
        raise error

    target = {"write": (checkpoint, "save_file"), "fsync": (os, "fsync"), "replace": (os, "replace")}[step]
    monkeypatch.setattr(*target, crash)
    with pytest.raises((CheckpointError, KeyboardInterrupt)):
        tk.save(net(), path)
    assert path.read_bytes() == old
    assert list(path.parent.iterdir()) == [path]
    monkeypatch.undo()
    assert torch.equal(tk.load(path, net()).eval()(X), model(X))
