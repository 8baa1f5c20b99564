"""The mechanism that all optimizers share.

An optimizer here is a rule (`lowprec.kernels.optim`), a list of states and their coefficients; everything else is in
`LowPrecOptimizer`: settings per group, layout per parameter, masters, Kahan residues, batching into few kernel calls,
checks before anything is written, and states as plain tensors.

A step has two halves. The first looks at everything (hyperparameters, gradients, shapes, dtypes) and may raise; the
second calls the kernels and cannot. So an error never leaves half of the parameters updated.

Parameters that share a program, a step count and a gradient factor form a `Batch`, which serves the next steps too as
long as nothing but gradients and coefficients changes (`lowprec.optim.kept`).
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any, ClassVar

import torch
from torch.optim import Optimizer

from lowprec import gradients
from lowprec.errors import LowprecWarning
from lowprec.kernels import optim as kernels
from lowprec.kernels.stores import STORES, Batch, Program, Slot
from lowprec.optim import layout
from lowprec.optim.kept import Kept, keep

__all__ = ["LowPrecOptimizer", "settings"]

_Work = tuple[Batch, list[float], int, list[torch.Tensor]]
_GRADS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}


def settings(
    states: Any, master: str | None, update: str, residue: torch.dtype | None, min_quantized: int, state_rounding: Any
) -> dict[str, Any]:
    """The settings every optimizer has, as defaults of its groups."""
    return {
        "states": states,
        "master": master,
        "update": update,
        "residue": residue,
        "min_quantized": min_quantized,
        "state_rounding": state_rounding,
    }


class LowPrecOptimizer(Optimizer):
    """A `torch.optim.Optimizer` whose states, masters and weights are stored as told.

    Args:
        params: parameters, or groups of them; every setting can differ from group to group.
        defaults: hyperparameters and `settings`.
        seed: key of the stochastic draws.
    """

    RULE: ClassVar[str] = "sgd"
    # name of a state -> whether it can be negative
    STATES: ClassVar[dict[str, bool]] = {}
    # whether batches serve more than one step
    KEEPS: ClassVar[bool] = True
    _kept: Kept | None = None

    def __init__(self, params: Any, defaults: dict[str, Any], seed: int = 0) -> None:
        if not 0 <= seed < 2**64:
            raise ValueError(f"seed must be in 0 .. 2^64 - 1, got {seed}")
        self.seed = seed
        self.nonfinite: dict[torch.Tensor, int] = {}
        self._streams: dict[torch.Tensor, int] = {}
        super().__init__(params, defaults)

    # -- what a rule says ------------------------------------------------------------------------------------------

    def _check(self, group: Mapping[str, Any]) -> None:
        """Raise if a group's hyperparameters are out of range."""

    def _coefficients(self, group: Mapping[str, Any], step: int) -> list[float]:
        """The rule's own coefficients at a step (the first is 1)."""
        raise NotImplementedError

    def _decay(self, group: Mapping[str, Any]) -> tuple[float, float]:
        """Weight decay inside the gradient, and what weights are multiplied by."""
        decay, lr = float(group.get("weight_decay", 0.0)), float(group["lr"])
        return (0.0, 1.0 - lr * decay) if group.get("decoupled", False) else (decay, 1.0)

    def _states(self, group: Mapping[str, Any]) -> dict[str, bool]:
        """The states a group's parameters have."""
        return self.STATES

    # -- groups ------------------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group; its settings are checked at once."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            self._check_group(group)
            for p in group["params"]:
                self._program(p, group)
                self._streams.setdefault(p, len(self._streams))
        except ValueError:
            self.param_groups.pop()
            raise
        if group["update"] != "nearest" and group["params"]:
            programs = [self._program(p, group) for p in group["params"]]
            if all(program.weight == "fp32" for program in programs):
                warnings.warn(
                    f"update={group['update']!r} has no effect on fp32 weights, and this group has no others",
                    LowprecWarning,
                    stacklevel=4,
                )

    def _check_group(self, group: Mapping[str, Any]) -> None:
        for name in ("lr", "weight_decay", "eps"):
            value = group.get(name, 0.0)
            if isinstance(value, (int, float, torch.Tensor)) and not (
                float(value) >= 0 and math.isfinite(float(value))
            ):
                raise ValueError(f"{name} must be a finite number of at least 0, got {float(value)}")
        layout.check_settings(group)
        self._check(group)

    def _program(self, p: torch.Tensor, group: Mapping[str, Any]) -> Program:
        return layout.resolve(
            p, group, self.RULE, tuple(self._states(group).values()), nesterov=bool(group.get("nesterov", False))
        )

    def layout(self) -> list[dict[str, Any]]:
        """How each parameter is stored: shape, weight, master, residue, states, bytes an element."""
        rows = []
        for group in self.param_groups:
            for p in group["params"]:
                program = self._program(p, group)
                parts = [program.weight, program.master, program.residue, *program.states]
                bits = sum(STORES[s].bits + 32 / max(STORES[s].block, 1) * (STORES[s].block > 0) for s in parts if s)
                rows.append(
                    {
                        "shape": tuple(p.shape),
                        "weight": program.weight,
                        "master": program.master,
                        "residue": program.residue,
                        "states": dict(zip(self._states(group), program.states, strict=True)),
                        "bytes": bits / 8,
                    }
                )
        return rows

    # -- the step ------------------------------------------------------------------------------------------------------

    def step(
        self, closure: Callable[[], Any] | None = None, *, grad_factor: float | Mapping[torch.Tensor, float] = 1.0
    ) -> Any:
        """Update every parameter that has a gradient.

        Args:
            closure: recomputes the loss and the gradients.
            grad_factor: every gradient is multiplied by it inside the update (unscale times clip), or a factor for
                each parameter (1 for those not named).

        Returns:
            What the closure returned.

        Raises:
            ValueError: for a bad hyperparameter or gradient; nothing has been updated then.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        with torch.no_grad():
            if not self._again(grad_factor):
                self._kept = None
                work = self._collect(grad_factor)
                self._update(work)
                if self.KEEPS:
                    self._kept = keep(self, work)
        return loss

    def _again(self, grad_factor: float | Mapping[torch.Tensor, float]) -> bool:
        """The step with what the last one left, if nothing but gradients and coefficients has changed."""
        last = self._kept
        if last is None or not last.stands(self):
            return False
        grads, factors = last.gradients(), last.factors(grad_factor)
        if grads is None or factors is None:
            return False
        for group in self.param_groups:
            self._check_group(group)
        made = [
            self._numbers(owner, factor, step + 1)
            for (owner, _, step, _), factor in zip(last.batches, factors, strict=True)
        ]
        self.nonfinite, start = {}, 0
        for number, (owner, batch, step, params) in enumerate(last.batches):
            batch.addresses = last.grad_addresses[start : start + len(params)]
            kernels.update(batch, made[number], self.seed, step + 1)
            if batch.spoiled:
                self.nonfinite.update((p, s.nonfinite) for p, s in zip(params, batch.slots, strict=True) if s.nonfinite)
            last.count(start, start + len(params), step + 1)
            last.batches[number] = (owner, batch, step + 1, params)
            start += len(params)
        return True

    def _numbers(self, group: Mapping[str, Any], factor: float, step: int) -> list[float]:
        """What the kernel multiplies by: gradient factor, decays, the rule's own."""
        sign = -1.0 if group.get("maximize", False) else 1.0
        return [sign * factor, *self._decay(group), *self._coefficients(group, step)]

    def _collect(self, grad_factor: float | Mapping[torch.Tensor, float]) -> list[_Work]:
        """Everything a step needs, checked."""
        each = grad_factor if isinstance(grad_factor, Mapping) else {}
        common = 1.0 if isinstance(grad_factor, Mapping) else float(grad_factor)
        for factor in (common, *each.values()):
            if not math.isfinite(float(factor)):
                raise ValueError(f"grad_factor must be finite, got {factor}")
        work: dict[Any, tuple[Mapping[str, Any], list[Any]]] = {}
        for number, group in enumerate(self.param_groups):
            self._check_group(group)
            for p in group["params"]:
                found = self._gradient(p)
                if found is None:
                    continue
                state = self._state(p, group)
                key = (number, replace(self._program(p, group), grad=found[2]), state["step"] + 1, each.get(p, common))
                work.setdefault(key, (group, []))[1].append((p, *found[:2]))
        return [self._batch(key, group, items) for key, (group, items) in work.items()]

    def _batch(self, key: Any, group: Mapping[str, Any], items: list[Any]) -> _Work:
        _, program, step, factor = key
        slots = []
        for p, grad, scale in items:
            slot = self._slot(p, group)
            slot.grad, slot.grad_scale = grad, scale
            slots.append(slot)
        return Batch(program, slots), self._numbers(group, factor, step), step, [p for p, _, _ in items]

    def _update(self, work: list[_Work]) -> None:
        for batch, coefficients, step, _ in work:
            kernels.update(batch, coefficients, self.seed, step)
        self._finish(work)

    def _finish(self, work: list[_Work]) -> None:
        for batch, _, step, params in work:
            for p, slot in zip(params, batch.slots, strict=True):
                self.state[p]["step"] = step
                if slot.weight is not p:  # the kernel worked on a contiguous copy
                    p.copy_(slot.weight)
        self._report(work)

    def _report(self, work: list[_Work]) -> None:
        """Keep count of elements that were left as they were because their update was not finite."""
        self.nonfinite = {}
        for batch, _, _, params in work:
            for p, slot in zip(params, batch.slots, strict=True):
                if slot.nonfinite:
                    self.nonfinite[p] = slot.nonfinite

    def _gradient(self, p: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None, str] | None:
        """A parameter's gradient, its scales and its store: from a gradient store, an accumulator, or ``p.grad``."""
        sink = gradients.sink(p)
        if sink is not None:
            if not sink.filled:
                return None
            assert sink.codes is not None
            return sink.codes, sink.scale, sink.store
        grad = getattr(p, "_lowprec_grad", None)
        if grad is None:
            grad = p.grad
        if grad is None:
            return None
        if grad.is_sparse:
            grad = grad.to_dense()
        if grad.dtype not in _GRADS:
            raise ValueError(f"a gradient is fp32, bf16 or fp16, got {str(grad.dtype).removeprefix('torch.')}")
        if grad.shape != p.shape or grad.device != p.device:
            raise ValueError(
                f"a gradient has its parameter's shape and device: {tuple(grad.shape)} on {grad.device} "
                f"for {tuple(p.shape)} on {p.device}"
            )
        return grad.contiguous(), None, _GRADS[grad.dtype]

    # -- states --------------------------------------------------------------------------------------------------------

    def _state(self, p: torch.Tensor, group: Mapping[str, Any]) -> dict[str, Any]:
        """A parameter's state, made on first use."""
        state: dict[str, Any] = self.state[p]
        if state:
            return state
        state.update(self._empty_state(p, group, p.device))
        if "master" in state:
            kept = getattr(p, "_lowprec_master", None)
            if kept is None or kept[0].dtype != state["master"].dtype or kept[0].shape != state["master"].shape:
                self._write_master(p, self._program(p, group), read_weight(p))
            else:  # what the weight was rounded from
                self._put(state, "master", *kept)
                del p._lowprec_master  # type: ignore[attr-defined]
        return state

    def _empty_state(self, p: torch.Tensor, group: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
        """A state of zeros; the master is still to be written."""
        program = self._program(p, group)
        state: dict[str, Any] = {"step": 0}
        for (name, _), kept in zip(self._states(group).items(), program.states, strict=True):
            self._put(state, name, *kernels.empty(kept, p.shape, device))
        for name, extra in (("residue", program.residue), ("master", program.master)):
            if extra is not None:
                self._put(state, name, *kernels.empty(extra, p.shape, device))
        return state

    @staticmethod
    def _put(state: dict[str, Any], name: str, codes: torch.Tensor, scale: torch.Tensor | None) -> None:
        state[name] = codes
        if scale is not None:
            state[name + "_scale"] = scale

    def _slot(self, p: torch.Tensor, group: Mapping[str, Any]) -> Slot:
        state, names = self.state[p], self._states(group)
        return Slot(
            p if p.is_contiguous() else p.contiguous(),
            getattr(p, "_lowprec_scale", None),
            master=state.get("master"),
            master_scale=state.get("master_scale"),
            residue=state.get("residue"),
            residue_scale=state.get("residue_scale"),
            states=[state[name] for name in names],
            scales=[state.get(name + "_scale") for name in names],
            stream=getattr(p, "_lowprec_stream", self._streams[p]),
            offset=getattr(p, "_lowprec_offset", 0),
        )

    def _write_master(self, p: torch.Tensor, program: Program, value: torch.Tensor) -> None:
        """Store a master value and the weight that follows from it."""
        state = self.state[p]
        slot = Slot(
            p, getattr(p, "_lowprec_scale", None), master=state["master"], master_scale=state.get("master_scale")
        )
        with torch.no_grad():
            kernels.write_weight(value.to(p.device, torch.float32), slot, replace(program, rounding="nearest"))

    def set_master(self, param: torch.Tensor, value: torch.Tensor) -> None:
        """Give a parameter its exact master, from which the weight is rounded.

        Args:
            param: a parameter of this optimizer whose layout has a master.
            value: fp32 values of the same shape.

        Raises:
            ValueError: if the parameter has no master, or the shape differs.
        """
        group = self._group(param)
        program = self._program(param, group)
        if program.master is None:
            raise ValueError(f"this parameter ({program.weight}) has no master: pass master= to the optimizer")
        if value.shape != param.shape:
            raise ValueError(f"the master has shape {tuple(value.shape)}, the parameter {tuple(param.shape)}")
        self._state(param, group)
        self._write_master(param, program, value)

    def masters(self) -> dict[torch.Tensor, torch.Tensor]:
        """The exact value of every parameter as fp32: its master or weight plus residue, or the weight itself."""
        found = {}
        for group in self.param_groups:
            for p in group["params"]:
                program = self._program(p, group)
                if program.master or program.residue:
                    self._state(p, group)
                    found[p] = kernels.read_weight(self._slot(p, group), program)
                else:
                    found[p] = read_weight(p)
        return found

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget gradients, stored ones included."""
        for group in self.param_groups:
            gradients.zero(group["params"])
        super().zero_grad(set_to_none)

    # -- saving --------------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Plain tensors and plain dicts: per parameter ``step``, states, scales, master and residue."""
        saved = super().state_dict()
        saved["state"] = {
            k: {n: torch.tensor(float(v)) if n == "step" else v for n, v in state.items()}
            for k, state in saved["state"].items()
        }
        saved["seed"] = self.seed
        return saved

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what `state_dict` gave.

        Raises:
            ValueError: if groups, names, shapes or dtypes do not fit; nothing has been changed then.
        """
        groups, saved = state_dict["param_groups"], state_dict["state"]
        if [len(g["params"]) for g in groups] != [len(g["params"]) for g in self.param_groups]:
            raise ValueError(
                f"the saved state has groups of {[len(g['params']) for g in groups]} parameters, "
                f"this optimizer of {[len(g['params']) for g in self.param_groups]}"
            )
        loaded: dict[torch.Tensor, dict[str, Any]] = {}
        fresh = []
        for group, other in zip(self.param_groups, groups, strict=True):
            new = {**group, **{k: v for k, v in other.items() if k != "params"}, "params": group["params"]}
            self._check_group(new)
            fresh.append(new)
            for key, p in zip(other["params"], group["params"], strict=True):
                if key in saved:
                    loaded[p] = self._check_state(f"parameter {key}", p, new, saved[key])
        for group, new in zip(self.param_groups, fresh, strict=True):
            group.update(new)
        self.seed = int(state_dict.get("seed", self.seed))
        self.state.clear()
        self.state.update(loaded)
        self._kept = None

    def _check_state(
        self, who: str, p: torch.Tensor, group: Mapping[str, Any], given: Mapping[str, Any]
    ) -> dict[str, Any]:
        """A copy of a loaded state on the parameter's device, if it fits."""
        want = self._empty_state(p, group, torch.device("meta"))
        missing = want.keys() - given.keys()
        if missing or given.keys() - want.keys():
            raise ValueError(
                f"{who}: the saved state has {sorted(given)}, these settings keep {sorted(want)}; "
                "use the settings it was saved with (or load_torch_state for a state of torch's)"
            )
        state: dict[str, Any] = {"step": int(given["step"])}
        if state["step"] < 0:
            raise ValueError(f"{who}: step is {state['step']}")
        for name, wanted in want.items():
            if name == "step":
                continue
            value = given[name]
            if not isinstance(value, torch.Tensor) or value.shape != wanted.shape or value.dtype != wanted.dtype:
                got = f"{tuple(value.shape)} {value.dtype}" if isinstance(value, torch.Tensor) else type(value).__name__
                raise ValueError(f"{who}: {name} must be {tuple(wanted.shape)} {wanted.dtype}, got {got}")
            state[name] = value.detach().to(p.device, copy=True).contiguous()
        return state

    def __getstate__(self) -> dict[str, Any]:
        own = {"seed": self.seed, "_streams": self._streams, "nonfinite": self.nonfinite, "_kept": None}
        return {**super().__getstate__(), **own}

    def _group(self, param: torch.Tensor) -> dict[str, Any]:
        for group in self.param_groups:
            if any(p is param for p in group["params"]):
                return group
        raise ValueError("this optimizer has no such parameter")


def read_weight(p: torch.Tensor) -> torch.Tensor:
    """A parameter's value as fp32."""
    with torch.no_grad():
        return kernels.decode(p.detach(), getattr(p, "_lowprec_scale", None), layout.weight_store(p), p.shape).clone()


def parameters(params: Iterable[Any]) -> list[torch.Tensor]:
    """The tensors of a list of parameters or groups."""
    return [p for item in params for p in (item["params"] if isinstance(item, dict) else [item])]
