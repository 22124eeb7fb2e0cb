"""One process of `benchmarks.warmup`'s timing: switches fresh VGG-19s and writes down the seconds."""

from __future__ import annotations

import sys
import time
from pathlib import Path


def main(folder: Path, processes: int, rounds: int, rank: int) -> None:
    import torch
    from torch import distributed
    from torch.nn.parallel import DistributedDataParallel

    import takifugu as tk

    torch.set_num_threads(1)
    store = distributed.FileStore(str(folder / "store"), processes)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=processes)
    seconds = []
    for seed in range(1 + rounds):
        torch.manual_seed(seed)
        model = DistributedDataParallel(tk.zoo.build("vgg19-cifar10"))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model(torch.randn(2, 3, 32, 32)).sum().backward()
        optimizer.step()
        warm = tk.WarmStart(
            rank=0.25, warmup=0, where=tk.zoo.where("vgg19-cifar10"), wrap=DistributedDataParallel
        )
        distributed.barrier()
        began = time.perf_counter()
        model = warm(model, optimizer, epoch=0)
        seconds.append(time.perf_counter() - began)
    (folder / f"{rank}.txt").write_text("\n".join(map(str, seconds[1:])))
    distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
