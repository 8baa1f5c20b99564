"""Native casts equal the reference bit for bit: format x rounding x overflow x dtype x instruction set."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from lowprec.formats import Format, format, formats, register_format, unregister_format
from lowprec.kernels import available, cast, native_core
from lowprec.kernels import use as use_backend
from lowprec.kernels.reference import cast as reference
from lowprec.kernels.reference.rounding import Rng

pytestmark = pytest.mark.skipif(not available("native")[0], reason="the native core is not built")

ROUNDINGS = list(cast.ROUNDINGS)
OVERFLOWS = list(cast.OVERFLOWS)
DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# what a user may register: no subnormals below fp64's, odd widths, normals that fp32 and fp64 only have as subnormals
OWN = [
    Format("own_e5m6", "float", 12, 5, 6, 15, "ieee"),
    Format("own_e8m15", "float", 24, 8, 15, 120, "none"),
    Format("own_e6m3_low", "float", 10, 6, 3, 140, "all-ones"),
    Format("own_e4m3_deep", "float", 8, 4, 3, 1040, "negative-zero"),
    Format("own_int12", "int", 12, step=2.0**-30),
    Format("own_int16", "int", 16),
    Format("own_e2m0", "float", 3, 2, 0, 1, "none"),
    Format("own_scale6", "scale", 6, 6, 0, 31, "all-ones"),
]
ISAS = native_core().isas() if available("native")[0] else []


@pytest.fixture(autouse=True, scope="module")
def own_formats() -> Iterator[None]:
    for fmt in OWN:
        register_format(fmt)
    yield
    for fmt in OWN:
        unregister_format(fmt.name)


@pytest.fixture(params=ISAS)
def isa(request: pytest.FixtureRequest) -> Iterator[str]:
    before = native_core().isa()
    assert native_core().set_isa(request.param)
    yield request.param
    native_core().set_isa(before)


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(INTEGERS[x.element_size()])


def same(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype and a.shape == b.shape
    wrong = (bits(a) != bits(b)).nonzero()
    assert len(wrong) == 0, (
        f"{len(wrong)} differ, first at {wrong[0].tolist()}: {a[tuple(wrong[0])]} {b[tuple(wrong[0])]}"
    )


def around(fmt: Format, dtype: torch.dtype) -> Tensor:
    """Values at, between and beside the grid points of a format, and what is special to the input's own dtype."""
    if fmt.bits <= 12:
        grid = [v for _, v in fmt.values() if math.isfinite(v)]
    else:
        tops = [
            0,
            1,
            2,
            3,
            (1 << max(fmt.mantissa_bits, 1)) - 1,
            1 << fmt.mantissa_bits,
            fmt.max_code - 1,
            fmt.max_code,
        ]
        grid = [fmt.value(c) for c in tops]
        grid += [-v for v in grid]
    g = torch.tensor(sorted(grid), dtype=torch.float64)
    near = torch.cat(
        [g, (g[1:] + g[:-1]) / 2, g * 1.25, g * 0.75, g * (1 + 2.0**-20), g * (1 - 2.0**-9), g * 2, g * 1e5]
    )
    x = near.to(dtype)
    integer = INTEGERS[x.element_size()]
    neighbours = torch.cat([bits(x) + d for d in (-1, 0, 1)]).to(integer).view(dtype)
    info = torch.finfo(dtype)
    own = [0.0, -0.0, math.inf, -math.inf, math.nan, info.max, -info.max, info.tiny, info.tiny / 2, -info.tiny / 4]
    generator = torch.Generator().manual_seed(1)
    limits = torch.iinfo(integer)
    random = torch.randint(limits.min, limits.max, (300,), generator=generator, dtype=integer).view(dtype)
    return torch.cat([neighbours, torch.tensor(own, dtype=dtype), random])


def check(x: Tensor, fmt: Format, rounding: str, overflow: str, bits_drawn: int | None = None) -> None:
    rng = Rng(seed=0x1234_5678_9ABC_DEF0, step=3, tensor=5, offset=11, bits=bits_drawn)
    for nan in ("zero", "max"):
        same(cast.encode(x, fmt, rounding, overflow, nan, rng), reference.encode(x, fmt, rounding, overflow, nan, rng))
    same(cast.round_to(x, fmt, rounding, overflow, rng), reference.round_to(x, fmt, rounding, overflow, rng))


def names() -> list[str]:
    return [n for n in formats() if not n.startswith("e5m1")] + [f.name for f in OWN]


@pytest.mark.parametrize("name", dict.fromkeys(names()))
def test_encode_and_round(name: str, isa: str) -> None:
    fmt = format(name)
    everything = list(itertools.product(ROUNDINGS, OVERFLOWS))
    for dtype in DTYPES:
        x = around(fmt, dtype)
        for rounding, overflow in everything if dtype is torch.float32 else everything[:: 4 if isa == ISAS[-1] else 7]:
            check(x, fmt, rounding, overflow)


