"""What has gathered between one step and the next."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

__all__ = ["Window"]


@dataclass
class Window:
    """The micro-batches of one step.

    Args:
        micro: losses given to `backward`.
        differentiated: how many of them were differentiated.
        scale: what the gradients are multiplied by.
        losses: their sum.
        batches: what they were called.
        bad_loss: "NaN" or "Inf", if a loss was.
        apart: whether losses with scales of their own took part.
        found: for these, whether each gave non-finite gradients.
        stepped: whether the step has been made since.
        unsynced: whether gradients were kept from other ranks (`no_sync`).
        total: losses since the start.
    """

    micro: int = 0
    differentiated: int = 0
    scale: float = 1.0
    losses: float = 0.0
    batches: list[Any] = field(default_factory=list)
    bad_loss: str | None = None
    apart: bool = False
    found: dict[str, bool] = field(default_factory=dict)
    stepped: bool = False
    unsynced: bool = False
    total: int = 0

    def note(self, loss: float, batch: Any) -> None:
        """Take up one loss."""
        self.micro += 1
        self.losses += loss
        self.batches.append(self.total if batch is None else batch)
        self.total += 1
        if not math.isfinite(loss):
            self.bad_loss = f"{'NaN' if math.isnan(loss) else 'Inf'} in batch {self.batches[-1]}"

    def mean_loss(self) -> float | None:
        """The mean of the losses, or None without any."""
        return self.losses / self.micro if self.micro else None

    def restart(self) -> None:
        """Begin the next step."""
        self.__init__(total=self.total)  # type: ignore[misc]
