"""The prepared optimizer: a `torch.optim.Optimizer` whose step cannot corrupt a run and says what it did.

    optimizer.backward(loss)        loss finite?  ->  gradients of S * loss
    optimizer.step()                one pass over the gradients (`lowprec.kernels.cast.tensor_stats`): Inf, NaN, sum of
                                    squares; then, and only then, the norm, the clip factor and the update

Order is the whole point. Clipping before unscaling clips to 1/S of what was asked for; updating before the check puts a
NaN where nothing removes it. So unscaling and clipping are not passes of their own: both are one number, which the
optimizer multiplies into each gradient as it reads it,

    factor = 1/S * min(1, clip / norm),   norm = sqrt(sum of squares) / S

and no gradient is written a second time. (An optimizer that knows nothing of such a factor gets its gradients
multiplied in place.) What `param.grad` holds between `backward` and `step` is therefore S times the gradient; who wants
to look at or change it calls `unscale_()` first, and who changes it without is told so.

It wraps another optimizer, whose param_groups and states it shares, so that schedulers, hooks and checkpoints see one
optimizer. It holds several loss scales where several losses are named.
"""

from __future__ import annotations

import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lowprec import loss_scale as scaling
from lowprec.errors import LowprecWarning, unknown_name
from lowprec.gradients import sinks
from lowprec.recipe import Recipe
from lowprec.training import repair
from lowprec.training.collect import Gradients, Source, measure
from lowprec.training.guard import Guard, GuardState
from lowprec.training.ranks import Ranks
from lowprec.training.report import StepOptions, StepReport
from lowprec.training.schedule import Watch
from lowprec.training.update import factors, update
from lowprec.training.window import Window
from lowprec.training.wrapper import Wrapper

__all__ = ["PreparedOptimizer"]

DEFAULT_LOSS = "loss"


