"""The built-in jobs learn, their data is a pure function of (seed, step), and a user's own are found."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from lowprec import workloads
from lowprec.workloads import data, gpt


@pytest.mark.parametrize("name", workloads.BUILT_IN)
def test_learns(name: str) -> None:
    work = workloads.load(name, size="nano")
    model = work.model(seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    losses = []
    for step in range(12):
        loss = work.loss(model, work.data.train(step, 0))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.95 * losses[0]


@pytest.mark.parametrize("name", workloads.BUILT_IN)
def test_same_seed_same_start_and_batches(name: str) -> None:
    one, two = (workloads.load(name, size="nano") for _ in range(2))
    before = torch.get_rng_state()
    for a, b in zip(one.model(3).parameters(), two.model(3).parameters(), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one.data.train(5, 1)[0], two.data.train(5, 1)[0])
    assert not torch.equal(one.data.train(5, 1)[0], one.data.train(5, 2)[0])
    assert not torch.equal(one.data.train(5, 1)[0], one.data.train(6, 1)[0])
    assert torch.equal(one.data.validation()[0][0], two.data.validation()[0][0])


def test_samples_sees_every_item_once_an_epoch() -> None:
    items = [(torch.tensor(float(i)), torch.tensor(i)) for i in range(12)]
    source = data.Samples(items, items[:3], batch=4)
    seen = torch.cat([source.train(step, 7)[1] for step in range(3, 6)])
    assert sorted(seen.tolist()) == list(range(12))
    assert [batch[1].tolist() for batch in source.validation()] == [[0, 1, 2]]


def test_stdlib_text_is_held_out_by_file() -> None:
    train, held_out = data.stdlib_bytes(400_000)
    assert train.dtype == torch.uint8
    assert 0.02 < len(held_out) / len(train) < 0.5
    assert bytes(held_out[:200].tolist()) not in bytes(train.tolist())


def test_jsonl_and_text_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("some text. " * 200)
    (tmp_path / "a.jsonl").write_text('{"text": "hello there"}\n"a string"\n' * 60)
    assert workloads.load("gpt", str(tmp_path / "a.txt"), size="nano").data.train(0, 0)[0].shape == (4, 32)
    text = data.bytes_of_file(tmp_path / "a.jsonl")
    both = workloads.load("gpt", f"{tmp_path / 'a.txt'},{tmp_path / 'a.jsonl'}", size="nano").data
    assert isinstance(both, data.ByteText) and len(both.text) + len(both.held_out) == len(text) + 11 * 200
    assert bytes(text.tolist()).startswith(b"hello there\na string\n")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("empty.txt", "", "holds 0 bytes of text"),
        ("bad.jsonl", '{"text": "a"}\nnot json\n', "line 2 is not JSON"),
        ("none.jsonl", '{"body": "a"}\n', 'line 1 has no "text"'),
    ],
)
def test_bad_files(tmp_path: Path, name: str, content: str, message: str) -> None:
    (tmp_path / name).write_text(content)
    with pytest.raises(ValueError, match=message):
        workloads.load("gpt", str(tmp_path / name), size="nano")


SCRIPT = """
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

def pairs(n):
    return TensorDataset(torch.randn(n, 6), torch.arange(n) % 3)

def build():
    return nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), pairs(40), pairs(10)

def model():
    return nn.Linear(6, 3)

def loader():
    return DataLoader(pairs(40), batch_size=10)

def broken():
    raise RuntimeError("no weights here")

def number():
    return 3

def stream():
    return iter([1, 2])
"""


@pytest.fixture
def script(tmp_path: Path) -> str:
    (tmp_path / "users_own.py").write_text(SCRIPT)
    return str(tmp_path / "users_own.py")


def test_users_own(script: str) -> None:
    work = workloads.load(script)
    assert torch.isfinite(work.loss(work.model(0), work.data.train(0, 0)))
    work = workloads.load(f"{script}:model", f"{script}:loader")
    assert work.data.train(0, 0)[0].shape == (10, 6)
    assert torch.equal(work.model(1).weight, work.model(1).weight)


@pytest.mark.parametrize(
    ("model", "source", "message"),
    [
        ("gptt", None, "did you mean 'gpt'"),
        ("no_such_module:build", None, "module no_such_module could not be imported"),
        ("{}:broken", None, "raised RuntimeError: no weights here"),
        ("{}:number", None, "returned int; it should return a torch.nn.Module"),
        ("{}:modle", None, "did you mean 'model'"),
        ("{}:model", None, "brings no data of its own"),
        ("{}:model", "{}:stream", "give \\(train, validation\\) datasets"),
    ],
)
def test_users_mistakes(script: str, model: str, source: str | None, message: str) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        workloads.load(model.format(script), source.format(script) if source else None)


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="could not be read: is a directory"):
        workloads.load("gpt", str(tmp_path), size="nano")
    with pytest.raises(OSError, match="could not be read: no such file"):
        workloads.load("gpt", str(tmp_path / "none.txt"), size="nano")


def test_missing_script() -> None:
    with pytest.raises(OSError, match=r"there is no file nowhere\.py"):
        workloads.load("nowhere.py")


def test_loss_rules() -> None:
    x, y = torch.randn(4, 5), torch.tensor([0, 1, 2, 0])
    plain = nn.Linear(5, 3)
    expected = nn.functional.cross_entropy(plain(x), y)
    assert torch.equal(workloads.loss_of(plain, (x, y)), expected)
    target = torch.randn(4, 3)
    assert torch.equal(workloads.loss_of(plain, (x, target)), nn.functional.mse_loss(plain(x), target))


def test_sample_is_reproducible() -> None:
    model = gpt.GPT.of_size("nano")
    one, two = (model.sample(torch.tensor([65, 66]), 5, seed=3) for _ in range(2))
    assert torch.equal(one, two) and len(one) == 7
    with pytest.raises(ValueError, match="cannot be split into 3 heads"):
        gpt.GPT(16, 32, 1, 3, 8)
