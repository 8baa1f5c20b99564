"""Scaled dot-product attention as batched products with a fused softmax between them, forward and backward.

    S = Q K^T (low)      P = softmax(scale S + mask) (fp32 inside)      O = P V (low, or fp32)
    dV = P^T dO     dP = dO V^T     dS = P * (dP - rowsum(P dP)) * scale     dQ = dS K     dK = dS^T Q

On a CPU the batched bf16 products of oneDNN run at the full speed of a GEMM, several times what a flash kernel reaches
there, so the question is only where the scores live. They are made in tiles that stay in the cache: some heads, and a
range of queries (under a causal mask a tile also stops at the last key its queries see, which saves nearly half of the
work). Forward keeps nothing but the log-sum-exp of each row; backward makes the scores again, tile by tile, and then
takes dK and dV over whole sequences, so that each is rounded once.

Low products take bf16 operands and round their results to bf16; fp16 and fp32 operands are multiplied in fp32, which is
exact for fp16. `high_values` takes the product with V (and its two gradients) in fp32.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lowprec.kernels import softmax
from lowprec.kernels.softmax import Tile

__all__ = ["LONGEST", "backward", "forward"]

LONGEST = 1536  # keys; beyond, backward is slower than a flash kernel (two queries x keys matrices a head)
_TILE_BYTES = 8 << 20  # scores worked on at a time
_QUERIES, _BACK_QUERIES = 128, 256  # queries of a tile under a causal mask
_MOST_QUERIES = 512


def _chunks(batch: int, heads: int, size: int, together: bool) -> Iterator[tuple[int, int]]:
    """Ranges of the batch * heads matrices; within one batch entry unless `together`."""
    span = batch * heads if together else heads
    for start in range(0, batch * heads, span):
        for first in range(start, start + span, size):
            yield first, min(first + size, start + span)


def _spans(queries: int, keys: int, step: int, causal: bool) -> list[tuple[int, int, int]]:
    """Ranges of queries, and how many keys each sees."""
    ranges = [(i, min(i + step, queries)) for i in range(0, queries, step)]
    return [(i, j, min(j, keys) if causal else keys) for i, j in ranges]


def _flat(x: Tensor, dtype: torch.dtype) -> Tensor:
    return x.to(dtype).reshape(-1, x.shape[2], x.shape[3])


def _mask_of(mask: Tensor | None, first: int, last: int, heads: int) -> Tensor | None:
    """The mask of a chunk, which lies within one batch entry."""
    return None if mask is None else mask[first // heads, first % heads : (last - 1) % heads + 1]


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, causal: bool, scale: float, high_values: bool
) -> tuple[Tensor, Tensor]:
    """Attention of (batch, heads, tokens, width) tensors of one dtype.

    Args:
        q: queries; k and v have as many heads.
        k: keys.
        v: values, of any width.
        mask: fp32, added to the scaled scores, expanded to (batch, heads, queries, keys); or None.
        causal: query i sees keys 0 .. i.
        scale: multiplies the scores.
        high_values: take the product with V in fp32.

    Returns:
        The mixed values, in the dtype of q, and the log-sum-exp of each query in fp32.
    """
    batch, heads, queries, _ = q.shape
    low = q.dtype if q.dtype == torch.bfloat16 else torch.float32
    pv = torch.float32 if high_values else low
    q3, k3, v3 = _flat(q, low), _flat(k, low).transpose(1, 2), _flat(v, pv)
    keys = k3.shape[2]
    lse = torch.empty(batch * heads, queries, dtype=torch.float32, device=q.device)
    out = torch.empty(batch * heads, queries, v3.shape[2], dtype=q.dtype, device=q.device)
    spans = _spans(queries, keys, _QUERIES if causal else _MOST_QUERIES, causal)
    size = max(1, _TILE_BYTES // ((spans[0][1] - spans[0][0]) * keys * low.itemsize)) if spans else 1
    for first, last in _chunks(batch, heads, size, mask is None):
        inside = _mask_of(mask, first, last, heads)
        for i, j, seen in spans:
            scores = torch.bmm(q3[first:last, i:j], k3[first:last, :, :seen])
            part = None if inside is None else inside[:, i:j, :seen]
            p = scores if pv == low else torch.empty_like(scores, dtype=pv)
            softmax.forward(Tile(scale, causal, i, part), scores, lse[first:last, i:j], p)
            mixed = torch.bmm(p, v3[first:last, :seen])
            out[first:last, i:j] = mixed
    return out.view(batch, heads, queries, -1), lse.view(batch, heads, queries)


def backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    lse: Tensor,
    mask: Tensor | None,
    causal: bool,
    scale: float,
    high_values: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v, each in its dtype."""
    batch, heads, queries, _ = q.shape
    low = q.dtype if q.dtype == torch.bfloat16 else torch.float32
    pv = torch.float32 if high_values else low
    q3, k3 = _flat(q, low), _flat(k, low)
    v3, g3 = _flat(v, pv), _flat(grad, pv)
    kt, vt = k3.transpose(1, 2), v3.transpose(1, 2)
    keys = k3.shape[1]
    lse = lse.reshape(-1, queries)
    grad_q, grad_k, grad_v = torch.empty_like(q3), torch.empty_like(k3), torch.empty_like(v3)
    if causal and keys > queries:  # keys that no query sees
        grad_k[:, queries:], grad_v[:, queries:] = 0, 0
    spans = _spans(queries, keys, _BACK_QUERIES if causal else _MOST_QUERIES, causal)
    size = max(1, _TILE_BYTES // max(1, queries * keys * low.itemsize))
    for first, last in _chunks(batch, heads, size, mask is None):
        inside = _mask_of(mask, first, last, heads)
        at = slice(first, last)
        p = torch.empty(last - first, queries, keys, dtype=pv, device=q.device)
        ds = torch.empty_like(p)
        for i, j, seen in spans:
            part = None if inside is None else inside[:, i:j, :seen]
            scores = torch.bmm(q3[at, i:j], kt[at, :, :seen])
            grad_p = torch.bmm(g3[at, i:j], vt[at, :, :seen])
            window = slice(i, j), slice(seen)
            tile = Tile(scale, causal, i, part)
            softmax.backward(
                tile, scores, lse[at, i:j], grad_p, p[:, window[0], window[1]], ds[:, window[0], window[1]]
            )
            grad_q[at, i:j] = torch.bmm(ds[:, i:j, :seen].to(low), k3[at, :seen])
        for i, j in [(i, min(j, keys)) for i, j, _ in spans] if causal else [(0, keys)]:
            rows = slice(i if causal else 0, None)
            # a window is copied row by row first: transposing it within the product is several times slower
            grad_v[at, i:j] = torch.bmm(p[:, rows, i:j].contiguous().transpose(1, 2), g3[at, rows])
            grad_k[at, i:j] = torch.bmm(ds[:, rows, i:j].to(low).contiguous().transpose(1, 2), q3[at, rows])
    return tuple(x.view(y.shape).to(y.dtype) for x, y in zip((grad_q, grad_k, grad_v), (q, k, v)))  # type: ignore[return-value]
