"""FP8 products in hardware, through torch's scaled product.

    out[m, n] = scale_a[m] * scale_b[n] * sum_k a[m, k] b[n, k]         a, b: e4m3 or e5m2, contiguous along k

What the units take (CUDA, compute capability 8.9 and up, dimensions divisible by 16): one fp32 scale a tensor for e4m3
with e4m3 and e4m3 with e5m2, and from 9.0 on one a row for e4m3 with e4m3. Everything else, and every shape that does
not fit, is carried exactly by a bf16 product on the same GPU. Hopper's units keep about 14 bits while they add (the
accumulator "hopper-fp8"), so a hardware product is less exact than its emulation.

Before a unit is used for the first time it computes one small product, which is compared with the emulated one: a torch
or driver that cannot is found then, and said in the plan, and not in the middle of a training.
"""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from lowprec.errors import LowprecWarning
from lowprec.formats import format as find_format
from lowprec.recipe import Cast, Gemm

__all__ = ["DTYPES", "MULTIPLE", "along_rows", "fits", "quantize", "scaled_product", "usable"]

DTYPES = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
MULTIPLE = 16  # every dimension of a product must be one of it


def fits(gemm: Gemm) -> str:
    """Why the units cannot take the casts of a product, or ""."""
    for cast in (gemm.a, gemm.b):
        if cast is None or cast.format not in DTYPES:
            return "no FP8 operands"
        if cast.scale not in ("tensor", "row") or cast.scale_format != "fp32" or cast.rule != "amax":
            return "its scales are not one fp32 a tensor or a row"
        if cast.rounding != "nearest" or cast.overflow != "saturate" or cast.hadamard:
            return "its rounding is not the hardware's"
    assert gemm.a is not None and gemm.b is not None
    if gemm.a.format == gemm.b.format == "e5m2":
        return "e5m2 with e5m2 is not offered"
    rows = "row" in (gemm.a.scale, gemm.b.scale)
    if rows and "e5m2" in (gemm.a.format, gemm.b.format):
        return "scales of rows go with e4m3 only"
    return ""


@functools.cache
def usable(gemm: Gemm, device: str) -> tuple[bool, str]:
    """Whether a GPU here computes this product, and why not.

    >>> usable(Gemm(Cast("e4m3"), Cast("e4m3")), "cpu")
    (False, 'cpu has no FP8 units')
    """
    if device != "cuda":
        return False, f"{device} has no FP8 units"
    reason = fits(gemm)
    if reason:
        return False, reason
    if not torch.cuda.is_available():
        return False, "untested on this machine: it has no GPU"
    rows = gemm.a is not None and gemm.a.scale == "row"
    capability, needed = torch.cuda.get_device_capability(), (9, 0) if rows else (8, 9)
    if capability < needed:
        return False, f"compute capability {capability[0]}.{capability[1]} has no such FP8 units"
    return _probe(gemm)


def _probe(gemm: Gemm) -> tuple[bool, str]:
    """Try one product and compare it with its float64 value."""
    assert gemm.a is not None and gemm.b is not None
    try:
        generator = torch.Generator().manual_seed(0)
        x, w = (torch.randn(64, 64, generator=generator).cuda() for _ in range(2))
        a, b = quantize(x, gemm.a, -1), quantize(w, gemm.b, -1)
        got = scaled_product(*a, *b, torch.bfloat16).double()
        wanted = (a[0].double() * a[1].reshape(-1, 1).double()) @ (b[0].double() * b[1].reshape(-1, 1).double()).t()
        error = float((got - wanted).abs().max() / wanted.abs().max())
    except (RuntimeError, ValueError, NotImplementedError, AttributeError) as problem:
        reason = str(problem).splitlines()[0]
        warnings.warn(
            f"torch cannot compute FP8 products here ({reason}); they are emulated", LowprecWarning, stacklevel=2
        )
        return False, f"torch refused: {reason}"
    return (True, "") if error < 0.02 else (False, f"a trial product was off by {error:.2g}")


def quantize(x: Tensor, cast: Cast, axis: int, scale: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Cast a matrix by the device's own conversions: the bits of `lowprec.kernels.scale.quantize`, in fewer passes.

    Args:
        x: the matrix.
        cast: e4m3 or e5m2, one fp32 scale a tensor or a row, rounding to nearest, saturating.
        axis: the axis it is contracted over.
        scale: the scale to use, or None to find it.

    Returns:
        Codes as a torch float8 tensor in the layout of x, and the scale: 0-d, or one for each slice.
    """
    largest = find_format(cast.format).max
    wide = x.float()
    if scale is None:
        size = wide.abs()
        amax = size.amax() if cast.scale == "tensor" else size.amax(dim=axis, keepdim=True)
        scale = torch.where(amax > 0, amax / largest, torch.ones_like(amax))
        scale = torch.where(amax.isnan(), amax, scale)
    codes = (wide / scale).clamp(-largest, largest).to(DTYPES[cast.format])
    return codes, scale if cast.scale == "tensor" else scale.reshape(-1)


def along_rows(codes: Tensor, axis: int) -> Tensor:
    """A float8 matrix as (other, contraction), contiguous."""
    if axis == -1:
        return codes if codes.is_contiguous() else codes.contiguous()
    return codes.view(torch.uint8).t().contiguous().view(codes.dtype)


def scaled_product(a: Tensor, scale_a: Tensor, b: Tensor, scale_b: Tensor, dtype: torch.dtype) -> Tensor:
    """The product of two float8 matrices, both contiguous along the contraction.

    Args:
        a, b: (m, k) and (n, k).
        scale_a, scale_b: 0-d, or one a row.
        dtype: bf16, fp16 or fp32; scales of rows give bf16.

    Returns:
        (m, n).
    """
    if scale_a.numel() == 1 and scale_b.numel() == 1 and scale_a.dim() == scale_b.dim() == 0:
        one, two = scale_a.float(), scale_b.float()
    else:
        one = scale_a.float().reshape(-1, 1).expand(a.shape[0], 1).contiguous()
        two = scale_b.float().reshape(1, -1).expand(1, b.shape[0]).contiguous()
        dtype = torch.bfloat16
    return torch._scaled_mm(a, b.t(), scale_a=one, scale_b=two, out_dtype=dtype, use_fast_accum=False)
