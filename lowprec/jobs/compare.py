"""Many recipes on one job, side by side.

Every recipe gets the same model from the same start and the same batches. They take turns step by step, in an order
that rotates, so that whatever the machine does meanwhile (another process, heat) hits all of them alike; speeds are
compared as the median of the ratios of neighbouring steps. Steps that are watched (memory, statistics) or that warm
up are left out of the timing.

All that happens goes into `metrics.jsonl` as it happens; the table and the report are made from that file alone, which
is why an interrupted comparison has a table, a resumed one has a whole one, and a recipe that fails is a row.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from lowprec.apply import applied
from lowprec.jobs import machine
from lowprec.jobs.engine import Engine, Hyper, LowPrec, learning_rate, make
from lowprec.jobs.rundir import RunDirectory
from lowprec.jobs.stopping import Stopped, Stopper
from lowprec.workloads import Workload, units_in

__all__ = ["WARM_UP", "Comparison", "Settings"]

WARM_UP = 2  # steps of a seed that are not timed


@dataclass(frozen=True)
class Settings:
    """What is compared.

    Args:
        recipes: names of recipes and peers, in the order of the table.
        hyper: what is the same for all of them.
        seeds: the seeds, one start and one order of batches each.
        eval_every: steps between validations; the last step is always followed by one.
        observe: about how many steps of the first seed are watched for statistics; 0 for none.
        device: where it runs.
    """

    recipes: tuple[str, ...]
    hyper: Hyper = field(default_factory=Hyper)
    seeds: tuple[int, ...] = (0,)
    eval_every: int = 50
    observe: int = 8
    device: str = "cpu"


class Comparison:
    """A comparison in a run folder.

    Args:
        work: the job.
        settings: what is compared.
        directory: where it is written.
        tell: called with one line of text now and then.
    """

    def __init__(
        self, work: Workload, settings: Settings, directory: RunDirectory, tell: Callable[[str], object] = print
    ) -> None:
        self.work, self.settings, self.directory, self.tell = work, settings, directory, tell
        self.engines: dict[str, Engine] = {}
        self.failed: set[str] = set()
        self.place = (0, 0)  # index of the seed, step: what comes next
        self.on_step: Callable[[int, int], object] | None = None

    # -- beginning and going on ----------------------------------------------------------------------------------

    def begin(self, extra: dict[str, Any] | None = None) -> None:
        """Start a new comparison: write down what was asked and where."""
        self.directory.fresh()
        about = {"job": self.work.name, "about": self.work.about, "unit": self.work.unit}
        settings = asdict(self.settings)
        self.directory.write_json(
            "run.json",
            {"kind": "compare", **about, "settings": settings, "machine": machine.facts(), **(extra or {})},
        )

    def resume(self) -> None:
        """Go on where the newest checkpoint was written."""
        if not self.directory.file("checkpoint.pt").exists():
            for name in ("metrics.jsonl", "statistics.jsonl"):
                self.directory.keep(name, lambda row: False)
            return
        state = self.directory.load_checkpoint()
        place, step = state["place"]
        done = self.settings.seeds[:place]
        now = self.settings.seeds[place] if place < len(self.settings.seeds) else None

        def before(row: dict[str, Any]) -> bool:
            return row["seed"] in done or (row["seed"] == now and row["step"] < step)

        for name in ("metrics.jsonl", "statistics.jsonl"):
            self.directory.keep(name, before)
        self.place = (place, step)
        if now is not None:
            self._build(now, state["trials"])
        self.failed = {row["recipe"] for row in self.directory.lines("metrics.jsonl") if row["kind"] == "failure"}

    def save(self) -> None:
        """Write a checkpoint of every recipe."""
        trials = {name: engine.state() for name, engine in self.engines.items()}
        self.directory.save_checkpoint({"format": "lowprec-run", "place": list(self.place), "trials": trials})

    # -- the loop ----------------------------------------------------------------------------------------------------

    def run(self, save_every: float = 300.0) -> None:
        """Train them all.

        Args:
            save_every: seconds between checkpoints.

        Raises:
            Stopped: on Ctrl-C, after the round is finished and a checkpoint written.
        """
        saved = time.monotonic()
        seeds, steps = self.settings.seeds, self.settings.hyper.steps
        try:
            with Stopper(self.tell) as stopper:
                while self.place[0] < len(seeds):
                    if not self.engines:
                        self._build(seeds[self.place[0]])
                    while self.place[1] < steps and self.engines:
                        self._round(seeds[self.place[0]], self.place[1])
                        self.place = (self.place[0], self.place[1] + 1)
                        if stopper.wanted or time.monotonic() - saved > save_every:
                            self.save()
                            saved = time.monotonic()
                        if stopper.wanted:
                            raise Stopped
                    self.engines = {}
                    self.place = (self.place[0] + 1, 0)
        finally:
            self.directory.close()
        with contextlib.suppress(OSError):
            self.directory.file("checkpoint.pt").unlink()

    def _build(self, seed: int, states: dict[str, Any] | None = None) -> None:
        self.engines = {}
        for recipe in self.settings.recipes:
            if recipe in self.failed or (states is not None and recipe not in states):
                continue
            try:
                engine = make(self.work, recipe, self.settings.hyper, seed, self.settings.device)
                if states is not None:
                    engine.load(states[recipe])
                self.engines[recipe] = engine
            except Exception as error:
                self._fail(recipe, seed, self.place[1], error)
        if not self.directory.file("plans.json").exists():
            self.directory.write_json("plans.json", plans_of(self.engines.values()))

    def _fail(self, recipe: str, seed: int, step: int, error: Exception) -> None:
        why = f"{error}" if isinstance(error, (ValueError, TypeError)) else f"{type(error).__name__}: {error}"
        why = why.strip().splitlines()[0] if why.strip() else type(error).__name__
        self.engines.pop(recipe, None)
        self.failed.add(recipe)
        self._write(kind="failure", recipe=recipe, seed=seed, step=step, error=why)
        self.tell(f"{recipe} failed at step {step}: {why}")

    def _write(self, **row: Any) -> None:
        self.directory.append("metrics.jsonl", row)

    def _watched(self, step: int) -> bool:
        """Whether this step of the first seed is watched for statistics."""
        count, steps = self.settings.observe, self.settings.hyper.steps
        return (
            bool(count)
            and self.place[0] == 0
            and step % max(1, steps // count) == min(2, steps - 1) % max(1, steps // count)
        )

    def _round(self, seed: int, step: int) -> None:
        """One step of every recipe."""
        hyper = self.settings.hyper
        batches = [self.work.data.train(step * hyper.accumulate + i, seed) for i in range(hyper.accumulate)]
        lr = learning_rate(hyper, step)
        names = [name for name in self.settings.recipes if name in self.engines]
        turn = step % len(names) if names else 0
        for recipe in names[turn:] + names[:turn]:
            try:
                self._step(recipe, seed, step, batches, lr)
            except Exception as error:
                self._fail(recipe, seed, step, error)
        last = step + 1 == hyper.steps
        if last or (step + 1) % self.settings.eval_every == 0:
            self._validate(seed, step)
        if self.on_step is not None:
            self.on_step(self.place[0] * hyper.steps + step + 1, len(self.settings.seeds) * hyper.steps)

    def _step(self, recipe: str, seed: int, step: int, batches: Sequence[Any], lr: float) -> None:
        engine = self.engines[recipe]
        timed = step >= WARM_UP
        if self.place[0] == 0 and step == min(1, self.settings.hyper.steps - 1):
            self._coverage(engine, seed, step, batches[0])
            info, held, peak = engine.measure(batches, lr, step)
            parameters = sum(p.numel() for p in engine.model.parameters())
            self._write(
                kind="memory", recipe=recipe, seed=seed, step=step, parameters=parameters, peak=peak, **asdict(held)
            )
            seconds, timed = 0.0, False
        elif self._watched(step) and isinstance(engine, LowPrec):
            seconds, timed = 0.0, False
            info, seen = engine.watched_step(batches, lr, step)
            for row in seen:
                self.directory.append("statistics.jsonl", {"recipe": recipe, "seed": seed, "step": step, **row})
        else:
            start = time.perf_counter()
            info = engine.step(batches, lr, step)
            seconds = time.perf_counter() - start
        units = sum(units_in(batch, self.work.unit) for batch in batches)
        self._write(
            kind="step", recipe=recipe, seed=seed, step=step, lr=lr, seconds=seconds, timed=timed, units=units,
            **info._asdict(),
        )  # fmt: skip

    def _coverage(self, engine: Engine, seed: int, step: int, batch: Any) -> None:
        shares = engine.coverage(batch)
        if shares is not None:
            self._write(kind="coverage", recipe=engine.recipe, seed=seed, step=step, **shares)

    def _validate(self, seed: int, step: int) -> None:
        held_out = self.work.data.validation()
        for recipe, engine in list(self.engines.items()):
            try:
                loss = engine.validate(held_out)
                self._write(kind="validation", recipe=recipe, seed=seed, step=step, loss=loss)
            except Exception as error:
                self._fail(recipe, seed, step, error)


def plans_of(engines: Iterable[Engine]) -> dict[str, Any]:
    """The plan of every recipe that was applied, as plain values."""
    found = {engine.recipe: applied(engine.model) for engine in engines if isinstance(engine, LowPrec)}
    return {name: plan.to_dict() for name, plan in found.items() if plan is not None}
