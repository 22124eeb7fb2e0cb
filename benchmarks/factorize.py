"""Factorizing VGG-19 (CIFAR): ours against `torch.linalg.svd` layer by layer."""

from __future__ import annotations

import copy

from benchmarks import stage


def main() -> None:
    options = stage.arguments(__doc__, rounds=5)
    import torch

    import takifugu as tk
    from takifugu.lowrank.factorized import Factorized

    torch.manual_seed(options.seed)
    name = "vgg19-cifar10"
    model, where = tk.zoo.build(name), tk.zoo.where(name)
    structure = tk.choose(model, 0.25, where)
    weights = {spec.name: model.get_submodule(spec.name).weight.detach().flatten(1) for spec in structure}
    ranks = {spec.name: spec.rank["weight"] for spec in structure}

    def by_svd() -> dict[str, torch.Tensor]:
        products = {}
        for layer, W in weights.items():
            U, s, V_t = torch.linalg.svd(W, full_matrices=False)
            r, root = ranks[layer], s[: ranks[layer]].sqrt()
            products[layer] = (U[:, :r] * root, root[:, None] * V_t[:r])
        return products

    copies = [copy.deepcopy(model) for _ in range(options.rounds + 1)]
    done = []

    def ours() -> None:
        done.append(copies[len(done)])
        tk.apply_(done[-1], structure)

    times = stage.in_turns({"takifugu": ours, "torch.linalg.svd": by_svd}, options.rounds)
    reference, worst = by_svd(), 0.0
    for layer, W in weights.items():
        made = done[-1].get_submodule(layer)
        assert isinstance(made, Factorized)
        U, V = reference[layer]
        exact = W.double()
        theirs = float((exact - U.double() @ V.double()).norm() / exact.norm())
        found = made.dense_weights(precise=True)["weight"].detach().flatten(1)
        ours_error = float((exact - found).norm() / exact.norm())
        worst = max(worst, ours_error / theirs - 1)
    ratio = times["torch.linalg.svd"]["median_s"] / times["takifugu"]["median_s"]
    result = {
        "network": name,
        "layers": len(weights),
        "times": times,
        "speed_up": ratio,
        "excess_error": worst,
    }
    lines = [
        f"{name}, {len(weights)} layers: takifugu {times['takifugu']['median_s']:.3f} s, torch.linalg.svd "
        f"{times['torch.linalg.svd']['median_s']:.3f} s: {ratio:.2f}x as fast (wanted: 4x)",
        f"reconstruction error above torch.linalg.svd's: {worst:.1e} relative at most (wanted: 1e-4)",
    ]
    stage.report("factorize", result, options, lines)


if __name__ == "__main__":
    main()
