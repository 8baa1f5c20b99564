"""Non-finite values that are already in a weight or an optimizer state: find them, name them, replace them.

A step is guarded against gradients; a bit flip, a bad checkpoint or a bug can still put a NaN into what persists. Three
lines of defence, by cost:

* the update kernels of `lowprec.optim` leave an element alone whose new value would not be finite, and count it. Free,
  always on: no NaN passes from a state to a weight. The state is then put right, and the report names it.
* a loss that is not finite makes the step look at the weights (only then, so it costs nothing in a healthy run). A
  weight with an exact master is written anew from it.
* with ``repair=True`` weights without a master get zeros where they were not finite, and states of optimizers that do
  not guard themselves are checked before every step: one more read of the states.

A first moment is set to zero (no memory), a second moment to the largest of its tensor (the smallest step).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import torch

from lowprec.errors import LowprecWarning
from lowprec.kernels.cast import tensor_stats
from lowprec.training.collect import Source

if TYPE_CHECKING:
    from lowprec.training.step import PreparedOptimizer

__all__ = ["states_after", "states_before", "tell", "weights"]

_FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


def states_before(inner: torch.optim.Optimizer, sources: list[Source]) -> tuple[str, ...]:
    """Check the states that the coming step will read, where the optimizer does not guard itself."""
    if hasattr(inner, "nonfinite"):
        return ()
    return tuple(text for s in sources for text in _clean(s.name, inner.state.get(s.param, {})))


def states_after(inner: torch.optim.Optimizer, name: Callable[[torch.Tensor], str]) -> tuple[str, ...]:
    """Put states right in which the kernel found what it could not use."""
    found: dict[torch.Tensor, int] = getattr(inner, "nonfinite", {})
    repaired: list[str] = []
    for param, count in found.items():
        done = _clean(name(param), inner.state.get(param, {}))
        repaired += done or [f"{name(param)} ({count} elements were left as they were)"]
    return tuple(repaired)


def tell(repaired: tuple[str, ...]) -> None:
    """Warn of states that were put right."""
    if repaired:
        warnings.warn(
            f"an optimizer state was not finite and was kept from the weights: {'; '.join(repaired[:4])}.",
            LowprecWarning,
            stacklevel=6,
        )


def weights(
    optimizer: PreparedOptimizer, among: Iterable[torch.Tensor] | None = None
) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Names of weights that are not finite, and what was done about each.

    Args:
        optimizer: whose weights.
        among: which of them to look at; None for all.
    """
    given = optimizer.gradients.params() if among is None else among
    params = [p for p in given if _local(p).dtype in _FLOATS]
    if not params:
        return (), ()
    stats = tensor_stats([_local(p) for p in params])
    counts = (stats.inf + stats.nan).tolist()
    bad = [p for p, count in zip(params, counts) if count]
    repaired = []
    inner: Any = optimizer.inner
    masters: dict[torch.Tensor, Any] = inner.masters() if bad and hasattr(inner, "masters") else {}
    for param in bad:
        name, wrong = optimizer.gradients.name(param), ~torch.isfinite(_local(param))
        master = masters.get(param)
        if master is not None and bool(torch.isfinite(master).all()):
            _local(param)[wrong] = master[wrong].to(param.dtype)
            repaired.append(f"{name}: {int(wrong.sum())} elements from the master")
        elif optimizer.options.repair:
            _local(param)[wrong] = 0.0
            _clean_master(inner, param, wrong)
            _clean(name, optimizer.state.get(param, {}))
            repaired.append(f"{name}: {int(wrong.sum())} elements to zero")
    names = tuple(optimizer.gradients.name(p) for p in bad)
    if bad:
        done = f"; {'; '.join(repaired)}" if repaired else ". Load a checkpoint, or prepare with repair=True"
        warnings.warn(f"weights are not finite: {', '.join(names)}{done}.", LowprecWarning, stacklevel=6)
    return names, tuple(repaired)


def _clean_master(inner: Any, param: torch.Tensor, wrong: torch.Tensor) -> None:
    """Put the master and residue right, where they have elements that are not finite."""
    state = inner.state.get(param, {})
    for key in ("master", "residue"):
        value = state.get(key)
        if isinstance(value, torch.Tensor) and value.shape == param.shape:
            value[wrong] = 0


def _clean(name: str, state: dict[str, Any]) -> list[str]:
    """Replace what is not finite in one parameter's states; says where."""
    tensors = {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.numel() > 1 and v.dtype in _FLOATS}
    if not tensors:
        return []
    stats = tensor_stats([_local(t) for t in tensors.values()])
    done = []
    for (key, tensor), count in zip(tensors.items(), (stats.inf + stats.nan).tolist()):
        if not count:
            continue
        value = _local(tensor)
        wrong = ~torch.isfinite(value)
        second = "sq" in key or "second" in key
        good = value[~wrong]
        value[wrong] = good.max() if second and good.numel() else 0.0
        done.append(f"{key} of {name} ({int(count)} elements)")
    return done


def _local(tensor: torch.Tensor) -> torch.Tensor:
    to_local = getattr(tensor, "to_local", None)
    return tensor.detach() if to_local is None else to_local().detach()