@pytest.mark.long
@pytest.mark.parametrize("name", dict.fromkeys(names()))
def test_encode_and_round_in_full(name: str, isa: str) -> None:
    fmt = format(name)
    patterns = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16)
    generator = torch.Generator().manual_seed(2)
    random = torch.randint(-(1 << 31), 1 << 31, (200_001,), generator=generator).to(torch.int32).view(torch.float32)
    inputs = [
        patterns.view(torch.bfloat16),
        patterns.view(torch.float16),
        random,
        random.to(torch.float64) * (1 + 2**-40),
    ]
    for x in [*inputs, *(around(fmt, dtype) for dtype in DTYPES)]:
        for rounding, overflow in itertools.product(ROUNDINGS, OVERFLOWS):
            check(x, fmt, rounding, overflow)


@pytest.mark.parametrize("name", dict.fromkeys(names()))
@pytest.mark.parametrize("dtype", DTYPES)
def test_decode(name: str, dtype: torch.dtype, isa: str) -> None:
    fmt = format(name)
    if fmt.bits <= 16:
        codes = torch.arange(1 << fmt.bits)
        codes = torch.cat([codes, codes.flip(0), codes])[: 1 << 17].to(cast.code_dtype(fmt))
    else:
        generator = torch.Generator().manual_seed(3)
        top = min(fmt.bits, 62)
        random = torch.randint(0, 1 << top, (5000,), generator=generator)
        special = [fmt.max_code, fmt.inf_code or 0, fmt.nan_code or 0, 1, 0, (1 << (fmt.bits - 1)) - 1]
        codes = torch.cat([random, torch.tensor(special)])
        codes = codes.view(torch.uint64) if fmt.bits == 64 else codes.to(cast.code_dtype(fmt))
    same(cast.decode(codes, fmt, dtype), reference.decode(codes, fmt, dtype))


@pytest.mark.parametrize("bits_drawn", [None, 1, 7, 8, 15, 16, 17, 24, 31, 32])
def test_stochastic_bits(bits_drawn: int | None, isa: str) -> None:
    for name, dtype in [
        ("bf16", torch.float32),
        ("e4m3", torch.float32),
        ("e5m2", torch.bfloat16),
        ("fp32", torch.float64),
    ]:
        check(around(format(name), dtype), format(name), "stochastic", "saturate", bits_drawn)


@pytest.mark.parametrize("name", ["e4m3", "bf16", "int8", "e8m0"])
@pytest.mark.parametrize("rounding", ["nearest", "stochastic"])
def test_threads_and_chunks(name: str, rounding: str, isa: str, two_threads: None) -> None:
    fmt, n = format(name), 3 * 32768 + 37
    x = torch.randn(n, generator=torch.Generator().manual_seed(4)) * 30
    rng = Rng(seed=9, offset=3)
    whole = cast.encode(x, fmt, rounding, rng=rng, nan="zero")
    torch.set_num_threads(1)
    same(whole, cast.encode(x, fmt, rounding, rng=rng, nan="zero"))
    cut = 40_001
    parts = [cast.encode(p, fmt, rounding, rng=rng._replace(offset=3 + at)) for p, at in ((x[:cut], 0), (x[cut:], cut))]
    same(whole, torch.cat(parts))
    same(whole, reference.encode(x, fmt, rounding, rng=rng))
    torch.set_num_threads(2)
    same(cast.decode(whole, fmt, torch.bfloat16), reference.decode(whole, fmt, torch.bfloat16))
    same(cast.round_to(x, fmt, rounding, rng=rng), reference.round_to(x, fmt, rounding, rng=rng))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0, 1, 15, 17, 63, 65, 1000, 1023, 1025])
def test_sizes_and_strides(dtype: torch.dtype, size: int) -> None:
    wide = (torch.randn(3, 2 * size, generator=torch.Generator().manual_seed(5)) * 9).to(dtype)
    for x in (wide, wide[:, ::2], wide.t(), wide[1:2, :size].expand(4, size), wide[:, 1 : 1 + size]):
        for name in ("e4m3", "bf16", "int4"):
            check(x, format(name), "nearest", "saturate")
        same(cast.amax(x), reference.amax(x))


@pytest.mark.parametrize("dtype", DTYPES)
def test_amax(dtype: torch.dtype, isa: str, two_threads: None) -> None:
    x = torch.randn(100_001, generator=torch.Generator().manual_seed(6)).to(dtype)
    for value in (0.0, -50.0, math.inf, -math.inf, math.nan):
        x[77_777] = value
        same(cast.amax(x), reference.amax(x))
    assert math.isnan(cast.amax(x).item())


def test_nan_without_a_code() -> None:
    x = torch.tensor([1.0, math.nan, 2.0, math.nan, math.inf])
    for name, overflow, count in [("e2m1", "saturate", 2), ("int8", "saturate", 2), ("e2m3", "keep-inf", 3)]:
        for backend in ("native", "reference"):
            with use_backend(backend), pytest.raises(ValueError, match=f"{name} has no NaN, and {count} values"):
                cast.encode(x, format(name), overflow=overflow)