class PreparedOptimizer(Wrapper):
    """What `lowprec.prepare` returns in place of an optimizer.

    Args:
        inner: the optimizer that updates.
        models: whose parameters these are; they give the tensors their names.
        scale: the loss scale to start from.
        options: clipping, repair and the like.
        guard: the anomaly guard, or None.
        ranks: the processes that decide together.
        original: the user's optimizer, if `inner` took its place.
    """

    _lowprec_prepared = True
    recipe: Recipe | None = None

    def __init__(
        self,
        inner: torch.optim.Optimizer,
        models: list[nn.Module],
        scale: scaling.ScaleState,
        options: StepOptions | None = None,
        guard: Guard | None = None,
        ranks: Ranks | None = None,
        original: torch.optim.Optimizer | None = None,
    ) -> None:
        super().__init__(inner)
        self.models = models
        self.options = options or StepOptions()
        self.scales: dict[str, scaling.ScaleState] = {DEFAULT_LOSS: scale}
        self.guard = GuardState(guard) if guard is not None else None
        self.ranks = ranks or Ranks()
        self.last_step = StepReport()
        self.gradients = Gradients(inner, models)
        self.window = Window()
        self.lost = 0  # steps skipped in a row, whatever the reason
        self._original = original if original is not inner else None
        self._watch = Watch()
        self._told_collapse = False
        self._at_floor: scaling.LossScaleCollapseError | None = None

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, accumulators included."""
        assert self.inner is not None
        self.inner.zero_grad(set_to_none=set_to_none)
        self.gradients.clear()
        self.window.restart()

    def __repr__(self) -> str:
        return f"Prepared({self.inner!r})"

    # -- backward --------------------------------------------------------------------------------------------------

    @property
    def loss_scale(self) -> float:
        """The factor the next loss will be multiplied by."""
        return self.scales[DEFAULT_LOSS].scale

    def backward(self, loss: torch.Tensor, *, name: str | None = None, batch: Any = None, **kwargs: Any) -> bool:
        """Compute gradients of a loss, scaled as the step expects them, adding to those that are there.

        Args:
            loss: a scalar. A loss that is NaN or Inf is not differentiated: the coming `step` is skipped.
            name: for several losses with a scale each: which one this is.
            batch: what to call this batch in reports (default: how many losses came before it).
            **kwargs: `retain_graph`, `create_graph`, `inputs` of `torch.Tensor.backward`.

        Returns:
            Whether gradients were computed.

        Raises:
            ValueError: if the loss is no scalar, or gradients were changed while they carry the loss scale.
        """
        if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
            shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
            raise ValueError(f"backward takes a scalar loss, got {shape}: reduce it with .mean() or .sum().")
        if not loss.requires_grad:
            raise ValueError("this loss depends on no parameter: was it computed under torch.no_grad()?")
        self._begin_backward()
        self.window.note(float(loss.detach()), batch)
        finite = self.window.bad_loss is None
        if not self._agree(finite, loss.device):
            self.window.bad_loss = self.window.bad_loss or "NaN or Inf on another rank"
            return False
        if name is not None or self.window.apart:
            self._backward_apart(loss, name or DEFAULT_LOSS, kwargs)
        else:
            if not self.window.differentiated:
                self.window.scale = self.scales[DEFAULT_LOSS].scale
            self._differentiate(loss, self.window.scale, kwargs)
        self.window.differentiated += 1
        self.gradients.remember()
        return True

    def _begin_backward(self) -> None:
        """Check what is in the gradients before more is added to it."""
        grads, window = self.gradients, self.window
        if window.stepped:
            # what is left of the last step carries a scale that may have moved
            if window.scale != 1.0 and grads.kept():
                raise ValueError(
                    "gradients of the last step are still there: call optimizer.zero_grad() before the next backward."
                )
            grads.clear()
            window.restart()
        elif grads.all_gone():
            grads.clear()
            window.restart()
        elif window.micro and window.scale != 1.0:
            self._refuse_changes()
        if window.micro:
            grads.make_room()

    def _refuse_changes(self) -> None:
        changed = self.gradients.changed()
        if changed:
            raise ValueError(
                f"the gradient of {self.gradients.name(changed[0])} was changed after optimizer.backward(), while it "
                f"is {self.window.scale:g} times the gradient: clip with prepare(clip_grad_norm=...), or call "
                f"optimizer.unscale_() first."
            )

    def _differentiate(self, loss: torch.Tensor, scale: float, kwargs: dict[str, Any]) -> None:
        loss.backward(gradient=torch.full_like(loss, scale), **kwargs)  # type: ignore[no-untyped-call]

    def _backward_apart(self, loss: torch.Tensor, name: str, kwargs: dict[str, Any]) -> None:
        """One of several losses: its gradients are judged alone, by its own scale, and then added."""
        window = self.window
        if not window.differentiated:
            window.scale = self.scales.setdefault(name, self._fresh_scale()).scale
        elif not window.apart:
            window.found[DEFAULT_LOSS] = self._found(self.gradients.collect())
        state = self.scales.setdefault(name, self._fresh_scale())
        if any(True for _ in sinks(self.gradients.params())):
            raise ValueError("losses with a scale each need gradients that are not stored in 8 bits: use one scale.")
        before = self.gradients.take_all()
        self._differentiate(loss, state.scale, kwargs)
        window.found[name] = window.found.get(name, False) or self._found(self.gradients.fresh())
        self.gradients.add_scaled(before, window.scale / state.scale)
        window.apart = True

    def _fresh_scale(self) -> scaling.ScaleState:
        return self.scales[DEFAULT_LOSS]

    def _found(self, sources: list[Source]) -> bool:
        health = measure(sources)
        return bool(health.inf or health.nan)

    def _agree(self, finite: bool, device: torch.device) -> bool:
        """Whether the loss is finite on every rank (a rank that skipped its backward alone would hang the others)."""
        return self.ranks.total([float(not finite)], device)[0] == 0.0

    @contextmanager
    def no_sync(self, *models: Any) -> Iterator[None]:
        """Within the block, data-parallel models do not exchange gradients: for all micro-batches but the last.

        Args:
            *models: the wrapped models (default: those given to prepare that have a `no_sync`).
        """
        with ExitStack() as stack:
            for model in models or self.models:
                enter: Any = getattr(model, "no_sync", None)
                if enter is not None:
                    stack.enter_context(enter())
                    self.window.unsynced = True
            yield

    # -- step ------------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def unscale_(self) -> None:
        """Divide the gradients by the loss scale in place, for who wants to read or change them before `step`."""
        if self.window.stepped or self.window.scale == 1.0:
            return
        self._refuse_changes()
        inverse = 1.0 / self.window.scale
        sources = self.gradients.collect()
        if any(s.store is not None for s in sources):
            raise ValueError(
                "gradients that are stored in 8 bits keep the loss scale: use prepare(clip_grad_norm=...)."
            )
        for source in sources:
            source.values.mul_(inverse)
        self.window.scale = 1.0
        self.gradients.remember()

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take a step, unless the loss or a gradient is not finite or the guard objects.

        `last_step` says what happened.

        Args:
            closure: computes the loss once more; it calls `zero_grad` and `backward` itself.

        Returns:
            What the closure returned.

        Raises:
            ValueError: if the gradients were not made by `backward`, or were changed since.
            LossScaleCollapseError, TrainingStoppedError: where these were asked for.
        """
        result = None
        if closure is not None:
            with torch.enable_grad():
                result = closure()
        if self.window.stepped:
            self.window.restart()
        self._watch.before(self.param_groups)
        if self._original is not None:
            self._original._opt_called = True  # type: ignore[attr-defined]  # a scheduler made before prepare asks
        with torch.no_grad():
            report = self._step()
        self.last_step = report
        self.lost = self.lost + 1 if report.skipped and report.kind != "nothing" else 0
        self.window.stepped = True
        self.gradients.sums.clear()
        self.gradients.remember()
        self._watch.after(self.param_groups, report.skipped)
        self._check_collapse(report)
        return result

    def _step(self) -> StepReport:
        window = self.window
        report = StepReport(
            index=self.last_step.index + 1,
            loss=window.mean_loss(),
            loss_scale=window.scale,
            micro_batches=window.micro,
            batches=tuple(window.batches),
        )
        if window.bad_loss is not None:
            return self._skip_bad_loss(report)
        sources = self._sources()
        report, found = self._measured(report, sources)
        if not found and not sources and self.ranks.size == 1:
            return dataclasses.replace(report, skipped=True, kind="nothing", reason="no parameter has a gradient")
        self._adjust(found)
        if found:
            reason = _sentence(report.inf, report.nan)
            return dataclasses.replace(report, skipped=True, kind="gradients", reason=reason)
        if self.guard is not None:
            why = self.guard.judge(report.index, report.loss, report.grad_norm, report.batches)
            if why and self.guard.guard.action == "skip":
                return dataclasses.replace(report, skipped=True, kind="guard", reason=why)
        return self._take(report, sources)

    def _sources(self) -> list[Source]:
        window = self.window
        if window.scale != 1.0:
            self._refuse_changes()
        if window.unsynced and self.gradients.sums:
            self.ranks.mean_(list(self.gradients.sums.values()))
        sources = self.gradients.collect()
        if sources and window.micro == 0 and self.loss_scale != 1.0:
            raise ValueError(
                "step() found gradients that optimizer.backward(loss) did not make: with a loss scale, "
                "loss.backward() alone gives gradients of the wrong size."
            )
        return sources

    def _measured(self, report: StepReport, sources: list[Source]) -> tuple[StepReport, bool]:
        """Statistics of all gradients, alike on every rank."""
        health = measure(sources)
        found = float(bool(health.inf or health.nan))
        device = sources[0].values.device if sources else torch.device("cpu")
        loss = report.loss if report.loss is not None else 0.0
        if self.ranks.size > 1:
            found, *shares, loss = self.ranks.total([found, *health.shares, loss], device)
            loss /= self.ranks.size
        else:
            shares = health.shares
        weight = (1.0, self.options.embedding_grad_scale)
        norms = [
            math.sqrt(a + b) / report.loss_scale * w if math.isfinite(a + b) else None
            for a, b, w in zip(health.squares, shares, weight)
        ]
        report = dataclasses.replace(
            report,
            inf=health.inf,
            nan=health.nan,
            loss=loss if report.loss is not None else None,
            grad_norm=norms[0],
            embedding_norm=norms[1],
        )
        if self.options.clip_embedding_norm is None:
            whole = None if None in norms else math.hypot(*(n for n in norms if n is not None))
            report = dataclasses.replace(report, grad_norm=whole, embedding_norm=None)
        return report, found > 0

    def _adjust(self, found: bool) -> None:
        """Move the scale of every loss that took part."""
        verdicts = self.window.found if self.window.apart else {DEFAULT_LOSS: found}
        for name, bad in verdicts.items():
            # a burst is over: go back to where the scale was before it
            state = self.scales[name]
            if state.collapsed and not bad:
                self.scales[name] = state.recover()
                continue
            try:
                self.scales[name] = state.adjust(bad)
            except scaling.LossScaleCollapseError as error:
                self._at_floor = error

    def _take(self, report: StepReport, sources: list[Source]) -> StepReport:
        assert self.inner is not None
        other, embedding = factors(self.options, report)
        clipped = min(other[1], embedding[1]) < 1.0
        numbers = [embedding[0] if s.embedding else other[0] for s in sources]
        rate = self.guard.learning_rate_factor() if self.guard is not None else 1.0
        repaired: tuple[str, ...] = ()
        if self.options.repair:
            repaired = repair.states_before(self.inner, sources)
        rates = [group.get("lr") for group in self.param_groups]
        if rate != 1.0:
            for group in self.param_groups:
                group["lr"] = group["lr"] * rate
        try:
            update(self.inner, sources, numbers)
        finally:
            if rate != 1.0:
                for group, lr in zip(self.param_groups, rates):
                    group["lr"] = lr
        repaired += repair.states_after(self.inner, self.gradients.name)
        repair.tell(repaired)
        left = getattr(self.inner, "nonfinite", {})
        bad, mended = repair.weights(self, left) if left else ((), ())
        return dataclasses.replace(report, clipped=clipped, nan=bad, repaired=repaired + mended)

    # -- when it goes wrong ----------------------------------------------------------------------------------------

    def _skip_bad_loss(self, report: StepReport) -> StepReport:
        """The forward gave NaN or Inf: the scale is not to blame and stays; a weight may be."""
        bad, repaired = repair.weights(self)
        reason = f"the loss is {self.window.bad_loss}"
        if bad:
            reason += f"; weights that are not finite: {', '.join(bad)}"
        if repaired:
            reason += f"; repaired: {', '.join(repaired)}"
        return dataclasses.replace(report, skipped=True, kind="loss", reason=reason, nan=bad, repaired=repaired)

    def _check_collapse(self, report: StepReport) -> None:
        """Say once, with the cause, when skipping does not help."""
        if self._at_floor is not None:
            error, self._at_floor = self._at_floor, None
            raise scaling.LossScaleCollapseError(f"{error} Last step: {report.reason}.")
        collapsed = any(s.collapsed for s in self.scales.values())
        if not report.skipped or not (collapsed or self.lost >= scaling.COLLAPSE_SKIPS * 2):
            self._told_collapse &= report.skipped
            return
        if self._told_collapse:
            return
        self._told_collapse = True
        message = (
            f"{self.lost} steps in a row were skipped and the loss scale is {self.loss_scale:g}: {report.reason}. "
            f"Overflow is no longer a likely cause; look at the data, the loss and these tensors. The scale returns "
            f"to the last one that worked as soon as gradients are finite again."
        )
        if self.options.collapse == "raise":
            raise scaling.LossScaleCollapseError(message)
        warnings.warn(message, LowprecWarning, stacklevel=4)

    def reset_loss_scale(self, scale: Any = None, *, name: str = DEFAULT_LOSS) -> None:
        """Set the loss scale: to a state, a preset's name or a number, or back to the last one that worked.

        Args:
            scale: what `prepare(loss_scale=...)` takes; None for the last scale that worked.
            name: of which loss.
        """
        if name not in self.scales:
            raise unknown_name("loss", name, self.scales)
        self.scales[name] = self.scales[name].recover() if scale is None else scaling.resolve(scale)
        self._told_collapse = False


def _sentence(inf: tuple[str, ...], nan: tuple[str, ...]) -> str:
    parts = [f"{kind} in {_some(names)}" for kind, names in (("NaN", nan), ("Inf", inf)) if names]
    return "gradients are not finite: " + ("; ".join(parts) or "on another rank")


def _some(names: tuple[str, ...], shown: int = 4) -> str:
    more = f" and {len(names) - shown} more" if len(names) > shown else ""
    return ", ".join(names[:shown]) + more
