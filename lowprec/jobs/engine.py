"""One model under one recipe: a step, a validation, a state.

`LowPrec` is what a user's three changed lines do. `Torch` is the peer: the same model and AdamW in plain torch at its
best setting (fused AdamW; autocast for bf16), so that a table can say what was gained over what people run today.
Peers are named ``torch-fp32`` and ``torch-bf16`` and stand in a list of recipes like any other.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn

import lowprec as lp
from lowprec.apply import applied
from lowprec.jobs import measure
from lowprec.workloads import Workload

__all__ = ["PEERS", "Engine", "Hyper", "LowPrec", "StepInfo", "Torch", "learning_rate", "make"]

PEERS = {
    "torch-fp32": "plain torch, fused AdamW",
    "torch-bf16": "torch.autocast bf16, fused AdamW",
}


@dataclass(frozen=True)
class Hyper:
    """What is the same for every recipe.

    Args:
        lr, weight_decay, betas: of AdamW.
        steps: length of the run; the schedule needs it.
        warmup: steps of linear warm-up.
        schedule: "constant", "linear" or "cosine" (both down to a tenth).
        clip: largest gradient norm, 0 for none.
        accumulate: micro-batches a step.
        options: what else `lowprec.prepare` is given (skip, rules by name, strict, guard, seed).
    """

    lr: float = 1e-3
    weight_decay: float = 0.1
    betas: tuple[float, float] = (0.9, 0.95)
    steps: int = 100
    warmup: int = 10
    schedule: str = "cosine"
    clip: float = 1.0
    accumulate: int = 1
    options: dict[str, Any] = field(default_factory=dict)


def learning_rate(hyper: Hyper, step: int) -> float:
    """The learning rate of a step, from the step alone.

    >>> hyper = Hyper(lr=1.0, steps=100, warmup=10, schedule="linear")
    >>> [round(learning_rate(hyper, step), 3) for step in (0, 9, 10, 55, 100)]
    [0.1, 1.0, 1.0, 0.55, 0.1]
    """
    if step < hyper.warmup:
        return hyper.lr * (step + 1) / hyper.warmup
    done = min(1.0, (step - hyper.warmup) / max(1, hyper.steps - hyper.warmup))
    if hyper.schedule == "linear":
        return hyper.lr * (1 - 0.9 * done)
    if hyper.schedule == "cosine":
        return hyper.lr * (0.1 + 0.45 * (1 + math.cos(math.pi * done)))
    return hyper.lr


class StepInfo(NamedTuple):
    """What a step did."""

    loss: float
    grad_norm: float | None = None
    loss_scale: float | None = None
    skipped: bool = False
    reason: str = ""


class Engine:
    """A model, its optimizer, and how a step is made; the two ways differ in `_backward` and `_update`."""

    def __init__(self, work: Workload, recipe: str, hyper: Hyper, seed: int, device: str = "cpu") -> None:
        self.work, self.recipe, self.hyper, self.seed = work, recipe, hyper, seed
        self.device = torch.device(device)
        self.model: nn.Module = work.model(seed).to(self.device)
        self.optimizer: torch.optim.Optimizer
        self._build()

    def _build(self) -> None:
        raise NotImplementedError

    def _loss(self, batch: Any) -> torch.Tensor:
        return self.work.loss(self.model, batch)

    def _backward(self, loss: torch.Tensor) -> None:
        raise NotImplementedError

    def _update(self) -> tuple[float | None, float | None, bool, str]:
        raise NotImplementedError

    def to_device(self, batch: Any) -> Any:
        """The batch on this engine's device."""
        if self.device.type == "cpu":
            return batch
        if isinstance(batch, dict):
            return {k: v.to(self.device) if isinstance(v, torch.Tensor) else v for k, v in batch.items()}
        return tuple(v.to(self.device) for v in batch)

    def set_lr(self, lr: float) -> None:
        """Set the learning rate of every group."""
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def reseed(self, step: int) -> None:
        """Random numbers of the model (dropout) follow from seed and step alone, whoever else drew some before."""
        torch.manual_seed((self.seed * 1_000_003 + step) % 2**63)

    def step(self, batches: Sequence[Any], lr: float, step: int) -> StepInfo:
        """One optimizer step over some micro-batches."""
        self.reseed(step)
        self.set_lr(lr)
        total = 0.0
        for batch in batches:
            loss = self._loss(self.to_device(batch))
            self._backward(loss / len(batches) if len(batches) > 1 else loss)
            total += float(loss.detach())
        norm, scale, skipped, reason = self._update()
        self.optimizer.zero_grad()
        return StepInfo(total / len(batches), norm, scale, skipped, reason)

    def validate(self, batches: Sequence[Any]) -> float:
        """Mean validation loss, computed in the recipe's own precision."""
        self.model.eval()
        try:
            with torch.no_grad():
                return sum(float(self._loss(self.to_device(batch))) for batch in batches) / len(batches)
        finally:
            self.model.train()

    def measure(self, batches: Sequence[Any], lr: float, step: int) -> tuple[StepInfo, measure.Bytes, int | None]:
        """One step, with the bytes by role and the bytes at its peak (everything this model keeps included)."""
        self.reseed(step)
        self.set_lr(lr)
        found: list[Any] = []

        def work() -> None:
            loss = self._loss(self.to_device(batches[0]))
            self._backward(loss)
            found.extend((float(loss.detach()), measure.bytes_by_role(self.model, self.optimizer)))
            del loss
            norm, scale, skipped, reason = self._update()
            self.optimizer.zero_grad()
            found[0] = StepInfo(found[0], norm, scale, skipped, reason)

        peak = measure.peak_of(work, self.device)
        info, held = found
        kept = measure.bytes_by_role(self.model, self.optimizer).total
        return info, held, None if peak is None else peak + kept

    def watched_step(self, batches: Sequence[Any], lr: float, step: int) -> tuple[StepInfo, list[dict[str, Any]]]:
        """A step, and what its casts did: a row for each module and role; none where nothing is cast."""
        return self.step(batches, lr, step), []

    def coverage(self, batch: Any) -> dict[str, Any] | None:
        """Share of the FLOPs of products by format, or None for a peer."""
        return None

    def state(self) -> dict[str, Any]:
        """Everything the next step depends on."""
        raise NotImplementedError

    def load(self, state: dict[str, Any]) -> None:
        """Put a state back."""
        raise NotImplementedError


