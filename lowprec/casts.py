"""The casts people know by name, as one table of literals.

A name is a shorthand for a `Cast`; what a cast prints as ("e4m3:1x128:e8m0") is accepted wherever a name is, and so is
the bare name of a format, which means one fp32 scale for the whole tensor. The contraction axis is the last one, so
"1x128" is 128 elements along the contraction.
"""

from __future__ import annotations

from lowprec.casting import Cast
from lowprec.errors import unknown_name
from lowprec.formats import formats

__all__ = ["cast", "casts"]

_CASTS: dict[str, Cast] = {
    # one scale a tensor, or a row: TransformerEngine, torchao, MS-AMP (power-of-two scales)
    "fp8": Cast("e4m3"),
    "fp8-gradient": Cast("e5m2"),
    "fp8-row": Cast("e4m3", scale="row"),
    "msamp-fp8": Cast("e4m3", rule="pow2"),
    # DeepSeek-V3: 1x128 for activations and gradients, 128x128 for weights; "-ue8m0" rounds the scale to a power of two
    "deepseek-1x128": Cast("e4m3", "block", (1, 128)),
    "deepseek-128x128": Cast("e4m3", "block", (128, 128)),
    "deepseek-1x128-ue8m0": Cast("e4m3", "block", (1, 128), "e8m0", "rceil"),
    "deepseek-128x128-ue8m0": Cast("e4m3", "block", (128, 128), "e8m0", "rceil"),
    # OCP microscaling: blocks of 32 under a power of two
    "mxfp8": Cast("e4m3", "block", (1, 32), "e8m0", "rceil"),
    "mxfp8-e5m2": Cast("e5m2", "block", (1, 32), "e8m0", "rceil"),
    "mxfp6-e3m2": Cast("e3m2", "block", (1, 32), "e8m0", "rceil"),
    "mxfp6-e2m3": Cast("e2m3", "block", (1, 32), "e8m0", "rceil"),
    "mxfp4": Cast("e2m1", "block", (1, 32), "e8m0", "rceil"),
    "mxint8": Cast("mxint8", "block", (1, 32), "e8m0", "rceil"),
    # NVFP4: blocks of 16 under an e4m3 scale under one fp32 scale
    "nvfp4": Cast("e2m1", "block", (1, 16), "e4m3"),
    "nvfp4-weight": Cast("e2m1", "block", (16, 16), "e4m3"),
    "nvfp4-gradient": Cast("e2m1", "block", (1, 16), "e4m3", rounding="stochastic"),
    "nvfp4-torchao": Cast("e2m1", "block", (1, 16), "e4m3", min_block_scale=2.0**-6),
    # integers: SwitchBack's rows, blocks, and the whole range with a zero point
    "int8-row": Cast("int8", scale="row"),
    "int8-block": Cast("int8", "block", (1, 128)),
    "int8-asymmetric": Cast("int8", scale="row", symmetric=False),
    "int4-block": Cast("int4", "block", (1, 32)),
    "int4-asymmetric": Cast("int4", "block", (1, 32), symmetric=False),
    "int1-row": Cast("int1", scale="row", rule="mean"),
}


def casts() -> list[str]:
    """The names of casts, beside those of formats.

    >>> "nvfp4" in casts()
    True
    """
    return list(_CASTS)


def cast(name: str | Cast) -> Cast:
    """Look up a cast.

    Args:
        name: a Cast (returned as it is), a name from `casts`, a format's name or alias (one fp32 scale for the tensor),
            or what a Cast prints as.

    Returns:
        The frozen Cast.

    Raises:
        ValueError: if there is no such cast; near matches are listed.

    >>> str(cast("mxfp8")), str(cast("e5m2")), cast("int8:row") == cast("int8-row")
    ('e4m3:1x32:e8m0:rceil', 'e5m2:tensor', True)
    """
    if isinstance(name, Cast):
        return name
    if not isinstance(name, str):
        raise TypeError(f"a cast is a Cast or a name, got {type(name).__name__}.")
    found = _CASTS.get(name)
    if found is not None:
        return found
    if ":" in name:
        return Cast.parse(name)
    try:
        return Cast(name)
    except ValueError as error:
        if "unknown format" not in str(error):
            raise
    raise unknown_name("cast", name, [*_CASTS, *formats()])
