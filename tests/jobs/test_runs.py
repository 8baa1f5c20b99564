"""Training runs and comparisons end to end: resume exact after a kill, failures as rows, mistakes as sentences."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from lowprec import workloads
from lowprec.cli import main
from lowprec.jobs import compare, results, table, train
from lowprec.jobs.engine import Hyper
from lowprec.jobs.rundir import RunDirectory
from lowprec.jobs.stopping import Stopped

RECIPES = ("torch-bf16", "bf16", "fp16", "fp8-delayed", "nvfp4", "int8", "msamp-O2", "bf16-sr")


def losses(path: Path) -> list[Any]:
    return [(row["kind"], row["recipe"], row["step"], row["loss"]) for row in RunDirectory(path).lines("metrics.jsonl")
            if row["kind"] in ("step", "validation")]  # fmt: skip


def training(path: Path, recipe: str, stop_at: int | None = None) -> train.Training:
    hyper = Hyper(steps=8, warmup=2, accumulate=2)
    work = workloads.load("gpt", size="nano", batch=2)
    run = train.Training(
        work, train.Settings(recipe, hyper, eval_every=4, save_every=3), RunDirectory(path), lambda text: None
    )

    def stop(done: int, *rest: object) -> None:
        if done == stop_at:
            raise RuntimeError("pulled the plug")

    run.on_step = stop
    return run


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_run_that_broke_goes_on_bit_for_bit(tmp_path: Path, recipe: str) -> None:
    whole = training(tmp_path / "whole", recipe)
    whole.begin()
    whole.run()
    broken = training(tmp_path / "broken", recipe, stop_at=5)
    broken.begin()
    with pytest.raises(RuntimeError, match="pulled the plug"):
        broken.run()
    assert len(losses(tmp_path / "broken")) > 4
    again = training(tmp_path / "broken", recipe)
    again.resume()
    assert again.step == 3
    again.run()
    assert losses(tmp_path / "broken") == losses(tmp_path / "whole")


def comparison(path: Path, recipes: tuple[str, ...], **settings: Any) -> compare.Comparison:
    work = workloads.load("gpt", size="nano", batch=2)
    chosen = compare.Settings(recipes, Hyper(steps=5, warmup=1), eval_every=5, observe=2, **settings)
    return compare.Comparison(work, chosen, RunDirectory(path), lambda text: None)


def test_a_comparison_that_was_stopped_goes_on_bit_for_bit(tmp_path: Path) -> None:
    recipes = ("torch-fp32", "fp32", "fp8", "bf16-sr")
    whole = comparison(tmp_path / "whole", recipes, seeds=(0, 1))
    whole.begin()
    whole.run()
    stopped = comparison(tmp_path / "stopped", recipes, seeds=(0, 1))
    stopped.begin()
    stopped.on_step = lambda done, of: os.kill(os.getpid(), signal.SIGINT) if done == 7 else None
    with pytest.raises(Stopped):
        stopped.run()
    assert "fp8" in table.render(results.summarise(stopped.directory))
    again = comparison(tmp_path / "stopped", recipes, seeds=(0, 1))
    again.resume()
    assert again.place == (1, 2)
    again.run()
    assert losses(tmp_path / "stopped") == losses(tmp_path / "whole")
    assert not (tmp_path / "stopped" / "checkpoint.pt").exists()


def test_a_recipe_that_fails_is_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made = compare.make

    def breaks(work: Any, recipe: str, *rest: Any) -> Any:
        if recipe == "int8":
            raise ValueError("blocks.0: no such luck.")
        engine = made(work, recipe, *rest)
        if recipe == "fp8":
            step = engine.step

            def later(batches: Any, lr: float, number: int) -> Any:
                if number == 3:
                    raise RuntimeError("out of something\nmore lines")
                return step(batches, lr, number)

            engine.step = later  # type: ignore[method-assign]
        return engine

    monkeypatch.setattr(compare, "make", breaks)
    run = comparison(tmp_path, ("fp32", "int8", "fp8", "bf16"))
    run.begin()
    run.run()
    rows = {row["recipe"]: row for row in results.summarise(run.directory)["rows"]}
    assert rows["int8"]["error"] == "blocks.0: no such luck." and rows["int8"]["verdict"] == "fails"
    assert rows["fp8"]["error"] == "RuntimeError: out of something"
    assert rows["bf16"]["loss"] is not None and rows["fp32"]["verdict"] == "base"


# -- from outside ------------------------------------------------------------------------------------------------------


def lowprec(*arguments: str, cwd: Path, **more: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "lowprec", *arguments], cwd=cwd, capture_output=True, text=True, check=False, **more
    )


def started(cwd: Path, *arguments: str) -> subprocess.Popen[str]:
    run = subprocess.Popen(
        [sys.executable, "-m", "lowprec", "train", "--size", "nano", "--recipe", "bf16", "--out", "run", *arguments],
        cwd=cwd, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    while not (cwd / "run" / "checkpoint.pt").exists():
        assert run.poll() is None, run.communicate()
        time.sleep(0.02)
    return run


def test_sigkill_and_resume(tmp_path: Path) -> None:
    steps = ("--steps", "60", "--save-every", "5", "--sample", "0")
    run = started(tmp_path, *steps)
    run.kill()
    run.communicate()
    assert lowprec("train", "--resume", "--out", "run", cwd=tmp_path).returncode == 0
    assert (
        lowprec("train", "--size", "nano", "--recipe", "bf16", "--out", "whole", *steps, cwd=tmp_path).returncode == 0
    )
    assert losses(tmp_path / "run") == losses(tmp_path / "whole")


def test_ctrl_c_leaves_a_checkpoint_and_a_sentence(tmp_path: Path) -> None:
    run = started(tmp_path, "--steps", "100000", "--save-every", "3")
    run.send_signal(signal.SIGINT)
    _, err = run.communicate(timeout=120)
    assert run.returncode == 130 and "Traceback" not in err
    assert "go on with: lowprec train --resume --out run" in err
    state = RunDirectory(tmp_path / "run").load_checkpoint()
    assert state["step"] == len([1 for row in losses(tmp_path / "run") if row[0] == "step"])


def test_mistakes_are_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "raises.py").write_text("def build():\n    raise KeyError('weights')\n")
    (tmp_path / "odd.py").write_text("def build():\n    return 3\n")
    (tmp_path / "bad").mkdir()
    (tmp_path / "bad" / "run.json").write_text(json.dumps({"kind": "train", "settings": {}}))
    for arguments, words in (
        (["--data", "empty.txt"], "empty.txt holds 0 bytes of text"),
        (["--data", "none.txt"], "none.txt could not be read: no such file or directory."),
        (["--model", "raises.py"], "raises.py raised KeyError: 'weights'"),
        (["--model", "odd.py"], "odd.py returned int; it should return a torch.nn.Module."),
    ):
        with pytest.raises(SystemExit) as stop:
            main(["train", "--out", "o", "--recipe", "bf16", *arguments])
        err = capsys.readouterr().err
        assert stop.value.code == 2 and words in err and len(err.strip().splitlines()) == 1


def test_a_corrupt_checkpoint_is_a_sentence(tmp_path: Path) -> None:
    run = training(tmp_path / "run", "bf16")
    run.begin()
    run.run()
    run.directory.file("checkpoint.pt").write_bytes(b"PK\x03\x04 not much of one")
    again = training(tmp_path / "run", "bf16")
    with pytest.raises(ValueError, match=r"the checkpoint .* is damaged or not one of lowprec's; delete it"):
        again.resume()
