from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import takifugu as tk
from takifugu.cli import Exit, main
from takifugu.errors import TakifuguWarning


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_help_and_version(capsys) -> None:
    code, out, _ = run(capsys, "--help")
    assert code == Exit.OK
    assert "inspect" in out
    assert "demo" in out
    assert run(capsys, "--version")[:2] == (0, f"takifugu {tk.__version__}\n")


def test_help_of_every_command_needs_no_torch() -> None:
    code = (
        "import sys\nfrom takifugu.cli import main\n"
        "codes = [main([*c.split(), '--help']) for c in ('', 'inspect', 'demo', 'plan')]\n"
        "sys.exit('torch' in sys.modules or any(codes))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False, capture_output=True).returncode == 0


def test_the_installed_command_runs() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "takifugu", "--version"], capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith("takifugu ")


@pytest.fixture
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (tmp_path / "mine_for_inspect.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def build(): return nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(), nn.Linear(8 * 36, 16))\n"
        "def with_example(): return build(), torch.zeros(2, 3, 8, 8)\n"
        "def number(): return 3\n"
        "def of_width(width): return nn.Linear(width, width)\n"
        "def half(): return build().half()\n"
        "model = nn.Sequential(nn.Linear(16, 16))\n"
    )
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_inspect_shows_spectra_ranks_and_costs(capsys, own_module: Path) -> None:
    code, out, err = run(capsys, "inspect", "mine_for_inspect:with_example", "--rank", "0.5", "--all")
    assert (code, err) == (0, "")
    for shown in ("singular values", "stable", "8x3x3x3", "█", "MACs", "2 layers factorized"):
        assert shown in out


def test_inspect_leaves_first_and_output_layer_dense_and_warns_if_nothing_is_left(
    capsys, own_module: Path
) -> None:
    with pytest.warns(TakifuguWarning, match="no layer becomes low-rank"):
        code, out, _ = run(capsys, "inspect", "mine_for_inspect:with_example")
    assert code == 0
    assert "left: the output layer stays dense by default" in out
    done = subprocess.run(
        [sys.executable, "-m", "takifugu", "inspect", "mine_for_inspect:with_example"],
        capture_output=True, text=True, check=True, cwd=own_module,
    )  # fmt: skip
    assert done.stderr.startswith("takifugu: warning: no layer becomes low-rank")


def macs(capsys: pytest.CaptureFixture[str], *arguments: str) -> int:
    code, out, err = run(capsys, "inspect", *arguments, "--json", "--all")
    assert (code, err) == (0, "")
    count: int = json.loads(out)["macs_before"]
    return count


def test_inspect_counts_at_the_shape_given_also_of_a_zoo_network(capsys) -> None:
    target = ("resnet18-cifar10", "--where", "layer4.1.conv2")
    assert macs(capsys, *target, "--shape", "1,3,64,64") > 3.9 * macs(capsys, *target)


def test_the_shape_is_of_the_models_dtype(capsys, own_module: Path) -> None:
    assert macs(capsys, "mine_for_inspect:half", "--shape", "1,3,8,8") == 36 * 216 + 8 * 36 * 16


def test_inspect_json_is_the_report_and_the_spectra(capsys, own_module: Path) -> None:
    code, out, _ = run(
        capsys,
        "inspect",
        "mine_for_inspect:build",
        "--rank",
        "energy:0.9",
        "--shape",
        "1,3,8,8",
        "--json",
        "--all",
    )
    data = json.loads(out)
    assert code == 0
    assert data["rank_rule"] == "energy:0.9"
    linear = data["spectra"]["2"]["weight"]
    assert data["layers"][1]["rank"] in (None, {"weight": linear["rank_90"]})
    assert linear["full_rank"] == 16
    assert linear["curve"][0] == 1.0
    assert data["macs_before"] == 36 * 216 + 8 * 36 * 16


