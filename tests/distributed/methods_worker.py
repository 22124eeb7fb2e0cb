"""One of two real processes: trains with every method and writes down what it finds.

    python methods_worker.py {ddp|fsdp} FOLDER RANK PROCESSES

A finding is one JSON file per method and rank; `test_methods_together.py` judges them.
"""

from __future__ import annotations

import hashlib
import json
import sys
import traceback
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from small_run import SmallRun, count, train_, vgg
from torch import Tensor, distributed, nn
from torch.nn.parallel import DistributedDataParallel

from takifugu import zoo
from takifugu.errors import UsageError
from takifugu.train.methods import method_for

TABLES: dict[str, dict[str, Any]] = {
    "dense": {},
    "warm-start": {"warmup": 1, "rank": 0.25},
    "low-rank": {"rank": 0.25},
    "lottery-ticket": {"rounds": 2, "keep": 0.5},
    "early-bird": {"latest": 1, "keep": 0.6},
}


def digest(tensors: Mapping[str, Tensor]) -> str:
    sha = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        sha.update(name.encode())
        sha.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def under_ddp(kind: str, rank: int) -> dict[str, Any]:
    method = method_for({"kind": kind, **TABLES[kind]}, zoo.where("vgg19-cifar10"))
    model = vgg(seed=0)
    before = count(model)
    method.build_(model)
    first = DistributedDataParallel(model)
    run = SmallRun(first, sharding="ddp", epochs=3, rank=rank, wrapper=DistributedDataParallel)
    train_(run, method)
    assert isinstance(run.model, DistributedDataParallel)
    return {
        "weights": digest(dict(run.module.named_parameters())),
        "state": digest({k: v for k, v in method.state_dict()[1].items() if not k.startswith("rewind/")}),
        "events": [event for event, _ in run.notes],
        "before": before,
        "left": run.notes[-1][1]["params"] if run.notes else before,
        "entries": count(run.module),
        "nonzero": sum(int(p.count_nonzero()) for p in run.module.parameters()),
        "rewrapped": run.model is not first,
        "held": {p for g in run.optimizer.param_groups for p in g["params"]} == set(run.model.parameters()),
        "without_gradient": [name for name, p in run.module.named_parameters() if p.grad is None],
    }


def under_fsdp(kind: str, rank: int) -> dict[str, Any]:
    from torch.distributed.fsdp import fully_shard

    from takifugu.lowrank.sharded import gathered

    def shard(module: nn.Module) -> nn.Module:
        return fully_shard(module)

    method = method_for({"kind": kind, **TABLES[kind]}, zoo.where("vgg19-cifar10"))
    model = vgg(seed=0)
    method.build_(model)
    run = SmallRun(shard(model), sharding="fsdp", epochs=2, rank=rank, wrapper=shard)
    try:
        train_(run, method)
    except UsageError as error:
        return {"refused": str(error)}
    plain = gathered(run.model)
    told = [fields["params"] for _, fields in run.notes]
    return {"weights": digest(dict(plain.named_parameters())), "told": told, "entries": count(plain)}


def main(job: str, folder: Path, rank: int, processes: int) -> None:
    store = distributed.FileStore(str(folder / "store"), processes)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=processes, timeout=timedelta(seconds=60)
    )
    try:
        for kind in TABLES:
            try:
                found = {"ddp": under_ddp, "fsdp": under_fsdp}[job](kind, rank)
            except Exception:
                found = {"exception": traceback.format_exc()}
            (folder / f"{kind}.{rank}.json").write_text(json.dumps(found))
            distributed.barrier()
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
