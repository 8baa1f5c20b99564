"""Encode and round_to against exact arithmetic: formats x roundings x overflows x input dtypes, both backends."""

from __future__ import annotations

import math
from fractions import Fraction

import gfloat
import numpy as np
import pytest
import torch
from exact_rounding import OVERFLOWS, ROUNDINGS, expected, locate, table
from patterns import every_16_bit, neighbourhoods_fp64, structured_fp32
from test_formats import BACKENDS, GFLOAT, ML_DTYPES, SMALL

import lowprec as lp
from lowprec import kernels
from lowprec.formats import Format

# tf32 has a table of its own size; fp32 and fp64 are compared with numpy below
TABLED = [*SMALL, "tf32"]


def _codes(codes: torch.Tensor) -> np.ndarray:
    return codes.to(torch.int64).numpy()


def check(x: torch.Tensor, name: str, rounding: str, overflow: str) -> None:
    """Codes and rounded values of x equal the table's."""
    fmt = lp.format(name)
    codes, nan = expected(x.double().numpy(), fmt, rounding, overflow)
    ours = _codes(lp.encode(x, fmt, rounding=rounding, overflow=overflow, nan="zero"))
    wrong = np.flatnonzero(ours != codes)
    assert wrong.size == 0, f"{x[wrong[:3]].tolist()} became {ours[wrong[:3]]}, not {codes[wrong[:3]]}"
    values = lp.round_to(x, fmt, rounding=rounding, overflow=overflow)
    assert values.dtype == x.dtype
    assert np.array_equal(values.isnan().numpy(), nan | (codes == (fmt.nan_code if fmt.has_nan else -1)))
    wanted = lp.decode(torch.from_numpy(codes).to(lp.encode(x[:1], fmt, nan="zero").dtype), fmt, dtype=torch.float64)
    held = wanted.to(x.dtype).double() == wanted
    keep = torch.from_numpy(~nan) & held
    assert torch.equal(values.double()[keep], wanted[keep])
    assert torch.equal(values.signbit()[keep], wanted.signbit()[keep])


@pytest.mark.parametrize("name", TABLED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_fp32_patterns(name: str, backend: str) -> None:
    x = structured_fp32(5 if backend == "reference" else 6, random=5000)
    with kernels.use(backend):
        for rounding in ROUNDINGS:
            check(x, name, rounding, "saturate")
        for overflow in ("keep-inf", "ieee"):
            for rounding in ("nearest", "up") if backend == "reference" else ROUNDINGS:
                check(x, name, rounding, overflow)


@pytest.mark.long
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TABLED)
def test_six_million_fp32_patterns(name: str, backend: str) -> None:
    x, fmt = structured_fp32(10 if backend == "reference" else 12, random=500_000), lp.format(name)
    wide = x.double().numpy()
    place = None if fmt.kind == "binary" else locate(wide, fmt)
    for rounding in ROUNDINGS:
        for overflow in OVERFLOWS:
            codes, _ = expected(wide, fmt, rounding, overflow, place=place)
            with kernels.use(backend):
                ours = _codes(lp.encode(x, fmt, rounding=rounding, overflow=overflow, nan="zero"))
            wrong = np.flatnonzero(ours != codes)
            assert wrong.size == 0, f"{x[wrong[:3]].tolist()} became {ours[wrong[:3]]}, not {codes[wrong[:3]]}"


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", TABLED)
def test_every_16_bit_input_native(name: str, dtype: torch.dtype) -> None:
    x = every_16_bit(dtype)
    for rounding in ROUNDINGS:
        for overflow in OVERFLOWS:
            check(x, name, rounding, overflow)


