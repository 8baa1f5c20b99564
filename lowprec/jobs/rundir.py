"""The folder of a run: everything the report and a resume need, as plain files.

    run.json          what was asked, where it ran, the command
    metrics.jsonl     one line a step (and one a validation), appended and flushed as it happens
    statistics.jsonl  one line a module, role and observed step
    checkpoint.pt     the newest state, replaced in one rename
    result.json       the finished table

A file that must be whole is written beside its place and renamed there, so that a kill at any moment leaves the old one
or the new one. Lines are appended; a resume drops those at or after the step it starts from, a torn last line included.
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

__all__ = ["RunDirectory", "atomic", "jsonable"]


def jsonable(value: Any) -> Any:
    """A value that JSON can hold: NaN and infinities become None.

    >>> jsonable({"loss": float("nan"), "steps": (1, 2.5)})
    {'loss': None, 'steps': [1, 2.5]}
    """
    if isinstance(value, dict):
        return {str(k): jsonable(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [jsonable(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def atomic(path: Path, write: Callable[[Path], object]) -> None:
    """Write a file beside its place and rename it there; a failure leaves what was there and says so."""
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        write(beside)
        with beside.open("rb") as file:
            os.fsync(file.fileno())
        beside.replace(path)
    except (OSError, RuntimeError) as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        if isinstance(error, RuntimeError) and not _is_write_failure(error):
            raise
        kept = f"; the earlier {path.name} is whole" if path.exists() else ""
        raise OSError(f"{path} could not be written: {_cause(error)}{kept}.") from error


def _is_write_failure(error: RuntimeError) -> bool:
    text = str(error)
    return "PytorchStreamWriter" in text or "enforce fail" in text or "unexpected pos" in text


def _cause(error: Exception) -> str:
    number = getattr(error, "errno", None)
    if number == errno.ENOSPC:
        return "no space left on the device"
    if number is not None:
        return os.strerror(number).lower()
    return "the device took no more bytes (is it full?)"


class RunDirectory:
    """Reads and writes the files of one run.

    Args:
        path: the folder; made when it does not exist.
        create: False to require that it exists.
    """

    def __init__(self, path: str | Path, create: bool = True) -> None:
        self.path = Path(path)
        if create:
            self.path.mkdir(parents=True, exist_ok=True)
        elif not self.path.is_dir():
            raise FileNotFoundError(f"there is no run folder {self.path}; give the folder that a run wrote.")
        self._open: dict[str, Any] = {}

    def fresh(self) -> None:
        """Refuse a folder that holds a run already."""
        if self.file("metrics.jsonl").exists() or self.file("run.json").exists():
            raise ValueError(f"{self.path} holds a run already; go on with --resume or give another --out.")

    def file(self, name: str) -> Path:
        """The path of a file of this run."""
        return self.path / name

    def write_json(self, name: str, value: Any) -> None:
        """Write a JSON file in one rename."""
        text = json.dumps(jsonable(value), indent=1)
        atomic(self.file(name), lambda path: path.write_text(text + "\n"))

    def read_json(self, name: str) -> Any:
        """Read a JSON file of this run."""
        path = self.file(name)
        try:
            return json.loads(path.read_text())
        except FileNotFoundError:
            raise FileNotFoundError(f"{self.path} has no {name}; it is not the folder of a run.") from None
        except ValueError:
            raise ValueError(f"{path} is damaged: it does not hold JSON.") from None

    def append(self, name: str, row: dict[str, Any]) -> None:
        """Append one line and flush it."""
        try:
            if name not in self._open:
                self._open[name] = self.file(name).open("a")
            self._open[name].write(json.dumps(jsonable(row), separators=(",", ":")) + "\n")
            self._open[name].flush()
        except OSError as error:
            self._open.pop(name, None)
            raise OSError(f"{self.file(name)} could not be written: {_cause(error)}.") from error

    def lines(self, name: str) -> Iterator[dict[str, Any]]:
        """The lines of a file; a torn last line (a kill while it was written) is left out."""
        path = self.file(name)
        if not path.exists():
            return
        with path.open() as file:
            for number, line in enumerate(file, 1):
                try:
                    yield json.loads(line)
                except ValueError:
                    if line.endswith("\n"):
                        raise ValueError(f"{path}, line {number} is damaged: it does not hold JSON.") from None

    def keep(self, name: str, wanted: Callable[[dict[str, Any]], bool]) -> None:
        """Drop the lines that are not wanted, in one rename."""
        self.close()
        if not self.file(name).exists():
            return
        kept = [json.dumps(row, separators=(",", ":")) + "\n" for row in self.lines(name) if wanted(row)]
        atomic(self.file(name), lambda path: path.write_text("".join(kept)))

    def save_checkpoint(self, state: dict[str, Any], name: str = "checkpoint.pt") -> None:
        """Write a checkpoint of tensors and plain values in one rename."""
        atomic(self.file(name), lambda path: torch.save(state, path))

    def load_checkpoint(self, name: str = "checkpoint.pt") -> dict[str, Any]:
        """Read the newest checkpoint."""
        path = self.file(name)
        if not path.exists():
            raise FileNotFoundError(f"{self.path} has no checkpoint to resume from; start it without --resume.")
        try:
            state = torch.load(path, weights_only=True)
        except Exception as error:
            raise ValueError(
                f"the checkpoint {path} is damaged or not one of lowprec's; delete it to start anew."
            ) from error
        if not isinstance(state, dict) or state.get("format") != "lowprec-run":
            raise ValueError(f"the checkpoint {path} was not written by lowprec compare or train.")
        return state

    def close(self) -> None:
        """Close the line files."""
        for file in self._open.values():
            file.close()
        self._open.clear()
