"""`lp.GradScaler`: torch.amp.GradScaler with the same methods, sequence and state dict, for any device.

It is a subclass, so that whoever asks ``isinstance(scaler, torch.amp.GradScaler)`` is answered yes, and torch's own
bookkeeping of stages is kept. What differs, and why:

* it works where there is no CUDA: torch's disables itself with a warning when its device is missing;
* the scale's rule is a `lowprec.loss_scale` state, so the rules of Apex, DeepSpeed, Megatron and Keras are there too;
* an optimizer that got no gradient in this step is stepped as it is: torch stops with "No inf checks were recorded";
* fp16 gradients are unscaled, in place and with one warning: torch stops with "Attempting to unscale FP16 gradients";
* `last_step` says whether the step was skipped, and which gradients held Inf and which NaN;
* in a distributed run every rank skips when one must: torch's looks at its own shard alone;
* a collapse of the scale is reported with its cause, and `recover` leads back.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch.amp.grad_scaler import OptState

from lowprec import loss_scale
from lowprec.errors import LowprecWarning

__all__ = ["GradScaler", "ScalerStep"]


@dataclass(frozen=True)
class ScalerStep:
    """What happened to the gradients of one optimizer in one step.

    Args:
        skipped: whether the optimizer's step was left out.
        loss_scale: the scale the gradients were made with.
        inf, nan: places of the gradients that held them, as "group 0, parameter 3 (64, 10)".
    """

    skipped: bool = False
    loss_scale: float = 1.0
    inf: tuple[str, ...] = ()
    nan: tuple[str, ...] = ()


class GradScaler(torch.amp.GradScaler):
    """Loss scaling for a plain torch loop; see `torch.amp.GradScaler` for the use of its methods.

    Args:
        device: device type of the scale; a device that is not there is replaced by "cpu".
        init_scale, growth_factor, backoff_factor, growth_interval: as torch has them.
        enabled: False makes every method pass through.
        preset: rule of another system by name, or a `lowprec.loss_scale` state; replaces the four numbers.
        process_group: the ranks that skip together (default: all of them, where torch.distributed is initialised).

    >>> scaler = GradScaler("cpu", init_scale=8.0)
    >>> scaler.scale(torch.tensor(2.0)).item()
    16.0
    """

    def __init__(
        self,
        device: str | None = None,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
        enabled: bool = True,
        *,
        preset: str | loss_scale.DynamicScale | None = None,
        process_group: Any = None,
    ) -> None:
        state: loss_scale.ScaleState
        if preset is None:
            state = loss_scale.DynamicScale(float(init_scale), growth_factor, backoff_factor, int(growth_interval))
        else:
            state = loss_scale.resolve(preset)
        if not isinstance(state, loss_scale.DynamicScale):
            raise ValueError(f"GradScaler needs a dynamic loss scale, got {state}: pass enabled=False for none.")
        if device is None or not _present(device):
            device = "cuda" if device is None and torch.cuda.is_available() else "cpu"
        super().__init__(device, state.scale, state.growth, state.backoff, state.window, enabled)
        self._state = state
        self._process_group = process_group
        self._steps: dict[int, ScalerStep] = {}
        self._warned_fp16 = self._warned_collapse = False
        self.last_step = ScalerStep()

    # -- the rule --------------------------------------------------------------------------------------------------

    @property
    def state(self) -> loss_scale.DynamicScale:
        """The immutable state behind the scale."""
        return self._state

    @state.setter
    def state(self, new: loss_scale.DynamicScale) -> None:
        self._state = new
        self._init_scale, self._growth_factor, self._backoff_factor = new.scale, new.growth, new.backoff
        self._growth_interval, self._init_growth_tracker = new.window, max(new.clean or 0, 0)
        if self._scale is not None and self._growth_tracker is not None:
            self._scale.fill_(new.scale)
            self._growth_tracker.fill_(self._init_growth_tracker)

    def set_growth_factor(self, new_factor: float) -> None:
        """Set the factor of growth."""
        self.state = dataclasses.replace(self._state, growth=new_factor)

    def set_backoff_factor(self, new_factor: float) -> None:
        """Set the factor of backoff."""
        self.state = dataclasses.replace(self._state, backoff=new_factor)

    def set_growth_interval(self, new_interval: int) -> None:
        """Set the number of clean steps before a growth."""
        self.state = dataclasses.replace(self._state, window=new_interval)

    def recover(self) -> None:
        """Go back to the last scale that gave finite gradients, after a collapse."""
        self.state = self._state.recover()
        self._warned_collapse = False

    def skipped(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether the last step of this optimizer was left out."""
        return self._steps.get(id(optimizer), self.last_step).skipped

    # -- the step --------------------------------------------------------------------------------------------------

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Divide the gradients by the scale and check them."""
        if self._enabled:
            _refuse_prepared(optimizer)
        super().unscale_(optimizer)

    def step(self, optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> float | None:
        """Step the optimizer unless its gradients are not finite; returns what its step returns."""
        if not self._enabled:
            return super().step(optimizer, *args, **kwargs)
        _refuse_prepared(optimizer)
        states = self._per_optimizer_states[id(optimizer)]
        nothing = states["stage"] is not OptState.STEPPED and not any(True for _ in _gradients(optimizer))
        if nothing and "closure" not in kwargs and not self._several_ranks():
            self._check_scale_growth_tracker("step")
            states["stage"] = OptState.STEPPED
            self._record(optimizer, {})
            result: float | None = optimizer.step(*args, **kwargs)
            return result
        return super().step(optimizer, *args, **kwargs)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Move the scale: from what the steps since the last update found, or to ``new_scale``.

        Where no optimizer checked anything, nothing was learned and the scale stays.
        """
        if not self._enabled:
            return
        if new_scale is not None:
            if not isinstance(new_scale, torch.Tensor):
                new_scale = float(new_scale)
            super().update(new_scale)
            self.state = dataclasses.replace(self._state, scale=self.get_scale())
            return
        self._check_scale_growth_tracker("update")
        checks = [t for s in self._per_optimizer_states.values() for t in s["found_inf_per_device"].values()]
        self._per_optimizer_states.clear()
        if checks:
            self.state = self._state.adjust(any(t.item() > 0 for t in checks))
            self._report_collapse()

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        if not allow_fp16 and not self._warned_fp16 and any(g.dtype == torch.float16 for _, g in _gradients(optimizer)):
            self._warned_fp16 = True
            warnings.warn(
                "fp16 gradients are unscaled in place, so values below 6e-8 are lost again: lp.prepare unscales them "
                "in fp32 inside the optimizer.",
                LowprecWarning,
                stacklevel=4,
            )
        found = super()._unscale_grads_(optimizer, inv_scale, found_inf, True)
        if self._several_ranks():
            shared = found.setdefault(found_inf.device, found_inf)
            for other in found.values():
                if other is not shared:
                    shared.add_(other.to(shared.device))
            torch.distributed.all_reduce(shared, op=torch.distributed.ReduceOp.MAX, group=self._process_group)
        self._record(optimizer, found)
        return found

    def _several_ranks(self) -> bool:
        available = torch.distributed.is_available() and torch.distributed.is_initialized()
        return available and torch.distributed.get_world_size(self._process_group) > 1

    def _record(self, optimizer: torch.optim.Optimizer, found: dict[torch.device, torch.Tensor]) -> None:
        skipped = any(t.item() > 0 for t in found.values())
        inf, nan = _name_nonfinite(optimizer) if skipped else ((), ())
        self.last_step = ScalerStep(skipped, self.get_scale(), inf, nan)
        self._steps[id(optimizer)] = self.last_step

    def _report_collapse(self) -> None:
        if not self._state.collapsed:
            self._warned_collapse &= bool(self._state.skipped)
            return
        if self._warned_collapse:
            return
        self._warned_collapse = True
        cause = ", ".join([*self.last_step.nan, *self.last_step.inf][:4]) or "another rank's gradients"
        kind = "NaN" if self.last_step.nan else "Inf"
        good = self._state.last_good
        worked = "no scale has worked yet" if good is None else f"{good:g} was the last scale that worked"
        warnings.warn(
            f"the loss scale fell to {self._state.scale:g} in {self._state.skipped} skipped steps and overflow is no "
            f"longer a likely cause: {kind} in {cause}; {worked}. Look at the data and the loss; scaler.recover() "
            f"goes back to the scale that worked.",
            LowprecWarning,
            stacklevel=3,
        )

    # -- state -----------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The five entries of torch's state dict; a rule that torch has not adds "lowprec"."""
        state = super().state_dict()
        if state and dataclasses.replace(self._state, **_TORCH_FIELDS) != loss_scale.DynamicScale(clean=0):
            state["lowprec"] = loss_scale.to_dict(self._state)
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` or torch's GradScaler wrote."""
        if not self._enabled:
            return
        if not state_dict:
            super().load_state_dict(state_dict)
        if "lowprec" in state_dict:
            loaded = loss_scale.from_dict(state_dict["lowprec"])
            assert isinstance(loaded, loss_scale.DynamicScale)
        else:
            plain = loss_scale.from_torch(state_dict)
            moving = {name: getattr(plain, name) for name in ("scale", "growth", "backoff", "window", "clean")}
            loaded = dataclasses.replace(self._state, **moving)
        self.state = loaded


# What torch's state dict holds, or what it does without: fields that do not count when rules are compared.
_TORCH_FIELDS: dict[str, Any] = {
    "scale": 65536.0,
    "growth": 2.0,
    "backoff": 0.5,
    "window": 2000,
    "clean": 0,
    "spent": 0,
    "skipped": 0,
    "last_good": None,
}


def _present(device: str) -> bool:
    kind = torch.device(device).type
    if kind == "cpu":
        return True
    module = getattr(torch, kind, None)
    return bool(module is not None and hasattr(module, "is_available") and module.is_available())


def _gradients(optimizer: torch.optim.Optimizer) -> Iterable[tuple[str, torch.Tensor]]:
    """Every gradient with the place of its parameter."""
    for g, group in enumerate(optimizer.param_groups):
        for p, param in enumerate(group["params"]):
            if param.grad is not None:
                yield f"group {g}, parameter {p} {tuple(param.shape)}", param.grad


def _name_nonfinite(optimizer: torch.optim.Optimizer) -> tuple[tuple[str, ...], tuple[str, ...]]:
    inf, nan = [], []
    for name, grad in _gradients(optimizer):
        values = grad.coalesce().values() if grad.is_sparse else grad
        if bool(values.isnan().any()):
            nan.append(name)
        if bool(values.isinf().any()):
            inf.append(name)
    return tuple(inf), tuple(nan)


def _refuse_prepared(optimizer: torch.optim.Optimizer) -> None:
    if getattr(optimizer, "_lowprec_prepared", False):
        raise ValueError(
            "this optimizer comes from lp.prepare and scales its loss itself: drop the GradScaler and call "
            "optimizer.backward(loss) and optimizer.step()."
        )
