"""One of two real processes: does a job for every kind of layer and writes down what it finds.

    python worker.py {composed|sharded|switched|switched_in_shards|odd_shards|hooked} FOLDER RANK PROCESSES

A finding is one JSON file per case and rank; the tests beside this file judge them.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
import traceback
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from every_kind import CASES, Case
from torch import Tensor, distributed, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel

import takifugu as tk
from takifugu.lowrank.factorized import Factorized
from takifugu.lowrank.sharded import gathered
from takifugu.lowrank.weight_decay import FrobeniusDecay

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], Optimizer]] = {
    "sgd": lambda parameters: SGD(parameters, lr=0.05, momentum=0.9),
    "adamw": lambda parameters: AdamW(parameters, lr=1e-2),
}
Findings = dict[str, Any]


def data(case: Case, step: int, rank: int) -> tuple[Tensor, ...]:
    return case.example(seed=1000 + 10 * step + rank)


def loss_of(model: nn.Module, inputs: tuple[Tensor, ...]) -> Tensor:
    loss: Tensor = (model(*inputs) - 1.0).square().mean()
    return loss


def train(model: nn.Module, optimizer: Optimizer, batches: Iterable[tuple[Tensor, ...]]) -> list[float]:
    losses = []
    for inputs in batches:
        loss = loss_of(model, inputs)
        losses.append(loss.item())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
    return losses


def digest(model: nn.Module) -> str:
    sha = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        sha.update(name.encode())
        sha.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return sha.hexdigest()


def largest_difference(some: Tensor, other: Tensor) -> float:
    return (some - other).abs().max().item()


# ---- DDP: train, checkpoint, resume, densify -------------------------------------------------------------


def composed(case: Case, rank: int, processes: int, folder: Path) -> Findings:
    return {name: trained_and_resumed(case, name, rank, folder) for name in OPTIMIZERS}


def trained_and_resumed(case: Case, optimizer_name: str, rank: int, folder: Path) -> Findings:
    found: Findings = {}
    build = OPTIMIZERS[optimizer_name]

    def batches(start: int, stop: int) -> list[tuple[Tensor, ...]]:
        return [data(case, step, rank) for step in range(start, stop)]

    model = case.factorized()
    found["start"] = digest(model)
    wrapped = DistributedDataParallel(model, find_unused_parameters=False)
    optimizer = build(model.parameters())
    found["losses"] = train(wrapped, optimizer, batches(0, 3))
    found["without_gradient"] = [
        name for name, p in model.named_parameters() if p.grad is None or not p.grad.abs().max() > 0
    ]
    found["after_3"] = digest(model)
    weights, state = folder / f"{case.name}.{optimizer_name}.safetensors", folder / f"{case.name}.optimizer"
    if rank == 0:
        tk.save(model, weights)
        torch.save(optimizer.state_dict(), state)
    distributed.barrier()

    train(wrapped, optimizer, batches(3, 5))
    found["uninterrupted"] = digest(model)

    fresh = tk.load(weights, case.build(seed=7))
    found["loaded"] = digest(fresh)
    resumed = DistributedDataParallel(fresh)
    optimizer = build(fresh.parameters())
    optimizer.load_state_dict(torch.load(state, weights_only=True))
    train(resumed, optimizer, batches(3, 5))
    found["resumed"] = digest(fresh)
    found["refusal"] = refusal(lambda: tk.factorize_(resumed, rank=0.25))

    inputs = data(case, 99, 0)
    before = fresh(*inputs).detach()
    tk.densify_(fresh)
    found["densified_difference"] = largest_difference(fresh(*inputs).detach(), before)
    found["densified_structure"] = len(tk.structure_of(fresh))
    dense = case.build()
    found["densified_is_plain"] = [type(m).__qualname__ for m in fresh.modules()] == [
        type(m).__qualname__ for m in dense.modules()
    ] and list(fresh.state_dict()) == list(dense.state_dict())
    # It is a model to go on with.
    train(DistributedDataParallel(fresh), build(fresh.parameters()), batches(5, 6))
    found["dense_after_1"] = digest(fresh)
    return found


# ---- FSDP2 -----------------------------------------------------------------------------------------------


def sharded(case: Case, rank: int, processes: int, folder: Path) -> Findings:
    alone = case.factorized()
    batches = [
        tuple(torch.cat(parts) for parts in zip(*(data(case, s, r) for r in range(processes)), strict=True))
        for s in range(3)
    ]
    model = copy.deepcopy(alone)
    start = {name: p.detach().clone() for name, p in alone.named_parameters()}
    train(alone, OPTIMIZERS["sgd"](alone.parameters()), batches)
    wanted = dict(alone.named_parameters())
    return {
        "root": trained_in_shards(case, copy.deepcopy(model), False, wanted, start, rank),
        "each": trained_in_shards(case, model, True, wanted, start, rank),
    }


def trained_in_shards(
    case: Case, model: nn.Module, each: bool, wanted: dict[str, Any], start: dict[str, Tensor], rank: int
) -> Findings:
    """`each`: the factorized layer is sharded on its own, before the rest."""
    found: Findings = {}
    if each:
        for module in [m for m in model.modules() if isinstance(m, Factorized)][:1]:
            fully_shard(module)
    fully_shard(model)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    train(model, optimizer, [data(case, step, rank) for step in range(3)])
    parameters = dict(model.named_parameters())
    found["not_sharded"] = [name for name, p in parameters.items() if not isinstance(p, DTensor)]
    whole = {name: p.full_tensor().detach() for name, p in parameters.items() if isinstance(p, DTensor)}
    found["names"] = sorted(whole) == sorted(wanted)
    moved = {name: largest_difference(whole[name], start[name]) for name in wanted}
    found["still"] = [name for name, distance in moved.items() if distance == 0]
    found["off"] = max(
        largest_difference(whole[name], wanted[name].detach()) / distance if distance else 0.0
        for name, distance in moved.items()
    )
    found["refusals"] = {
        "factorize_": refusal(lambda: tk.factorize_(model, rank=0.25, rerank=True, where="layer")),
        "densify_": refusal(lambda: tk.densify_(model)),
        "save": refusal(lambda: tk.save(model, "never-written.safetensors")),
    }
    dense = case.build()
    fully_shard(dense)
    found["refusals"]["factorize_ dense"] = refusal(lambda: tk.factorize_(dense, rank=0.5, where="layer"))
    # The way out: gather, load into the same structure, densify.
    plain = case.build(seed=7)
    tk.apply_(plain, tk.structure_of(model))
    plain.load_state_dict(whole)
    inputs = data(case, 99, 0)
    found["gathered_difference"] = largest_difference(plain(*inputs).detach(), model(*inputs).detach())
    return found


# ---- the switch in the middle of training -------------------------------------------------------------------


def switched(case: Case, rank: int, processes: int, folder: Path) -> Findings:
    found: Findings = {}
    options = {"where": "layer", "scheme": case.scheme, "force": True}
    model: nn.Module = DistributedDataParallel(case.build())
    optimizer = OPTIMIZERS["adamw"](model.parameters())
    warm = tk.WarmStart(rank=0.5, warmup=3, **options)
    untouched = model.module.head.weight

    # One process finds broken weights: all of them refuse alike, and go on with what they have.
    train(model, optimizer, [data(case, step, rank) for step in range(2)])
    broken = next(iter(model.module.layer.parameters()))
    kept = broken.detach().clone()
    if rank == processes - 1:
        with torch.no_grad():
            broken.fill_(float("nan"))
    early = tk.WarmStart(rank="stable", warmup=0, wrap=DistributedDataParallel, **options)
    found["failure"] = refusal(lambda: early(model, optimizer, step=0))
    found["still_dense"] = len(tk.structure_of(model.module)) == 0
    with torch.no_grad():
        broken.copy_(kept)

    # One process cannot wrap the model again: layers and optimizer go back to what they were.
    def out_of_memory(module: nn.Module) -> nn.Module:
        if rank == processes - 1:
            raise RuntimeError("out of memory")
        return module

    early = tk.WarmStart(rank=0.5, warmup=0, wrap=out_of_memory, **options)
    before, state = digest(model.module), copy.deepcopy(optimizer.state_dict())
    found["failure_on_one"] = refusal(lambda: early(model, optimizer, step=0))
    after = optimizer.state_dict()
    found["undone"] = digest(model.module) == before and after["param_groups"] == state["param_groups"]
    found["undone"] = found["undone"] and str(after["state"]) == str(state["state"])
    train(model, optimizer, [data(case, 2, rank)])

    averages = [AveragedModel(model), AveragedModel(model.module)]
    moments = {key: value.clone() for key, value in optimizer.state[untouched].items()}
    for step in range(3, 6):
        before = model
        model = warm(model, optimizer, step=step, ema=averages)
        if step == 3:
            found["rebuilt"] = model is not before and isinstance(model, DistributedDataParallel)
            found["at_the_switch"] = digest(model.module)
            found["kept"] = all(torch.equal(optimizer.state[untouched][k], v) for k, v in moments.items())
            found["projected"] = len(warm.report.state.projected)
            found["factors"] = len(model.module.layer.factor_parameters())
            alone = copy.deepcopy(model.module)
            error = {layer.name: layer.error for layer in warm.report.layers.layers}
            found["error"] = error["layer"]
        train(model, optimizer, [data(case, step, rank)])
        averages[0].update_parameters(model)
        averages[1].update_parameters(model.module)
    found["three_steps_later"] = digest(model.module)
    gradients = [p.grad.clone() for p in model.parameters()]
    FrobeniusDecay(0.1, where="layer").add_(model)
    found["decayed"] = sum(
        not torch.equal(p.grad, g) for p, g in zip(model.parameters(), gradients, strict=True)
    )
    found["averages"] = [digest(averages[0].module.module), digest(averages[1].module)]
    found["moved"] = digest(alone) != found["three_steps_later"]
    return found


# ---- the switch in the middle of training, FSDP2 ------------------------------------------------------------

SHARDED_OPTIMIZERS: dict[str, tuple[str, Callable[[Iterable[nn.Parameter]], Optimizer]]] = {
    "sgd": ("projected", lambda parameters: SGD(parameters, lr=0.05, momentum=0.9)),
    # A large eps: otherwise Adam turns the rounding of a vanishing gradient into a step.
    "adamw": ("auto", lambda parameters: AdamW(parameters, lr=1e-2, eps=1e-3)),
}


def shard_each(model: nn.Module) -> nn.Module:
    fully_shard(model.layer)
    return fully_shard(model)


def switched_in_shards(case: Case, rank: int, processes: int, folder: Path) -> Findings:
    wraps = {"sgd": fully_shard, "adamw": shard_each}
    return {
        name: one_switch_in_shards(case, name, wraps[name], rank, processes, folder)
        for name in SHARDED_OPTIMIZERS
    }


def one_switch_in_shards(
    case: Case, kind: str, wrap: Callable[[nn.Module], Any], rank: int, processes: int, folder: Path
) -> Findings:
    found: Findings = {}
    way, build = SHARDED_OPTIMIZERS[kind]
    options = {"where": "layer", "scheme": case.scheme, "force": True, "rank": 0.5}

    def together(step: int) -> tuple[Tensor, ...]:
        parts = (data(case, step, r) for r in range(processes))
        return tuple(torch.cat(tensors) for tensors in zip(*parts, strict=True))

    # The same on one process, with everyone's data.
    alone = case.build()
    alone_optimizer = build(alone.parameters())
    alone_warm = tk.WarmStart(warmup=3, state=way, **options)
    start = None
    for step in range(6):
        alone = alone_warm(alone, alone_optimizer, step=step)
        if step == 3:
            start = {name: p.detach().clone() for name, p in alone.named_parameters()}
        train(alone, alone_optimizer, [together(step)])

    model: Any = wrap(case.build())
    optimizer = build(model.parameters())
    train(model, optimizer, [data(case, step, rank) for step in range(2)])

    # One process's part of the weights is broken; then one process cannot shard. Nothing is to change.
    broken: Any = next(iter(model.layer.parameters()))
    kept = broken.to_local().detach().clone()
    if rank == 0:  # with few rows the others may hold nothing
        with torch.no_grad():
            broken.to_local().fill_(float("nan"))
    early = tk.WarmStart(warmup=0, state=way, wrap=wrap, **options)
    found["failure"] = refusal(lambda: early(model, optimizer, step=0))
    with torch.no_grad():
        broken.to_local().copy_(kept)

    def out_of_memory(module: nn.Module) -> nn.Module:
        if rank == processes - 1:
            raise RuntimeError("out of memory")
        return wrap(module)

    followed = {**options, "rank": "stable"}
    early = tk.WarmStart(warmup=0, state=way, wrap=out_of_memory, **followed)
    found["failure_on_one"] = refusal(lambda: early(model, optimizer, step=0))
    found["partly"] = refusal(
        lambda: tk.WarmStart(warmup=0, wrap=shard_the_head_only, **options)(model, optimizer, step=0)
    )
    found["without_wrap"] = refusal(lambda: tk.WarmStart(warmup=0, **options)(model, optimizer, step=0))
    found["still_dense"] = len(tk.structure_of(model)) == 0 and not early.switched
    train(model, optimizer, [data(case, 2, rank)])

    # Stop, and go on from files.
    weights, state = folder / f"{case.name}.{kind}.shards", folder / f"{case.name}.{kind}.state"
    whole_state = get_optimizer_state_dict(model, optimizer, options=WHOLE)
    plain = gathered(model)
    if rank == 0:
        tk.save(plain, weights)
        torch.save(whole_state, state)
    distributed.barrier()
    model = wrap(tk.load(weights, case.build(seed=7)))
    optimizer = build(model.parameters())
    options_in = StateDictOptions(full_state_dict=True)
    set_optimizer_state_dict(model, optimizer, torch.load(state, weights_only=True), options=options_in)

    head = dict(model.named_parameters())["head.weight"]
    moments = {key: local(value).clone() for key, value in optimizer.state[head].items()}
    same_object = optimizer
    warm = tk.WarmStart(warmup=3, state=way, wrap=wrap, **options)
    for step in range(3, 6):
        model = warm(model, optimizer, step=step)
        if step == 3:
            names = dict(model.named_parameters())
            now = optimizer.state[names["head.weight"]]
            found["kept"] = all(torch.equal(local(now[key]), value) for key, value in moments.items())
            found["projected"] = len(warm.report.state.projected)
            found["factors"] = len(model.layer.factor_parameters())
            found["held"] = {p for g in same_object.param_groups for p in g["params"]} == set(names.values())
        train(model, optimizer, [data(case, step, rank)])
    found["not_sharded"] = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
    found["state_not_sharded"] = [
        key
        for entries in optimizer.state.values()
        for key, value in entries.items()
        if key != "step" and isinstance(value, Tensor) and not isinstance(value, DTensor)
    ]
    plain = gathered(model)
    found["three_steps_later"] = digest(plain)
    wanted, now_plain = dict(alone.named_parameters()), dict(plain.named_parameters())
    found["names"] = sorted(wanted) == sorted(now_plain)
    assert start is not None
    far = max(largest_difference(wanted[name], start[name]) for name in wanted)
    found["off"] = max(largest_difference(wanted[name], now_plain[name]) for name in wanted) / far
    inputs = data(case, 99, 0)
    before = model(*inputs).detach()
    tk.densify_(plain)
    found["densified_difference"] = largest_difference(plain(*inputs).detach(), before)
    found["plain_has_no_traces"] = [type(m).__qualname__ for m in plain.modules()] == [
        type(m).__qualname__ for m in case.build().modules()
    ]
    return found


class Odd(nn.Module):
    """What `fully_shard` meets in the wild: tied, frozen and ignored parameters, buffers, users' hooks and lists."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(20, 12)
        self.norm = nn.BatchNorm1d(12)
        self.first = nn.Linear(12, 12)
        self.frozen = nn.Linear(12, 12).requires_grad_(False)
        self.gain = nn.Parameter(torch.ones(12))
        self.decoder = nn.Linear(12, 20, bias=False)
        self.decoder.weight = self.embed.weight
        self.in_a_list = [self.frozen]
        self.seen = [0]
        self.first.register_forward_hook(lambda *_: self.seen.__setitem__(0, self.seen[0] + 1))

    def forward(self, words: Tensor) -> Tensor:
        x = self.norm(self.embed(words))
        return self.decoder(torch.tanh(self.in_a_list[0](self.first(x))) * self.gain)


