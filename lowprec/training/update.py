"""The update: each gradient times one number, inside the optimizer where it can, in place where it cannot."""

from __future__ import annotations

import functools
import inspect
from typing import Any

import torch

from lowprec.training.collect import Source
from lowprec.training.report import StepOptions, StepReport

__all__ = ["factors", "takes_factor", "update"]


@functools.cache
def takes_factor(kind: Any) -> bool:
    """Whether the step of an optimizer of this class multiplies gradients as it reads them."""
    return "grad_factor" in inspect.signature(kind.step).parameters


def factors(options: StepOptions, report: StepReport) -> tuple[tuple[float, float], tuple[float, float]]:
    """(factor, its clipping part) of ordinary and of embedding gradients: unscale times clip."""
    inverse = 1.0 / report.loss_scale
    clip = _clip(options.clip_grad_norm, report.grad_norm)
    apart = clip
    if options.clip_embedding_norm is not None:
        apart = _clip(options.clip_embedding_norm, report.embedding_norm)
    return (inverse * clip, clip), (inverse * apart * options.embedding_grad_scale, apart)


def update(inner: torch.optim.Optimizer, sources: list[Source], numbers: list[float]) -> None:
    """Let an optimizer step, each gradient times its number."""
    kind: Any = type(inner)
    if not takes_factor(kind):
        for source, number in zip(sources, numbers):
            if number != 1.0:
                source.values.mul_(number)
            if source.grad is not source.param.grad:
                source.param.grad = source.grad.to(source.param.dtype)
        inner.step()
        return
    # an accumulator is wider than its parameter, and autograd allows no such .grad
    wide = [s for s in sources if s.store is None and s.grad is not s.param.grad]
    for source in wide:
        source.param._lowprec_grad = source.grad  # type: ignore[attr-defined]
    try:
        same = len(set(numbers)) <= 1
        given: Any = (numbers or [1.0])[0] if same else dict(zip((s.param for s in sources), numbers))
        step: Any = inner.step
        step(grad_factor=given)
    finally:
        for source in wide:
            source.param._lowprec_grad = None  # type: ignore[attr-defined]


def _clip(limit: float | None, norm: float | None) -> float:
    """The factor that brings a norm down to its limit, as torch.nn.utils.clip_grad_norm_ has it."""
    if limit is None or norm is None:
        return 1.0
    return min(1.0, limit / (norm + 1e-6))
