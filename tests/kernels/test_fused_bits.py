"""Softmax, loss and norms: native equals the reference bit for bit, on every instruction set and thread count."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor

from lowprec import kernels
from lowprec.kernels import loss, norm, softmax
from lowprec.kernels.reference.lanes import exp
from lowprec.kernels.softmax import Tile

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
pytestmark = pytest.mark.skipif(not kernels.available("native")[0], reason="needs the native core")


@pytest.fixture(params=kernels.native_core().isas() if kernels.available("native")[0] else [])
def isa(request: pytest.FixtureRequest) -> Iterator[None]:
    core = kernels.native_core()
    before = core.isa()
    core.set_isa(request.param)
    yield
    core.set_isa(before)


def same(run: Callable[[], tuple[Tensor, ...]]) -> None:
    with kernels.use("reference"):
        expected = run()
    threads = torch.get_num_threads()
    for n in (1, 2):
        torch.set_num_threads(n)
        with kernels.use("native"):
            found = run()
        torch.set_num_threads(threads)
        for a, b in zip(found, expected):
            assert a.dtype == b.dtype
            assert torch.equal(a.isnan(), b.isnan())
            assert torch.equal(a.nan_to_num(0.0, 9.0, -9.0), b.nan_to_num(0.0, 9.0, -9.0))


def wild(*shape: int, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Ordinary values with a few huge, tiny (subnormal) and zero ones."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(*shape, generator=g)
    x[torch.rand(*shape, generator=g) < 0.02] *= 1e-40
    x[torch.rand(*shape, generator=g) < 0.02] *= 50
    return x.to(dtype)


def test_exp_is_within_one_ulp() -> None:
    x = torch.cat([torch.linspace(-87, 88, 400001), torch.randn(100000), -torch.rand(100000) * 1e-3])
    true = x.double().exp()
    ulp = torch.exp2(torch.floor(torch.log2(true)) - 23)
    assert ((exp(x).double() - true).abs() / ulp).max() < 1.0
    edge = exp(torch.tensor([-float("inf"), -87.5, float("nan"), float("inf"), 0.0]))
    assert edge[:2].tolist() == [0, 0]
    assert bool(edge[2].isnan())
    assert edge[3] == exp(torch.tensor([88.0]))[0]
    assert edge[4] == 1


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("shape", "causal", "first"), [((3, 5, 7), False, 0), ((2, 33, 50), True, 4), ((2, 70, 64), True, 0)]
)
def test_softmax(shape: tuple[int, int, int], causal: bool, first: int, dtype: torch.dtype) -> None:
    scores = wild(*shape, dtype=dtype) * 3
    grad = wild(*shape, dtype=dtype, seed=1)
    for mask in (None, wild(shape[0], 1, shape[2], dtype=torch.float32, seed=2).expand(shape)):
        tile = Tile(0.37, causal, first, mask)

        def run(tile: Tile = tile) -> tuple[Tensor, ...]:
            lse = torch.empty(shape[0], shape[1] + 2)[:, 1:-1]
            p = softmax.forward(tile, scores, lse, torch.empty_like(scores))
            q, ds = torch.zeros(2, shape[0], shape[1], shape[2] + 3, dtype=dtype)[..., : shape[2]]
            softmax.backward(tile, scores, lse, grad, q, ds)
            return p, lse, q, ds

        same(run)


def test_softmax_rows_that_see_nothing_are_zero() -> None:
    scores, mask = torch.randn(1, 2, 20), torch.full((1, 2, 20), -float("inf"))
    mask[0, 1] = 0
    lse = torch.empty(1, 2)
    p = softmax.forward(Tile(1.0, mask=mask), scores, lse, torch.empty_like(scores))
    assert p[0, 0].abs().sum() == 0
    assert lse[0, 0] == float("inf")
    torch.testing.assert_close(p[0, 1], scores[0, 1].softmax(0))
    q, ds = torch.empty(2, 1, 2, 20)
    softmax.backward(Tile(1.0, mask=mask), scores, lse, torch.ones(1, 2, 20), q, ds)
    assert q[0, 0].abs().sum() == 0
    assert ds[0, 0].abs().sum() == 0


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("cols", [1, 15, 17, 256, 1001])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_loss(cols: int, smoothing: float, dtype: torch.dtype) -> None:
    logits = wild(37, cols, dtype=dtype)
    target = torch.randint(0, cols, (37,), generator=torch.Generator().manual_seed(3))
    target[5] = -100

    def run() -> tuple[Tensor, ...]:
        losses, lse = loss.forward(logits, target, -100, smoothing)
        each = loss.backward(logits, target, lse, torch.linspace(0, 2, 37), -100, smoothing)
        one = loss.backward(logits, target, lse, torch.tensor([0.25]), -100, smoothing, out=logits.clone())
        return losses, lse, each, one

    same(run)


def test_loss_keeps_nan_and_inf() -> None:
    logits = torch.randn(3, 40)
    logits[0, 3], logits[1, 39] = float("nan"), float("inf")
    losses, _ = loss.forward(logits, torch.tensor([0, 0, 0]))
    assert losses[:2].isnan().tolist() == [True, True] or losses[1].isinf()
    assert losses[2].isfinite()
    with pytest.raises(IndexError, match=r"0\.\.39"):
        loss.forward(logits, torch.tensor([0, 40, 0]))


@pytest.mark.usefixtures("isa")
@pytest.mark.parametrize("x_dtype", DTYPES)
@pytest.mark.parametrize("y_dtype", DTYPES)
@pytest.mark.parametrize(("rows", "cols"), [(1, 1), (3, 15), (130, 33), (65, 64)])
def test_norm(rows: int, cols: int, x_dtype: torch.dtype, y_dtype: torch.dtype) -> None:
    x, grad = wild(rows, cols, dtype=x_dtype), wild(rows, cols, dtype=y_dtype, seed=1)
    weight, bias = torch.randn(cols), torch.randn(cols)
    for rms in (False, True):
        for w in (None, weight):

            def run(rms: bool = rms, w: Tensor | None = w) -> tuple[Tensor, ...]:
                y, mean, rstd = norm.forward(x, w, None if w is None or rms else bias, 1e-5, rms, y_dtype)
                grads = norm.backward(x, grad, w, mean, rstd, rms, (w is not None, w is not None and not rms))
                return (y, mean, rstd, *(g for g in grads if g is not None))

            same(run)


@pytest.mark.usefixtures("isa")
def test_column_sum() -> None:
    x = wild(200, 50, dtype=torch.bfloat16)
    same(lambda: (norm.column_sum(x),))
    torch.testing.assert_close(norm.column_sum(x), x.double().sum(0).float(), rtol=1e-5, atol=1e-4)
