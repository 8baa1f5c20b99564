"""Options that several commands share, and how a result leaves a command."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

__all__ = ["Plain", "complete_recipe", "emit", "given_on_command_line", "job_options", "json_option", "split"]

F = TypeVar("F", bound=Callable[..., Any])


def json_option(function: F) -> F:
    """``--json`` prints JSON instead of text; ``--json FILE`` writes it there beside the text."""
    option = click.option(
        "--json",
        "json_to",
        is_flag=False,
        flag_value="-",
        metavar="[FILE]",
        help="Print the result as JSON, or write it to FILE.",
    )
    return option(function)


def complete_recipe(ctx: click.Context, parameter: click.Parameter, incomplete: str) -> list[Any]:
    """Recipe names for the shell; after a comma, the next one."""
    from click.shell_completion import CompletionItem

    from lowprec.recipes import recipes

    before, comma, last = incomplete.rpartition(",")
    return [CompletionItem(f"{before}{comma}{name}") for name in recipes() if name.startswith(last)]


def job_options(function: F) -> F:
    """What is trained: ``--model --data --size --batch``."""
    for option in reversed(
        (
            click.option(
                "--model",
                default="gpt",
                show_default=True,
                metavar="M",
                help="gpt, cnn, package.module:factory, or a script with build().",
            ),
            click.option("--data", metavar="D", help="A text or JSONL file, or package.module:factory."),
            click.option("--size", default=None, metavar="S", help="Of gpt and cnn: tiny, small, medium."),
            click.option("--batch", type=click.IntRange(1), help="Windows or samples a batch."),
        )
    ):
        function = option(function)
    return function


def given_on_command_line(ctx: click.Context, why: str, allowed: set[str]) -> None:
    """Refuse options that would have no effect.

    Raises:
        ValueError: naming those that were given and are not in ``allowed``.
    """
    typed = [
        parameter.opts[0]
        for parameter in ctx.command.params
        if parameter.name not in allowed
        and ctx.get_parameter_source(parameter.name or "") is click.core.ParameterSource.COMMANDLINE
    ]
    if typed:
        them = "it" if len(typed) == 1 else "them"
        raise ValueError(f"{why}, so {', '.join(typed)} would have no effect; leave {them} out.")


def split(text: str) -> tuple[str, ...]:
    """Names separated by commas.

    >>> split("fp32, bf16,,fp8")
    ('fp32', 'bf16', 'fp8')
    """
    return tuple(part.strip() for part in text.split(",") if part.strip())


def emit(value: Any, json_to: str | None, text: Callable[[], str]) -> None:
    """Print a result: as text, as JSON on stdout (``--json``), or as text with JSON in a file (``--json FILE``)."""
    if json_to == "-":
        click.echo(json.dumps(value, indent=1))
        return
    click.echo(text())
    if json_to:
        path = Path(json_to)
        try:
            path.write_text(json.dumps(value, indent=1) + "\n")
        except OSError as error:
            raise OSError(f"{path} could not be written: {(error.strerror or str(error)).lower()}.") from error


class Plain:
    """Progress as plain lines on stderr, at most one every few seconds, or as a bar on a terminal.

    Args:
        total: how many steps there are.
        what: a word for the bar.
        quiet: show nothing.
        every: seconds between plain lines.
    """

    def __init__(self, total: int, what: str, quiet: bool = False, every: float = 10.0) -> None:
        self.total, self.what, self.quiet, self.every = total, what, quiet, every
        self._bar: Any = None
        self._last = 0.0

    def __enter__(self) -> Plain:
        import sys
        import time

        self._last = time.monotonic()
        if not self.quiet and sys.stderr.isatty():
            from rich.console import Console
            from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total} {task.fields[note]}"),
                TimeElapsedColumn(),
                TextColumn("left"),
                TimeRemainingColumn(),
                console=Console(stderr=True),
                transient=True,
            )
            self._bar.start()
            self._task = self._bar.add_task(self.what, total=self.total, note="")
        return self

    def __exit__(self, *unused: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, done: int, note: str = "") -> None:
        """Say how far it has come."""
        import time

        if self._bar is not None:
            self._bar.update(self._task, completed=done, note=note)
        elif not self.quiet and (time.monotonic() - self._last > self.every or done == self.total):
            self._last = time.monotonic()
            click.echo(f"{self.what} {done}/{self.total} {note}".rstrip(), err=True)

    def tell(self, text: str) -> None:
        """A line that stays."""
        if self._bar is not None:
            self._bar.console.print(text, highlight=False, markup=False)
        else:
            click.echo(text, err=True)
