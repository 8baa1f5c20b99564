"""The table of formats against three libraries that know them, and the decode of every code."""

from __future__ import annotations

import importlib
import math
import subprocess
import sys

import gfloat.formats as gf
import ml_dtypes
import numpy as np
import pytest
import torch
from exact_rounding import table
from gfloat import decode_ndarray

import lowprec as lp
from lowprec import kernels
from lowprec.formats import Format, unregister_format

GFLOAT = {
    "fp16": gf.format_info_binary16,
    "bf16": gf.format_info_bfloat16,
    "e4m3": gf.format_info_ocp_e4m3,
    "e5m2": gf.format_info_ocp_e5m2,
    "e3m2": gf.format_info_ocp_e3m2,
    "e2m3": gf.format_info_ocp_e2m3,
    "e2m1": gf.format_info_ocp_e2m1,
    "e8m0": gf.format_info_ocp_e8m0,
    "mxint8": gf.format_info_ocp_int8,
}
ML_DTYPES = {
    "fp16": np.float16,
    "bf16": ml_dtypes.bfloat16,
    "e4m3": ml_dtypes.float8_e4m3fn,
    "e5m2": ml_dtypes.float8_e5m2,
    "e4m3fnuz": ml_dtypes.float8_e4m3fnuz,
    "e5m2fnuz": ml_dtypes.float8_e5m2fnuz,
    "e4m3b11fnuz": ml_dtypes.float8_e4m3b11fnuz,
    "e3m4": ml_dtypes.float8_e3m4,
    "e3m2": ml_dtypes.float6_e3m2fn,
    "e2m3": ml_dtypes.float6_e2m3fn,
    "e2m1": ml_dtypes.float4_e2m1fn,
    "e8m0": ml_dtypes.float8_e8m0fnu,
    "int4": ml_dtypes.int4,
    "int8": np.int8,
}
TORCH = {
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e4m3fnuz": torch.float8_e4m3fnuz,
    "e5m2fnuz": torch.float8_e5m2fnuz,
    "e8m0": torch.float8_e8m0fnu,
}
SMALL = [name for name in lp.formats() if lp.format(name).bits <= 16]
BACKENDS = [name for name in kernels.BACKENDS if kernels.available(name)[0]]


def _all_codes(fmt: Format) -> np.ndarray:
    return np.arange(2**fmt.bits).astype(np.uint8 if fmt.bits <= 8 else np.uint16)


def _decode(fmt: Format) -> np.ndarray:
    return lp.decode(torch.from_numpy(_all_codes(fmt)), fmt).numpy()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", SMALL)
def test_decode_every_code(name: str, backend: str) -> None:
    fmt = lp.format(name)
    codes = _all_codes(fmt)
    with kernels.use(backend):
        ours = _decode(fmt)
        for dtype in (torch.float64, torch.bfloat16, torch.float16):
            same = lp.decode(torch.from_numpy(codes), fmt, dtype=dtype)
            wide = torch.from_numpy(ours).to(dtype)  # every value here is exact in float32
            torch.testing.assert_close(same, wide, rtol=0, atol=0, equal_nan=True)
    np.testing.assert_array_equal(ours, np.array([fmt.value(int(c)) for c in codes], dtype=np.float32))
    assert np.array_equal(
        np.signbit(ours[ours == 0]), [math.copysign(1, fmt.value(int(c))) < 0 for c in codes[ours == 0]]
    )
    oracles = []
    if name in GFLOAT:
        oracles.append(decode_ndarray(GFLOAT[name], codes))
    if name in ML_DTYPES:
        oracles.append(codes.view(ML_DTYPES[name]).astype(np.float32))
    if name in TORCH:
        raw = torch.from_numpy(codes.view(np.int8 if fmt.bits <= 8 else np.int16))
        oracles.append(raw.view(TORCH[name]).float().numpy())
    for oracle in oracles:
        np.testing.assert_array_equal(ours, oracle.astype(np.float32))
    assert oracles or name in ("int1",)


@pytest.mark.parametrize("name", sorted(GFLOAT))
def test_derived_numbers_equal_gfloat(name: str) -> None:
    ours, theirs = lp.format(name), GFLOAT[name]
    assert (ours.bits, ours.max) == (theirs.k, theirs.max)
    if ours.kind == "float":
        assert ours.min_normal == theirs.smallest_normal and ours.min_subnormal == theirs.smallest_subnormal
        assert ours.eps == theirs.eps and ours.has_infinity == (theirs.domain == gf.Domain.Extended)


@pytest.mark.parametrize("name", ["fp16", "bf16", "e4m3", "e5m2", "e4m3fnuz", "e5m2fnuz"])
def test_derived_numbers_equal_torch(name: str) -> None:
    ours, theirs = lp.format(name), torch.finfo(TORCH[name])
    assert (ours.max, ours.min_normal) == (theirs.max, theirs.smallest_normal)
    assert ours.eps == theirs.eps or name == "e5m2fnuz"  # torch says 0.125 there; 1.25 is the next value after 1


@pytest.mark.parametrize("name", SMALL)
def test_positive_codes_are_in_order(name: str) -> None:
    if lp.format(name).kind != "binary":
        assert (np.diff(table(lp.format(name))) > 0).all()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["fp32", "fp64", "tf32"])
