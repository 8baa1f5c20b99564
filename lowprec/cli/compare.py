"""`lowprec compare`: which precision can this model take, and what does it buy?"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lowprec.cli.options import Plain, complete_recipe, emit, given_on_command_line, job_options, json_option, split

DEFAULT = "fp32,bf16,fp8,mxfp8,nvfp4,int8,msamp-O2"
EXAMPLE = """\b
Examples:
  lowprec compare
  lowprec compare --recipes fp32,bf16,fp8 --size tiny --steps 50 --seeds 3
  lowprec compare --model mine.models:build --data mine.data:sets
"""


@click.command(epilog=EXAMPLE)
@click.option(
    "--recipes",
    default=DEFAULT,
    show_default=True,
    metavar="R,R",
    shell_complete=complete_recipe,
    help="Recipes, in order.",
)
@job_options
@click.option("--steps", type=click.IntRange(1), help="Steps of each recipe.")
@click.option("--seeds", type=click.IntRange(1), default=None, help="Starts to average over.")
@click.option("--lr", type=float, help="Learning rate of AdamW.")
@click.option("--peers/--no-peers", default=True, help="Rows of plain torch beside them.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@click.option("--out", type=click.Path(path_type=Path), help="Folder of the run [runs/compare-...].")
@click.option("--resume", is_flag=True, help="Go on with the run in --out (or the newest).")
@click.option("--report", type=click.Path(path_type=Path), metavar="F.html", help="Write the report.")
@json_option
@click.pass_context
def command(ctx: click.Context, /, **given: Any) -> None:
    """Train one model under many recipes and print one table.

    The recipes take turns step by step on the same batches, from the same start. Speed is
    given beside plain torch in fp32 and under autocast bf16; the loss is that on held-out
    data, and its difference from fp32. A recipe that fails is a row with the reason.
    """
    from lowprec.jobs import results, table
    from lowprec.jobs.compare import Comparison
    from lowprec.jobs.engine import PEERS
    from lowprec.jobs.rundir import RunDirectory
    from lowprec.jobs.stopping import Stopped
    from lowprec.recipes import recipe as find_recipe

    if given["resume"]:
        given_on_command_line(ctx, "--resume takes everything from the run", {"out", "resume", "report", "json_to"})
    for name in split(given["recipes"]):
        if name not in PEERS:
            find_recipe(name)
    if given["report"] is not None:
        from lowprec.observe import report

        report.check()
    directory = RunDirectory(given["out"] or _folder(given["resume"]), create=not given["resume"])
    if not given["resume"]:
        directory.fresh()
    settings, job = _resumed(directory) if given["resume"] else _asked(given)
    total = settings.hyper.steps * len(settings.seeds)
    with Plain(total, "step", quiet=given["json_to"] == "-") as progress:
        comparison = Comparison(_load(job), settings, directory, progress.tell)
        comparison.resume() if given["resume"] else comparison.begin({"job_options": job})
        comparison.on_step = lambda done, of: progress(done)
        try:
            comparison.run()
            stopped = False
        except Stopped:
            stopped = True
    result = results.summarise(directory)
    directory.write_json("result.json", result)
    emit(result, given["json_to"], lambda: table.render(result))
    if given["report"] is not None:
        report.write(directory.path, given["report"])
        click.echo(f"report: {given['report']}", err=True)
    if stopped:
        click.echo(f"stopped; go on with: lowprec compare --resume --out {directory.path}", err=True)
        raise click.exceptions.Exit(130)


def _folder(resume: bool) -> Path:
    """A new run folder's name, or the newest one."""
    import time

    if not resume:
        return Path("runs") / time.strftime("compare-%Y%m%d-%H%M%S")
    found = sorted(Path("runs").glob("compare-*"))
    if not found:
        raise FileNotFoundError("there is no runs/compare-* folder to resume; give the folder with --out.")
    return found[-1]


def _load(job: dict[str, Any]) -> Any:
    from lowprec import workloads

    return workloads.load(job["model"], job["data"], job["size"], job["batch"])


def _asked(given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The settings and the job that the options ask for."""
    from lowprec.jobs.compare import Settings
    from lowprec.jobs.engine import PEERS, Hyper

    embedded = given["model"] == "gpt" and given["size"] is None and given["data"] is None
    size = given["size"] or ("demo" if embedded else "tiny")
    job = {"model": given["model"], "data": given["data"], "size": size, "batch": given["batch"]}
    work = _load(job)
    steps, seeds = given["steps"] or work.steps, given["seeds"] or 1
    hyper = Hyper(lr=given["lr"] or work.lr, steps=steps, warmup=min(10, max(1, steps // 5)))
    names = split(given["recipes"])
    peers = tuple(p for p in PEERS if given["peers"] and p not in names)
    settings = Settings(
        peers + names,
        hyper,
        tuple(range(seeds)),
        eval_every=max(1, steps // 5),
        device=given["device"],
    )
    return settings, job


def _resumed(directory: Any) -> tuple[Any, dict[str, Any]]:
    """The settings and the job of the run that is there."""
    from lowprec.jobs.compare import Settings
    from lowprec.jobs.engine import Hyper

    run = directory.read_json("run.json")
    if run.get("kind") != "compare":
        raise ValueError(f"{directory.path} is not the folder of a comparison.")
    fields = dict(run["settings"])
    hyper = Hyper(**{**fields.pop("hyper"), "betas": tuple(run["settings"]["hyper"]["betas"])})
    made: Any = {k: tuple(v) if isinstance(v, list) else v for k, v in fields.items()}
    return Settings(hyper=hyper, **made), run["job_options"]
