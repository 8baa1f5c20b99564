"""`lowprec bench step`: unscale, norm, clip and update against torch's, and what the whole step adds to a loop."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import click

from lowprec.cli.options import emit, json_option

EXAMPLE = """\b
Example:
  lowprec bench step --rounds 8
"""


@click.command(epilog=EXAMPLE)
@click.option("--rounds", type=click.IntRange(1), default=8, show_default=True, help="Measurements, by turns.")
@click.option("--rows", type=click.IntRange(8), default=4096, show_default=True, help="Of 8 weights, 1024 columns.")
@json_option
def command(**given: Any) -> None:
    """Time the step of lp.prepare.

    First its end alone (unscale, norm, clip, AdamW) on 8 weights, beside torch's GradScaler,
    clip_grad_norm_ and fused AdamW; then a whole GPT step beside a loop written by hand with
    the same kernels. Each pair is measured by turns.
    """
    from lowprec.jobs import machine

    rows = [_update(given["rows"], given["rounds"]), _whole(given["rounds"])]
    result = {"kind": "bench step", "machine": machine.facts(), "rows": rows}
    emit(result, given["json_to"], lambda: "\n".join(map(_line, rows)) + "\n")


def _line(row: dict[str, Any]) -> str:
    met = "met" if row["ratio"] <= row["bound"] else "missed"
    return (
        f"{row['name']}: {row['ours_ms']:.1f} ms, {row['peer']} {row['peer_ms']:.1f} ms, "
        f"ratio {row['ratio']:.3f} (at most {row['bound']}: {met})"
    )


def _race(ours: Callable[[], Any], peer: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """The best time of each in ms, measured by turns after a warm-up."""
    best = [float("inf")] * 2
    for _ in range(2):
        ours()
        peer()
    for _ in range(rounds):
        for i, run in enumerate((ours, peer)):
            start = time.perf_counter()
            run()
            best[i] = min(best[i], 1000 * (time.perf_counter() - start))
    return best[0], best[1]


def _row(name: str, peer: str, bound: float, times: tuple[float, float]) -> dict[str, Any]:
    ratio = times[0] / times[1]
    return {"name": name, "ours_ms": times[0], "peer": peer, "peer_ms": times[1], "ratio": ratio, "bound": bound}


def _update(rows: int, rounds: int) -> dict[str, Any]:
    import torch
    from torch import nn

    from lowprec.training import prepare

    def weights() -> nn.ParameterList:
        torch.manual_seed(0)
        made = nn.ParameterList([nn.Parameter(torch.randn(rows, 1024) * 0.02) for _ in range(8)])
        for p in made:
            p.grad = torch.randn(rows, 1024)
        return made

    theirs, ours = weights(), weights()
    adam = torch.optim.AdamW(theirs.parameters(), lr=1e-5, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(torch.ones(()))
    _, optimizer = prepare(
        ours, torch.optim.AdamW(ours.parameters(), lr=1e-5), "fp32", clip_grad_norm=1.0, loss_scale=2.0
    )

    def peer() -> None:
        # the fused AdamW unscales by itself unless asked before, as clipping needs it
        scaler.unscale_(adam)
        torch.nn.utils.clip_grad_norm_(theirs.parameters(), 1.0)
        scaler.step(adam)
        scaler.update()

    def own() -> None:
        optimizer.window.restart()
        optimizer.window.micro, optimizer.window.differentiated, optimizer.window.scale = 1, 1, 2.0
        optimizer.gradients.remember()
        optimizer.step()

    name = f"unscale + norm + clip + AdamW, {8 * rows * 1024 / 1e6:.0f}M parameters"
    return _row(name, "torch GradScaler + clip_grad_norm_ + fused AdamW", 0.75, _race(own, peer, rounds))


def _whole(rounds: int) -> dict[str, Any]:
    import torch

    from lowprec import workloads
    from lowprec.apply import apply
    from lowprec.kernels.cast import tensor_stats
    from lowprec.optim import AdamW
    from lowprec.training import prepare

    work = workloads.load("gpt", size="small")
    batch = work.data.train(0, 0)
    model, by_hand = work.model(0), work.model(0)
    model, optimizer = prepare(model, torch.optim.AdamW(model.parameters()), "bf16", clip_grad_norm=1.0)
    apply(by_hand, "bf16")
    adam = AdamW(by_hand.parameters())

    def own() -> None:
        optimizer.zero_grad()
        optimizer.backward(work.loss(model, batch))
        optimizer.step()

    def peer() -> None:
        adam.zero_grad()
        work.loss(by_hand, batch).backward()  # type: ignore[no-untyped-call]
        stats = tensor_stats([p.grad for p in by_hand.parameters() if p.grad is not None])
        norm = float(stats.sum_squares.sum()) ** 0.5
        adam.step(grad_factor=min(1.0, 1.0 / (norm + 1e-6)))

    return _row("whole GPT step, bf16", "the same kernels by hand", 1.02, _race(own, peer, rounds))
