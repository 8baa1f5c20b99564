"""One recipe, a real run: checkpoints, validation, metrics, and a resume that changes no bit.

What makes a resume exact: a batch follows from seed and step, so does what dropout draws, the learning rate follows
from the number of steps that were applied, and everything else is in the engine's state. Metrics of steps after the
checkpoint are dropped before going on, so that the files read as if nothing had happened.

The schedule counts *applied* steps: a step that was skipped for a non-finite gradient does not move it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from lowprec.errors import missing_extra
from lowprec.jobs import machine
from lowprec.jobs.compare import plans_of
from lowprec.jobs.engine import Engine, Hyper, LowPrec, StepInfo, learning_rate, make
from lowprec.jobs.rundir import RunDirectory
from lowprec.jobs.stopping import Stopped, Stopper
from lowprec.workloads import Workload, units_in

__all__ = ["Settings", "Training"]

PATIENCE = 25  # skipped steps in a row after which a run is called broken


@dataclass(frozen=True)
class Settings:
    """What a run does.

    Args:
        recipe: name of the recipe (or of a peer).
        hyper: learning rate, schedule, accumulation and so on.
        seed: of the start and of the batches.
        eval_every, save_every: steps between validations and checkpoints.
        observe: steps between watched steps (statistics), 0 for none.
        tensorboard: write TensorBoard event files too.
        device: where it runs.
    """

    recipe: str
    hyper: Hyper = field(default_factory=Hyper)
    seed: int = 0
    eval_every: int = 50
    save_every: int = 100
    observe: int = 0
    tensorboard: bool = False
    device: str = "cpu"


class Training:
    """A training run in a folder.

    Args:
        work: the job.
        settings: what it does.
        directory: where it is written.
        tell: called with a line of text now and then.
    """

    def __init__(
        self, work: Workload, settings: Settings, directory: RunDirectory, tell: Callable[[str], object] = print
    ) -> None:
        self.work, self.settings, self.directory, self.tell = work, settings, directory, tell
        self.engine: Engine = make(work, settings.recipe, settings.hyper, settings.seed, settings.device)
        self.step, self.applied, self.skipped_in_a_row = 0, 0, 0
        self.on_step: Callable[[int, StepInfo, float], object] | None = None
        self._writer: Any = None

    def begin(self, extra: dict[str, Any] | None = None) -> None:
        """Start a new run: write down what was asked and where."""
        self.directory.fresh()
        about = {"job": self.work.name, "about": self.work.about, "unit": self.work.unit}
        self.directory.write_json(
            "run.json",
            {
                "kind": "train",
                **about,
                "settings": asdict(self.settings),
                "machine": machine.facts(),
                **(extra or {}),
            },
        )
        self.directory.write_json("plans.json", plans_of([self.engine]))

    def resume(self) -> None:
        """Go on from the newest checkpoint, or from the start where there is none."""
        if self.directory.file("checkpoint.pt").exists():
            state = self.directory.load_checkpoint()
            try:
                self.step, self.applied = int(state["step"]), int(state["applied"])
                self.skipped_in_a_row = int(state["skipped_in_a_row"])
                self.engine.load(state["engine"])
            except (KeyError, RuntimeError) as error:
                first = str(error).strip().splitlines()[0]
                path = self.directory.file("checkpoint.pt")
                raise ValueError(f"the checkpoint {path} does not fit this model: {first}") from error
        for name in ("metrics.jsonl", "statistics.jsonl"):
            self.directory.keep(name, lambda row: row["step"] < self.step)

    def save(self) -> None:
        """Write a checkpoint in one rename."""
        state = {"step": self.step, "applied": self.applied, "skipped_in_a_row": self.skipped_in_a_row}
        self.directory.save_checkpoint({"format": "lowprec-run", **state, "engine": self.engine.state()})

    def run(self) -> None:
        """Train to the end.

        Raises:
            Stopped: on Ctrl-C, after the step is finished and a checkpoint written.
            ValueError: when no step can be applied any more.
            OSError: when something cannot be written; the last checkpoint stays whole.
        """
        settings = self.settings
        self._writer = self._tensorboard() if settings.tensorboard else None
        try:
            with Stopper(self.tell) as stopper:
                while self.step < settings.hyper.steps:
                    self._one()
                    ended = self.step == settings.hyper.steps
                    if ended or self.step % settings.eval_every == 0:
                        self._validate()
                    if ended or stopper.wanted or self.step % settings.save_every == 0:
                        self.save()
                    if stopper.wanted and not ended:
                        raise Stopped
        finally:
            self.directory.close()
            if self._writer is not None:
                self._writer.close()

    def _one(self) -> None:
        hyper, step = self.settings.hyper, self.step
        lr = learning_rate(hyper, self.applied)
        batches = [
            self.work.data.train(step * hyper.accumulate + i, self.settings.seed) for i in range(hyper.accumulate)
        ]
        start = time.perf_counter()
        watch = bool(self.settings.observe) and step % self.settings.observe == 0
        if watch:
            info, seen = self.engine.watched_step(batches, lr, step)
            for row in seen:
                self.directory.append(
                    "statistics.jsonl",
                    {"recipe": self.settings.recipe, "seed": self.settings.seed, "step": step, **row},
                )
        else:
            info = self.engine.step(batches, lr, step)
        seconds = time.perf_counter() - start
        units = sum(units_in(batch, self.work.unit) for batch in batches)
        self._write("step", lr=lr, seconds=seconds, timed=not watch, units=units, **info._asdict())
        self.step += 1
        self.applied += not info.skipped
        self.skipped_in_a_row = self.skipped_in_a_row + 1 if info.skipped else 0
        if self.on_step is not None:
            self.on_step(self.step, info, units / seconds)
        if self.skipped_in_a_row >= PATIENCE:
            raise ValueError(
                f"{PATIENCE} steps in a row were skipped ({info.reason or 'not finite'}), the run does not train any "
                "more; try a lower --lr, or a recipe with more range such as bf16."
            )
        if info.loss != info.loss and not isinstance(self.engine, LowPrec):
            raise ValueError(f"the loss became NaN at step {step}; try a lower --lr.")

    def _validate(self) -> None:
        loss = self.engine.validate(self.work.data.validation())
        self._write("validation", step=self.step - 1, loss=loss)
        self.tell(f"step {self.step}: validation loss {loss:.4f}")

    def _write(self, kind: str, **row: Any) -> None:
        row.setdefault("step", self.step)
        line = {"kind": kind, "recipe": self.settings.recipe, "seed": self.settings.seed, **row}
        self.directory.append("metrics.jsonl", line)
        if self._writer is not None:
            for key in ("loss", "lr", "grad_norm", "loss_scale"):
                if row.get(key) is not None:
                    name = f"{'validation' if kind == 'validation' else 'train'}/{key}"
                    self._writer.add_scalar(name, row[key], row["step"])

    def _tensorboard(self) -> Any:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise missing_extra("tensorboard", "tensorboard", "--tensorboard") from None
        return SummaryWriter(str(self.directory.file("tensorboard")), purge_step=self.step)
