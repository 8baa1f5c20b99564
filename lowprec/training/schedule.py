"""Learning-rate schedules and skipped steps.

A scheduler that is stepped after every optimizer step counts skipped steps too, and its schedule runs ahead of the
training. `follow` wraps it so that it does not. For loops without it, `Watch` looks at the learning rates from step to
step and warns when the schedule was moved after a step that was skipped.

It must not warn where nothing is wrong. A schedule by epochs moves rarely, and one that a loop computes from its own
counter is meant to follow that counter. So it warns only when a torch scheduler is at work (it marks the group with
"initial_lr") and the rate moved after each of the last three steps, one of them skipped.
"""

from __future__ import annotations

import warnings
from collections import deque
from typing import Any

import torch

from lowprec.errors import LowprecWarning

__all__ = ["Follow", "Watch", "follow"]

_PATTERN = 3


class Follow:
    """A learning-rate scheduler that stands still when the optimizer did; made by `follow`."""

    def __init__(self, scheduler: Any, optimizer: Any) -> None:
        self.scheduler = scheduler
        self.optimizer = optimizer

    def step(self, *args: Any, **kwargs: Any) -> None:
        """Step the scheduler, unless the optimizer's last step was skipped."""
        if not self.optimizer.last_step.skipped:
            self.scheduler.step(*args, **kwargs)

    def state_dict(self) -> dict[str, Any]:
        """The scheduler's state."""
        state: dict[str, Any] = self.scheduler.state_dict()
        return state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load the scheduler's state."""
        self.scheduler.load_state_dict(state)

    def __getattr__(self, name: str) -> Any:
        if name in ("scheduler", "optimizer"):  # while it is being unpickled
            raise AttributeError(name)
        return getattr(self.scheduler, name)


def follow(scheduler: Any, optimizer: Any) -> Follow:
    """Make a scheduler follow the steps that were taken instead of those that were called.

    Args:
        scheduler: any scheduler with a `step` method.
        optimizer: what `lowprec.prepare` returned.

    Returns:
        A scheduler to use in its place; everything but `step` goes to the one given.

    Raises:
        TypeError: if the optimizer does not say whether it skipped.

    >>> from types import SimpleNamespace
    >>> optimizer = SimpleNamespace(last_step=SimpleNamespace(skipped=True))
    >>> follow(SimpleNamespace(step=lambda: print("moved")), optimizer).step()
    """
    if not hasattr(getattr(optimizer, "last_step", None), "skipped"):
        raise TypeError(
            f"follow needs an optimizer from lowprec.prepare, which says whether it skipped, got "
            f"{type(optimizer).__name__}."
        )
    return Follow(scheduler, optimizer)


class Watch:
    """Notices a schedule that moves although the step was skipped."""

    def __init__(self) -> None:
        self._rates: list[float] | None = None
        self._skipped = False
        self._seen: deque[tuple[bool, bool]] = deque(maxlen=_PATTERN)  # (skipped, rate moved afterwards)
        self._warned = False

    def before(self, groups: list[dict[str, Any]]) -> None:
        """Called when a step begins."""
        if self._warned or self._rates is None:
            return
        self._seen.append((self._skipped, self._rates != _rates(groups)))
        moved_always = len(self._seen) == _PATTERN and all(moved for _, moved in self._seen)
        if moved_always and any(skipped for skipped, _ in self._seen) and any("initial_lr" in g for g in groups):
            self._warned = True
            warnings.warn(
                "the learning-rate scheduler was stepped although optimizer.step() had skipped, so the schedule runs "
                "ahead of the training: use scheduler = lowprec.follow(scheduler, optimizer).",
                LowprecWarning,
                stacklevel=4,
            )

    def after(self, groups: list[dict[str, Any]], skipped: bool) -> None:
        """Called when a step ends."""
        if not self._warned:
            self._rates, self._skipped = _rates(groups), skipped


def _rates(groups: list[dict[str, Any]]) -> list[float]:
    return [float(g["lr"].item() if isinstance(g["lr"], torch.Tensor) else g["lr"]) for g in groups if "lr" in g]
