"""The fused ops as torch operators: they differentiate, appear in compiled graphs and run under any policy.

    lowprec::attention, lowprec::cross_entropy, lowprec::norm      and a backward of each

Each has a kernel for every device (the topic picks native code or torch), a fake kernel that knows shapes and dtypes
only, and a derivative that is again one operator.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lowprec.kernels import attention as attention_kernels
from lowprec.kernels import loss as loss_kernels
from lowprec.kernels import norm as norm_kernels

__all__ = ["attention", "cross_entropy", "norm"]

_library = torch.library.Library("lowprec", "FRAGMENT")  # type: ignore[no-untyped-call]


def _define(schema: str, run: Any, fake: Any) -> Any:
    name = schema.partition("(")[0]
    _library.define(schema)  # type: ignore[no-untyped-call]
    _library.impl(name, run, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
    torch.library.register_fake(f"lowprec::{name}", fake, lib=_library)
    return getattr(torch.ops.lowprec, name).default


# -- attention -----------------------------------------------------------------------------------------------------

_attention_backward = _define(
    "attention_backward(Tensor grad, Tensor q, Tensor k, Tensor v, Tensor lse, Tensor? mask, bool causal, float scale,"
    " bool high_values) -> (Tensor, Tensor, Tensor)",
    attention_kernels.backward,
    lambda grad, q, k, v, *rest: tuple(x.new_empty(x.shape) for x in (q, k, v)),
)
attention = _define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool causal, float scale, bool high_values)"
    " -> (Tensor, Tensor)",
    attention_kernels.forward,
    lambda q, k, v, *rest: (
        q.new_empty(*q.shape[:3], v.shape[3]),
        q.new_empty(q.shape[:3], dtype=torch.float32),
    ),
)


def _keep_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    q, k, v, mask, *ctx.options = inputs
    ctx.save_for_backward(q, k, v, output[1], mask)
    ctx.mark_non_differentiable(output[1])


def _attention_grad(ctx: Any, grad: Tensor, _lse: Tensor) -> tuple[Tensor | None, ...]:
    q, k, v, lse, mask = ctx.saved_tensors
    return (*_attention_backward(grad, q, k, v, lse, mask, *ctx.options), None, None, None, None)


torch.library.register_autograd("lowprec::attention", _attention_grad, setup_context=_keep_attention, lib=_library)


# -- cross-entropy -------------------------------------------------------------------------------------------------

_cross_entropy_backward = _define(
    "cross_entropy_backward(Tensor logits, Tensor target, Tensor lse, Tensor factor, int ignore, float smoothing)"
    " -> Tensor",
    loss_kernels.backward,
    lambda logits, *rest: logits.new_empty(logits.shape),
)
cross_entropy = _define(
    "cross_entropy(Tensor logits, Tensor target, int ignore, float smoothing) -> (Tensor, Tensor)",
    loss_kernels.forward,
    lambda logits, *rest: tuple(logits.new_empty(logits.shape[0], dtype=torch.float32) for _ in range(2)),
)


def _keep_loss(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    logits, target, *ctx.options = inputs
    ctx.save_for_backward(logits, target, output[1])
    ctx.mark_non_differentiable(output[1])


def _loss_grad(ctx: Any, grad: Tensor, _lse: Tensor) -> tuple[Tensor | None, ...]:
    logits, target, lse = ctx.saved_tensors
    return _cross_entropy_backward(logits, target, lse, grad, *ctx.options), None, None, None


torch.library.register_autograd("lowprec::cross_entropy", _loss_grad, setup_context=_keep_loss, lib=_library)


# -- layer and RMS normalisation -----------------------------------------------------------------------------------


def _norm_backward_run(
    x: Tensor, grad: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, rms: bool, need_w: bool, need_b: bool
) -> tuple[Tensor, Tensor, Tensor]:
    grads = norm_kernels.backward(x, grad, weight, mean, rstd, rms, (need_w, need_b))
    return tuple(rstd.new_empty(0) if g is None else g for g in grads)  # type: ignore[return-value]


_norm_backward = _define(
    "norm_backward(Tensor x, Tensor grad, Tensor? weight, Tensor mean, Tensor rstd, bool rms, bool need_w, bool need_b)"
    " -> (Tensor, Tensor, Tensor)",
    _norm_backward_run,
    lambda x, grad, weight, mean, rstd, rms, need_w, need_b: (
        x.new_empty(x.shape),
        rstd.new_empty(x.shape[1] if need_w else 0),
        rstd.new_empty(x.shape[1] if need_b else 0),
    ),
)
norm = _define(
    "norm(Tensor x, Tensor? weight, Tensor? bias, float eps, bool rms, ScalarType dtype) -> (Tensor, Tensor, Tensor)",
    norm_kernels.forward,
    lambda x, weight, bias, eps, rms, dtype: (
        x.new_empty(x.shape, dtype=dtype),
        x.new_empty(x.shape[0], dtype=torch.float32),
        x.new_empty(x.shape[0], dtype=torch.float32),
    ),
)


def _keep_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor]) -> None:
    x, weight, _bias, _eps, ctx.rms, _dtype = inputs
    ctx.save_for_backward(x, weight, output[1], output[2])
    ctx.mark_non_differentiable(output[1], output[2])


def _norm_grad(ctx: Any, grad: Tensor, _mean: Tensor, _rstd: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, mean, rstd = ctx.saved_tensors
    need_w, need_b = ctx.needs_input_grad[1], ctx.needs_input_grad[2]
    grad_x, grad_w, grad_b = _norm_backward(x, grad, weight, mean, rstd, ctx.rms, need_w, need_b)
    return grad_x, grad_w if need_w else None, grad_b if need_b else None, None, None, None


torch.library.register_autograd("lowprec::norm", _norm_grad, setup_context=_keep_norm, lib=_library)
