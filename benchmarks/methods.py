"""A training step of VGG-19 (CIFAR) at equal size by every method, and what its own work costs.

All but dense have about as many parameters as the paper's low-rank VGG-19. Nothing is trained before channels
are cut: their scales are drawn at random, so it is the step's time that is compared here, not the quality.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from benchmarks import stage

NAME = "vgg19-cifar10"
TABLES: dict[str, dict[str, Any]] = {
    "dense": {},
    "low-rank": {"rank": 0.25},
    "lottery-ticket": {"rounds": 1, "keep": 0.407},
    "early-bird": {"latest": 1, "keep": 0.407},
}


class Run:
    """As much of a run as the methods need."""

    sharding, epochs, cycle, epoch = "none", 2, 0, 0

    def __init__(self, model: Any) -> None:
        self.model = self.module = model
        self.told: dict[str, Any] = {}
        self.new_optimizer_()

    def wrap(self, module: Any) -> Any:
        return module

    def new_optimizer_(self) -> None:
        import torch

        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1, momentum=0.9, weight_decay=1e-4)

    def note(self, event: str, **fields: Any) -> None:
        self.told = fields


def prepared(kind: str, options: Any) -> tuple[Callable[[], None], dict[str, Any]]:
    """A step of this method once it has made the model small, and figures about that."""
    import torch

    from takifugu import zoo
    from takifugu.train.methods import method_for

    torch.manual_seed(options.seed)
    model = zoo.build(NAME)
    method = method_for({"kind": kind, **TABLES[kind]}, zoo.where(NAME))
    began = time.perf_counter()
    method.build_(model)
    spent = time.perf_counter() - began
    for module in model.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            torch.nn.init.uniform_(module.weight, 0.1, 1.0)
    run = Run(model.to(memory_format=torch.channels_last).train())
    began = time.perf_counter()
    method.before_epoch_(run)
    run.cycle, run.epoch = (1, 0) if kind == "lottery-ticket" else (0, 1)
    method.before_epoch_(run)
    spent += time.perf_counter() - began
    images = torch.randn(options.batch, 3, 32, 32).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (options.batch,))

    def step() -> None:
        loss = torch.nn.functional.cross_entropy(run.model(images), labels)
        run.optimizer.zero_grad()
        loss.backward()
        method.before_step_(run.module)
        run.optimizer.step()
        method.after_step_(run.module)

    entries = sum(parameter.numel() for parameter in model.parameters())
    return step, {"params": run.told.get("params", entries), "entries": entries, "change_s": spent}


def main() -> None:
    options = stage.arguments(__doc__, rounds=7, batch=32)
    made = {kind: prepared(kind, options) for kind in TABLES}
    times = stage.in_turns({kind: step for kind, (step, _) in made.items()}, options.rounds)
    dense = times["dense"]["median_s"]
    result = {
        kind: {**facts, **times[kind], "speed_up": dense / times[kind]["median_s"]}
        for kind, (_, facts) in made.items()
    }
    lines = [
        f"{kind:15} {found['params']:>11,} parameters in {found['entries']:>11,} entries, "
        f"change {found['change_s']:.2f} s, step {1e3 * found['median_s']:.0f} ms ({found['speed_up']:.2f}x)"
        for kind, found in result.items()
    ]
    stage.report("methods", {"network": NAME, "batch": options.batch, "methods": result}, options, lines)


if __name__ == "__main__":
    main()
