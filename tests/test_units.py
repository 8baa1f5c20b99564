"""FP8 units: the layouts and scales they are given, on torch's CPU implementation of the same call."""

from __future__ import annotations

import pytest
import torch

import lowprec as lp
from lowprec import products, units
from lowprec.kernels import scale as scale_kernels
from lowprec.recipe import Cast, Gemm
from lowprec.spec import Spec

ENGINE = products.Engine("fp8", "")


@pytest.mark.parametrize("word", ["e4m3", "e4m3:row", "e5m2"])
@pytest.mark.parametrize("axis", [-1, -2])
def test_quantisation_has_the_reference_bits(word: str, axis: int) -> None:
    torch.manual_seed(0)
    cast = Cast.parse(word)
    for x in (torch.randn(48, 33), torch.randn(16, 16).bfloat16() * 1e-30, torch.zeros(4, 4)):
        x[0, 0] = x.abs().max() * 3
        codes, scale = units.quantize(x, cast, axis)
        wanted = scale_kernels.quantize(x, cast, axis=axis)
        assert torch.equal(codes.view(torch.uint8), wanted.codes)
        assert wanted.scale is not None and torch.equal(scale.reshape(-1), wanted.scale.reshape(-1))


@pytest.mark.parametrize("axes", [(-1, -1), (-1, -2), (-2, -2)])
def test_products_meet_their_axes(axes: tuple[int, int]) -> None:
    torch.manual_seed(0)
    cast = Cast("e4m3")
    a = torch.randn(32, 48) if axes[0] == -1 else torch.randn(48, 32)
    b = torch.randn(64, 48) if axes[1] == -1 else torch.randn(48, 64)
    operands = [products.prepare(x, cast, axis, ENGINE, "bf16")[0] for x, axis in zip((a, b), axes)]
    got = products.product(operands[0], operands[1], ENGINE, torch.bfloat16, bias=torch.arange(64.0))
    one, two = (o.rows.float() * o.scale for o in operands)
    wanted = one @ two.t() + torch.arange(64.0)
    torch.testing.assert_close(got.float(), wanted, rtol=2**-7, atol=2**-7 * float(wanted.abs().max()))


def test_what_units_take() -> None:
    row, tensor, e5m2 = Cast("e4m3", scale="row"), Cast("e4m3"), Cast("e5m2")
    assert (
        not units.fits(Gemm(tensor, tensor)) and not units.fits(Gemm(e5m2, tensor)) and not units.fits(Gemm(row, row))
    )
    assert "e5m2 with e5m2" in units.fits(Gemm(e5m2, e5m2))
    assert "with e4m3 only" in units.fits(Gemm(e5m2, row))
    assert "one fp32 a tensor or a row" in units.fits(Gemm(Cast.parse("e4m3:1x128:e8m0:pow2"), tensor))
    assert units.usable(Gemm(tensor, tensor), "cpu") == (False, "cpu has no FP8 units")
    if not torch.cuda.is_available():
        words = products.engine(Gemm(tensor, tensor), "bf16", "cuda").words
        assert "untested on this machine" in words


def test_shapes_that_do_not_fit_are_carried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(units, "usable", lambda gemm, device: (True, ""))
    products.engine.cache_clear()
    try:
        spec = Spec.of(lp.recipe("fp8").replace(note="x", name="units-test"), "cuda")
        assert [unit.kind for unit in spec.units] == ["fp8"] * 3
        assert spec.fitting(32, 48, 64) is spec and Spec.parse(spec.text) == spec
        assert [unit.kind for unit in spec.fitting(32, 48, 65).units] == ["bf16"] * 3
    finally:
        products.engine.cache_clear()
