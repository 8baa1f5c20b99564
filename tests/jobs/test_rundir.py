"""A run's files survive a kill, a torn line and a full disk."""

from __future__ import annotations

import errno
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowprec.jobs.rundir import RunDirectory, atomic


def test_lines_and_torn_last_line(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "run")
    for step in range(3):
        directory.append("metrics.jsonl", {"step": step, "loss": float("inf")})
    directory.close()
    with directory.file("metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')
    assert [row["step"] for row in directory.lines("metrics.jsonl")] == [0, 1, 2]
    directory.keep("metrics.jsonl", lambda row: row["step"] < 2)
    directory.append("metrics.jsonl", {"step": 2})
    directory.close()
    assert [row["step"] for row in directory.lines("metrics.jsonl")] == [0, 1, 2]


def test_a_failed_write_keeps_what_was_there(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    directory.save_checkpoint({"format": "lowprec-run", "step": 1})

    def full(path: Path) -> None:
        path.write_text("half")
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OSError, match=r"no space left on the device; the earlier checkpoint\.pt is whole"):
        atomic(directory.file("checkpoint.pt"), full)
    assert directory.load_checkpoint()["step"] == 1
    assert [p.name for p in tmp_path.iterdir()] == ["checkpoint.pt"]


FULL = """
import resource, signal, sys, torch
from pathlib import Path
from lowprec.jobs.rundir import RunDirectory
resource.setrlimit(resource.RLIMIT_FSIZE, (20000, 20000))
try:
    RunDirectory(sys.argv[1]).save_checkpoint({"format": "lowprec-run", "t": torch.zeros(100000)})
except OSError as error:
    print(error)
"""


def test_a_real_write_that_fails(tmp_path: Path) -> None:
    assert resource.getrlimit(resource.RLIMIT_FSIZE)
    ran = subprocess.run([sys.executable, "-c", FULL, str(tmp_path)], capture_output=True, text=True, check=True)
    assert "checkpoint.pt could not be written: " in ran.stdout
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"", "is damaged"), (b"not a checkpoint", "is damaged"), (None, "was not written by lowprec")],
)
def test_bad_checkpoints(tmp_path: Path, content: bytes | None, message: str) -> None:
    directory = RunDirectory(tmp_path)
    if content is None:
        torch.save({"some": torch.zeros(2)}, directory.file("checkpoint.pt"))
    else:
        directory.file("checkpoint.pt").write_bytes(content)
    with pytest.raises(ValueError, match=message):
        directory.load_checkpoint()


def test_missing_pieces(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="there is no run folder"):
        RunDirectory(tmp_path / "nowhere", create=False)
    directory = RunDirectory(tmp_path)
    with pytest.raises(OSError, match="has no checkpoint to resume from"):
        directory.load_checkpoint()
    with pytest.raises(OSError, match=r"has no run\.json"):
        directory.read_json("run.json")
    directory.file("run.json").write_text("{")
    with pytest.raises(ValueError, match="does not hold JSON"):
        directory.read_json("run.json")
    with pytest.raises(ValueError, match="holds a run already"):
        directory.fresh()
