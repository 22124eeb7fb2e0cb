"""The loss and accuracy of a model on data it does not train on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from takifugu.errors import DataError
from takifugu.train.round import Loss, Samples


@dataclass(frozen=True)
class Score:
    loss: float
    accuracy: float


def evaluate(model: nn.Module, data: Samples, loss: Loss = cross_entropy, batch_size: int = 512) -> Score:
    """Mean loss and share of right answers, in evaluation mode; the model is left as it was."""
    if not len(data):
        raise DataError("there are no samples to evaluate on; raise [workload].validation")
    modes = {module: module.training for module in model.modules()}
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    total = right = 0.0
    model.eval()
    try:
        with torch.no_grad():
            for inputs, labels in zip(
                data.inputs.split(batch_size), data.labels.split(batch_size), strict=True
            ):
                labels = labels.to(device)
                outputs = model(inputs.to(device))
                total += float(loss(outputs, labels)) * len(labels)
                right += float((outputs.argmax(dim=1) == labels).sum())
    finally:
        for module, mode in modes.items():
            module.training = mode
    return Score(total / len(data), right / len(data))