def test_inspect_narrowed_and_with_weights(capsys, own_module: Path) -> None:
    import mine_for_inspect

    model = mine_for_inspect.build()
    tk.factorize_(model, 2, where="2")
    tk.save(model, "w.safetensors")
    code, out, _ = run(
        capsys, "inspect", "mine_for_inspect:build", "--where", "2", "--weights", "w.safetensors", "--json"
    )
    data = json.loads(out)
    assert code == 0
    assert list(data["spectra"]) == ["2"]
    assert data["spectra"]["2"]["weight"]["rank_99"] <= 2  # the saved weight has rank 2
    assert data["layers"][0]["error"] < 1e-4


def test_inspect_a_zoo_network_defaults_to_the_papers_layers(capsys) -> None:
    code, out, _ = run(capsys, "inspect", "resnet18-cifar10", "--json")
    assert code == 0
    assert json.loads(out)["params"] == 3_336_138


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["inspect", "resnet18-cifar"], "package.module:callable; did you mean 'resnet18-cifar10'"),
        (["inspect", "no_such_module:build"], "cannot import 'no_such_module'"),
        (["inspect", "mine_for_inspect:biuld"], "'mine_for_inspect' has no 'biuld'; did you mean 'build'"),
        (["inspect", "mine_for_inspect:number"], "gave a int; it must return a torch.nn.Module"),
        (["inspect", "mine_for_inspect:of_width"], "called without arguments, but it has a missing a required argument: 'width'"),
        (["inspect", "lstm-wikitext2", "--shape", "3,3"], "--shape is for networks that take one image"),
        (["inspect", "mine_for_inspect:build", "--seed", "99999999999999999999"], "Invalid value for '--seed'"),
        (["inspect", "mine_for_inspect:build", "--rank", "0"], "rank 0 is less than 1"),
        (["inspect", "mine_for_inspect:build", "--rank", "big"], "rank 'big' is not understood"),
        (["inspect", "mine_for_inspect:build", "--where", "conv"], "matches no layer"),
        (["inspect", "mine_for_inspect:build", "--shape", "1,x"], "--shape '1,x' is not a list of positive integers"),
        (["inspect", "mine_for_inspect:build", "--weights", "none.safetensors"], "there is no file"),
        (["inspect"], "Missing "),
        (["inspct"], "No such command"),
        (["demo", "--switch", "--warmup", "10", "--epochs", "10"], "--warmup 10 leaves no low-rank epoch of 10"),
    ],
)  # fmt: skip
def test_wrong_usage_is_exit_2_and_says_what_to_do(
    capsys, own_module: Path, arguments: list[str], message: str
) -> None:
    code, out, err = run(capsys, *arguments)
    assert code == Exit.USAGE
    assert message in err
    assert out == ""
    assert "Traceback" not in err


def test_interruption_is_exit_130(capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    from takifugu import zoo

    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(zoo, "build", stop)
    code, _, err = run(capsys, "inspect", "resnet18-cifar10")
    assert (code, err) == (Exit.INTERRUPTED, "takifugu: interrupted\n")


def test_demo_of_the_switch_trains_for_real(capsys, tmp_path: Path) -> None:
    pytest.importorskip("sklearn")
    code, out, err = run(
        capsys,
        "demo",
        "--switch",
        "--epochs",
        "4",
        "--warmup",
        "2",
        "--folder",
        str(tmp_path / "d"),
        "--json",
    )
    result = json.loads(out)
    assert code == 0
    assert result["low_rank"]["accuracy"] > 0.8
    assert result["dense"]["accuracy"] > 0.8
    assert result["low_rank"]["parameters"] == 837_546
    assert result["loaded_model_agrees"] is True
    assert json.loads((tmp_path / "d" / "result.json").read_text()) == result
    assert "layer4.1.conv2" in (tmp_path / "d" / "layers.txt").read_text()
    assert "low-rank: epoch 2: 14 layers factorized" in err
