"""The anomaly guard: running statistics of the loss and the gradient norm, and what to do when they take off.

Both are followed as exponential means and variances; the norm by its logarithm, because it is a product of many factors
and its ratio to the usual is what tells. A value is an anomaly when it lies more than `sigma` deviations above the mean
(below is never one). Three things keep the guard from crying wolf: it says nothing before `warmup` steps, a deviation
counts as at least 2% of the loss or 10% of the norm, and anomalies do not enter the statistics. Where more than
`patience` come in a row, the level itself has moved: the statistics start again from there, or, with action "stop", the
run ends.

    skip      leave the step out
    backoff   take it, and the next `steps`, at `factor` times the learning rate
    stop      raise `TrainingStoppedError` with a post-mortem: the last steps, each with its batch
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from lowprec.errors import unknown_name

__all__ = ["Guard", "GuardState", "TrainingStoppedError"]

_ACTIONS = ("skip", "backoff", "stop")
_KEPT = 50  # steps in a post-mortem


class TrainingStoppedError(ValueError):
    """The guard ended the run; `post_mortem` holds the last steps and which batch set it off."""

    def __init__(self, message: str, post_mortem: dict[str, Any]) -> None:
        super().__init__(message)
        self.post_mortem = post_mortem


@dataclass(frozen=True)
class Guard:
    """What the guard watches and does.

    Args:
        action: "skip", "backoff" or "stop".
        sigma: deviations above the mean that make an anomaly.
        warmup: steps before the first judgement.
        decay: how slowly the statistics forget; 0.98 remembers about 50 steps.
        factor: of the learning rate, with "backoff".
        steps: how long the learning rate stays reduced, with "backoff".
        patience: anomalies in a row that are believed to be the new level.
        loss, grad_norm: which of the two is watched.
        post_mortem: with "stop", a file that gets the last steps as JSON.

    >>> Guard("backoff", steps=20).factor
    0.1
    """

    action: Literal["skip", "backoff", "stop"] = "skip"
    sigma: float = 6.0
    warmup: int = 50
    decay: float = 0.98
    factor: float = 0.1
    steps: int = 100
    patience: int = 10
    loss: bool = True
    grad_norm: bool = True
    post_mortem: str | None = None

    def __post_init__(self) -> None:
        if self.action not in _ACTIONS:
            raise unknown_name("action of the guard", self.action, _ACTIONS)
        rules = {
            "sigma": self.sigma > 0,
            "warmup": self.warmup >= 2,
            "decay": 0 < self.decay < 1,
            "factor": 0 <= self.factor < 1,
            "steps": self.steps >= 1,
            "patience": self.patience >= 1,
        }
        for name, holds in rules.items():
            if not holds:
                raise ValueError(f"the guard's {name} cannot be {getattr(self, name)!r}")


@dataclass
class _Running:
    """Exponential mean and variance of one number."""

    mean: float = 0.0
    variance: float = 0.0
    count: int = 0

    def add(self, value: float, decay: float) -> None:
        # a plain mean at first, an exponential one once enough has been seen
        weight = max(1.0 / (self.count + 1), 1.0 - decay)
        delta = value - self.mean
        self.mean += weight * delta
        self.variance = (1.0 - weight) * (self.variance + weight * delta * delta)
        self.count += 1

    def deviations(self, value: float, least: float) -> float:
        return (value - self.mean) / max(math.sqrt(self.variance), least, 1e-30)


@dataclass
class GuardState:
    """The guard at work: its statistics and what it remembers.

    Args:
        guard: what to watch and do.
    """

    guard: Guard
    loss: _Running = field(default_factory=_Running)
    norm: _Running = field(default_factory=_Running)
    in_a_row: int = 0
    reduced: int = 0
    anomalies: list[dict[str, Any]] = field(default_factory=list)
    history: deque[dict[str, Any]] = field(default_factory=lambda: deque(maxlen=_KEPT))

    def judge(self, step: int, loss: float | None, norm: float | None, batches: tuple[Any, ...]) -> str:
        """Look at one step before it is taken.

        Args:
            step: its index.
            loss: its loss.
            norm: its gradient norm.
            batches: the batches it was made of.

        Returns:
            Why it is an anomaly, as a sentence; "" where it is none.

        Raises:
            TrainingStoppedError: for an anomaly, with action "stop".
        """
        self.history.append({"step": step, "loss": loss, "grad_norm": norm, "batches": list(batches)})
        why = self._why(loss, norm)
        if why:
            self.in_a_row += 1
            self.anomalies.append({"step": step, "why": why, "batches": list(batches)})
            if self.guard.action == "stop":
                self._stop(step, why, batches)
            if self.guard.action == "backoff":
                self.reduced = self.guard.steps
            if self.in_a_row <= self.guard.patience:
                return why
            self.loss, self.norm = _Running(), _Running()
        self.in_a_row = 0
        if loss is not None and math.isfinite(loss):
            self.loss.add(loss, self.guard.decay)
        if norm is not None and math.isfinite(norm) and norm > 0:
            self.norm.add(math.log(norm), self.guard.decay)
        return ""

    def learning_rate_factor(self) -> float:
        """The factor of the learning rate for the step about to be taken; counts it."""
        if self.reduced == 0:
            return 1.0
        self.reduced -= 1
        return self.guard.factor

    def _why(self, loss: float | None, norm: float | None) -> str:
        g = self.guard
        if g.loss and loss is not None and self.loss.count >= g.warmup:
            far = self.loss.deviations(loss, 0.02 * abs(self.loss.mean))
            if far > g.sigma:
                return f"loss {loss:.4g} is {far:.1f} deviations above its mean {self.loss.mean:.4g}"
        if g.grad_norm and norm is not None and norm > 0 and self.norm.count >= g.warmup:
            far = self.norm.deviations(math.log(norm), 0.1)
            if far > g.sigma:
                return (
                    f"gradient norm {norm:.4g} is {far:.1f} deviations above its usual {math.exp(self.norm.mean):.4g}"
                )
        return ""

    def _stop(self, step: int, why: str, batches: tuple[Any, ...]) -> None:
        report = {"step": step, "why": why, "batches": list(batches), "history": list(self.history)}
        where = ""
        if self.guard.post_mortem is not None:
            Path(self.guard.post_mortem).write_text(json.dumps(report, indent=1, default=str))
            where = f" The last {len(self.history)} steps are in {self.guard.post_mortem}."
        shown = ", ".join(map(str, batches)) or "?"
        raise TrainingStoppedError(f"stopped at step {step}, batch {shown}: {why}.{where}", report)

    # -- state -----------------------------------------------------------------------------------------------------

    def to_dict(self) -> dict[str, Any]:
        """Everything that changes, as plain values."""
        plain = {f.name: getattr(self, f.name) for f in dataclasses.fields(self) if f.name != "guard"}
        plain |= {"loss": dataclasses.asdict(self.loss), "norm": dataclasses.asdict(self.norm)}
        return plain | {"history": list(self.history), "anomalies": list(self.anomalies)}

    def load(self, plain: dict[str, Any]) -> None:
        """Go on from what `to_dict` gave."""
        for f in dataclasses.fields(self):
            if f.name in ("loss", "norm"):
                setattr(self, f.name, _Running(**plain[f.name]))
            elif f.name == "history":
                self.history = deque(plain["history"], maxlen=_KEPT)
            elif f.name != "guard":
                setattr(self, f.name, plain[f.name])