@pytest.mark.long
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", TABLED)
def test_every_16_bit_input_reference(name: str, dtype: torch.dtype) -> None:
    with kernels.use("reference"):
        test_every_16_bit_input_native(name, dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", TABLED)
def test_fp64_neighbourhoods(name: str, backend: str) -> None:
    x = neighbourhoods_fp64(lp.format(name))
    with kernels.use(backend):
        for rounding in ROUNDINGS:
            for overflow in OVERFLOWS:
                check(x, name, rounding, overflow)


@pytest.mark.parametrize("backend", BACKENDS)
def test_fp64_to_fp32_equals_numpy(backend: str) -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal(50000) * np.exp2(rng.integers(-160, 135, 50000).astype(float))
    tie = 1 + (2 * rng.integers(0, 2**23, 1000) + 1) * 2.0**-24
    x = np.concatenate([x, tie, np.nextafter(tie, 2), np.nextafter(tie, 1), [np.inf, -np.inf, 3.4028235677973366e38]])
    with np.errstate(over="ignore"):
        wanted = x.astype(np.float32)
    with kernels.use(backend):
        ours = lp.round_to(torch.from_numpy(x), "fp32", overflow="ieee").numpy()
        up = lp.round_to(torch.from_numpy(x), "fp32", rounding="up", overflow="ieee").numpy()
    np.testing.assert_array_equal(ours, wanted.astype(np.float64))
    finite = np.isfinite(x)
    above = np.where(wanted[finite] >= x[finite], wanted[finite], np.nextafter(wanted[finite], np.float32(np.inf)))
    np.testing.assert_array_equal(up[finite], above.astype(np.float64))


@pytest.mark.parametrize("name", sorted(set(GFLOAT) - {"mxint8", "e8m0"}))
@pytest.mark.parametrize("backend", BACKENDS)
def test_against_gfloat(name: str, backend: str) -> None:
    modes = {"nearest": "TiesToEven", "nearest-away": "TiesToAway", "toward-zero": "TowardZero"}
    modes |= {"up": "TowardPositive", "down": "TowardNegative"}
    fmt, info = lp.format(name), GFLOAT[name]
    x = structured_fp32(4, random=20000)
    x = x[~x.isnan()]
    wide = x.double().numpy()
    for rounding, mode in modes.items():
        for overflow, saturate in (("saturate", True), ("ieee", False)):
            if not saturate and not fmt.has_nan:
                continue  # gfloat refuses to overflow there
            wanted = gfloat.round_ndarray(info, wide, gfloat.RoundMode[mode], saturate)
            with kernels.use(backend):
                ours = lp.round_to(x, fmt, rounding=rounding, overflow=overflow).double().numpy()
            np.testing.assert_array_equal(ours, wanted)
            assert np.array_equal(np.signbit(ours[ours == 0]), np.signbit(wanted[ours == 0]))


def test_the_table_itself_against_fractions() -> None:
    """The oracle's comparisons of float64 distances are those of rationals."""
    rng = np.random.default_rng(1)
    for name in ("e4m3", "e5m2", "e2m1", "mxint8", "e3m4"):
        fmt = lp.format(name)
        grid = [Fraction(v) for v in table(fmt)]
        points = neighbourhoods_fp64(fmt)
        for x in points[rng.integers(0, len(points), 100)].tolist():
            if not math.isfinite(x) or abs(x) >= fmt.max:
                continue
            at = max(i for i, v in enumerate(grid) if v <= abs(Fraction(x)))
            below, above = abs(Fraction(x)) - grid[at], grid[at + 1] - abs(Fraction(x))
            magnitude = at + (below > above or (below == above and at % 2 == 1))
            ours, _ = expected(np.array([abs(x)]), fmt, "nearest", "saturate")
            assert ours[0] == magnitude


# -- one rounding, and what others do ---------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
def test_float64_is_rounded_once(backend: str) -> None:
    x = torch.tensor([1 + 2.0**-4 + 2.0**-40], dtype=torch.float64)  # just above a tie of e4m3
    with kernels.use(backend):
        assert lp.round_to(x, "e4m3").item() == 1.125
        assert lp.round_to(x, "e4m3", profile="torch").item() == 1.0
        assert lp.round_to(x, "e4m3", profile="ml_dtypes").item() == 1.0
    assert x.to(torch.float8_e4m3fn).double().item() == 1.0
    assert x.numpy().astype(ML_DTYPES["e4m3"]).astype(np.float64).item() == 1.0


def test_rounding_through_another_format_differs_as_often_as_it_is_said_to() -> None:
    rng = np.random.default_rng(0)
    x = torch.from_numpy(rng.standard_normal(400_000).astype(np.float32))
    once = lp.round_to(x, "e4m3")
    through_half = lp.round_to(lp.round_to(x, "fp16"), "e4m3")
    through_bf16 = lp.round_to(lp.round_to(x, "bf16"), "e4m3")
    assert 0.0030 < (once != through_half).double().mean() < 0.0048
    assert 0.028 < (once != through_bf16).double().mean() < 0.034


def _flatten(codes: torch.Tensor, nan: torch.Tensor, fmt: Format) -> np.ndarray:
    """Codes with every NaN as -1: libraries differ in sign and payload of NaN."""
    ours = _codes(codes)
    return np.where(nan.numpy(), -1, ours) if fmt.has_nan else ours


PROFILE_FORMATS: dict[str, list[str]] = {
    "torch": ["fp16", "bf16", "e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0"],
    "ml_dtypes": [name for name in ML_DTYPES if name not in ("int4", "int8")],
}


def _theirs(x: torch.Tensor, name: str, profile: str) -> torch.Tensor:
    """Codes of another library."""
    integer = torch.int16 if lp.format(name).bits == 16 else torch.uint8
    if profile == "torch":
        from test_formats import TORCH

        return x.to(TORCH[name]).view(integer)
    source = x.numpy() if x.dtype != torch.bfloat16 else x.view(torch.int16).numpy().view(ML_DTYPES["bf16"])
    with np.errstate(over="ignore", invalid="ignore"):
        cast = source.astype(ML_DTYPES[name])
    return torch.from_numpy(cast.view(np.int16 if integer == torch.int16 else np.uint8))


@pytest.mark.parametrize(
    ("profile", "name"), [(profile, name) for profile, names in PROFILE_FORMATS.items() for name in names]
)
def test_profiles_equal_their_library(profile: str, name: str) -> None:
    fmt = lp.format(name)
    inputs = [structured_fp32(8, random=50000), every_16_bit(torch.bfloat16), every_16_bit(torch.float16)]
    inputs.append(neighbourhoods_fp64(fmt))
    for x in inputs:
        ours = lp.encode(x, fmt, profile=profile)
        theirs = _theirs(x, name, profile)
        theirs = theirs.view(torch.uint16) if fmt.bits == 16 else theirs
        nan = [lp.decode(c, fmt).isnan() for c in (ours, theirs)]
        wrong = np.flatnonzero(_flatten(ours, nan[0], fmt) != _flatten(theirs, nan[1], fmt))
        assert wrong.size == 0, f"{x[wrong[:3]].tolist()}: {ours[wrong[:3]].tolist()} {theirs[wrong[:3]].tolist()}"
        values = lp.round_to(x, fmt, profile=profile)
        exact = lp.decode(ours, fmt, dtype=torch.float64)
        held = (exact.to(x.dtype).double() == exact) & ~x.isnan()
        assert torch.equal(values.double()[held], exact[held])


@pytest.mark.parametrize("name", ["e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz", "e2m1", "e8m0"])
def test_onnx_profile(name: str) -> None:
    onnx = pytest.importorskip("onnx")
    from onnx.reference.ops.op_cast import cast_to

    types = {"e4m3": "FLOAT8E4M3FN", "e5m2": "FLOAT8E5M2", "e4m3fnuz": "FLOAT8E4M3FNUZ"}
    types |= {"e5m2fnuz": "FLOAT8E5M2FNUZ", "e2m1": "FLOAT4E2M1", "e8m0": "FLOAT8E8M0"}
    fmt, x = lp.format(name), structured_fp32(8, random=50000)
    with np.errstate(over="ignore", invalid="ignore"):
        theirs = cast_to(x.numpy(), getattr(onnx.TensorProto, types[name]), True, "up")
    theirs = torch.from_numpy(theirs.view(np.uint8))
    ours = lp.encode(x, fmt, profile="onnx")
    nan = [lp.decode(c, fmt).isnan() for c in (ours, theirs)]
    wrong = np.flatnonzero(_flatten(ours, nan[0], fmt) != _flatten(theirs, nan[1], fmt))
    assert wrong.size == 0, f"{x[wrong[:3]].tolist()}: {ours[wrong[:3]].tolist()} {theirs[wrong[:3]].tolist()}"


def test_cuda_profile() -> None:
    """What the CUDA headers document (no GPU here): saturation, NaN to the largest value where there is none."""
    x = torch.tensor([1e30, -math.inf, math.nan, 464.0, 1.5])
    assert lp.encode(x, "e4m3", profile="cuda").tolist() == [0x7E, 0xFE, 0x7F, 0x7E, 0x3C]
    assert lp.encode(x, "e5m2", profile="cuda").tolist()[:3] == [0x7B, 0xFB, 0x7E]
    assert lp.encode(x, "e2m1", profile="cuda").tolist() == [7, 15, 7, 7, 3]
    assert lp.encode(torch.tensor([0.0, 1.25, math.inf]), "e8m0", profile="cuda").tolist() == [0, 128, 254]
    assert lp.round_to(torch.tensor([1 + 2.0**-11]), "tf32", profile="cuda").item() == 1 + 2.0**-10


@pytest.mark.parametrize("backend", BACKENDS)
def test_overflow_boundaries(backend: str) -> None:
    above = np.nextafter(np.float32(464), np.float32(500))
    with kernels.use(backend):
        for name, last, first in (("e4m3", 464.0, float(above)), ("e5m2", 61439.996, 61440.0)):
            ieee = lp.round_to(torch.tensor([last, first]), name, overflow="ieee")
            assert ieee[0].item() == lp.format(name).max and not math.isfinite(ieee[1].item())
        for name, limit in (("e5m2fnuz", 61440.0), ("e4m3fnuz", 248.0)):
            below = float(np.nextafter(np.float32(limit), np.float32(0)))
            ieee = lp.round_to(torch.tensor([below, limit]), name, overflow="ieee")
            assert ieee[0].item() == lp.format(name).max and math.isnan(ieee[1].item())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SMALL)
