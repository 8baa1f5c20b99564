"""Schedules and skipped steps: the helper, and a warning that comes when it should and never else."""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler

import lowprec as lp
from lowprec.errors import LowprecWarning


def _make() -> tuple[nn.Module, Any]:
    torch.manual_seed(0)
    model = nn.Linear(2, 2)
    return lp.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), "fp32", loss_scale=2.0)


def _step(model: nn.Module, optimizer: Any, good: bool) -> None:
    optimizer.zero_grad()
    optimizer.backward(model(torch.ones(1, 2)).sum() * (1.0 if good else math.nan))
    optimizer.step()


def _run(pattern: str, schedule: Callable[[Any], Any], every: int = 1, follow: bool = False) -> Any:
    """Steps good (+) or bad (-), the scheduler stepped after every so many; returns the scheduler."""
    model, optimizer = _make()
    scheduler = schedule(optimizer)
    if follow:
        scheduler = lp.follow(scheduler, optimizer)
    for i, sign in enumerate(pattern):
        _step(model, optimizer, sign == "+")
        if scheduler is not None and (i + 1) % every == 0:
            scheduler.step()
    return scheduler


def _exponential(optimizer: Any) -> Any:
    return lr_scheduler.ExponentialLR(optimizer, 0.9)


@pytest.mark.parametrize("pattern", ["+-+", "-++", "++-+", "---+", "+++++-+"])
def test_a_scheduler_that_moves_after_a_skip_is_reported(pattern: str) -> None:
    with pytest.warns(
        LowprecWarning, match=r"schedule runs ahead of the training: use scheduler = lowprec\.follow"
    ) as seen:
        _run(pattern + "+-+-", _exponential)
    assert len(seen) == 1


@pytest.mark.parametrize("pattern", ["++++++", "+-+-+--+", "-+-+-+", "------++"])
def test_follow_never_warns_and_counts_taken_steps(pattern: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = _run(pattern, _exponential, follow=True)
    assert scheduler.last_epoch == pattern.count("+")
    assert scheduler.get_last_lr()[0] == pytest.approx(0.9 ** pattern.count("+"))


def _no_warning(run: Callable[[], Any]) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run()


@pytest.mark.parametrize("pattern", ["++-++-++-++-", "--++++++----", "-----", "+" * 12])
def test_no_false_alarm_with_schedules_by_epoch(pattern: str) -> None:
    """An epoch's last step may well be a skipped one."""
    for every in (2, 3, 4):
        _no_warning(lambda every=every: _run(pattern, _exponential, every))


def test_no_false_alarm_with_a_loop_that_sets_the_rate_itself() -> None:
    def run() -> None:
        model, optimizer = _make()
        for i in range(12):
            optimizer.param_groups[0]["lr"] = 1.0 / (i + 1)
            _step(model, optimizer, i % 3 != 1)

    _no_warning(run)


def test_no_false_alarm_without_skips_plateau_or_constant() -> None:
    _no_warning(lambda: _run("+" * 10, _exponential))
    _no_warning(lambda: _run("+-+-+-", lambda o: lr_scheduler.LambdaLR(o, lambda i: 1.0)))

    def plateau() -> None:
        model, optimizer = _make()
        scheduler = lr_scheduler.ReduceLROnPlateau(optimizer, patience=3)
        for i in range(16):
            _step(model, optimizer, i % 4 != 0)
            scheduler.step(1.0)

    _no_warning(plateau)


def test_no_false_alarm_from_torch_when_the_first_steps_are_skipped() -> None:
    """torch warns of a scheduler stepped before the optimizer, when a scaler skipped the first step."""
    model = nn.Linear(2, 2)
    given = torch.optim.SGD(model.parameters(), lr=1.0)
    scheduler = _exponential(given)
    model, optimizer = lp.prepare(model, given, "fp32")

    def run() -> None:
        _step(model, optimizer, False)
        scheduler.step()

    _no_warning(run)


def test_follow_passes_everything_else_on() -> None:
    scheduler = _run("++", _exponential, follow=True)
    other = lp.follow(_exponential(_make()[1]), scheduler.optimizer)
    other.load_state_dict(scheduler.state_dict())
    assert other.last_epoch == 2
    assert pickle.loads(pickle.dumps(lp.follow(_Counter(), _Report()))).count == 0
    with pytest.raises(TypeError, match=r"follow needs an optimizer from lowprec\.prepare"):
        lp.follow(scheduler, torch.optim.SGD([torch.ones(1)], lr=1.0))


class _Counter:
    count = 0

    def step(self) -> None:
        self.count += 1


class _Report:
    last_step = lp.StepReport()
