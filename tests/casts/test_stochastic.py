"""Stochastic rounding: the definition, its mean, and what does not change the bits."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from exact_rounding import expected, philox, random_bits
from test_formats import BACKENDS

import lowprec as lp
from lowprec import kernels
from lowprec.kernels.reference import rounding as reference

FORMATS = ["bf16", "tf32", "e4m3", "e5m2", "e2m1", "int8", "e4m3fnuz", "e8m0", "fp16"]


def test_philox_known_answers() -> None:
    """The vectors of the Random123 distribution."""
    ones = 2**32 - 1
    assert philox((0, 0, 0, 0), (0, 0)) == (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)
    assert philox((ones,) * 4, (ones, ones)) == (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)
    pi = (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344)
    assert philox(pi, (0xA4093822, 0x299F31D0)) == (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1)


@pytest.mark.parametrize("bits", [1, 8, 13, 16, 17, 32])
@pytest.mark.parametrize("offset", [0, 3, 2**34 + 5])
def test_random_bits_are_addressed_by_element(bits: int, offset: int) -> None:
    rng = lp.Rng(seed=0x0123456789ABCDEF, step=7, tensor=11, offset=offset)
    ours = reference.random_bits(21, rng, bits, torch.device("cpu")).tolist()
    assert ours == [random_bits(offset + i, rng.seed, 7, 11, bits) for i in range(21)]


def _inputs(dtype: torch.dtype) -> torch.Tensor:
    rng = np.random.default_rng(3)
    x = rng.standard_normal(600) * np.exp2(rng.integers(-20, 9, 600).astype(float))
    special = [0.0, -0.0, math.inf, -math.inf, math.nan, 1e-40, -1e-42, 3e38, -3e38, 448.0, 463.0, 0.5]
    return torch.tensor([*x, *special], dtype=torch.float64).to(dtype)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_equals_the_definition(name: str, dtype: torch.dtype, backend: str) -> None:
    fmt, x = lp.format(name), _inputs(dtype)
    default = 16 if name in ("bf16", "tf32") and dtype in (torch.float32, torch.bfloat16) else 32
    for bits in (None, 7, 16, 24):
        count = default if bits is None else bits
        rng = lp.Rng(seed=2**63 + 12345, step=3, tensor=9, offset=5, bits=bits)
        random = np.array([random_bits(5 + i, rng.seed, 3, 9, count) for i in range(x.numel())])
        codes, _ = expected(x.double().numpy(), fmt, "stochastic", "ieee", random, count)
        with kernels.use(backend):
            ours = lp.encode(x, fmt, rounding="stochastic", overflow="ieee", nan="zero", rng=rng)
        np.testing.assert_array_equal(ours.to(torch.int64).numpy(), codes)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(
    ("name", "bits"), [("bf16", None), ("e4m3", None), ("e2m1", None), ("int8", None), ("e4m3", 16)]
)
def test_mean_error_is_zero(name: str, bits: int | None, backend: str) -> None:
    n = 200_000
    x = torch.rand(n, generator=torch.Generator().manual_seed(1)) * 5 + 0.26
    with kernels.use(backend):
        rounded = lp.round_to(x, name, rounding="stochastic", rng=lp.Rng(77, bits=bits))
    error = rounded.double() - x.double()
    assert abs(error.mean()) < 4 * error.std() / math.sqrt(n)
    assert error.std() > 0


@pytest.mark.parametrize("backend", BACKENDS)
def test_few_bits_are_biased_as_the_definition_says(backend: str) -> None:
    """One bit can only say 0, 1/2 or 1: a fraction of 0.3 goes up half the time."""
    x = torch.full((20_000,), 1 + 0.3 * 2.0**-3)
    with kernels.use(backend):
        up = lp.round_to(x, "e4m3", rounding="stochastic", rng=lp.Rng(5, bits=1)) > 1
    assert abs(up.double().mean() - 0.5) < 4 * 0.5 / math.sqrt(20_000)


@pytest.mark.parametrize("backend", BACKENDS)
def test_nan_and_inf_stay(backend: str) -> None:
    bits = torch.tensor([0x7FFFFFFF, 0x7F800001, -1, 0x7F800000, -0x800000], dtype=torch.int32)
    x = bits.view(torch.float32).repeat(64)
    with kernels.use(backend):
        for seed in range(5):
            y = lp.round_to(x, "bf16", rounding="stochastic", overflow="ieee", seed=seed)
            assert y.isnan().reshape(64, 5)[:, :3].all()
            assert torch.equal(y.reshape(64, 5)[:, 3:], x.reshape(64, 5)[:, 3:])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("name", ["bf16", "e4m3"])
def test_chunks_and_threads_do_not_change_the_bits(name: str, backend: str) -> None:
    x = torch.randn(150_001 if backend == "native" else 5001)
    before = torch.get_num_threads()
    with kernels.use(backend):
        whole = lp.round_to(x, name, rounding="stochastic", rng=lp.Rng(1, 2, 3))
        cuts = [0, 1, 16, 1000, 4099, x.numel()]
        parts = [
            lp.round_to(x[a:b], name, rounding="stochastic", rng=lp.Rng(1, 2, 3, offset=a))
            for a, b in itertools.pairwise(cuts)
        ]
        try:
            for threads in (1, 2, 3):
                torch.set_num_threads(threads)
                assert torch.equal(lp.round_to(x, name, rounding="stochastic", rng=lp.Rng(1, 2, 3)), whole)
        finally:
            torch.set_num_threads(before)
        for other in (lp.Rng(2, 2, 3), lp.Rng(1, 3, 3), lp.Rng(1, 2, 4), lp.Rng(1 + 2**40, 2, 3)):
            share = (lp.round_to(x, name, rounding="stochastic", rng=other) != whole).double().mean()
            assert share > 0.2  # independent draws differ where the two neighbours are both likely
    assert torch.equal(torch.cat(parts), whole)


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_element_index_is_logical(backend: str) -> None:
    """A strided or expanded view rounds as its contiguous copy."""
    x = torch.randn(24, 40)
    views = [x.t(), x[::2, 1::3], x[:1].expand(9, 40), x.view(2, 12, 40).permute(2, 0, 1), x.flip(0)]
    with kernels.use(backend):
        for view in views:
            a = lp.round_to(view, "e5m2", rounding="stochastic", seed=4)
            b = lp.round_to(view.contiguous(), "e5m2", rounding="stochastic", seed=4)
            assert torch.equal(a, b)


def test_seed_comes_from_torch() -> None:
    x = torch.randn(1000)
    torch.manual_seed(5)
    a = lp.round_to(x, "e4m3", rounding="stochastic")
    b = lp.round_to(x, "e4m3", rounding="stochastic")
    torch.manual_seed(5)
    assert torch.equal(lp.round_to(x, "e4m3", rounding="stochastic"), a) and not torch.equal(a, b)
