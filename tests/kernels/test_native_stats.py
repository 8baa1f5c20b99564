"""Multi-tensor statistics, transposes, block amax and the Hadamard transform: native equals reference."""

from __future__ import annotations

import math

import pytest
import torch

from lowprec.kernels import available, cast, native_core
from lowprec.kernels.reference import cast as reference

pytestmark = pytest.mark.skipif(not available("native")[0], reason="the native core is not built")

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
ISAS = native_core().isas() if available("native")[0] else []


def test_tensor_stats() -> None:
    generator = torch.Generator().manual_seed(0)
    tensors = [torch.randn(n, generator=generator).to(d) for n in (0, 1, 17, 16384, 50_001) for d in DTYPES]
    bad = torch.randn(40_000, generator=generator)
    bad[3], bad[30_000], bad[39_999] = math.inf, -math.inf, math.nan
    tensors += [
        bad,
        bad[:30_500].bfloat16(),
        torch.randn(30, 40, generator=generator).t(),
        torch.full((3,), 1e30, dtype=torch.float64),
    ]
    native, expected = cast.native.tensor_stats(tensors), reference.tensor_stats(tensors)
    torch.testing.assert_close(native, expected, rtol=1e-12, atol=0, equal_nan=True)
    for column in (0, 1, 3):
        assert torch.equal(native[:, column].nan_to_num(-1), expected[:, column].nan_to_num(-1))


def test_sum_of_squares_does_not_depend_on_threads_or_instruction_set() -> None:
    x = [torch.randn(300_007, generator=torch.Generator().manual_seed(1)), torch.randn(77)]
    sums = set()
    threads, isa = torch.get_num_threads(), native_core().isa()
    try:
        for name in ISAS:
            native_core().set_isa(name)
            for count in (1, 2):
                torch.set_num_threads(count)
                sums.add(tuple(cast.tensor_stats(x).sum_squares.tolist()))
    finally:
        torch.set_num_threads(threads)
        native_core().set_isa(isa)
    assert len(sums) == 1


@pytest.mark.parametrize("shape", [(0, 5), (1, 1), (63, 65), (64, 64), (200, 129)])
def test_transpose(shape: tuple[int, int]) -> None:
    x = torch.randint(0, 255, shape, generator=torch.Generator().manual_seed(2))
    for dtype in (torch.uint8, torch.int16, torch.int32, torch.int64):
        assert torch.equal(cast.transpose(x.to(dtype)), x.to(dtype).t())


@pytest.mark.parametrize("shape", [(1, 16), (3, 15), (5, 100), (2, 3, 48), (40, 33), (0, 16)])
def test_hadamard(shape: tuple[int, ...]) -> None:
    x = torch.randn(shape, generator=torch.Generator().manual_seed(3))
    for dtype in DTYPES:
        y = x.to(dtype)
        assert torch.equal(
            cast.native.hadamard16(y, cast.hadamard_signs()), reference.hadamard16(y, cast.hadamard_signs())
        )


def test_hadamard_down() -> None:
    x = torch.randn(37, 50, generator=torch.Generator().manual_seed(4))
    down = cast.native.hadamard(x, cast.hadamard_signs(), True)
    assert torch.equal(down, reference.hadamard16(x.t(), cast.hadamard_signs()).t())


@pytest.mark.parametrize("block", [(1, 16), (1, 32), (16, 1), (3, 5), (128, 128), (1, 2000)])
def test_block_amax(block: tuple[int, int]) -> None:
    x = torch.randn(140, 1030, generator=torch.Generator().manual_seed(5))
    x[3, 7], x[100, 1000] = math.nan, math.inf
    for dtype in DTYPES:
        a, b = cast.native.block_amax(x.to(dtype), block), reference.block_amax(x.to(dtype), block)
        assert torch.equal(a.view(torch.int32), b.view(torch.int32))
