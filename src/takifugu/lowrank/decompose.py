"""Truncated SVD of a weight, split in two balanced factors.

Legend: `W` is m x n, `U` is m x r with orthonormal columns, `s` the singular values, and the two
factors are `A = U sqrt(s)` (m x r) and `B = sqrt(s) V^T` (r x n), so that `A @ B` is the best
rank-r approximation of `W`.

The exact way goes through the Gram matrix of the *small* side in float64. That squares the
condition number, so singular values below about 1e-8 of the largest are lost in rounding. For
weights of 32 bits or fewer this is below what they can hold; where it is not (float64 weights, or
nearly rank-deficient ones) a full SVD takes over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

_CHUNK_ELEMENTS = 1 << 21
"""Columns are taken to float64 in pieces of about this size, so no temporary exceeds the weight."""

_GRAM_DIGITS = 1e-7
"""Below this share of the largest singular value the Gram matrix has no digits left."""

_NEGLIGIBLE = 1e-12
"""Below this share a direction is treated as absent."""


@dataclass(frozen=True)
class Factors:
    """`A @ B` approximates the weight; `error` is relative, in the Frobenius norm."""

    A: Tensor
    B: Tensor
    error: float


Decomposer = Callable[[Tensor, int], Factors]
"""Maps a float matrix and a rank to its two factors, in the matrix's dtype and on its device."""


def exact(W: Tensor, r: int) -> Factors:
    """The best rank-r factors of `W`."""
    work = _workable(W)
    U, s, V_t, energy = _leading_by_gram(work, r)
    if _gram_lost_digits(s, work.dtype):
        U, s, V_t = _leading_by_svd(work, r)
    return balanced(U, s, V_t, energy, like=W)


def randomized(W: Tensor, r: int, *, oversample: int = 16, passes: int = 4, seed: int = 0) -> Factors:
    """Nearly the best factors, for layers whose small side is many thousands wide.

    Subspace iteration (Halko, Martinsson, Tropp 2011, algorithm 4.4) on a seeded random start:
    cost m * n * (r + oversample) per pass instead of min(m, n)^3.
    """
    work = _workable(W)
    W32 = work.float()
    m, n = W32.shape
    width = min(r + oversample, m, n)
    generator = torch.Generator(device="cpu").manual_seed(seed)
    start = torch.randn(n, width, generator=generator, dtype=torch.float32, device="cpu").to(W32.device)
    Q = torch.linalg.qr(W32 @ start).Q
    for _ in range(passes):
        Q = torch.linalg.qr(W32.mT @ Q).Q
        Q = torch.linalg.qr(W32 @ Q).Q
    U_small, s, V_t = torch.linalg.svd((Q.mT @ W32).double(), full_matrices=False)
    U = Q.double() @ U_small[:, :r]
    return balanced(U, s[:r], V_t[:r], _energy(work), like=W)


DECOMPOSERS: dict[str, Decomposer] = {"exact": exact, "randomized": randomized}


def singular_values(W: Tensor) -> Tensor:
    """All singular values of `W` (..., m, n), descending, in float64 on the CPU."""
    if W.dim() > 2:
        return torch.stack([singular_values(block) for block in W])
    work = _workable(W)
    if work.dtype == torch.float64:
        values: Tensor = torch.linalg.svdvals(work).cpu()
        return values
    eigenvalues: Tensor = torch.linalg.eigvalsh(_gram(work if work.shape[0] <= work.shape[1] else work.mT))
    return eigenvalues.flip(-1).clamp_min(0).sqrt().cpu()


def _workable(W: Tensor) -> Tensor:
    """`W` detached, at 32 bits or more, on a device that knows float64."""
    work = W.detach()
    if work.dtype not in (torch.float32, torch.float64):
        work = work.float()
    return work.cpu() if work.device.type == "mps" else work


def _columns(W: Tensor) -> Iterator[tuple[int, int]]:
    step = max(1, _CHUNK_ELEMENTS // W.shape[0])
    for start in range(0, W.shape[1], step):
        yield start, min(start + step, W.shape[1])


def _gram(W: Tensor) -> Tensor:
    """`W W^T` in float64."""
    G = torch.zeros(W.shape[0], W.shape[0], dtype=torch.float64, device=W.device)
    for start, stop in _columns(W):
        part = W[:, start:stop].double()
        G.addmm_(part, part.mT)
    return G


def _energy(W: Tensor) -> float:
    return float(sum(float(W[:, a:b].double().square().sum()) for a, b in _columns(W)))


def _leading_by_gram(W: Tensor, r: int) -> tuple[Tensor, Tensor, Tensor, float]:
    m, n = W.shape
    if m > n:
        U, s, V_t, energy = _leading_by_gram(W.mT, r)
        return V_t.mT, s, U.mT, energy
    G = _gram(W)
    eigenvalues, vectors = torch.linalg.eigh(G)
    U = vectors[:, -r:].flip(-1)
    s = eigenvalues[-r:].flip(-1).clamp_min(0).sqrt()
    # U^T W = diag(s) V^T exactly for the U we have, whatever the rounding in s.
    projected = torch.empty(r, n, dtype=torch.float64, device=W.device)
    for start, stop in _columns(W):
        projected[:, start:stop] = U.mT @ W[:, start:stop].double()
    floor = float(s[0]) * _NEGLIGIBLE + torch.finfo(torch.float64).tiny
    return U, s, projected / s.clamp_min(floor)[:, None], float(G.diagonal().sum())


def _gram_lost_digits(s: Tensor, dtype: torch.dtype) -> bool:
    largest, smallest = float(s[0]), float(s[-1])
    if largest == 0:
        return True
    # For float64 weights the values themselves should be good to more than half the digits.
    return smallest < largest * (1e-4 if dtype == torch.float64 else _GRAM_DIGITS)


def _leading_by_svd(W: Tensor, r: int) -> tuple[Tensor, Tensor, Tensor]:
    U, s, V_t = torch.linalg.svd(W.double(), full_matrices=False)
    return U[:, :r], s[:r], V_t[:r]


def balanced(U: Tensor, s: Tensor, V_t: Tensor, energy: float, *, like: Tensor) -> Factors:
    """Singular vectors and values as two factors of `like`'s dtype; `energy` is the whole weight's."""
    sign = _signs(U)
    U, V_t = U * sign, V_t * sign[:, None]
    present = s > s[0] * _NEGLIGIBLE if float(s[0]) > 0 else torch.zeros_like(s, dtype=torch.bool)
    root = s.sqrt()
    # A direction the weight does not have would be zero in both factors, and so would its two
    # gradients, for ever. One side keeps a unit direction: the product is the same, and it can learn.
    typical = float(root[present].median()) if bool(present.any()) else like.shape[1] ** -0.25
    A = U * torch.where(present, root, torch.zeros_like(root))
    B = V_t * torch.where(present, root, torch.full_like(root, typical))[:, None]
    lost = max(0.0, energy - float(s.square().sum()))
    error = (lost / energy) ** 0.5 if energy > 0 else 0.0
    return Factors(A.to(like), B.to(like), error)


def _signs(U: Tensor) -> Tensor:
    """Fixes each pair's sign: the first of the (nearly) largest entries of a column is positive."""
    size = U.abs()
    near_largest = size >= size.amax(dim=0) * (1 - 1e-3)
    leading = U.gather(0, near_largest.to(torch.int8).argmax(dim=0, keepdim=True))[0]
    return torch.where(leading < 0, -1.0, 1.0).to(U.dtype)
