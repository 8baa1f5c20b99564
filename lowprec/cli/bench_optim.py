"""`lowprec bench optim`: optimizer steps in time and bytes, beside torch, torchao and bitsandbytes."""

from __future__ import annotations

from typing import Any

import click

from lowprec.cli.options import emit, json_option

__all__ = ["command"]


@click.command()
@click.option("--threads", type=click.IntRange(1), default=2, show_default=True, help="Threads of every runner.")
@click.option("--seconds", type=click.FloatRange(0.01), default=0.5, show_default=True, help="Per measurement.")
@click.option("--peers/--no-peers", default=True, help="Also torchao and bitsandbytes.")
@click.option("--scale", type=click.FloatRange(0.001), default=1.0, help="Fewer tensors, for a quick look.")
@json_option
def command(threads: int, seconds: float, peers: bool, scale: float, json_to: str | None) -> None:
    """Measure AdamW steps: ms, bytes a parameter, share of a copy's bandwidth.

    On 8 tensors of 4096 x 1024 and on 2,000 of 4,096; ratios are to torch's fused
    fp32 AdamW in the same run. Bytes count weights, gradients and states.

    \b
    Example:
      lowprec bench optim --json optim.json
    """
    from lowprec.jobs import optim_speed

    result = optim_speed.measure(threads, seconds, peers, scale)
    emit(result, json_to, lambda: _render(result))


def _render(result: dict[str, Any]) -> str:
    from rich.console import Console
    from rich.table import Table

    console = Console(width=110)
    with console.capture() as capture:
        for part in result["sets"]:
            shape = " x ".join(map(str, part["shape"]))
            title = (
                f"{part['tensors']} tensors of {shape}, {result['threads']} threads, copy {part['copy_gbs']:.0f} GB/s"
            )
            made = Table(title=title, box=None, title_justify="left", pad_edge=False)
            for head in ("AdamW", "ms", "of torch fused", "target", "bytes", "of copy"):
                made.add_column(head, justify="left" if head == "AdamW" else "right", no_wrap=True)
            for row in part["rows"]:
                if "error" in row:
                    made.add_row(row["name"], "-", row["error"][:40])
                    continue
                target = "" if row.get("target") is None else f"{row['target']:.2f}"
                figures = (f"{row['ms']:.2f}", f"{row['over_fused']:.2f}", target, f"{row['bytes']:.2f}")
                made.add_row(row["name"], *figures, f"{row['share_of_copy']:.2f}")
            console.print(made)
            console.print()
        for name, ratio in result["small_over_big"].items():
            console.print(f"{name}: {ratio:.2f} times the time per parameter on small tensors")
    return capture.get().rstrip()
