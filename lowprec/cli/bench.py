"""`lowprec bench`: measurements next to their peers, in one run on this machine. One file a subcommand."""

from __future__ import annotations

import importlib
import importlib.util
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import click

from lowprec.cli.options import emit, json_option

__all__ = ["command"]

# name -> (module, one-line summary)
PARTS: dict[str, tuple[str, str]] = {
    "kernels": ("lowprec.cli.bench_kernels", "Casts and block quantisation against a copy."),
    "train": ("lowprec.cli.bench_train", "A training step under each recipe against torch."),
    "optim": ("lowprec.cli.bench_optim", "Optimizer steps against torch's fused ones."),
    "step": ("lowprec.cli.bench_step", "Unscale, norm, clip and update against torch's."),
    "quality": ("lowprec.cli.bench_quality", "Final losses of all recipes over seeds."),
}


class _Lazy(click.Group):
    """Loads a subcommand's module when it is asked for."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*(name for name in PARTS if _exists(name)), *self.commands]

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name in self.commands:
            return self.commands[name]
        if name not in PARTS or not _exists(name):
            return None
        found = importlib.import_module(PARTS[name][0]).command
        assert isinstance(found, click.Command)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in self.list_commands(ctx):
            from lowprec.errors import unknown_name

            raise click.UsageError(str(unknown_name("benchmark", args[0], self.list_commands(ctx))))
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        rows = [(name, PARTS[name][1]) for name in PARTS if _exists(name)]
        with formatter.section("Commands"):
            formatter.write_dl([*rows, ("all", "All of them, one after the other.")])


def _exists(name: str) -> bool:
    return importlib.util.find_spec(PARTS[name][0]) is not None


@click.group(cls=_Lazy)
def command() -> None:
    """Measure lowprec next to its peers: ratios of one run on this machine.

    \b
    Example:
      lowprec bench kernels
      lowprec bench all --json bench.json
    """


@command.command("all")
@click.option("--skip", multiple=True, metavar="PART", help="Leave a part out; may be repeated.")
@json_option
def run_all(skip: tuple[str, ...], json_to: str | None) -> None:
    """Run every benchmark, each in a process of its own.

    \b
    Example:
      lowprec bench all --skip quality --json bench.json
    """
    for name in skip:
        if name not in PARTS:
            from lowprec.errors import unknown_name

            raise unknown_name("benchmark", name, PARTS)
    results: dict[str, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        for name in PARTS:
            if name in skip or not _exists(name):
                continue
            file = Path(folder) / f"{name}.json"
            click.echo(f"bench {name}", err=True)
            arguments = [sys.executable, "-m", "lowprec", "bench", name, "--json", str(file)]
            done = subprocess.run(arguments, check=False, stdout=None if json_to != "-" else subprocess.DEVNULL)
            if done.returncode or not file.exists():
                raise OSError(f"bench {name} ended with exit code {done.returncode}.")
            results[name] = json.loads(file.read_text())
    emit(results, json_to, lambda: f"{len(results)} benchmarks: {', '.join(results)}.")
