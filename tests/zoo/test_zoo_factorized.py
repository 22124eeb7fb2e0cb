"""The paper's counts once more, this time of networks that were really factorized."""

from __future__ import annotations

import pytest
import torch

import takifugu as tk

COUNTS = {
    "vgg19-cifar10": (20_560_330, 8_370_634, 0.399, 0.289),
    "resnet18-cifar10": (11_173_834, 3_336_138, 0.555, 0.216),
    "resnet50-imagenet": (25_557_032, 15_202_344, 4.089, 3.572),
    "wide-resnet50-2-imagenet": (68_883_240, 40_047_400, 11.398, 9.947),
    # torch.nn.LSTM keeps two biases per gate: 12,000 more than with one.
    "lstm-wikitext2": (85_974_278, 67_974_278, None, None),
    "transformer-multi30k": (48_978_432, 26_696_192, None, None),
}


@pytest.mark.parametrize("name", tk.zoo.names())
def test_counts_to_the_last_digit_and_macs(name: str) -> None:
    with torch.device("meta"):
        model = tk.zoo.build(name)
        example = tk.zoo.example(name)
    dense, hybrid, dense_gmacs, hybrid_gmacs = COUNTS[name]
    report = tk.factorize_(model, 0.25, where=tk.zoo.where(name), example_input=example)
    assert (report.params_before, report.params) == (dense, hybrid)
    assert not report.left_dense
    if dense_gmacs is not None:
        assert report.macs_before / 1e9 == pytest.approx(dense_gmacs, rel=0.01)
        # ResNet-50's table entry has the stride of the downsample on its second factor; ours has it
        # on the first, as the method says, and computes 1.1% less.
        within = 0.011 if name == "resnet50-imagenet" else 0.01
        assert report.macs / 1e9 == pytest.approx(hybrid_gmacs, rel=within)
