"""`lowprec report`: the page of a run, made anew from its folder."""

from __future__ import annotations

from pathlib import Path

import click

from lowprec.cli.options import emit, json_option

EXAMPLE = """\b
Examples:
  lowprec report runs/first --out report.html
  lowprec report runs/first --json
"""


@click.command(epilog=EXAMPLE)
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="The HTML file [RUN/report.html].")
@json_option
def command(run: Path, out: Path | None, json_to: str | None) -> None:
    """Make the report of a run: one HTML file that needs no network.

    RUN is the folder that lowprec compare or train wrote, finished or not. With --json the
    numbers of the page are printed instead.
    """
    from lowprec.jobs.rundir import RunDirectory
    from lowprec.observe import report

    data = report.collect(RunDirectory(run, create=False))
    if json_to != "-":
        report.write(run, out or run / "report.html")
    emit(data, json_to, lambda: f"{out or run / 'report.html'}: {data['sentence']}")