class Torch(Engine):
    """The peer: plain torch."""

    def _build(self) -> None:
        hyper = self.hyper
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=hyper.lr, betas=hyper.betas, weight_decay=hyper.weight_decay, fused=True
        )

    def _loss(self, batch: Any) -> torch.Tensor:
        low = self.recipe == "torch-bf16"
        with torch.autocast(self.device.type, torch.bfloat16) if low else nullcontext():
            return self.work.loss(self.model, batch)

    def _backward(self, loss: torch.Tensor) -> None:
        loss.backward()  # type: ignore[no-untyped-call]

    def _update(self) -> tuple[float | None, float | None, bool, str]:
        norm = None
        if self.hyper.clip:
            norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.hyper.clip))
        self.optimizer.step()
        return norm, None, False, ""

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}

    def load(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])


class LowPrec(Engine):
    """A recipe, by the three lines a user changes."""

    def _build(self) -> None:
        hyper = self.hyper
        optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=hyper.lr, betas=hyper.betas, weight_decay=hyper.weight_decay
        )
        self.model, self.optimizer = lp.prepare(
            self.model, optimizer, recipe=self.recipe, clip_grad_norm=hyper.clip or None, **hyper.options
        )

    def watched_step(self, batches: Sequence[Any], lr: float, step: int) -> tuple[StepInfo, list[dict[str, Any]]]:
        plan = applied(self.model)
        if plan is None or not any(row.output or row.grad_input or row.grad_weight for row in plan.converted):
            return self.step(batches, lr, step), []
        with lp.observe(self.model) as watch:
            info = self.step(batches, lr, step)
        return info, [row._asdict() for row in watch.rows()]

    def coverage(self, batch: Any) -> dict[str, Any] | None:
        found = lp.coverage(self.model, lambda model: self.work.loss(model, self.to_device(batch)))
        return {"shares": found.shares, "low": found.low}

    def _backward(self, loss: torch.Tensor) -> None:
        self.optimizer.backward(loss)  # type: ignore[attr-defined]

    def _update(self) -> tuple[float | None, float | None, bool, str]:
        self.optimizer.step()
        last = self.optimizer.last_step  # type: ignore[attr-defined]
        return last.grad_norm, last.loss_scale, bool(last.skipped), str(last.reason or "")

    def state(self) -> dict[str, Any]:
        return lp.state_dict(self.model, self.optimizer)  # type: ignore[no-any-return]

    def load(self, state: dict[str, Any]) -> None:
        lp.load_state_dict(self.model, self.optimizer, state)


def make(work: Workload, recipe: str, hyper: Hyper, seed: int, device: str = "cpu") -> Engine:
    """The engine for a recipe or a peer."""
    return (Torch if recipe in PEERS else LowPrec)(work, recipe, hyper, seed, device)
