"""The public surface: shapes, strides, gradients, packing, names and bad input."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_formats import BACKENDS, SMALL

import lowprec as lp
from lowprec import kernels
from lowprec.kernels import cast as kernel


def _views() -> list[torch.Tensor]:
    x = torch.randn(6, 8, 10)
    return [
        torch.tensor(1.3),
        torch.empty(0),
        torch.empty(3, 0, 2),
        x,
        x.transpose(0, 2),
        x[:, ::3, 1:],
        x[0, :1].expand(7, 10),
        x.permute(2, 0, 1)[::2],
        torch.randn(17),
        torch.randn(4, 3, 5, 6).to(memory_format=torch.channels_last),
    ]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_any_shape_and_stride(dtype: torch.dtype, backend: str) -> None:
    with kernels.use(backend):
        for view in _views():
            x = view.to(dtype)  # keeps the strides where it can
            codes, plain = lp.encode(x, "e5m2"), lp.encode(x.contiguous().clone(), "e5m2")
            assert codes.shape == x.shape and codes.is_contiguous() and torch.equal(codes, plain)
            assert torch.equal(lp.round_to(x, "e5m2"), lp.decode(codes, "e5m2", dtype=dtype))
            assert kernel.amax(x).item() == (x.abs().max().item() if x.numel() else 0.0)
            q = lp.quantize(x, "e4m3")
            assert q.dequantize(dtype).shape == x.shape


@pytest.mark.parametrize("name", ["mxfp8", "int8-row", "nvfp4", "deepseek-128x128"])
def test_leading_dimensions_are_rows(name: str) -> None:
    x = torch.randn(3, 4, 50)
    q, flat = lp.quantize(x, name), lp.quantize(x.reshape(12, 50), name)
    assert torch.equal(q.codes.reshape(12, 50), flat.codes)
    assert torch.equal(q.dequantize().reshape(12, 50), flat.dequantize())
    front = lp.quantize(x, name, axis=0)
    moved = lp.quantize(x.movedim(0, -1).contiguous(), name)
    assert torch.equal(front.dequantize().movedim(0, -1), moved.dequantize())
    matrix = torch.randn(40, 24)
    assert torch.equal(lp.quantize(matrix, name, axis=0).codes, lp.quantize(matrix, name, axis=-2).codes)


def test_gradient_passes_straight_through() -> None:
    x = torch.randn(50, requires_grad=True)
    for kwargs in ({}, {"rounding": "stochastic", "seed": 3}, {"profile": "torch"}):
        y = lp.round_to(x, "e4m3", **kwargs)  # type: ignore[arg-type]
        (grad,) = torch.autograd.grad((y * torch.arange(50.0)).sum(), x)
        assert torch.equal(grad, torch.arange(50.0))
    assert not lp.encode(x, "e4m3").requires_grad and not lp.quantize(x, "e4m3").dequantize().requires_grad
    with torch.no_grad():
        assert not lp.round_to(x, "e4m3").requires_grad


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["int4", "e2m1", "e3m2", "e2m3", "int1"])
def test_pack_and_unpack(name: str, backend: str) -> None:
    fmt = lp.format(name)
    with kernels.use(backend):
        for shape in [(0,), (1,), (7,), (8,), (3, 5), (2, 3, 4), (1001,)]:
            codes = torch.randint(0, 2**fmt.bits, shape, dtype=torch.uint8)
            packed = lp.pack(codes, name)
            assert packed.numel() == -(-codes.numel() * fmt.bits // 8)
            stream = sum(int(c) << (i * fmt.bits) for i, c in enumerate(codes.flatten().tolist()))
            assert bytes(packed.tolist()) == stream.to_bytes(packed.numel(), "little")
            assert torch.equal(lp.unpack(packed, name, shape), codes)


def test_packed_e2m1_is_torchs_layout() -> None:
    codes = torch.tensor([1, 2, 3, 12], dtype=torch.uint8)
    assert lp.pack(codes, "e2m1").view(torch.float4_e2m1fn_x2).shape == (2,)
    assert lp.pack(codes, "e2m1").tolist() == [0x21, 0xC3]


def test_decode_reads_torchs_own_tensors() -> None:
    x = torch.randn(100)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz):
        assert torch.equal(lp.decode(x.to(dtype), dtype), x.to(dtype).float())
    with pytest.raises(TypeError, match="holds e4m3, not e5m2"):
        lp.decode(x.to(torch.float8_e4m3fn), "e5m2")


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.floats(width=32), min_size=1, max_size=40),
    st.sampled_from(SMALL),
    st.sampled_from(["nearest", "nearest-away", "toward-zero", "up", "down"]),
)
def test_properties_of_rounding(values: list[float], name: str, rounding: str) -> None:
    """Idempotent, monotone, symmetric in sign, and never further than the neighbours."""
    fmt = lp.format(name)
    x = torch.tensor(values)
    y = lp.round_to(x, fmt, rounding=rounding)
    assert torch.equal(y.nan_to_num(9e9), lp.round_to(y, fmt, rounding=rounding).nan_to_num(9e9))
    keep = ~y.isnan()
    order = x[keep].argsort()
    assert (y[keep][order].diff() >= 0).all()
    if fmt.signed and fmt.kind != "binary":
        mirror = {"up": "down", "down": "up"}.get(rounding, rounding)
        assert torch.equal(lp.round_to(-x, fmt, rounding=mirror)[keep], -y[keep])


CALLS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "integers": (lambda: lp.encode(torch.ones(3, dtype=torch.int32), "e4m3"), TypeError, "convert it first, as in"),
    "bool": (lambda: lp.round_to(torch.ones(3, dtype=torch.bool), "e4m3"), TypeError, "got bool"),
    "complex": (lambda: lp.encode(torch.ones(3, dtype=torch.complex64), "e4m3"), TypeError, "view_as_real"),
    "float8": (lambda: lp.encode(torch.ones(3).to(torch.float8_e5m2), "e4m3"), TypeError, "view.torch.uint8"),
    "meta": (lambda: lp.encode(torch.ones(3, device="meta"), "e4m3"), TypeError, "meta device"),
    "sparse": (lambda: lp.quantize(torch.eye(3).to_sparse(), "e4m3"), TypeError, "dense tensor"),
    "list": (lambda: lp.quantize([1.0], "e4m3"), TypeError, "torch.as_tensor"),  # type: ignore[arg-type]
    "format": (lambda: lp.encode(torch.ones(3), "e4m4"), ValueError, "did you mean 'e4m3'"),
    "rounding": (lambda: lp.encode(torch.ones(3), "e4m3", rounding="nearst"), ValueError, "did you mean 'nearest'"),
    "overflow": (lambda: lp.encode(torch.ones(3), "e4m3", overflow="saturated"), ValueError, "did you mean 'saturate'"),
    "nan": (lambda: lp.encode(torch.ones(3), "e2m1", nan="zeros"), ValueError, "did you mean 'zero'"),
    "profile": (lambda: lp.encode(torch.ones(3), "e4m3", profile="tourch"), ValueError, "did you mean 'torch'"),
    "profile and rounding": (
        lambda: lp.encode(torch.ones(3), "e4m3", profile="torch", rounding="up"),
        ValueError,
        "fixes rounding",
    ),
    "profile without": (lambda: lp.encode(torch.ones(3), "int8", profile="cuda"), ValueError, "no such cast"),
    "cast": (lambda: lp.quantize(torch.ones(3, 3), "mxpf8"), ValueError, "did you mean 'mxfp8'"),
    "cast word": (lambda: lp.quantize(torch.ones(3, 3), "e4m3:rows"), ValueError, "did you mean 'row'"),
    "cast type": (lambda: lp.quantize(torch.ones(3, 3), 8), TypeError, "a Cast or a name"),  # type: ignore[arg-type]
    "block": (lambda: lp.Cast("e4m3", "block", (0, 3)), ValueError, "two positive integers"),
    "block missing": (lambda: lp.Cast("e4m3", "block"), ValueError, "block="),
    "block shape": (lambda: lp.Cast("e4m3", "block", (1, 2, 3)), ValueError, "two positive"),  # type: ignore[arg-type]
    "axis": (lambda: lp.quantize(torch.ones(3, 3), "e4m3", axis=2), ValueError, "out of range"),
    "scale shape": (lambda: lp.quantize(torch.ones(3, 3), "int8-row", scale=torch.ones(3)), ValueError, r"\(3, 1\)"),
    "scale twice": (lambda: lp.quantize(torch.ones(3, 3), "nvfp4", scale=torch.ones(())), ValueError, "one-level"),
    "codes": (lambda: lp.decode(torch.ones(3, dtype=torch.int64), "e4m3"), TypeError, "codes are uint8"),
    "high codes": (lambda: lp.decode(torch.tensor([200], dtype=torch.uint8), "e2m1"), ValueError, "from 0 to 15"),
    "decode dtype": (
        lambda: lp.decode(torch.ones(3, dtype=torch.uint8), "e4m3", dtype=torch.int32),
        TypeError,
        "not torch.int32",
    ),
    "seed": (lambda: lp.encode(torch.ones(1), "e4m3", seed=3), ValueError, "no effect"),
    "bits": (
        lambda: lp.encode(torch.ones(1), "e4m3", rounding="stochastic", rng=lp.Rng(0, bits=33)),
        ValueError,
        "1 to 32 random bits",
    ),
    "unpack": (lambda: lp.unpack(torch.ones(3, dtype=torch.uint8), "int4", (7,)), ValueError, "fill 4 bytes, got 3"),
    "pack": (lambda: lp.pack(torch.ones(3), "int4"), ValueError, "uint8 codes"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", sorted(CALLS))
def test_bad_input_is_one_sentence(name: str, backend: str) -> None:
    call, kind, sentence = CALLS[name]
    with kernels.use(backend), pytest.raises(kind, match=sentence) as caught:
        call()
    assert "\n" not in str(caught.value)


def test_names_of_casts() -> None:
    for name in lp.casts():
        cast = lp.cast(name)
        assert lp.cast(str(cast)) == cast
        q = lp.quantize(torch.randn(20, 40), name)
        assert q.dequantize().isfinite().all() and 0 < q.nbytes < 20 * 40 * 4
    assert lp.cast("float8_e4m3fn") == lp.Cast("e4m3")


def test_without_the_native_core() -> None:
    """One warning, the same bits."""
    code = """
