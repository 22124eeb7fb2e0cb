"""What augmentation costs: crop, flip and normalization of CIFAR-sized batches, as a share of a step."""

from __future__ import annotations

from typing import Any

from benchmarks import stage
from benchmarks.step import NAME


def main() -> None:
    options = stage.arguments(__doc__, rounds=9, batch=128, width=32, threads=1)
    import torch

    import takifugu as tk
    from takifugu.zoo import augment

    torch.set_num_threads(options.threads)
    torch.manual_seed(options.seed)
    model = tk.zoo.build(NAME, width=options.width).to(memory_format=torch.channels_last).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    images = torch.randint(0, 256, (options.batch, 3, 32, 32), dtype=torch.uint8)
    ready = augment.normalize(images, (0.5,) * 3, (0.25,) * 3).to(memory_format=torch.channels_last)
    labels = torch.randint(10, (options.batch,))

    def step() -> None:
        loss = torch.nn.functional.cross_entropy(model(ready), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    def prepare() -> None:
        augment.normalize(augment.crop_and_flip(images, options.seed), (0.5,) * 3, (0.25,) * 3)

    variants = {
        "crop and flip": lambda: augment.crop_and_flip(images, options.seed),
        "crop, flip and normalize": prepare,
        "step": step,
    }
    times = stage.in_turns(variants, options.rounds, warm_up=2)
    speeds = {name: options.batch / t["median_s"] for name, t in times.items()}
    share = times["crop, flip and normalize"]["median_s"] / times["step"]["median_s"]
    result: dict[str, Any] = {"network": NAME, "width": options.width, "batch": options.batch}
    result |= {"times": times, "images_per_s": speeds, "share_of_step": share}
    lines = [
        f"{name}: {times[name]['median_s'] * 1e3:.2f} ms for {options.batch} images, {speed:,.0f} images/s"
        for name, speed in speeds.items()
    ]
    lines.append(f"augmentation takes {share:.2%} of a training step (wanted: at most 2%)")
    stage.report("augment", result, options, lines)


if __name__ == "__main__":
    main()
