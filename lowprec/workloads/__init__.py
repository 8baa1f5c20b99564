"""What is trained: a model, its data and its loss, built in or the user's own.

A `Workload` is what `lowprec compare` and `lowprec train` need to know of a job. Two are built in and need no download:
a byte-level GPT on the running Python's standard library (`gpt`) and a CNN with batch norm on scikit-learn's digits
(`cnn`), each in named sizes. A user's own is found by `load`:

* ``--model package.module:factory``: a callable without arguments that returns the model;
* ``--data package.module:factory``: a callable without arguments that returns ``(train, validation)`` datasets, or one
  dataset (the last tenth is held out), or a DataLoader (its dataset, batch size and collate function are used);
* ``--data file.txt`` or ``file.jsonl``, or several with commas between: bytes of text, the last tenth of each held out;
* ``--model script.py``: a file with ``build()`` that returns ``(model, train, validation)``, ``(model, data)``, the
  model alone, or a `Workload`.

The loss is the model's when it gives one (``forward(x, y)``, or ``.loss`` in what it returns for a mapping), else
``model.loss(output, y)``, else cross-entropy for integer targets and mean squared error for others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from lowprec.errors import unknown_name
from lowprec.workloads import cnn, gpt
from lowprec.workloads.data import Batch, ByteText, Data, bytes_of_files, digits, stdlib_bytes

__all__ = ["BUILT_IN", "SIZES", "Workload", "load", "loss_of", "units_in"]

BUILT_IN = ("gpt", "cnn")
SIZES = ("tiny", "small", "medium")


def loss_of(model: nn.Module, batch: Batch) -> torch.Tensor:
    """The loss of a model on a batch, by the rules at the head of this module."""
    if isinstance(batch, Mapping):
        output = model(**batch)
        loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
        if loss is None:
            raise ValueError(f"{type(model).__name__} returned no loss for a batch with {', '.join(batch)}.")
        return _scalar(loss)
    x, y = batch
    if _takes_target(model):
        return _scalar(model(x, y))
    output = model(x)
    output = getattr(output, "logits", output)
    own = getattr(model, "loss", None)
    if callable(own):
        return _scalar(own(output, y))
    if y.is_floating_point():
        return F.mse_loss(output.float().reshape(y.shape), y.float())
    return F.cross_entropy(output.flatten(0, -2).float(), y.flatten())


def _scalar(loss: Any) -> torch.Tensor:
    loss = loss[-1] if isinstance(loss, tuple) else loss
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        raise ValueError(f"the model's loss should be one number, it is {type(loss).__name__}.")
    return loss


def _takes_target(model: nn.Module) -> bool:
    names = [
        p.name for p in inspect.signature(type(model).forward).parameters.values() if p.kind is p.POSITIONAL_OR_KEYWORD
    ]
    return len(names) > 2 and names[2] in ("y", "target", "targets", "labels", "label")


def units_in(batch: Batch, unit: str) -> int:
    """How many tokens or samples a batch holds."""
    first = next(iter(batch.values())) if isinstance(batch, Mapping) else batch[0]
    return int(first.numel()) if unit == "tokens" else int(first.shape[0])


@dataclass(frozen=True)
class Workload:
    """A training job: how to build the model, where batches come from, and sensible settings.

    Args:
        name: shown in tables and reports.
        build: makes a new model; called under a fixed seed.
        data: where batches come from.
        loss: loss of a model on a batch.
        lr: learning rate for AdamW.
        steps: how many steps a comparison takes unless told otherwise.
        sample: whether the model continues bytes of text.
        about: one line for the report.
    """

    name: str
    build: Callable[[], nn.Module]
    data: Data
    loss: Callable[[nn.Module, Batch], torch.Tensor] = field(default=loss_of)
    lr: float = 1e-3
    steps: int = 100
    sample: bool = False
    about: str = ""

    @property
    def unit(self) -> str:
        """What is counted: "tokens" or "samples"."""
        return self.data.unit

    def model(self, seed: int) -> nn.Module:
        """A new model, the same for the same seed; the global generator is left as it was."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = self.build()
        if not isinstance(model, nn.Module):
            raise TypeError(f"the factory of {self.name} returned {type(model).__name__}, not a torch.nn.Module.")
        return model


def _gpt(size: str, text: tuple[torch.Tensor, torch.Tensor] | None = None, batch: int | None = None) -> Workload:
    if size not in gpt.SIZES:
        raise unknown_name("size", size, gpt.SIZES)
    shape = gpt.SIZES[size]
    train, held_out = text if text is not None else stdlib_bytes()
    source = ByteText(train, held_out, shape.context, batch or shape.batch)
    about = (
        f"byte-level GPT, {shape.blocks} blocks of width {shape.dim}, {shape.heads} heads, batch "
        f"{source.batch} x {shape.context} tokens"
    )
    lr = 1e-3 if shape.dim <= 256 else 6e-4
    return Workload(f"gpt-{size}", lambda: gpt.GPT.of_size(size), source, lr=lr, steps=100, sample=True, about=about)


def _cnn(size: str, batch: int | None = None) -> Workload:
    if size not in cnn.SIZES:
        raise unknown_name("size", size, cnn.SIZES)
    shape = cnn.SIZES[size]
    source = digits(batch or shape.batch)
    about = f"residual CNN with batch norm, width {shape.width}, batch {source.batch}, scikit-learn digits"
    return Workload(f"cnn-{size}", lambda: cnn.CNN.of_size(size), source, lr=2e-3, steps=100, about=about)


def load(model: str = "gpt", source: str | None = None, size: str = "tiny", batch: int | None = None) -> Workload:
    """Find a workload by what the command line was given.

    Args:
        model: "gpt", "cnn", ``package.module:factory`` or a script with ``build()``.
        source: None for the model's own data, a text or JSONL file, or ``package.module:factory``.
        size: size of a built-in model.
        batch: windows or samples a batch, None for the workload's own.

    Returns:
        The workload.

    Raises:
        ValueError, TypeError, OSError: one sentence on what could not be used.
    """
    from lowprec.workloads import user

    if model == "cnn" and source is None:
        return _cnn(size, batch)
    if model == "gpt" and (source is None or user.is_text(source)):
        return _gpt(size, bytes_of_files(source.split(",")) if source else None, batch)
    if model in BUILT_IN:
        built_in = _gpt(size) if model == "gpt" else _cnn(size)
        return user.with_data(built_in, source, batch)
    return user.load(model, source, batch)
