"""What a step says about itself, and what a step may be asked to do: two frozen values."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["StepOptions", "StepReport"]

Kind = Literal["", "gradients", "loss", "guard", "nothing"]


@dataclass(frozen=True)
class StepReport:
    """What one call of ``optimizer.step()`` did; kept in ``optimizer.last_step``.

    Args:
        index: which call of `step` this was, counted from 1 (0: none yet).
        skipped: whether the weights were left as they were.
        kind: why, as one word: "gradients" or "loss" (not finite), "guard", "nothing" (no gradient was there); "" if
            the step was taken.
        reason: why, as a sentence; "" if the step was taken.
        loss: mean of the losses given to `backward` since the last step (NaN or Inf if one was).
        loss_scale: the scale the gradients were made with.
        grad_norm: norm of all gradients, unscaled, before clipping (of those without embeddings, where these are
            clipped apart); None where none could be computed.
        embedding_norm: norm of the embedding gradients where they are clipped apart.
        clipped: whether gradients were made smaller.
        inf: names of tensors whose gradient held Inf.
        nan: names of tensors whose gradient held NaN, or of weights found not to be finite.
        repaired: names of weights or optimizer states in which non-finite values were replaced, with how.
        micro_batches: calls of `backward` in this step.
        batches: what those calls were given as `batch` (their count since the start where they were given none).
    """

    index: int = 0
    skipped: bool = False
    kind: Kind = ""
    reason: str = ""
    loss: float | None = None
    loss_scale: float = 1.0
    grad_norm: float | None = None
    embedding_norm: float | None = None
    clipped: bool = False
    inf: tuple[str, ...] = ()
    nan: tuple[str, ...] = ()
    repaired: tuple[str, ...] = ()
    micro_batches: int = 0
    batches: tuple[Any, ...] = ()

    @property
    def taken(self) -> bool:
        """Whether the weights were updated."""
        return self.index > 0 and not self.skipped

    def to_dict(self) -> dict[str, Any]:
        """The report as plain values, for JSON."""
        return dataclasses.asdict(self)

    @classmethod
    def from_dict(cls, plain: dict[str, Any]) -> StepReport:
        """The report that `to_dict` wrote."""
        fields: dict[str, Any] = {k: tuple(v) if isinstance(v, list) else v for k, v in plain.items()}
        return cls(**fields)


@dataclass(frozen=True)
class StepOptions:
    """What the step does besides updating; the arguments of `lowprec.prepare` explain the fields."""

    clip_grad_norm: float | None = None
    clip_embedding_norm: float | None = None
    embedding_grad_scale: float = 1.0
    repair: bool = False
    collapse: Literal["warn", "raise"] = "warn"

    def __post_init__(self) -> None:
        for name in ("clip_grad_norm", "clip_embedding_norm"):
            value = getattr(self, name)
            if value is not None and not 0.0 < value < float("inf"):
                raise ValueError(f"{name} must be a positive number or None, got {value!r}")
        if not 0.0 < self.embedding_grad_scale < float("inf"):
            raise ValueError(f"embedding_grad_scale must be a positive number, got {self.embedding_grad_scale!r}")
        if self.collapse not in ("warn", "raise"):
            raise ValueError(f"collapse must be 'warn' or 'raise', got {self.collapse!r}")
