"""One of two real processes: switches a model in DistributedDataParallel (or fully_shard) without `wrap=`.

    python rebuild_worker.py all FOLDER RANK PROCESSES

A finding is one JSON file per job and rank; test_rebuild.py judges them.
"""

from __future__ import annotations

import inspect
import json
import re
import sys
import traceback
import warnings
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import bf16_compress_hook
from torch.distributed.algorithms.ddp_comm_hooks.powerSGD_hook import PowerSGDState, powerSGD_hook
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import takifugu as tk
from takifugu.lowrank.ddp import options_of

README = Path(__file__).parents[2] / "README.md"


class Net(nn.Module):
    """An MLP with a layer that no input reaches, and a buffer that differs between processes."""

    def __init__(self, unused: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(12, 48), nn.ReLU(), nn.Linear(48, 48), nn.ReLU(), nn.Linear(48, 4)
        )
        self.unused = nn.Linear(3, 3) if unused else nn.Identity()
        self.register_buffer("own", torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.layers(x)
        return output


def step(model: nn.Module, optimizer: torch.optim.Optimizer, seed: int) -> None:
    x = torch.randn(8, 12, generator=torch.Generator().manual_seed(10 * seed + distributed.get_rank()))
    optimizer.zero_grad()
    (model(x) - 1).square().mean().backward()
    optimizer.step()


def weights(model: nn.Module) -> list[float]:
    return [float(p.detach().double().sum()) for p in model.parameters()]


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except tk.TakifuguError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


def readme() -> dict[str, Any]:
    """README's diff as it stands, on a model in DistributedDataParallel."""
    diff = re.search(r"^```diff\n(.*?)^```", README.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert diff is not None
    loop = "".join(line[2:].rstrip("\n") + "\n" for line in diff[1].splitlines())
    ddp = DDP(Net())
    names: dict[str, Any] = {
        "epochs": 13,
        "model": ddp,
        "optimizer": torch.optim.AdamW(ddp.parameters(), lr=1e-2),
        "train_one_epoch": lambda model, optimizer: step(model, optimizer, 1),
    }
    exec(compile(loop, str(README), "exec"), names)
    model = names["model"]
    return {
        "low_rank": [spec.name for spec in tk.structure_of(model.module)],
        "wrapped": isinstance(model, DDP) and model is not ddp,
        "weights": weights(model),
    }


OPTIONS: dict[str, dict[str, Any]] = {
    "defaults": {},
    "unused": {"find_unused_parameters": True},
    "static": {"static_graph": True},
    "view": {"gradient_as_bucket_view": True},
    "buckets": {"bucket_cap_mb": 2**-10},
    "bucket list": {"bucket_cap_mb_list": [2**-10, 2**-9]},
    "buffers": {"broadcast_buffers": False},
    "synced at first": {"forward_sync_buffers": False},
}


def options() -> dict[str, Any]:
    found: dict[str, Any] = {}
    group = distributed.new_group([0, 1])
    known = inspect.signature(DDP.__init__).parameters
    for wrap in (None, DDP):
        for name, asked in OPTIONS.items():
            if not known.keys() >= asked.keys():
                continue  # an older torch
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                old = DDP(Net(name == "unused"), process_group=group, **asked)
            old.module.own.fill_(distributed.get_rank())
            model: nn.Module = old
            seen: list[int] = []
            old.register_forward_hook(lambda module, args, out, seen=seen: seen.append(1))
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
            warm = tk.WarmStart(rank=0.25, warmup=1, wrap=wrap)
            with warnings.catch_warnings():
                warnings.simplefilter("error")
                for epoch in range(3):
                    model = warm(model, optimizer, epoch=epoch)
                    for seed in range(2):
                        step(model, optimizer, seed)
            assert isinstance(model, DDP)
            before, after = options_of(old), options_of(model)
            logged = model._get_ddp_logging_data()
            found[f"{name}, wrap={None if wrap is None else 'DDP'}"] = {
                "same": sorted(before) == sorted(after) and all(before[k] == after[k] for k in before),
                "differ": {k: repr(after[k]) for k in asked if k in after},
                "logged": {k: logged[k] for k in ("find_unused_parameters", "gradient_as_bucket_view")},
                "own": float(model.module.own),
                "hook_calls": len(seen),
                "rank": len(tk.structure_of(model.module)),
                "weights": weights(model),
            }
    return found


def hooks() -> dict[str, Any]:
    calls: list[str] = []

    def counted(state, bucket):  # torch checks annotations, and strings are not what it looks for
        calls.append("call")
        return bf16_compress_hook(state, bucket)

    def trained(attach: Callable[[DDP], object], **options: Any) -> Any:
        model: nn.Module = DDP(Net())
        attach(model)  # type: ignore[arg-type]
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        warm = tk.WarmStart(rank=0.25, warmup=1, **options)
        for epoch in range(2):
            model = warm(model, optimizer, epoch=epoch)
            calls.clear()
            step(model, optimizer, epoch)
        return model

    def halves(model: nn.Module, dtype: torch.dtype) -> bool:
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        return all(torch.equal(g, g.to(dtype).float()) for g in gradients)

    found: dict[str, Any] = {}
    builtin = distributed.BuiltinCommHookType
    model = trained(lambda ddp: ddp.register_comm_hook(distributed.group.WORLD, counted))
    found["python"] = halves(model, torch.bfloat16) and len(calls) > 0
    model = trained(lambda ddp: ddp._register_builtin_comm_hook(builtin.FP16_COMPRESS))
    found["builtin"] = halves(model, torch.float16)
    model = trained(lambda ddp: None)
    found["none"] = not halves(model, torch.float16)

    def power(ddp: DDP) -> None:
        ddp.register_comm_hook(PowerSGDState(None, start_powerSGD_iter=2), powerSGD_hook)

    found["stateful"] = refusal(lambda: trained(power))

    class Attached:
        def attach_(self, ddp: DDP) -> None:
            power(ddp)

    model = trained(power, hook=Attached())
    found["given"] = len(model._comm_hooks)

    class Own(DDP):
        def __init__(self, module: nn.Module) -> None:
            super().__init__(module)

    found["subclass"] = refusal(
        lambda: tk.WarmStart(warmup=0)(Own(Net()), torch.optim.SGD(Net().parameters()), epoch=0)
    )
    ignoring = Net()
    DDP._set_params_and_buffers_to_ignore_for_model(ignoring, ["layers.2.weight"])
    ignoring_ddp = DDP(ignoring)
    found["ignored"] = refusal(
        lambda: tk.WarmStart(warmup=0)(ignoring_ddp, torch.optim.SGD(ignoring_ddp.parameters()), epoch=0)
    )
    return found


def stale() -> dict[str, Any]:
    """The return value is not used: the next call says so, and so does training the old model."""
    found: dict[str, Any] = {}
    for name, wrap in {"ddp": DDP, "fsdp": fully_shard}.items():
        model: Any = wrap(Net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        warm = tk.WarmStart(rank=0.25, warmup=1, wrap=None if wrap is DDP else wrap)
        for epoch in range(2):
            new = warm(model, optimizer, epoch=epoch)
        found[f"{name} trained"] = refusal(lambda model=model, o=optimizer: step(model, o, 0))
        with torch.no_grad():
            found[f"{name} looked at"] = float(model(torch.ones(1, 12)).isfinite().all())
        found[f"{name} called"] = refusal(lambda m=model, o=optimizer, w=warm: w(m, o, epoch=2))
        step(new, optimizer, 0)  # the returned one trains
        found[f"{name} returned"] = warm(new, optimizer, epoch=2) is new
    return found


JOBS = {"readme": readme, "options": options, "hooks": hooks, "stale": stale}


def main(job: str, folder: Path, rank: int, processes: int) -> None:
    store = distributed.FileStore(str(folder / "store"), processes)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=processes, timeout=timedelta(seconds=60)
    )
    try:
        for name in JOBS if job == "all" else [job]:
            try:
                found = JOBS[name]()
            except Exception:
                found = {"exception": traceback.format_exc()}
            (folder / f"{name}.{rank}.json").write_text(json.dumps(found))
            distributed.barrier()
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
