"""The pass after a GEMM: native equals the reference bit for bit."""

from __future__ import annotations

import itertools

import pytest
import torch

from lowprec import kernels
from lowprec.kernels import epilogue
from lowprec.kernels import scale as scale_kernels
from lowprec.recipe import Cast

SUMS = [torch.int32, torch.float32, torch.bfloat16]


def _sums(dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
    torch.manual_seed(rows)
    if dtype == torch.int32:
        return torch.randint(-(2**31), 2**31 - 1, (rows, columns), dtype=torch.int32)
    x = torch.randn(rows, columns) * 10.0 ** torch.randint(-40, 38, (rows, columns)).float()
    x[0, :3] = torch.tensor([float("inf"), float("nan"), -0.0])
    return x.to(dtype)


@pytest.mark.parametrize("dtype", SUMS)
@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16, torch.float16])
def test_native_equals_reference(dtype: torch.dtype, out: torch.dtype) -> None:
    for rows, columns in [(1, 33), (7, 16), (300, 301)]:
        sums = _sums(dtype, rows, columns)
        rows_of = [None, torch.tensor(0.3), torch.rand(rows) + 0.1]
        columns_of = [None, torch.tensor([1.7]), torch.rand(columns)]
        for row, column, bias in itertools.product(rows_of, columns_of, [None, torch.randn(columns)]):
            with kernels.use("reference"):
                wanted = epilogue.scaled(sums, row, column, bias, out)
            got = epilogue.scaled(sums, row, column, bias, out)
            assert got.dtype == out
            torch.testing.assert_close(got, wanted, rtol=0, atol=0, equal_nan=True)


def test_scales_meet_their_axes() -> None:
    sums = torch.tensor([[1, 2], [3, 4]], dtype=torch.int32)
    got = epilogue.scaled(
        sums, torch.tensor([1.0, 10.0]), torch.tensor([1.0, 100.0]), torch.tensor([0.5, 0.0]), torch.float32
    )
    assert got.tolist() == [[1.5, 200.0], [30.5, 4000.0]]


def test_in_place_and_wrong_sizes() -> None:
    sums = torch.ones(3, 4)
    assert epilogue.scaled(sums, torch.tensor(2.0), None, None, torch.float32, out=sums) is sums
    assert torch.equal(sums, torch.full((3, 4), 2.0))
    with pytest.raises(ValueError, match="as many row and column scales"):
        epilogue.scaled(sums, torch.ones(4), None, None, torch.float32)
    with pytest.raises(ValueError, match="as many biases"):
        epilogue.scaled(sums, None, None, torch.ones(3), torch.float32)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("isa", [None, *kernels.native_core().isas()])
def test_int8_columns_have_the_bits_of_quantize(dtype: torch.dtype, isa: str | None) -> None:
    before = kernels.native_core().isa()
    kernels.native_core().set_isa(isa or before)
    try:
        for rows, columns in [(1, 1), (33, 17), (70, 600)]:
            x = _sums(torch.float32, rows + 2, columns + 2)[2:, 2:].to(dtype).contiguous()
            x = torch.where(x.isfinite(), x, 1.0).clamp(-1e30, 1e30)
            x[:, 0] = 0.0
            x = torch.where(x.abs().amax(0) < 1e-29, torch.zeros_like(x), x)
            got = epilogue.int8_columns(x)
            wanted = scale_kernels.quantize(x, Cast("int8", scale="row"), axis=-2)
            assert got is not None and wanted.scale is not None
            assert torch.equal(got[0], wanted.codes.view(torch.int8)) and torch.equal(got[1], wanted.scale.reshape(-1))
    finally:
        kernels.native_core().set_isa(before)
    for bad in (float("nan"), float("inf"), 1e-38):
        assert epilogue.int8_columns(torch.full((2, 2), bad, dtype=dtype)) is None
