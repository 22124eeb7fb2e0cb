from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from takifugu.lowrank import decompose
from takifugu.lowrank.decompose import exact, randomized, singular_values


def matrix(m: int, n: int, seed: int, dtype: torch.dtype = torch.float32, decay: float = 0.0) -> torch.Tensor:
    """A random matrix whose singular values fall off as exp(-decay * i)."""
    generator = torch.Generator().manual_seed(seed)
    W = torch.randn(m, n, generator=generator, dtype=torch.float64)
    if decay:
        U, s, V_t = torch.linalg.svd(W, full_matrices=False)
        W = U @ torch.diag(torch.exp(-decay * torch.arange(len(s), dtype=torch.float64))) @ V_t
    return W.to(dtype)


@settings(max_examples=60, deadline=None)
@given(
    m=st.integers(1, 40), n=st.integers(1, 40), share=st.floats(0.05, 1.0), seed=st.integers(0, 99),
    decay=st.sampled_from([0.0, 0.3, 2.0]), dtype=st.sampled_from([torch.float32, torch.float64]),
)  # fmt: skip
def test_best_error_balanced_and_signed(
    m: int, n: int, share: float, seed: int, decay: float, dtype: torch.dtype
) -> None:
    W = matrix(m, n, seed, dtype, decay)
    r = max(1, int(share * min(m, n)))
    factors = exact(W, r)
    assert (factors.A.shape, factors.B.shape, factors.A.dtype) == ((m, r), (r, n), dtype)
    # No rank-r matrix is closer than the truncated SVD (Eckart and Young).
    s = torch.linalg.svdvals(W.double())
    best = float(s[r:].norm() / s.norm())
    off = float((W.double() - factors.A.double() @ factors.B.double()).norm() / W.double().norm())
    digits = 1e-6 if dtype == torch.float32 else 1e-12
    assert off <= best + digits
    assert factors.error == pytest.approx(best, abs=1e-7)
    # Split by sqrt(S): both sides carry the singular values.
    present = s[:r] > s[0] * 1e-6
    for side in (factors.A.double().norm(dim=0), factors.B.double().norm(dim=1)):
        torch.testing.assert_close(side.square()[present], s[:r][present], rtol=1e-4, atol=1e-9)


@pytest.mark.parametrize("way", [exact, randomized])
def test_two_runs_agree_also_after_a_perturbation(way: decompose.Decomposer) -> None:
    W = matrix(30, 50, 3, torch.float64, decay=0.3)
    first, second = way(W, 8), way(W + 1e-10 * matrix(30, 50, 4, torch.float64), 8)
    tolerance = 1e-6 if way is exact else 1e-3
    torch.testing.assert_close(first.A, second.A, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(first.B, second.B, rtol=tolerance, atol=tolerance)


def test_the_sign_convention_is_that_of_the_negated_matrix_too() -> None:
    W = matrix(12, 9, 0, torch.float64)
    plus, minus = exact(W, 4), exact(-W, 4)
    torch.testing.assert_close(plus.A, minus.A)
    torch.testing.assert_close(plus.B, -minus.B)


@pytest.mark.parametrize("rank", [3, 10])
def test_small_singular_values_fall_back_to_a_full_svd(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    # Condition number 1e10: its square is beyond float64, so the Gram matrix alone would be wrong.
    W = matrix(10, 14, 0, torch.float64, decay=23 / 9)
    used = []
    full = decompose._leading_by_svd
    monkeypatch.setattr(decompose, "_leading_by_svd", lambda *a: used.append(1) or full(*a))
    factors = exact(W, rank)
    assert bool(used) == (rank == 10)
    s = torch.linalg.svdvals(W)
    assert float((W - factors.A @ factors.B).norm()) <= float(s[rank:].norm()) * (1 + 1e-6) + 1e-14
    torch.testing.assert_close(factors.A.norm(dim=0) ** 2, s[:rank], rtol=1e-6, atol=0)


def test_well_conditioned_weights_need_no_full_svd(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decompose, "_leading_by_svd", lambda *a: pytest.fail("needless"))
    exact(matrix(64, 100, 0), 16)
    exact(matrix(100, 64, 0), 64)


@pytest.mark.parametrize("shape", [(6, 8), (8, 6)])
def test_directions_a_weight_does_not_have_can_still_learn(shape: tuple[int, int]) -> None:
    for W in (torch.zeros(shape), torch.ones(shape)):
        factors = exact(W, 4)
        torch.testing.assert_close(factors.A @ factors.B, W, rtol=1e-5, atol=1e-6)
        A, B = factors.A.requires_grad_(), factors.B.requires_grad_()
        ((A @ B) * matrix(*shape, 1)).sum().backward()
        moving = (A.grad.norm(dim=0) > 1e-4) | (B.grad.norm(dim=1) > 1e-4)
        assert moving.all(), "a direction is zero on both sides: it would stay dead for ever"


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_any_dtype_comes_back_as_it_was(dtype: torch.dtype) -> None:
    W = matrix(20, 12, 0, dtype)
    factors = exact(W, 12)
    assert factors.A.dtype == factors.B.dtype == dtype
    off = (factors.A.double() @ factors.B.double() - W.double()).norm() / W.double().norm()
    assert off < 8 * torch.finfo(dtype).eps


def test_randomized_is_close_to_best_and_repeatable() -> None:
    W = matrix(300, 400, 0, decay=0.02)
    best, found, again = exact(W, 40), randomized(W, 40), randomized(W, 40)
    assert found.error <= best.error * 1.01
    real = float((W.double() - found.A.double() @ found.B.double()).norm() / W.double().norm())
    assert found.error == pytest.approx(real, rel=1e-3)
    assert torch.equal(found.A, again.A)
    assert torch.equal(found.B, again.B)


def test_singular_values_of_a_stack() -> None:
    W = torch.stack([matrix(9, 5, seed) for seed in range(3)])
    torch.testing.assert_close(singular_values(W), torch.linalg.svdvals(W.double()), rtol=1e-5, atol=1e-6)
    assert singular_values(W.mT).shape == (3, 5)


def test_no_temporary_is_much_larger_than_the_weight() -> None:
    """A long, thin matrix: anything of the long side squared would be 400 times the weight."""
    W = torch.randn(64, 200_000, dtype=torch.bfloat16)
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            for t in out if isinstance(out, tuple | list) else [out]:
                if isinstance(t, torch.Tensor):
                    largest = max(largest, t.numel() * t.element_size())
            return out

    with Watch():
        exact(W, 8)
    assert largest <= 4 * W.numel() * W.element_size()


def test_the_randomized_way_does_not_depend_on_the_default_device() -> None:
    W = torch.randn(30, 20)
    wanted = randomized(W, 4)
    with torch.device("meta"):  # as a user's torch.set_default_device("cuda")
        assert torch.equal(randomized(W, 4).A, wanted.A)
