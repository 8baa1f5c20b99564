"""Scaled casts against `exact_scales`: every rule, granularity and edge; SQNR anchors; counters; carriers."""

from __future__ import annotations

import math

import exact_scales as exact
import numpy as np
import pytest
import torch
from test_formats import BACKENDS

import lowprec as lp
from lowprec import kernels
from lowprec.kernels import scale as scales

RULES = ["floor", "ceil", "even", "rceil"]
MX_ELEMENTS = ["e4m3", "e5m2", "e3m2", "e2m3", "e2m1", "mxint8", "int8"]
CASTS = [
    *[f"{element}:1x32:e8m0:{rule}" for element in MX_ELEMENTS for rule in RULES],
    *["e4m3", "e5m2", "int8", "e2m1", "e4m3:tensor:pow2", "e3m4", "int4"],
    *["e4m3:row", "int8:row", "e4m3:column", "int8:row:pow2", "e5m2:row:floor"],
    *["e4m3:1x128", "e4m3:128x128", "e4m3:128x128:e8m0", "int8:1x128", "e4m3:1x128:pow2", "int4:4x7"],
    *["nvfp4", "nvfp4-weight", "nvfp4-torchao", "e4m3:1x16:e4m3", "bf16", "fp16:row"],
]


def _data(rows: int, columns: int, seed: int = 0) -> np.ndarray:
    """Rows of very different size, with zeros, subnormals and huge values among them."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((rows, columns)) * np.exp2(rng.integers(-12, 12, (rows, 1)).astype(float))
    x[rng.random((rows, columns)) < 0.05] = 0
    x = x.astype(np.float32)
    if rows > 8 and columns:
        x[1] = 0
        x[2] = 1e-45 * rng.integers(-3, 4, columns)
        x[3] = (3e38 * rng.uniform(-1, 1, columns)).astype(np.float32)
        x[4] = -0.0
        x[5] *= np.float32(1e-38)
    return x


def _compare(x: np.ndarray, name: str, axis: int = -1) -> None:
    cast = lp.cast(name)
    wanted = exact.quantize(x, cast)
    given = torch.from_numpy(x) if axis == -1 else torch.from_numpy(x).t()
    q = lp.quantize(given, cast, axis=axis, counters=True)
    codes, values = q.codes.to(torch.int64), q.dequantize()
    if axis == -2:
        codes, values = codes.t(), values.t()
    np.testing.assert_array_equal(codes.numpy(), wanted.codes)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(values.numpy(), wanted.values.astype(np.float32))
    assert q.counters is not None
    amax = np.abs(x).max() if x.size else np.float32(0)
    assert q.counters.tolist() == [
        wanted.flushed,
        wanted.saturated,
        int((~np.isfinite(x)).sum()),
        0x7FC00000 if np.isnan(amax) else int(amax.view(np.uint32)),
    ]
    _compare_scales(q, wanted, cast, axis)


def _compare_scales(q: lp.Quantized, wanted: exact.Result, cast: lp.Cast, axis: int) -> None:
    assert q.scale is not None
    stored = q.scale if cast.scale_format == "fp32" else lp.decode(q.scale, cast.scale_format)
    if axis == -2 and stored.dim() == 2:
        stored = stored.t()
    table = stored.reshape(1, 1) if stored.dim() == 0 else stored
    for (i, j), scale in wanted.scales.items():
        np.testing.assert_equal(table[i, j].item(), scale)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", CASTS)
def test_every_rule(name: str, backend: str) -> None:
    with kernels.use(backend):
        _compare(_data(40, 70), name)
        _compare(_data(33, 48, seed=1), name, axis=-2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_scaling_is_a_true_division(backend: str) -> None:
    """Eleven significant bits over many rows: multiplying by a reciprocal would change some of these codes."""
    with kernels.use(backend):
        _compare(_data(300, 400), "fp16:row")


@pytest.mark.parametrize("backend", BACKENDS)
def test_two_level_block_scales_on_ties(backend: str) -> None:
    """Block amax values whose scale falls on a tie of e4m3 or one ulp beside it: the order of operations shows."""
    grid = np.array([lp.format("e4m3").value(code) for code in range(8, 127)], np.float32)
    middle = (grid[1:] + grid[:-1]) / 2
    for amax_t in np.random.default_rng(0).uniform(1, 2, 8).astype(np.float32):
        factor = np.float32(448 * 6) / amax_t / np.float32(6)
        tie = (middle / factor).astype(np.float32)
        near = np.concatenate([tie, np.nextafter(tie, np.float32(0)), np.nextafter(tie, np.float32(9))])
        x = np.zeros((near.size + 1, 16), np.float32)
        x[0, 0], x[1:, 3] = amax_t, -near
        with kernels.use(backend):
            _compare(x, "nvfp4")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "deepseek-1x128", "deepseek-128x128", "int8-row", "e4m3", "mxfp4"])
def test_ragged_edges(name: str, backend: str) -> None:
    with kernels.use(backend):
        for k in (1, 15, 16, 17, 31, 33, 127, 129):
            _compare(_data(3, k), name)
            _compare(_data(k, 5), name, axis=-2)
        _compare(_data(130, 257), name)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", [n for n in lp.casts() if "gradient" not in n])
def test_nothing_to_cast(name: str, backend: str) -> None:
    with kernels.use(backend):
        for shape in [(0, 5), (4, 0), (0, 0), (0,), (3, 0, 2)]:
            for dtype in (torch.float32, torch.bfloat16):
                q = lp.quantize(torch.zeros(shape, dtype=dtype), name)
                assert q.codes.shape == shape and q.dequantize().shape == shape
        assert lp.quantize(torch.tensor(3.0), name).dequantize().item() == pytest.approx(3.0, rel=0.1)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("element", MX_ELEMENTS)
def test_mx_rules_on_exponent_boundaries(element: str, rule: str, backend: str) -> None:
    """amax on, one ulp below and one above every power of two, every power times the element's max, and where `even`
    rounds over: floor(log2(x)) is wrong for the second of each three."""
    fmt = lp.format(element)
    tie = 2 - 2.0 ** -(1 + (fmt.mantissa_bits if fmt.kind == "float" else fmt.bits - 2))
    heads = [1.0, math.frexp(fmt.max)[0] * 2, tie, 1.5]
    with np.errstate(over="ignore", under="ignore"):
        points = np.array([h * 2.0**e for h in heads for e in range(-149, 128)]).astype(np.float32)
        points = points[points > 0]
        near = np.concatenate([points, np.nextafter(points, np.float32(0)), np.nextafter(points, np.float32(np.inf))])
    near = near[np.isfinite(near) & (near > 0)]
    x = np.zeros((near.size, 32), np.float32)
    x[:, 7] = -near
    q_scale = [exact.exponent_of(exact.Fraction(float(a)), fmt, rule) for a in near]
    with kernels.use(backend):
        q = lp.quantize(torch.from_numpy(x), lp.Cast(element, "block", (1, 32), "e8m0", rule))
        fp32 = lp.quantize(torch.from_numpy(x), lp.Cast(element, "block", (1, 32), "fp32", rule))
    assert q.scale is not None and fp32.scale is not None
    np.testing.assert_array_equal(q.scale.reshape(-1).numpy().astype(int) - 127, q_scale)
    np.testing.assert_array_equal(fp32.scale.reshape(-1).double().numpy(), np.exp2(np.array(q_scale, float)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("name", ["e4m3", "int8-row", "mxfp8", "mxfp4", "deepseek-128x128", "nvfp4", "int4-asymmetric"])
def test_nan_and_inf_never_vanish(name: str, bad: float, backend: str) -> None:
    x = torch.randn(20, 40, generator=torch.Generator().manual_seed(0))
    clean = x.clone()
    x[3, 5] = bad
    cast = lp.cast(name)
    with kernels.use(backend):
        q, without = lp.quantize(x, cast, counters=True), lp.quantize(clean, cast)
        y = q.dequantize()
        assert y[3, 5].isnan() and q.counters is not None and q.counters[2] == 1
        untouched = ~y.isnan()
        assert torch.equal(y[untouched], without.dequantize()[untouched])
        sizes = {"int8-row": 40, "mxfp8": 32, "mxfp4": 32, "int4-asymmetric": 32}
        assert int(y.isnan().sum()) == sizes.get(name, 800)
        if not scales.folds(cast):
            carried = scales.carrier(x, cast)
            product = carried.values.float() * (1.0 if carried.scale is None else carried.scale)
            assert torch.equal(product.isnan(), y.isnan())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["e4m3", "e5m2", "int8"])
def test_a_given_scale_keeps_bad_values_visible(name: str, backend: str) -> None:
    x = torch.tensor([[1.0, math.inf], [math.nan, -1e30]])
    scale = torch.tensor(0.5)
    with kernels.use(backend):
        q = lp.quantize(x, name, scale=scale, counters=True)
        carried = scales.carrier(x, lp.cast(name), scale=scale)
    y, top = q.dequantize(), lp.format(name).max
    assert q.counters is not None and q.counters.tolist()[1:3] == [1, 2]
    assert carried.values.isnan().tolist() == [[False, True], [True, False]]
    assert carried.values[1, 1] == -top
    if lp.format(name).has_nan:
        assert y.isnan().tolist() == [[False, True], [True, False]] and y[1, 1] == -top * 0.5
        assert torch.equal(q.scale, scale)  # type: ignore[arg-type]
    else:
        assert y.isnan().all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_tiny_amax_has_a_usable_scale(backend: str) -> None:
    """The scale never underflows to zero and its reciprocal is finite; a floor of 1e-4 would zero all of this."""
    with kernels.use(backend):
        for amax in (1e-45, 1e-42, 1e-39, 1e-30, 1e-6):
            q = lp.quantize(torch.tensor([[amax, -amax / 2]]), "e4m3")
            assert q.scale is not None and q.scale > 0 and torch.isfinite(1 / q.scale)
            if amax > 1e-37:
                assert q.dequantize()[0, 0].item() == pytest.approx(amax, rel=0.07)
        weights = torch.randn(64, 64, generator=torch.Generator().manual_seed(0)) * 1e-7
        zeros = (lp.quantize(weights, "e4m3").dequantize() == 0).double().mean()
        assert zeros < 0.01


# -- anchors ----------------------------------------------------------------------------------------------------------

ANCHORS = {"e4m3": 31.53, "e5m2": 25.62, "int8": 39.67, "nvfp4": 20.37}
for _element, _values in {
    "e4m3": (30.69, 31.52, 31.52, 31.20),
    "e5m2": (25.34, 25.51, 25.51, 25.51),
    "e2m3": (30.95, 30.96, 28.77, 30.99),
    "e2m1": (18.82, 18.75, 16.84, 19.04),
}.items():
    ANCHORS |= {f"{_element}:1x32:e8m0:{r}": v for r, v in zip(("floor", "rceil", "ceil", "even"), _values)}


@pytest.mark.parametrize("name", sorted(ANCHORS))
def test_sqnr_anchor(name: str) -> None:
    torch.manual_seed(0)
    x = torch.randn(2**17).reshape(-1, 32)
    noise = (x.double() - lp.quantize(x, name).dequantize().double()).square().sum()
    sqnr = 10 * math.log10(x.double().square().sum() / noise)
    assert abs(sqnr - ANCHORS[name]) < 0.05


# -- asymmetric, mean, Hadamard, carriers -----------------------------------------------------------------------------


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["int8:row:asymmetric", "int4:1x32:asymmetric", "int8:tensor:asymmetric"])
def test_asymmetric_integers(name: str, backend: str) -> None:
    """Against the textbook affine quantiser, in numpy."""
    cast, x = lp.cast(name), _data(20, 70, seed=4) + np.float32(1.5)
    bits = lp.format(cast.format).bits
    low_code, span = -(2 ** (bits - 1)), 2**bits - 1
    with kernels.use(backend):
        q = lp.quantize(torch.from_numpy(x), cast)
    codes, values = q.codes.numpy().astype(np.int64), q.dequantize().numpy()
    signed = np.where(codes >= 2 ** (bits - 1), codes - 2**bits, codes)
    for _, where in exact.groups(x.shape, cast):
        part = x[where]
        low, high = min(part.min(), np.float32(0)), max(part.max(), np.float32(0))
        scale = np.float32((float(high) - float(low)) / span)
        zero = np.clip(low_code - np.rint(low / scale), low_code, low_code + span)
        wanted = np.clip(np.rint(part / scale) + zero, low_code, low_code + span)
        np.testing.assert_array_equal(signed[where], wanted)
        np.testing.assert_array_equal(values[where], (wanted - zero).astype(np.float32) * scale)
    ramp = torch.linspace(0, 10, 300).reshape(1, 300)
    both = [(ramp - lp.quantize(ramp, f"int8:row{kind}").dequantize()).square().mean() for kind in ("", ":asymmetric")]
    assert both[1] < both[0] / 3  # the half of the codes that has nothing to say is put to use


@pytest.mark.parametrize("backend", BACKENDS)
def test_int1_scales_by_the_mean(backend: str) -> None:
    x = torch.tensor([[1.0, -2.0, 3.0, -6.0], [0.0, 0.0, 0.0, 0.0], [-0.5, 0.5, 0.0, -0.0]])
    with kernels.use(backend):
        q = lp.quantize(x, "int1-row")
    assert q.scale is not None and q.scale.flatten().tolist() == [3.0, 0.0, 0.25]
    assert q.dequantize().tolist() == [[3, -3, 3, -3], [0, 0, 0, 0], [-0.25, 0.25, 0.25, 0.25]]
    big = torch.randn(1, 100_000)
    with kernels.use(backend):
        scale = lp.quantize(big, "int1-row").scale
    assert scale is not None and scale.item() == pytest.approx(big.double().abs().mean().item(), rel=1e-7)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("k", [0, 1, 15, 16, 17, 33, 64])
def test_hadamard_is_orthonormal_and_undone(k: int, backend: str) -> None:
    from scipy.linalg import hadamard

    from lowprec.kernels import cast as kernel

    x = torch.randn(5, k, generator=torch.Generator().manual_seed(k))
    signs = kernel.hadamard_signs()
    with kernels.use(backend):
        y = kernel.hadamard16(x, signs)
        q = lp.quantize(x, "int8:row:hadamard")
        turned = lp.quantize(x.t(), "int8:row:hadamard", axis=-2)
    matrix = np.eye(k)
    for i in range(0, k - k % 16, 16):
        matrix[i : i + 16, i : i + 16] = np.diag(signs.numpy()) @ hadamard(16) / 4
    np.testing.assert_allclose(y.numpy(), x.double().numpy() @ matrix, atol=1e-6)
    np.testing.assert_allclose(y @ y.T, x @ x.T, atol=1e-5)
    assert torch.equal(turned.codes.t(), q.codes)
    if k:
        assert (q.dequantize() - x).abs().max() < 0.02 * x.abs().max() + 1e-6
        assert torch.equal(turned.dequantize().t(), q.dequantize())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "name", [*CASTS, "nvfp4-gradient", "int8:row:asymmetric", "int1-row", "e4m3:none", "e2m1:none"]
)
def test_carriers_carry_the_quantised_value(name: str, dtype: torch.dtype, backend: str) -> None:
    cast = lp.cast(name)
    x = torch.from_numpy(np.delete(_data(40, 70), [2, 3, 5], axis=0))  # bfloat16 has no room for 2^-149 * 448
    rng = lp.Rng(3) if cast.rounding == "stochastic" else None
    if reason := scales.folds(cast, dtype):
        with pytest.raises(ValueError, match="cannot be carried by one product"):
            scales.carrier(x, cast, dtype=dtype)
        assert "float" in reason or "contraction" in reason
        return
    with kernels.use(backend):
        for axis in (-1, -2):
            q = lp.quantize(x, cast, axis=axis, rng=rng)
            made = scales.carrier(x, cast, axis, dtype=dtype, rng=rng, counters=True)
            parts = scales.QuantizedParts(q.codes, q.scale, q.tensor_scale, q.zero_point)
            again = scales.carrier_from_codes(parts, cast, axis, dtype)
            assert made.values.dtype == dtype and torch.equal(made.values, again.values)
            value = made.values.float() * (1.0 if made.scale is None else made.scale)
            assert torch.equal(value, q.dequantize())
            assert (made.scale is None) == (cast.power_of_two or cast.scale == "none") or cast.scale_format == "e4m3"
            assert made.counters is not None
            counted = lp.quantize(x, cast, axis=axis, rng=rng, counters=True).counters
            assert counted is not None and made.counters.tolist() == counted.tolist()
        both = scales.carrier_both(x, cast, cast, dtype=dtype, rng=rng)
        for axis, one in zip((-1, -2), both):
            assert torch.equal(one.values, scales.carrier(x, cast, axis, dtype=dtype, rng=rng).values)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["int8-row", "e4m3", "mxfp8", "nvfp4", "deepseek-1x128", "int8-asymmetric"])
def test_quantise_with_transpose(name: str, backend: str) -> None:
    cast, x = lp.cast(name), torch.from_numpy(_data(33, 70))
    with kernels.use(backend):
        for axis in (-1, -2):
            turned = scales.quantize_t(x, cast, axis)
            plain = scales.quantize(x.t().contiguous(), cast, -1 if axis == -2 else -2)
            for a, b in zip(turned, plain):
                assert (a is None and b is None) or torch.equal(a, b)  # type: ignore[arg-type]
            assert turned.codes.is_contiguous()


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("name", ["mxfp8", "nvfp4", "deepseek-1x128", "int8-row", "e5m2"])
def test_other_dtypes_are_widened_exactly(name: str, dtype: torch.dtype, backend: str) -> None:
    x = torch.randn(20, 70).to(torch.bfloat16).to(dtype)
    with kernels.use(backend):
        ours, wide = lp.quantize(x, name), lp.quantize(x.float(), name)
        if dtype != torch.float64 or lp.cast(name).power_of_two:
            assert torch.equal(ours.codes, wide.codes)
        assert torch.equal(ours.scale.float(), wide.scale.float())  # type: ignore[union-attr]
        for out in (torch.bfloat16, torch.float16, torch.float64):
            assert ours.dequantize(out).dtype == out
