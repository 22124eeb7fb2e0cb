from __future__ import annotations

import json

import torch
from torch import nn

import takifugu as tk


def test_numbers_add_up_and_the_table_shows_them() -> None:
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.Flatten(),
        nn.Linear(32 * 64, 40),
        nn.Linear(40, 2),
    )
    x = torch.zeros(1, 3, 8, 8)
    dense = sum(p.numel() for p in model.parameters())
    report = tk.factorize_(model, 0.25, where=["0", "3", "4"], example_input=x)
    assert report.params_before == dense
    assert report.params == sum(p.numel() for p in model.parameters())
    assert report.gradient_bytes == 4 * report.params
    buffers = 4 * (32 + 32) + 8  # running mean and variance, and the count of batches
    assert report.payload_bytes == 4 * report.params + buffers
    conv, big, small = report.layers
    assert (conv.params_before, conv.params) == (896, 6 * 27 + 32 * 6 + 32)
    assert (conv.macs_before, conv.macs) == (64 * 864, 64 * (6 * 27 + 32 * 6))
    assert (big.macs_before, big.macs) == (2048 * 40, 10 * (2048 + 40))
    assert report.macs == conv.macs + big.macs + small.macs
    assert report.macs_before == conv.macs_before + big.macs_before + small.macs_before
    assert 0 < conv.error < 1
    text = str(report)
    for shown in (
        "32x3x3x3",
        "40x2048",
        "kxk-1x1",
        "896 -> 386",
        "3,584 -> 1,544",
        f"{dense:,} -> {report.params:,}",
        "3 layers factorized",
    ):
        assert shown in text


def test_to_dict_is_json_and_complete() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(16, 64))
    report = tk.factorize_(model, {"0": 30, "1": 2}, where="*")
    data = json.loads(json.dumps(report.to_dict()))
    assert tk.Structure.from_dict(data["structure"]) == tk.structure_of(model)
    assert data["structure_id"] == tk.structure_of(model).id
    left, done = data["layers"]
    assert left["rank"] is None
    assert left["reason"] == "its factors would cost more (1,920 parameters) than the dense weight (1,024)"
    assert (done["rank"], done["reason"], done["shapes"]) == ({"weight": 2}, None, {"weight": [64, 16]})
    assert (done["params_before"], done["params"], done["gradient_bytes"]) == (1088, 224, 896)
    assert 0 < done["error"] < 1


def test_without_an_example_macs_are_not_invented() -> None:
    report = tk.factorize_(nn.Sequential(nn.Linear(32, 32)), 0.25, where="0")
    assert report.macs is None
    assert report.layers[0].macs is None
    assert "pass example_input= to count MACs" in str(report)
