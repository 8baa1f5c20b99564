"""Checkpoints: bit-exact resume from anywhere, and errors that name the key."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from resume_worker import PARTS, Net, build, micro_batch
from safetensors.torch import load_file, save_file
from torch import nn

import lowprec as lp
from lowprec.loss_scale import DynamicScale

WORKER = Path(__file__).with_name("resume_worker.py")


# -- resume --------------------------------------------------------------------------------------------------------


def _losses(recipe: str, steps: int) -> list[float]:
    model, optimizer = build(recipe)
    return [micro_batch(model, optimizer, i) for i in range(steps * PARTS)]


@pytest.mark.parametrize("recipe", lp.recipes())
def test_resume_between_steps_and_in_the_middle_of_one(recipe: str, tmp_path: Path) -> None:
    """Saved after an even and an odd micro-batch, loaded into fresh objects: the remaining losses are the same bits."""
    whole = _losses(recipe, 5)
    model, optimizer = build(recipe)
    done = 0
    for until in (4, 7):
        assert [micro_batch(model, optimizer, i) for i in range(done, until)] == whole[done:until]
        done = until
        lp.save(tmp_path / "a.ckpt", model, optimizer)
        model, optimizer = build(recipe)
        torch.manual_seed(99)  # must not matter: the generators come from the checkpoint
        lp.load(tmp_path / "a.ckpt", model, optimizer)
    assert [micro_batch(model, optimizer, i) for i in range(done, len(whole))] == whole[done:]


def _start(recipe: str, folder: Path, steps: int) -> subprocess.Popen[bytes]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.Popen([sys.executable, str(WORKER), recipe, str(folder), str(steps)], env=environment)


def _kill_and_resume(recipe: str, folder: Path, draw: random.Random) -> None:
    steps = 8
    process = _start(recipe, folder, steps)
    log, wanted = folder / "log", draw.randint(1, steps * PARTS - 2)
    while process.poll() is None and (not log.exists() or len(log.read_text().splitlines()) < wanted):
        time.sleep(0.002)
    time.sleep(draw.random() * 0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert _start(recipe, folder, steps).wait() == 0
    whole = [loss.hex() for loss in _losses(recipe, steps)]
    lines = [line.split() for line in log.read_text().splitlines() if len(line.split()) == 2]
    assert {int(i) for i, _ in lines} == set(range(steps * PARTS))
    assert all(whole[int(i)] == loss for i, loss in lines)


@pytest.mark.parametrize("recipe", ["fp16", "fp8-delayed"])
def test_sigkill_and_resume(recipe: str, tmp_path: Path) -> None:
    _kill_and_resume(recipe, tmp_path, random.Random(recipe))


@pytest.mark.long
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("recipe", lp.recipes())
def test_sigkill_and_resume_every_preset(recipe: str, seed: int, tmp_path: Path) -> None:
    _kill_and_resume(recipe, tmp_path, random.Random(f"{recipe}{seed}"))


def test_kill_while_the_checkpoint_is_written(tmp_path: Path) -> None:
    """A process that does nothing but save is killed: what is at the path always loads."""
    code = (
        "import torch, lowprec as lp\n"
        "m = torch.nn.Linear(1500, 1500)\n"
        "for i in range(10**6):\n"
        "    torch.nn.init.constant_(m.weight, float(i))\n"
        "    torch.nn.init.constant_(m.bias, float(i))\n"
        f"    lp.save({str(tmp_path / 'a.ckpt')!r}, m, index=i)\n"
    )
    draw = random.Random(0)
    seen = -1
    for _ in range(3):
        process = subprocess.Popen([sys.executable, "-c", code], env={**os.environ, "OMP_NUM_THREADS": "1"})
        before = (tmp_path / "a.ckpt").stat().st_mtime_ns if (tmp_path / "a.ckpt").exists() else 0
        while not (tmp_path / "a.ckpt").exists() or (tmp_path / "a.ckpt").stat().st_mtime_ns == before:
            time.sleep(0.005)
        time.sleep(draw.random() * 0.05)
        process.send_signal(signal.SIGKILL)
        process.wait()
        model = nn.Linear(1500, 1500)
        index = lp.load(tmp_path / "a.ckpt", model)["index"]
        assert bool((model.weight == index).all()) and bool((model.bias == index).all())
        seen = max(seen, index)
    assert seen >= 0
    lp.save(tmp_path / "a.ckpt", nn.Linear(2, 2))
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]  # what the killed ones left is gone


def test_a_failed_write_leaves_the_old_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(2, 2)
    lp.save(tmp_path / "a.ckpt", model, mark="old")

    def full(*args: Any, **kwargs: Any) -> None:
        Path(args[1]).write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lowprec.training.files.save_file", full)
    with pytest.raises(OSError, match="No space left"):
        lp.save(tmp_path / "a.ckpt", model, mark="new")
    assert lp.load(tmp_path / "a.ckpt", model)["mark"] == "old"
    assert [p.name for p in tmp_path.iterdir()] == ["a.ckpt"]


# -- what is in it -------------------------------------------------------------------------------------------------


def test_everything_comes_back(tmp_path: Path) -> None:
    model, optimizer = build("fp16", guard="skip", loss_scale=DynamicScale(64.0, window=3))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    for i in range(6):
        micro_batch(model, optimizer, i)
    optimizer.backward(model(*[torch.zeros(1, 4, dtype=torch.long)] * 2) * float("nan"))
    optimizer.step()
    scheduler.step()
    lp.save(tmp_path / "a.ckpt", model, optimizer, scheduler=scheduler, note={"epoch": 3, "best": float("inf")})
    other, fresh = build("fp16", guard="skip")
    extra = lp.load(tmp_path / "a.ckpt", other, fresh)
    assert extra["note"] == {"epoch": 3, "best": float("inf")} and extra["scheduler"] == scheduler.state_dict()
    assert repr(fresh.last_step) == repr(optimizer.last_step) and fresh.last_step.kind == "loss"
    assert fresh.scales == optimizer.scales and fresh.lost == 1 and repr(fresh.window) == repr(optimizer.window)
    assert fresh.guard.to_dict() == optimizer.guard.to_dict()
    assert fresh.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    for a, b in zip(model.parameters(), other.parameters()):
        assert torch.equal(a, b)


def test_the_dict_reads_with_weights_only(tmp_path: Path) -> None:
    model, optimizer = build("fp8-delayed")
    for i in range(3):
        micro_batch(model, optimizer, i)
    # a copy: the state's tensors are those in use
    torch.save(lp.state_dict(model, optimizer), tmp_path / "a.pt")
    other, fresh = build("fp8-delayed")
    lp.load_state_dict(other, fresh, torch.load(tmp_path / "a.pt", weights_only=True))
    rest = [micro_batch(other, fresh, i) for i in (3, 4)]
    lp.load_state_dict(model, optimizer, torch.load(tmp_path / "a.pt", weights_only=True))
    assert [micro_batch(model, optimizer, i) for i in (3, 4)] == rest


def test_several_models_and_optimizers(tmp_path: Path) -> None:
    def make() -> tuple[Any, Any]:
        torch.manual_seed(0)
        pair = [nn.Linear(2, 3), nn.Linear(3, 1)]
        return lp.prepare(pair, [torch.optim.Adam(m.parameters()) for m in pair], "fp32", loss_scale="torch")

    models, optimizers = make()
    optimizers[1].backward(models[1](models[0](torch.ones(1, 2))).sum())
    optimizers[1].step()
    lp.save(tmp_path / "a.ckpt", models, optimizers)
    others, fresh = make()
    lp.load(tmp_path / "a.ckpt", others, fresh)
    assert torch.equal(models[1].weight, others[1].weight) and fresh[1].last_step == optimizers[1].last_step
    with pytest.raises(ValueError, match="key 'model' of the checkpoint holds 2 of them, and 1 were given"):
        lp.load(tmp_path / "a.ckpt", others[0], fresh[0])


def test_the_model_alone(tmp_path: Path) -> None:
    model, optimizer = build("fp16")
    micro_batch(model, optimizer, 0)
    micro_batch(model, optimizer, 1)
    lp.save(tmp_path / "a.ckpt", model, optimizer)
    other = Net()
    lp.load(tmp_path / "a.ckpt", other)
    assert torch.equal(other.up.weight, model.up.weight)
    assert lp.load(tmp_path / "a.ckpt")["optimizer"][0]["param_groups"][0]["lr"] == 3e-3


# -- errors --------------------------------------------------------------------------------------------------------


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    model, optimizer = build("fp32")
    for i in range(2):
        micro_batch(model, optimizer, i)
    lp.save(tmp_path / "a.ckpt", model, optimizer)
    return tmp_path / "a.ckpt"


@pytest.mark.parametrize("share", [0.0, 0.001, 0.3, 0.9, 0.9999])
def test_truncated(saved: Path, share: float) -> None:
    data = saved.read_bytes()
    saved.write_bytes(data[: int(len(data) * share)])
    model, optimizer = build("fp32")
    with pytest.raises(ValueError, match=r"a\.ckpt is truncated or no checkpoint of lowprec\.save"):
        lp.load(saved, model, optimizer)


def test_foreign_files(tmp_path: Path) -> None:
    model, optimizer = build("fp32")
    path = tmp_path / "b.ckpt"
    path.write_text("hello " * 100)
    with pytest.raises(ValueError, match="is truncated or no checkpoint"):
        lp.load(path, model, optimizer)
    save_file({"x": torch.ones(2)}, path)
    with pytest.raises(ValueError, match="safetensors file without key 'lowprec' in its header"):
        lp.load(path, model, optimizer)
    torch.save({"a": 1}, path)
    with pytest.raises(ValueError, match="is truncated or no checkpoint"):
        lp.load(path, model, optimizer)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint"):
        lp.load(tmp_path / "none", model, optimizer)
    with pytest.raises(FileNotFoundError, match="there is no folder"):
        lp.save(tmp_path / "none" / "x.ckpt", model, optimizer)
    with pytest.raises(ValueError, match=r"key 'format' is missing \(it has weight\)"):
        lp.load_state_dict(model, optimizer, {"weight": 1})


def _changed(state: dict[str, Any], path: str, value: Any = None) -> dict[str, Any]:
    """A copy with one entry set, or removed where the value is None."""
    head, _, rest = path.partition("/")
    if isinstance(state, list):
        copied: Any = list(state)
        copied[int(head)] = _changed(state[int(head)], rest, value)
        return copied
    copied = dict(state)
    if rest:
        copied[head] = _changed(state[head], rest, value)
    elif value is None:
        del copied[head]
    else:
        copied[head] = value
    return copied


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("version", 99, "key 'version' of the checkpoint is 99, and this lowprec reads up to 1: update lowprec"),
        ("optimizer", None, "no key 'optimizer'"),
        ("model/0/up.weight", None, "no key model.up.weight: is it the checkpoint of another model"),
        ("model/0/other", torch.ones(1), "has a key model.other that this model has not"),
        (
            "model/0/up.weight",
            torch.ones(3),
            r"key model.up.weight of the checkpoint is \(3,\) float32, and \(64, 32\)",
        ),
        ("model/0/up.weight", torch.ones(64, 32).half(), r"is \(64, 32\) float16, and \(64, 32\) float32 is needed"),
        ("training/0/scales", None, "no key training.scales"),
        ("training/0/window/micrro", 1, "unknown key training.window 'micrro'"),
        ("training/0/scales/loss/kind", "x", "unknown kind of loss scale 'x'"),
        ("optimizer/0/state/2/exp_avg", torch.ones(3), "exp_avg must be"),
    ],
)
def test_errors_name_the_key_and_change_nothing(path: str, value: Any, message: str) -> None:
    model, optimizer = build("fp32")
    for i in range(2):
        micro_batch(model, optimizer, i)
    state = lp.state_dict(model, optimizer)
    if path.startswith("optimizer/0/state"):
        state = _changed(state, path.replace("/2/", "/2/"), value) if "2" in state["optimizer"][0]["state"] else state
        key = 2
        inner = dict(state["optimizer"][0]["state"])
        inner[key] = {**inner[key], "exp_avg": value}
        state = {**state, "optimizer": [{**state["optimizer"][0], "state": inner}]}
    else:
        state = _changed(state, path, value)
    other, fresh = build("fp32")
    before = other.up.weight.detach().clone()
    with pytest.raises(ValueError, match=message):
        lp.load_state_dict(other, fresh, state)
    assert torch.equal(other.up.weight, before) and fresh.last_step.index == 0


def test_another_recipe_is_named(saved: Path) -> None:
    model, optimizer = build("bf16")
    with pytest.raises(ValueError, match=r"key training.recipe: the checkpoint was made with recipe fp32"):
        lp.load(saved, model, optimizer)


def test_what_cannot_be_saved(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"extra.thing is object"):
        lp.save(tmp_path / "a.ckpt", nn.Linear(1, 1), thing=object())


# -- export --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", ["bf16-true", "apex-O2", "msamp-O2", "msamp-O3"])
def test_low_weights_go_into_any_model_and_export_their_masters(recipe: str, tmp_path: Path) -> None:
    model, optimizer = build(recipe)
    for i in range(4):
        micro_batch(model, optimizer, i)
    lp.save(tmp_path / "a.ckpt", model, optimizer)
    plain, exported = Net(), Net()
    lp.load(tmp_path / "a.ckpt", plain)
    lp.export(model, tmp_path / "w.safetensors")
    exported.load_state_dict(load_file(tmp_path / "w.safetensors"))
    exact = optimizer.inner.masters()[model.up.weight]
    assert torch.equal(exported.up.weight, exact)
    torch.testing.assert_close(plain.up.weight, exact, rtol=2**-3 if recipe == "msamp-O3" else 2**-7, atol=1e-4)


@pytest.mark.parametrize("name", ["w.safetensors", "w.pt"])
def test_export_reads_without_lowprec(name: str, tmp_path: Path) -> None:
    model, optimizer = build("fp16")
    micro_batch(model, optimizer, 0)
    micro_batch(model, optimizer, 1)
    lp.export(model, tmp_path / name, torch.bfloat16)
    loaded = load_file(tmp_path / name) if name.endswith("tensors") else torch.load(tmp_path / name)
    assert {v.dtype for v in loaded.values()} == {torch.bfloat16}
    plain = Net().bfloat16()
    plain.load_state_dict(loaded)
    assert torch.equal(plain.up.weight, model.up.weight.bfloat16())
    with pytest.raises(ValueError, match=r"export writes \.safetensors, \.pt or \.pth"):
        lp.export(model, tmp_path / "w.bin")


def test_export_of_tied_weights(tmp_path: Path) -> None:
    model = Net()
    model.head.weight = nn.Parameter(model.table.weight.detach().clone())
    model.head.weight = model.table.weight
    lp.export(model, tmp_path / "w.safetensors")
    assert set(load_file(tmp_path / "w.safetensors")) == set(model.state_dict())
