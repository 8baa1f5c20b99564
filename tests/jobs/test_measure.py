"""Bytes are counted once, by role, and the peak of a step is seen."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from lowprec import gradients, optim
from lowprec.jobs import measure


def test_adamw_is_sixteen_bytes_a_parameter() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 64))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    held = measure.bytes_by_role(model, optimizer)
    count = sum(p.numel() for p in model.parameters())
    steps = 4 * len(list(model.parameters()))  # AdamW's step counters
    assert (held.weights, held.gradients, held.masters) == (4 * count, 4 * count, 0)
    assert held.states == 8 * count + steps


def test_tied_weights_and_views_count_once() -> None:
    one, two = nn.Linear(32, 32, bias=False), nn.Linear(32, 32, bias=False)
    two.weight = one.weight
    model = nn.Sequential(one, two)
    model.register_buffer("view", one.weight.detach()[:4])
    assert measure.bytes_by_role(model, torch.optim.SGD(model.parameters(), lr=0.1)).weights == 4 * 32 * 32


def test_masters_of_an_optimizer_are_masters() -> None:
    model = nn.Linear(16, 16, bias=False).bfloat16()
    optimizer = optim.AdamW(model.parameters(), lr=0.1, master="fp32", states="bf16")
    model(torch.ones(2, 16, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    held = measure.bytes_by_role(model, optimizer)
    assert (held.weights, held.masters, held.gradients, held.states) == (512, 1024, 512, 1024)


def test_stored_gradients_are_gradients() -> None:
    model = nn.Linear(64, 64, bias=False)
    gradients.install(list(model.parameters()), "fp8")
    found = gradients.sink(model.weight)
    assert found is not None
    found.add(torch.ones(64, 64))
    held = measure.bytes_by_role(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert held.weights == 4 * 4096 and held.gradients == 4096 + 4 * 64  # codes, and a scale a row


@pytest.mark.skipif(measure.bytes_in_use() is None, reason="this C library cannot say how many bytes are in use")
def test_peak_sees_what_was_freed_again() -> None:
    def work() -> None:
        big = torch.zeros(32 << 20, dtype=torch.uint8)
        for _ in range(20):
            big.add_(1)

    peak = measure.peak_of(work)
    assert peak is not None and 32 << 20 <= peak < 40 << 20


def test_saved_bytes_leave_parameters_out() -> None:
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.ReLU(), nn.Linear(64, 8, bias=False))
    x = torch.randn(4, 64)
    assert measure.saved_bytes(lambda: model(x), model) == 4 * 64 * 4 * 2  # x, and the ReLU's output (kept twice, once)
