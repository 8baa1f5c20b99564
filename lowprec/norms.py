"""Layer and RMS normalisation that compute in fp32 and give their result in the compute dtype.

A norm's input is often fp32 (the residual stream) and its output feeds a low-precision product: computing in fp32 and
rounding once on the way out saves the fp32 result and its cast, forward and backward. Behind plain `F.layer_norm` and
`F.rms_norm` (and so `nn.LayerNorm`, `nn.RMSNorm`) these stand wherever a recipe's op policy is active on a CPU.

GELU, SiLU and ReLU have no kernel here: torch's read and write bf16 once, with fp32 inside.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowprec import policy
from lowprec.kernels import fused

__all__ = ["layer_norm", "rms_norm"]

_EPS = torch.finfo(torch.float32).eps
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)


def _fp32(parameter: Tensor | None) -> Tensor | None:
    return None if parameter is None else parameter.float().reshape(-1).contiguous()


def _norm(
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    rms: bool,
    dtype: torch.dtype,
) -> Tensor:
    cols = 1
    for size in shape:
        cols *= size
    out: Tensor = fused.norm(x.reshape(-1, cols), _fp32(weight), _fp32(bias), eps, rms, dtype)[0]
    return out.view(x.shape)


def layer_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Layer normalisation in fp32, rounded once to `dtype` (that of x unless given).

    >>> layer_norm(torch.tensor([[1.0, 3.0]]), (2,), dtype=torch.bfloat16)
    tensor([[-1.,  1.]], dtype=torch.bfloat16)
    """
    _check(x, normalized_shape)
    return _norm(x, normalized_shape, weight, bias, eps, False, dtype or x.dtype)


def rms_norm(
    x: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
    *,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """Root-mean-square normalisation in fp32, rounded once to `dtype` (that of x unless given).

    `eps` is by default the machine epsilon of fp32, which is what is computed in.

    >>> rms_norm(torch.tensor([[3.0, 3.0]]), (2,), eps=0.0)
    tensor([[1., 1.]])
    """
    _check(x, normalized_shape)
    return _norm(x, normalized_shape, weight, None, _EPS if eps is None else eps, True, dtype or x.dtype)


def _check(x: Tensor, shape: Sequence[int]) -> None:
    if not shape or list(x.shape[-len(shape) :]) != list(shape):
        raise ValueError(f"the input ends in {list(x.shape[-len(shape) :])}, not in normalized_shape {list(shape)}.")
    if x.dtype not in _FLOATS:
        raise TypeError(f"normalisation takes fp32, bf16 or fp16 tensors, got {x.dtype}.")


def _takes(x: Tensor, shape: Sequence[int]) -> bool:
    return (
        x.device.type == "cpu" and x.dtype in _FLOATS and x.numel() > 0 and list(x.shape[-len(shape) :]) == list(shape)
    )


def _fused_layer_norm(
    active: policy.Policy,
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Any:
    return _norm(x, shape, weight, bias, eps, False, active.dtype) if _takes(x, shape) else NotImplemented


def _fused_rms_norm(
    active: policy.Policy, x: Tensor, shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Any:
    if not _takes(x, shape):
        return NotImplemented
    return _norm(x, shape, weight, None, _EPS if eps is None else eps, True, active.dtype)


policy.register(torch.ops.aten.layer_norm.default, _fused_layer_norm)
policy.register(torch.ops.aten.rms_norm.default, _fused_rms_norm)
