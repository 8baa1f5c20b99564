"""Training data as a pure function of (seed, step).

Comparing recipes and resuming bit-exactly both need the same thing: that the batch of a step is known from the seed and
the step alone, without an iterator that remembers. So a data source here has two methods and no state:

    train(step, seed) -> batch        the batch of that step
    validation() -> list of batches   always the same

`ByteText` cuts random windows out of text, `Samples` walks a map-style dataset in an order shuffled anew every epoch.
"""

from __future__ import annotations

import functools
import json
import sysconfig
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from lowprec.errors import missing_extra

__all__ = ["Batch", "ByteText", "Data", "Samples", "bytes_of_file", "bytes_of_files", "digits", "stdlib_bytes"]

Batch = Any  # a tuple (x, y) or a mapping of keyword arguments, as the model takes it


class Data(Protocol):
    """What a data source must offer."""

    unit: str  # "tokens" or "samples"

    def train(self, step: int, seed: int) -> Batch:
        """The training batch of a step."""

    def validation(self) -> Sequence[Batch]:
        """The validation batches, the same every time."""


def _generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed((seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9) % 2**63)


@functools.lru_cache(maxsize=2)
def stdlib_bytes(limit: int = 4_000_000) -> tuple[torch.Tensor, torch.Tensor]:
    """The running Python's own standard library sources as bytes: (training, validation), uint8.

    Every tenth file is held out. Files are taken in the order of a hash of their name, so that the first megabytes are
    a mixture of everything.

    Args:
        limit: about how many bytes to read.
    """
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [p for p in root.rglob("*.py") if not {"site-packages", "test", "tests", "dist-packages"} & set(p.parts)]
    files.sort(key=lambda path: _stable_hash(str(path.relative_to(root))))
    parts: tuple[list[bytes], list[bytes]] = ([], [])
    total = 0
    for index, path in enumerate(files):
        if total >= limit:
            break
        content = path.read_bytes()
        total += len(content)
        parts[index % 10 == 9].append(content)
    if total < 100_000:
        raise OSError(f"the standard library under {root} has no sources to train on; give a text file with --data.")
    train, held_out = (torch.frombuffer(bytearray(b"\n".join(part)), dtype=torch.uint8) for part in parts)
    return train, held_out


def _stable_hash(text: str) -> int:
    value = 2166136261
    for byte in text.encode():
        value = (value ^ byte) * 16777619 % 2**32
    return value


def bytes_of_file(path: str | Path) -> torch.Tensor:
    """A text or JSONL file as bytes.

    Text is mapped into memory, not read. In a ``.jsonl`` file every line is an object with a "text", or a string.
    """
    path = Path(path)
    try:
        if path.suffix == ".jsonl":
            content = b"\n".join(_jsonl_texts(path, path.read_bytes()))
            size = len(content)
            text = torch.frombuffer(bytearray(content or b" "), dtype=torch.uint8)
        else:
            with path.open("rb") as file:  # says what is wrong with it better than a mapping does
                file.read(1)
            size = path.stat().st_size
            text = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8) if size else torch.empty(0)
    except OSError as error:
        raise OSError(f"{path} could not be read: {(error.strerror or str(error)).lower()}.") from error
    if size < 1000:
        raise ValueError(f"{path} holds {size} bytes of text; at least 1000 are needed to train on.")
    return text


