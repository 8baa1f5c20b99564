"""An optimizer around another one: the same groups, the same states, the same hooks.

Schedulers, checkpoints and `zero_grad` must not see two optimizers. So the wrapper keeps no groups or states of its
own; it hands out those of the inner one, whatever happens to them (`load_state_dict` replaces both).
"""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Wrapper"]


class Wrapper(torch.optim.Optimizer):
    """A `torch.optim.Optimizer` that is one with another.

    Args:
        inner: the optimizer that updates.
    """

    inner: torch.optim.Optimizer | None = None

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        super().__init__(list(inner.param_groups), inner.defaults)
        self.inner = inner

    @property
    def param_groups(self) -> list[dict[str, Any]]:
        """The groups of the inner optimizer: the same dicts."""
        return self.inner.param_groups if self.inner is not None else []

    @param_groups.setter
    def param_groups(self, groups: list[dict[str, Any]]) -> None:
        if self.inner is not None:
            self.inner.param_groups = groups

    @property
    def state(self) -> Any:
        """The states of the inner optimizer: the same dict."""
        return self.inner.state if self.inner is not None else {}

    @state.setter
    def state(self, state: Any) -> None:
        if self.inner is not None:
            self.inner.state = state

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters to train."""
        if self.inner is not None:
            self.inner.add_param_group(param_group)

    def state_dict(self) -> dict[str, Any]:
        """The inner optimizer's state dict; `lowprec.state_dict` has the loss scale and all the rest too."""
        assert self.inner is not None
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a state dict of the inner optimizer."""
        assert self.inner is not None
        self.inner.load_state_dict(state_dict)

    def register_step_pre_hook(self, hook: Any) -> Any:
        """Register a hook that runs before each step that is taken."""
        assert self.inner is not None
        return self.inner.register_step_pre_hook(hook)

    def register_step_post_hook(self, hook: Any) -> Any:
        """Register a hook that runs after each step that was taken."""
        assert self.inner is not None
        return self.inner.register_step_post_hook(hook)