def odd_shards(case: Case, rank: int, processes: int, folder: Path) -> Findings:
    if case.name != "embedding":
        return {}
    meshes = {
        "all": None,
        "hybrid": init_device_mesh("cpu", (processes, 1), mesh_dim_names=("replicate", "shard")),
        "each for itself": DeviceMesh("cpu", [rank], _init_backend=True),
    }
    return {name: odd_shards_on(mesh, rank) for name, mesh in meshes.items()}


def odd_shards_on(mesh: DeviceMesh | None, rank: int) -> Findings:
    found: Findings = {}

    def wrap(model: Any) -> Any:
        fully_shard(model.frozen, mesh=mesh)
        return fully_shard(model, ignored_params={model.gain}, mesh=mesh)

    model: Any = wrap(Odd())
    old = model
    beside = nn.Parameter(torch.ones(3))
    optimizer = AdamW(
        [
            {"params": [p for p in model.parameters() if p.requires_grad], "lr": 1e-2},
            {"params": [beside], "lr": 0.5},
        ]
    )
    words = torch.randint(20, (8,), generator=torch.Generator().manual_seed(rank))
    warm = tk.WarmStart(
        stages=[(1, 4), (2, 2), (3, None)], where=["embed", "first", "decoder"], force=True, wrap=wrap
    )
    gain = model.gain
    found["structures"] = []
    for step in range(4):
        with torch.no_grad():
            model.eval()(words)  # leaves the root's parameters in one piece
        model.train()
        model = warm(model, optimizer, step=step)
        loss = (model(words).square().mean() - 1) ** 2 + beside.square().sum()
        optimizer.zero_grad()
        loss.backward()
        gain.grad = None  # ignored: nobody averages it
        optimizer.step()
        spec = tk.structure_of(model)
        found["structures"].append([[s.name, s.rank["weight"], s.tie] for s in spec])
    held = [p for group in optimizer.param_groups for p in group["params"]]
    found["held"] = len(held) == len(set(held)) and set(held) == {
        beside, *(p for p in model.parameters() if p.requires_grad)
    }  # fmt: skip
    found["groups"] = [len(group["params"]) for group in optimizer.param_groups]
    found["gain_is_the_same"] = model.gain is gain
    found["tied"] = model.decoder.weight is model.embed.weight
    found["frozen"] = not model.frozen.weight.requires_grad
    found["list_follows"] = model.in_a_list[0] is model.frozen is not old.frozen
    found["hook_calls"] = old.seen[0]  # the hook is a closure over the first object
    found["plain"] = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
    found["whole"] = digest(gathered(model))
    return found


WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def shard_the_head_only(model: nn.Module) -> nn.Module:
    fully_shard(model.head)
    return model


def local(value: Any) -> Any:
    return value.to_local() if isinstance(value, DTensor) else value


# ---- communication hooks ------------------------------------------------------------------------------------


class CountedHook:
    """torch's fp16 compression, and how often each wrapper has used it."""

    def __init__(self) -> None:
        self.calls: list[int] = []

    def attach_(self, model: DistributedDataParallel) -> None:
        self.calls.append(0)

        def counted(group, bucket):  # torch checks annotations, and strings are not what it looks for
            self.calls[-1] += 1
            return fp16_compress_hook(group, bucket)

        model.register_comm_hook(distributed.group.WORLD, counted)


def hooked(case: Case, rank: int, processes: int, folder: Path) -> Findings:
    hook = CountedHook()
    model: Any = DistributedDataParallel(case.build())
    hook.attach_(model)
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    warm = tk.WarmStart(
        stages=[(2, 0.5), (4, None)], where="layer", scheme=case.scheme, force=True,
        wrap=DistributedDataParallel, hook=hook,
    )  # fmt: skip
    for step in range(6):
        model = warm(model, optimizer, step=step)
        train(model, optimizer, [data(case, step, rank)])
    compressed = [p.grad for p in model.parameters()]
    return {
        "calls": hook.calls,
        "halves": all(torch.equal(g, g.half().float()) for g in compressed),
        "at_the_end": digest(model.module),
        "without_ddp": refusal(lambda: tk.WarmStart(warmup=0, hook=hook)(case.build(), optimizer, step=0)),
    }


def refusal(call: Callable[[], object]) -> str:
    try:
        call()
    except tk.TakifuguError as error:
        return f"{type(error).__name__}: {error}"
    return "not refused"


# ---- the process -----------------------------------------------------------------------------------------

JOBS = {
    "composed": composed,
    "sharded": sharded,
    "switched": switched,
    "switched_in_shards": switched_in_shards,
    "odd_shards": odd_shards,
    "hooked": hooked,
}


def main(job: str, folder: Path, rank: int, processes: int) -> None:
    store = distributed.FileStore(str(folder / "store"), processes)
    distributed.init_process_group(
        "gloo", store=store, rank=rank, world_size=processes, timeout=timedelta(seconds=60)
    )
    try:
        for name, case in CASES.items():
            try:
                found = JOBS[job](case, rank, processes, folder)
            except Exception:
                found = {"exception": traceback.format_exc()}
            (folder / f"{name}.{rank}.json").write_text(json.dumps(found))
            distributed.barrier()
    finally:
        distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