def bytes_of_files(paths: Sequence[str | Path]) -> tuple[torch.Tensor, torch.Tensor]:
    """Some files as bytes: (training, validation); the last tenth of each is held out."""
    texts = [bytes_of_file(path) for path in paths]
    if len(texts) == 1:
        cut = len(texts[0]) * 9 // 10
        return texts[0][:cut], texts[0][cut:]
    cuts = [len(text) * 9 // 10 for text in texts]
    return torch.cat([t[:c] for t, c in zip(texts, cuts)]), torch.cat([t[c:] for t, c in zip(texts, cuts)])


def _jsonl_texts(path: Path, content: bytes) -> list[bytes]:
    texts = []
    for number, line in enumerate(content.splitlines(), 1):
        if not line.strip():
            continue
        try:
            value = json.loads(line)
        except ValueError:
            raise ValueError(f"{path}, line {number} is not JSON.") from None
        text = value.get("text") if isinstance(value, dict) else value
        if not isinstance(text, str):
            raise ValueError(f'{path}, line {number} has no "text"; a line is an object with a "text", or a string.')
        texts.append(text.encode())
    return texts


class ByteText:
    """Random windows of a text, the next byte as the target.

    >>> data = ByteText(torch.arange(200, dtype=torch.uint8), torch.arange(200, dtype=torch.uint8), 16, 2)
    >>> x, y = data.train(step=0, seed=1)
    >>> x.shape, bool((y[:, :-1] == x[:, 1:]).all())
    (torch.Size([2, 16]), True)
    """

    unit = "tokens"

    def __init__(
        self, text: torch.Tensor, held_out: torch.Tensor, context: int, batch: int, validation_batches: int = 4
    ) -> None:
        for what, part in (("training", text), ("validation", held_out)):
            if len(part) <= context:
                raise ValueError(
                    f"the {what} text has {len(part)} bytes and a window of {context} does not fit; give more text or "
                    "a shorter context."
                )
        self.text, self.held_out, self.context, self.batch = text, held_out, context, batch
        self.validation_batches = validation_batches

    def _windows(self, text: torch.Tensor, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        starts = torch.randint(len(text) - self.context, (self.batch,), generator=generator)
        windows = text[starts[:, None] + torch.arange(self.context + 1)].long()
        return windows[:, :-1].contiguous(), windows[:, 1:].contiguous()

    def train(self, step: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The windows of a step."""
        return self._windows(self.text, _generator(seed, step))

    def validation(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        """Windows of the held-out text, the same every time."""
        return [self._windows(self.held_out, _generator(-1, i)) for i in range(self.validation_batches)]


class Samples:
    """A map-style dataset in batches, shuffled anew every epoch.

    Args:
        train_set: anything with ``len`` and indexing whose items are ``(x, y)`` or mappings.
        validation_set: the same, held out.
        batch: samples a batch.
        collate: joins a list of items; torch's default otherwise.
        validation_batches: at most that many.
    """

    unit = "samples"

    def __init__(
        self, train_set: Any, validation_set: Any, batch: int, collate: Any = None, validation_batches: int = 8
    ) -> None:
        for what, part in (("training", train_set), ("validation", validation_set)):
            if not (hasattr(part, "__len__") and hasattr(part, "__getitem__")):
                raise TypeError(
                    f"the {what} data is a {type(part).__name__}, which cannot be indexed; give a dataset with "
                    "__len__ and __getitem__, so that every recipe sees the same batches."
                )
            if len(part) == 0:
                raise ValueError(f"the {what} data is empty.")
        self.train_set, self.validation_set = train_set, validation_set
        self.batch = min(batch, len(train_set))
        self.collate = collate or torch.utils.data.default_collate
        self.validation_batches = validation_batches

    def _pick(self, dataset: Any, indices: list[int]) -> Batch:
        items = [dataset[i] for i in indices]
        if isinstance(items[0], Mapping):
            return self.collate([dict(item) for item in items])
        batch = self.collate(items)
        return tuple(batch) if isinstance(batch, list) else batch

    def train(self, step: int, seed: int) -> Batch:
        """The batch of a step; the last, incomplete batch of an epoch is left out."""
        a_epoch = len(self.train_set) // self.batch
        epoch, place = divmod(step, a_epoch)
        order = torch.randperm(len(self.train_set), generator=_generator(seed, epoch))
        return self._pick(self.train_set, order[place * self.batch : (place + 1) * self.batch].tolist())

    def validation(self) -> list[Batch]:
        """The held-out samples in order."""
        count = len(self.validation_set)
        starts = range(0, count, self.batch)[: self.validation_batches]
        return [self._pick(self.validation_set, list(range(s, min(s + self.batch, count)))) for s in starts]


def digits(batch: int) -> Samples:
    """scikit-learn's 8 x 8 digits: 1,437 training images and 360 held out, values from -1 to 1."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        raise missing_extra("scikit-learn", "vision", "the digits data") from None
    images, labels = load_digits(return_X_y=True)
    x = torch.from_numpy(images).float().reshape(-1, 1, 8, 8) / 8 - 1
    y = torch.from_numpy(labels).long()
    order = torch.randperm(len(x), generator=_generator(0, 0))
    x, y = x[order], y[order]
    cut = len(x) - 360
    train, held_out = (torch.utils.data.TensorDataset(x[part], y[part]) for part in (slice(cut), slice(cut, None)))
    return Samples(train, held_out, batch)
