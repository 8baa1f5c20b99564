"""Scaled dot-product attention under a recipe: scores low, softmax in fp32, the product with V low or fp32.

`scaled_dot_product_attention` here has torch's signature. Behind plain `F.scaled_dot_product_attention` calls it stands
wherever a recipe's op policy is active on a CPU; `lowprec.kernels.attention` says how it runs and why it is faster than
a flash kernel there. What it does not take goes to torch's own kernel, with the reason in `why_not` (and so in the
policy's trace): dropout, sequences past `LONGEST` keys, nested or differently typed operands, and masks that want
gradients. Accelerators keep torch's kernels, which are made for them.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from lowprec import policy
from lowprec.kernels import fused
from lowprec.kernels.attention import LONGEST

__all__ = ["scaled_dot_product_attention", "why_not"]

_LOW = {"bf16": torch.bfloat16, "fp16": torch.float16}


def why_not(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, dropout_p: float = 0.0) -> str:
    """Why torch's kernel is used instead of the fused one; "" where the fused one is.

    >>> q = torch.zeros(1, 1, 4, 8)
    >>> why_not(q, q, q), why_not(q, q, q, dropout_p=0.1)
    ('', 'dropout on attention probabilities: left to torch')
    """
    if any(x.device.type != "cpu" for x in (q, k, v)):
        return f"on {q.device.type} torch's kernels are used"
    if dropout_p > 0:
        return "dropout on attention probabilities: left to torch"
    if k.shape[-2] > LONGEST or q.shape[-2] > LONGEST:
        return f"sequences longer than {LONGEST}: left to torch's flash kernel"
    if not 2 <= q.dim() <= 4 or q.dim() != k.dim() or q.dim() != v.dim() or 0 in (*q.shape, *k.shape, *v.shape):
        return "operands are not (batch, heads, tokens, width)"
    if not all(x.dtype in (torch.float32, torch.bfloat16, torch.float16) for x in (q, k, v)):
        return f"operands of {q.dtype}"
    if mask is not None and mask.requires_grad:
        return "a mask with a gradient: left to torch"
    return ""


def _four(x: Tensor) -> Tensor:
    return x[(None,) * (4 - x.dim())]


def _mask(mask: Tensor | None, shape: tuple[int, ...]) -> Tensor | None:
    """A mask as fp32 to be added, expanded to (batch, heads, queries, keys)."""
    if mask is None:
        return None
    if mask.dtype == torch.bool:
        mask = torch.zeros(mask.shape).masked_fill_(~mask, -math.inf)
    return _four(mask.float()).expand(shape)


def _repeat(x: Tensor, q: Tensor) -> Tensor:
    """Keys or values shared by a group of heads, or by the batch, once for each."""
    if x.shape[1] != q.shape[1]:
        x = x.repeat_interleave(q.shape[1] // x.shape[1], 1)
    return x.expand(q.shape[0], -1, -1, -1)


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    compute: str = "bf16",
    values: str = "low",
) -> Tensor:
    """Attention with low-precision products and an fp32 softmax.

    Args:
        query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa: as in torch.
        compute: "bf16" or "fp16", the dtype of the products' operands and of the result.
        values: "low", or "high" for the product of probabilities and values in fp32.

    Returns:
        The mixed values in the compute dtype.

    Raises:
        ValueError: if `is_causal` comes with a mask.

    >>> x = torch.ones(1, 2, 4, 8)
    >>> scaled_dot_product_attention(x, x, x, is_causal=True).dtype
    torch.bfloat16
    """
    low = _LOW[compute]
    query, key, value = (x.to(low) for x in (query, key, value))
    if attn_mask is not None and is_causal:
        raise ValueError("scaled_dot_product_attention: is_causal=True already is a mask; pass it or attn_mask.")
    if why_not(query, key, value, attn_mask, dropout_p):
        if attn_mask is not None and attn_mask.is_floating_point():
            attn_mask = attn_mask.to(low)
        return F.scaled_dot_product_attention(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
    dims = query.dim()
    q, k, v = _four(query), _four(key), _four(value)
    if k.shape[:2] != q.shape[:2] or v.shape[:2] != q.shape[:2]:
        k, v = _repeat(k, q), _repeat(v, q)
    mask = _mask(attn_mask, (*q.shape[:3], k.shape[2]))
    factor = 1 / math.sqrt(q.shape[3]) if scale is None else float(scale)
    out: Tensor = fused.attention(q, k, v, mask, is_causal, factor, values != "low")[0]
    return out[(0,) * (4 - dims)]


def _fused(active: policy.Policy, query: Tensor, key: Tensor, value: Tensor, *args: Any, **options: Any) -> Any:
    given = dict(zip(("attn_mask", "dropout_p", "is_causal"), args)) | options
    if why_not(query, key, value, given.get("attn_mask"), given.get("dropout_p", 0.0)):
        return NotImplemented
    return scaled_dot_product_attention(query, key, value, **given, compute=active.compute, values=active.attention_pv)


policy.register(torch.ops.aten.scaled_dot_product_attention.default, _fused)
