"""A small residual CNN with batch norm, for scikit-learn's 8 x 8 digits.

Convolution, batch norm, ReLU, pooling and a last linear layer: what a GPT does not exercise. The widths are what the
named sizes change.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["CNN", "SIZES", "CNNSize"]


@dataclass(frozen=True)
class CNNSize:
    """Channels of the two stages, residual blocks a stage, and the batch."""

    width: int
    blocks: int
    batch: int


SIZES: dict[str, CNNSize] = {
    "nano": CNNSize(width=16, blocks=1, batch=32),  # for tests
    "tiny": CNNSize(width=32, blocks=1, batch=64),
    "small": CNNSize(width=64, blocks=2, batch=128),
    "medium": CNNSize(width=128, blocks=3, batch=128),
}


class Residual(nn.Module):
    """Two 3 x 3 convolutions with batch norm around a shortcut."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = F.relu(self.norm1(self.conv1(x)))
        return F.relu(x + self.norm2(self.conv2(out)))


class CNN(nn.Module):
    """A residual network of two stages for small grey images.

    >>> CNN(width=16, blocks=1)(torch.zeros(2, 1, 8, 8)).shape
    torch.Size([2, 10])
    """

    def __init__(self, width: int, blocks: int, classes: int = 10, channels: int = 1) -> None:
        super().__init__()
        self.stem = nn.Conv2d(channels, width, 3, padding=1, bias=False)
        self.stem_norm = nn.BatchNorm2d(width)
        self.stage1 = nn.Sequential(*(Residual(width) for _ in range(blocks)))
        self.down = nn.Conv2d(width, 2 * width, 3, stride=2, padding=1, bias=False)
        self.down_norm = nn.BatchNorm2d(2 * width)
        self.stage2 = nn.Sequential(*(Residual(2 * width) for _ in range(blocks)))
        self.head = nn.Linear(2 * width, classes)

    @classmethod
    def of_size(cls, size: str | CNNSize) -> CNN:
        """The CNN of a named size."""
        shape = size if isinstance(size, CNNSize) else SIZES[size]
        return cls(shape.width, shape.blocks)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        x = self.stage1(F.relu(self.stem_norm(self.stem(x))))
        x = self.stage2(F.relu(self.down_norm(self.down(x))))
        logits: torch.Tensor = self.head(x.mean((2, 3)))
        return logits if y is None else self.loss(logits, y)

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats a sample."""
        return F.cross_entropy(logits, y)
