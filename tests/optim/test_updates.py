"""What rounding does to training: the least-squares study, and that stochastic updates are unbiased."""

from __future__ import annotations

import pytest
import torch

import lowprec.optim as lo
from lowprec import kernels

STEPS = 6000


def _least_squares(update: str, seed: int, dtype: torch.dtype = torch.bfloat16) -> float:
    """Final mean squared error of SGD on y = w.x, d = 10, lr 0.01: the error is w's own, x being standard normal."""
    generator = torch.Generator().manual_seed(seed)
    truth = torch.rand(10, generator=generator) * 100
    data = torch.randn(STEPS, 2, 10, generator=generator)
    w = torch.nn.Parameter(torch.zeros(10, dtype=dtype))
    optimizer = lo.SGD([w], lr=0.01, update=update, seed=seed)
    for x in data:
        w._lowprec_grad = (x @ (w.detach().float() - truth)) @ x / 2
        optimizer.step()
    return float(((optimizer.masters()[w].detach() - truth) ** 2).sum())


def test_nearest_stalls_where_stochastic_and_kahan_go_on() -> None:
    error = {u: _least_squares(u, 0) for u in ("nearest", "stochastic", "kahan")}
    assert error["nearest"] >= 10 * error["stochastic"]
    assert error["nearest"] >= 10 * error["kahan"]
    assert _least_squares("nearest", 0, torch.float32) < 1e-6


@pytest.mark.parametrize("backend", ["native", "reference"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_stochastic_updates_are_unbiased_over_a_million_draws(dtype: torch.dtype, backend: str) -> None:
    if not kernels.available(backend)[0]:
        pytest.skip("no compiled core")
    n, quantum = 1_000_000, 2.0**-8 if dtype == torch.bfloat16 else 2.0**-11
    for share in (0.1, 0.5, 0.9):  # of the distance between two neighbours of 1 - something
        w = torch.nn.Parameter(torch.full((n,), 0.75, dtype=dtype))
        optimizer = lo.SGD([w], lr=1.0, update="stochastic", seed=3)
        w._lowprec_grad = torch.full((n,), -share * quantum)
        with kernels.use(backend):
            optimizer.step()
        moved = (w.detach().double() - 0.75) / quantum
        assert set(moved.unique().tolist()) == {0.0, 1.0}
        deviation = (share * (1 - share) / n) ** 0.5
        assert abs(moved.mean().item() - share) < 4.5 * deviation


def test_draws_differ_by_step_and_parameter_and_not_by_sharding() -> None:
    rows, cols = 16, 256
    grad = torch.full((rows, cols), -0.5 * 2.0**-8)

    def run(first: int, last: int, stream: int, steps: int = 2) -> torch.Tensor:
        w = torch.nn.Parameter(torch.full((last - first, cols), 0.75, dtype=torch.bfloat16))
        w._lowprec_grad, w._lowprec_stream, w._lowprec_offset = grad[first:last].clone(), stream, first * cols
        optimizer = lo.AdamW([w], lr=2.0**-9, update="stochastic", states="8bit", min_quantized=0, weight_decay=0.0)
        for _ in range(steps):
            optimizer.step()
        return torch.cat(
            [w.detach().float(), *[t.float() for t in optimizer.state[w].values() if hasattr(t, "shape")]], 1
        )

    whole = run(0, rows, 0)
    assert torch.equal(whole, torch.cat([run(0, 4, 0), run(4, 12, 0), run(12, 16, 0)]))
    assert not torch.equal(whole, run(0, rows, 1))
    assert not torch.equal(run(0, rows, 0, 1), whole)


def test_kahan_keeps_what_rounding_cuts_off() -> None:
    for residue in (None, torch.float16, torch.float32):
        w = torch.nn.Parameter(torch.ones(8, 64, dtype=torch.bfloat16))
        optimizer = lo.SGD([w], lr=1.0, update="kahan", residue=residue)
        for _ in range(1000):
            w.grad = torch.full_like(w, -(2.0**-12))  # a sixteenth of the distance to the next number
            optimizer.step()
        assert (optimizer.masters()[w] - (1 + 1000 * 2.0**-12)).abs().max() < 2e-3
        assert (w.float() - (1 + 1000 * 2.0**-12)).abs().max() < 2.0**-7


def test_remainder_bits_make_bf16_an_exact_fp32() -> None:
    torch.manual_seed(0)
    a = torch.nn.Parameter(torch.randn(64, 64).bfloat16())
    b = torch.nn.Parameter(a.detach().float())
    one, two = lo.AdamW([a], master="bf16+16"), lo.AdamW([b])
    for _ in range(20):
        b.grad = torch.randn(64, 64)
        a._lowprec_grad = b.grad.clone()
        one.step()
        two.step()
    assert torch.equal(one.masters()[a], b.detach())
    assert (a.float() - b).abs().max() <= b.abs().max() * 2.0**-8


def test_muon_orthogonalises_as_torch_does() -> None:
    muon = getattr(torch.optim, "Muon", None)
    if muon is None:
        pytest.skip("this torch has no Muon")
    torch.manual_seed(0)
    for shape in ((24, 48), (48, 24)):
        a = torch.nn.Parameter(torch.randn(shape))
        b = torch.nn.Parameter(a.detach().clone())
        one, two = lo.Muon([a], lr=0.02), muon([b], lr=0.02)
        for _ in range(10):
            a.grad = torch.randn(shape)
            b.grad = a.grad.clone()
            one.step()
            two.step()
        assert (a - b).abs().max() < 10 * 0.02 * 2.0**-6  # products in bf16: a bf16 ulp of the direction a step
    exact = lo.muon.orthogonalise(torch.randn(20, 30), (3.4445, -4.775, 2.0315), 5, 1e-7, torch.float32)
    values = torch.linalg.svdvals(exact)
    assert values.min() > 0.3 and values.max() < 1.3


def test_lion_follows_its_equations() -> None:
    torch.manual_seed(0)
    w = torch.nn.Parameter(torch.randn(8, 8))
    x, m = w.detach().double(), torch.zeros(8, 8, dtype=torch.float64)
    optimizer = lo.Lion([w], lr=0.01, weight_decay=0.1)
    for _ in range(50):
        g = torch.randn(8, 8)
        w.grad = g
        optimizer.step()
        x = x * (1 - 0.001) - 0.01 * torch.sign(0.9 * m + 0.1 * g)
        m = 0.99 * m + 0.01 * g
    assert (w - x).abs().max() < 1e-5