import sys, warnings
sys.modules["lowprec.kernels._native"] = None
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import torch, lowprec as lp
    x = torch.linspace(-3, 3, 77).reshape(7, 11)
    print(lp.encode(x, "e4m3").sum().item(), lp.quantize(x, "mxfp4").codes.sum().item())
assert [w.category.__name__ for w in caught] == ["LowprecWarning"], caught
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    x = torch.linspace(-3, 3, 77).reshape(7, 11)
    wanted = f"{lp.encode(x, 'e4m3').sum().item()} {lp.quantize(x, 'mxfp4').codes.sum().item()}"
    assert run.stdout.strip() == wanted


def test_tensor_stats() -> None:
    tensors = [
        torch.randn(100),
        torch.tensor([1.0, math.inf, math.nan, -2.0]),
        torch.zeros(0),
        torch.randn(9).bfloat16(),
    ]
    for backend in BACKENDS:
        with kernels.use(backend):
            stats = kernel.tensor_stats(tensors)
        assert stats.inf.tolist() == [0, 1, 0, 0] and stats.nan.tolist() == [0, 1, 0, 0]
        for i in (0, 2, 3):
            assert stats.sum_squares[i].item() == pytest.approx(tensors[i].double().square().sum().item(), rel=1e-12)
            assert stats.amax[i].item() == (tensors[i].abs().max().item() if tensors[i].numel() else 0)
        assert stats.amax[1].isnan() and not stats.sum_squares[1].isfinite()