def test_values_on_the_grid_stay(name: str, backend: str) -> None:
    fmt = lp.format(name)
    values = torch.tensor([v for _, v in fmt.values() if not math.isnan(v) and abs(v) <= fmt.max])
    with kernels.use(backend):
        for rounding in ROUNDINGS:
            assert torch.equal(lp.round_to(values, fmt, rounding=rounding), values)


def test_nan_in_formats_without_one() -> None:
    x = torch.tensor([1.0, math.nan, -math.inf])
    for name in ("e2m1", "e3m2", "e2m3", "int8", "int4", "int1", "mxint8"):
        assert lp.round_to(x, name)[1].isnan()
        with pytest.raises(ValueError, match=f"{name} has no NaN"):
            lp.encode(x, name)
        top = lp.format(name).max_code
        assert lp.encode(x, name, nan="zero")[1] == 0 and lp.encode(x, name, nan="max")[1] == top
        if name != "int1":
            assert lp.round_to(x, name, overflow="ieee")[2].isnan()
            assert lp.round_to(x, name)[2].item() == -lp.format(name).max


def test_sign_of_zero() -> None:
    x = torch.tensor([-0.0, -1e-30])
    for name in lp.formats():
        fmt = lp.format(name)
        if fmt.kind == "float" and fmt.bits <= 8:
            assert lp.round_to(x, name).signbit().tolist() == [fmt.has_negative_zero] * 2
    assert lp.encode(x, "int1").tolist() == [0, 1] and lp.encode(x, "int8").tolist() == [0, 0]
    assert lp.encode(x, "e8m0").tolist() == [0, 255]