def test_wide_formats_keep_their_own_values(name: str, backend: str) -> None:
    fmt, dtype = lp.format(name), torch.float64 if name == "fp64" else torch.float32
    rng = np.random.default_rng(0)
    bits = rng.integers(0, 2**64, 20000, dtype=np.uint64).view(np.float64)
    x = torch.from_numpy(bits) if name == "fp64" else torch.from_numpy(bits.view(np.float32))
    x = torch.cat([x, torch.tensor([0.0, -0.0, math.inf, -math.inf, 1e-310, -5e-324, 1e-42], dtype=dtype)])
    if name == "tf32":
        x = (x.view(torch.int32) & ~0x1FFF).view(torch.float32)
    with kernels.use(backend):
        codes = lp.encode(x, fmt, overflow="ieee")
        back = lp.decode(codes, fmt, dtype=dtype)
    torch.testing.assert_close(back, x, rtol=0, atol=0, equal_nan=True)
    keep = ~x.isnan()
    assert torch.equal(torch.signbit(back)[keep], torch.signbit(x)[keep])
    if name != "tf32":
        raw = x.view(torch.int64 if name == "fp64" else torch.int32).view(codes.dtype)
        wide = torch.int64
        assert torch.equal(codes.view(raw.dtype).to(wide)[keep], raw.to(wide)[keep])


@pytest.mark.parametrize("backend", BACKENDS)
def test_decode_into_a_narrower_dtype_rounds_once(backend: str) -> None:
    value = 1 + 2.0**-8 + 2.0**-40  # above a tie of bfloat16, on it once it has been through float32
    codes = lp.encode(torch.tensor([value], dtype=torch.float64), "fp64")
    with kernels.use(backend):
        assert lp.decode(codes, "fp64", dtype=torch.bfloat16).item() == 1 + 2.0**-7
    assert torch.tensor([value], dtype=torch.float64).to(torch.bfloat16).item() == 1.0


def test_aliases_and_dtypes() -> None:
    for key in ("float8_e4m3fn", torch.float8_e4m3fn, ml_dtypes.float8_e4m3fn, np.dtype(ml_dtypes.float8_e4m3fn)):
        assert lp.format(key).name == "e4m3"
    assert lp.format(torch.float4_e2m1fn_x2).name == "e2m1"
    with pytest.raises(ValueError, match="did you mean 'e4m3'"):
        lp.format("e4m33")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_registered_format_works_everywhere(backend: str) -> None:
    mine = lp.register_format(Format("e4m2-test", "float", 7, 4, 2, 7, "none", aliases=("fp7-test",)))
    try:
        x = torch.linspace(-500, 500, 1001)
        with kernels.use(backend):
            codes = lp.encode(x, "fp7-test")
            values = lp.round_to(x, "e4m2-test")
            assert torch.equal(lp.decode(codes, mine), values)
            assert torch.equal(lp.unpack(lp.pack(codes, mine), mine, codes.shape), codes)
            q = lp.quantize(x.reshape(7, 143), lp.Cast("e4m2-test", scale="row"))
            assert q.codes.max() < 128 and torch.allclose(q.dequantize(), x.reshape(7, 143), rtol=0.13, atol=0.1)
        nearest = table(mine)[:-1][np.abs(table(mine)[:-1, None] - np.abs(x.numpy())).argmin(0)]
        assert np.abs(values.numpy() - x.numpy()).max() == np.abs(nearest - np.abs(x.numpy())).max()
        with pytest.raises(ValueError, match="exists already"):
            lp.register_format(mine)
    finally:
        unregister_format("e4m2-test")
    with pytest.raises(ValueError, match="unknown format"):
        lp.encode(x, "e4m2-test")


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_name_registered_anew_means_the_new_format(backend: str) -> None:
    x = torch.tensor([[1.3, 3.1]])
    try:
        with kernels.use(backend):
            lp.register_format(Format("e3m1-test", "float", 5, 3, 1, 3, "none"))
            first = lp.quantize(x, lp.Cast("e3m1-test", scale="none")).dequantize()
            unregister_format("e3m1-test")
            lp.register_format(Format("e3m1-test", "float", 7, 3, 3, 3, "none"))
            second = lp.quantize(x, lp.Cast("e3m1-test", scale="none")).dequantize()
        assert first.tolist() == [[1.5, 3.0]] and second.tolist() == [[1.25, 3.0]]
    finally:
        unregister_format("e3m1-test")


@pytest.mark.skipif("native" not in BACKENDS, reason="no native core")
@pytest.mark.parametrize("topic", ["cast", "scale"])
def test_what_the_native_core_leaves_to_the_reference_is_listed(topic: str) -> None:
    importlib.import_module(f"lowprec.kernels.{topic}")
    native, reference = (importlib.import_module(f"lowprec.kernels.{b}.{topic}") for b in ("native", "reference"))
    listed = kernels.REFERENCE_ONLY.get(topic, ())
    functions = [name for name in reference.__all__ if callable(getattr(reference, name))]
    assert {name for name in functions if getattr(native, name) is getattr(reference, name)} == set(listed)


def test_import_loads_no_torch() -> None:
    code = "import sys, lowprec as lp; lp.formats(); lp.casts(); assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
