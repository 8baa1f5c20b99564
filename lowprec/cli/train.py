"""`lowprec train`: one recipe, a real run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from lowprec.cli.options import Plain, complete_recipe, emit, given_on_command_line, job_options, json_option

EXAMPLE = """\b
Examples:
  lowprec train --recipe bf16 --steps 200 --out runs/first
  lowprec train --recipe fp8-block --data corpus.txt --out runs/corpus
  lowprec train --resume --out runs/first
"""


@click.command(epilog=EXAMPLE)
@click.option(
    "--recipe", metavar="R", shell_complete=complete_recipe, help="The recipe [from lowprec.toml, else bf16]."
)
@job_options
@click.option("--out", type=click.Path(path_type=Path), required=True, help="Folder of the run.")
@click.option("--resume", is_flag=True, help="Go on with the run in --out, bit for bit.")
@click.option("--steps", type=click.IntRange(1), help="Optimizer steps.")
@click.option("--lr", type=float, help="Learning rate of AdamW.")
@click.option("--schedule", type=click.Choice(["constant", "linear", "cosine"]), default="cosine", show_default=True)
@click.option("--warmup", type=click.IntRange(0), help="Steps of linear warm-up.")
@click.option("--clip", type=float, help="Largest gradient norm, 0 for none [lowprec.toml, else 1].")
@click.option("--accumulate", type=click.IntRange(1), default=1, show_default=True, help="Micro-batches a step.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the start and the batches.")
@click.option("--eval-every", type=click.IntRange(1), default=50, show_default=True, help="Steps.")
@click.option("--save-every", type=click.IntRange(1), default=100, show_default=True, help="Steps.")
@click.option("--observe", type=click.IntRange(0), default=0, help="Watch every N-th step (statistics).")
@click.option("--tensorboard", is_flag=True, help="Write TensorBoard event files too.")
@click.option("--sample", type=click.IntRange(0), default=200, show_default=True, help="Bytes to write at the end.")
@click.option("--report", type=click.Path(path_type=Path), metavar="F.html", help="Write the report.")
@click.option("--device", default="cpu", show_default=True, help="cpu or cuda.")
@json_option
@click.pass_context
def command(ctx: click.Context, /, **given: Any) -> None:
    """Train a model under one recipe.

    Writes run.json, metrics.jsonl, checkpoint.pt and result.json into --out. A checkpoint is
    replaced in one rename; after Ctrl-C, a kill or a full disk, --resume goes on with the
    same losses as if nothing had happened.
    """
    from lowprec.jobs.rundir import RunDirectory
    from lowprec.jobs.stopping import Stopped
    from lowprec.jobs.train import Training

    if given["report"] is not None:
        from lowprec.observe import report

        report.check()
    if given["resume"]:
        given_on_command_line(ctx, "--resume takes everything from the run", {"out", "resume", "report", "json_to"})
    directory = RunDirectory(given["out"], create=not given["resume"])
    if not given["resume"]:
        directory.fresh()
    settings, job = _resumed(directory) if given["resume"] else _asked(given)
    work = _load(job)
    with Plain(settings.hyper.steps, "step", quiet=given["json_to"] == "-") as progress:
        training = Training(work, settings, directory, progress.tell)
        training.resume() if given["resume"] else training.begin({"job_options": job})
        training.on_step = lambda done, info, rate: progress(done, _note(info, rate, work.unit))
        try:
            training.run()
        except Stopped:
            progress.tell(f"stopped at step {training.step}; go on with: lowprec train --resume --out {directory.path}")
            raise click.exceptions.Exit(130) from None
    result = _finish(training, job["sample"])
    emit(result, given["json_to"], lambda: _text(result))
    if given["report"] is not None:
        report.write(directory.path, given["report"])
        click.echo(f"report: {given['report']}", err=True)


def _load(job: dict[str, Any]) -> Any:
    from lowprec import workloads

    return workloads.load(job["model"], job["data"], job["size"], job["batch"])


def _note(info: Any, rate: float, unit: str) -> str:
    scale = "" if info.loss_scale is None else f" scale {info.loss_scale:g}"
    skipped = f" skipped: {info.reason}" if info.skipped else ""
    return f"loss {info.loss:.4f} {rate:,.0f} {unit}/s{scale}{skipped}"


def _asked(given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The settings and the job that the options ask for."""
    from lowprec.jobs.engine import PEERS, Hyper
    from lowprec.jobs.train import Settings
    from lowprec.recipes import recipe as find_recipe
    from lowprec.settings import settings

    file = settings()
    recipe = given["recipe"] or file.recipe or "bf16"
    if recipe not in PEERS:
        find_recipe(recipe)
    options = {"skip": file.skip, "strict": file.strict, "guard": file.guard, "seed": file.seed}
    options = {k: v for k, v in options.items() if v} | (
        {"rules": {g: None if r == "high" else r for g, r in file.rules.items()}} if file.rules else {}
    )
    job = {k: given[k] for k in ("model", "data", "size", "batch", "sample")}
    job["size"] = job["size"] or "tiny"
    work = _load(job)
    steps = given["steps"] or work.steps
    hyper = Hyper(
        lr=work.lr if given["lr"] is None else given["lr"],
        steps=steps,
        warmup=min(10, max(1, steps // 5)) if given["warmup"] is None else given["warmup"],
        schedule=given["schedule"],
        clip=file.clip_grad_norm or 1.0 if given["clip"] is None else given["clip"],
        options=options,
        accumulate=given["accumulate"],
    )
    same = {k: given[k] for k in ("seed", "eval_every", "save_every", "observe", "tensorboard", "device")}
    return Settings(recipe, hyper, **same), job


def _resumed(directory: Any) -> tuple[Any, dict[str, Any]]:
    """The settings and the job of the run that is there."""
    from lowprec.jobs.engine import Hyper
    from lowprec.jobs.train import Settings

    run = directory.read_json("run.json")
    if run.get("kind") != "train":
        raise ValueError(f"{directory.path} is not the folder of a training run.")
    fields = dict(run["settings"])
    hyper = fields.pop("hyper")
    return Settings(hyper=Hyper(**{**hyper, "betas": tuple(hyper["betas"])}), **fields), run["job_options"]


def _finish(training: Any, sample: int) -> dict[str, Any]:
    """The result of a finished run, written beside it."""
    directory, work = training.directory, training.work
    lines = list(directory.lines("metrics.jsonl"))
    steps = [line for line in lines if line["kind"] == "step"]
    timed = sorted(line["units"] / line["seconds"] for line in steps if line["timed"] and line["seconds"])
    validation = [line["loss"] for line in lines if line["kind"] == "validation"]
    result = {
        "kind": "train",
        "job": work.name,
        "recipe": training.settings.recipe,
        "unit": work.unit,
        "steps": training.step,
        "skipped_steps": sum(bool(line["skipped"]) for line in steps),
        "loss": steps[-1]["loss"] if steps else None,
        "validation_loss": validation[-1] if validation else None,
        "rate": timed[len(timed) // 2] if timed else None,
        "sample": _sample(training.engine.model, sample) if work.sample and sample else None,
        "folder": str(directory.path),
    }
    directory.write_json("result.json", result)
    return result


def _sample(model: Any, count: int) -> str:
    import torch

    model.eval()
    prompt = torch.tensor(list(b"import "), device=next(model.parameters()).device)
    return bytes(model.sample(prompt, count).tolist()).decode("utf-8", "replace")


def _text(result: dict[str, Any]) -> str:
    loss = "-" if result["validation_loss"] is None else f"{result['validation_loss']:.4f}"
    rate = "" if result["rate"] is None else f", {result['rate']:,.0f} {result['unit']}/s"
    lines = [f"{result['recipe']}: validation loss {loss} after {result['steps']} steps{rate}, in {result['folder']}"]
    if result["skipped_steps"]:
        lines.append(f"{result['skipped_steps']} steps were skipped (metrics.jsonl says why).")
    if result["sample"]:
        lines += ["", result["sample"]]
    return "\n".join(lines)
