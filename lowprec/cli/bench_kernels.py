"""`lowprec bench kernels`: casts, reductions and block quantisation as shares of a copy's bandwidth."""

from __future__ import annotations

from typing import Any

import click

from lowprec.cli.options import emit, json_option

__all__ = ["command"]


@click.command()
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True, help="Threads of every runner.")
@click.option("--seconds", type=click.FloatRange(0.01), default=0.4, show_default=True, help="Per measurement.")
@click.option("--peers/--no-peers", default=True, help="Also torch, ml_dtypes and torchao.")
@json_option
def command(threads: int, seconds: float, peers: bool, json_to: str | None) -> None:
    """Measure kernels in GB/s and as a share of a copy, at 16M and 256K elements.

    Bytes are those that must move: the input once, the output once. The copy is torch's
    or numpy's, whichever is faster, into memory that is there already.

    \b
    Example:
      lowprec bench kernels --json kernels.json
    """
    from lowprec.jobs import kernel_speed

    result = kernel_speed.measure(threads, seconds, peers)
    emit(result, json_to, lambda: _render(result))


def _render(result: dict[str, Any]) -> str:
    from lowprec.cli._bench import table

    parts = []
    for size in result["sizes"]:
        heads = ("", "GB/s", "of copy", "target", "us", *result["peers"])
        rows = []
        for row in size["rows"]:
            beside = [f"{row['peers'][p]:.2f}" if p in row["peers"] else "" for p in result["peers"]]
            target = "" if row["target"] is None else f"{row['target']:.2f}"
            rows.append((row["name"], f"{row['gbs']:.1f}", f"{row['share']:.2f}", target, f"{row['us']:.1f}", *beside))
        title = f"{size['elements']} elements, copy {size['copy_gbs']:.1f} GB/s; peers as shares of the copy"
        parts.append(table(title, heads, rows))
    small = [(name, f"{us:.2f}") for name, us in result["small"].items()]
    parts.append(table(f"{result['small_elements']} elements, one call, target 6 us", ("", "us"), small))
    return "\n\n".join(parts)
