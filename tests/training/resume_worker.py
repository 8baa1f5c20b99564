"""A tiny run that can be killed at any moment and started again; `test_state` runs it as a process.

    python resume_worker.py RECIPE FOLDER STEPS

appends one line "micro-batch loss" per backward to FOLDER/log and saves FOLDER/run.ckpt after each, in the middle of an
accumulation too. Data depend on the micro-batch's number alone.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

import lowprec as lp

PARTS = 2  # micro-batches of a step


class Net(nn.Module):
    """Embedding, norm, two linear layers with dropout between, head: with a block size of work for every recipe."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(17, 32)
        self.norm = nn.LayerNorm(32)
        self.up = nn.Linear(32, 64)
        self.down = nn.Linear(64, 32)
        self.head = nn.Linear(32, 17)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        z = self.table(x)
        z = z + self.down(F.dropout(F.gelu(self.up(self.norm(z))), 0.1, self.training))
        return F.cross_entropy(self.head(z).float().flatten(0, 1), y.flatten())


def build(recipe: str, **options: Any) -> tuple[nn.Module, Any]:
    """The model and its optimizer as they start."""
    torch.manual_seed(0)
    model = Net()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return lp.prepare(model, torch.optim.AdamW(model.parameters(), lr=3e-3), recipe, clip_grad_norm=1.0, **options)


def micro_batch(model: nn.Module, optimizer: Any, index: int) -> float:
    """Run one micro-batch, and the step where it is the last of its step; gives its loss."""
    x = torch.randint(17, (4, 8), generator=torch.Generator().manual_seed(index))
    loss = model(x, (3 * x + 1) % 17)
    optimizer.backward(loss / PARTS)
    if index % PARTS == PARTS - 1:
        optimizer.step()
        optimizer.zero_grad()
    return float(loss.detach())


def main(recipe: str, folder: Path, steps: int) -> None:
    """Train, or go on training."""
    model, optimizer = build(recipe)
    checkpoint = folder / "run.ckpt"
    start = lp.load(checkpoint, model, optimizer)["next"] if checkpoint.exists() else 0
    with (folder / "log").open("a") as log:
        for index in range(start, steps * PARTS):
            log.write(f"{index} {micro_batch(model, optimizer, index).hex()}\n")
            log.flush()
            lp.save(checkpoint, model, optimizer, next=index + 1)


if __name__ == "__main__":
    torch.set_num_threads(1)
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]))
