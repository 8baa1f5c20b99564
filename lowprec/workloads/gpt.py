"""A byte-level GPT in plain PyTorch modules.

Nothing here knows of lowprec: it is the model a user would bring, with the module names they would use, so that
applying a recipe to it proves something. Pre-norm blocks, learned positions, GELU, causal
`scaled_dot_product_attention`; residual projections start smaller by 1/sqrt(2 * blocks).

``forward(x)`` gives logits and ``forward(x, y)`` the mean cross-entropy, so that the loss is computed inside the
model, where a recipe's op policy reaches it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional as F

__all__ = ["GPT", "SIZES", "GPTSize"]


@dataclass(frozen=True)
class GPTSize:
    """The shape of a GPT, and the batch it is trained with unless told otherwise."""

    dim: int
    blocks: int
    heads: int
    context: int
    batch: int
    vocab: int = 256


SIZES: dict[str, GPTSize] = {
    "nano": GPTSize(dim=32, blocks=2, heads=2, context=32, batch=4),  # for tests
    "tiny": GPTSize(dim=128, blocks=2, heads=4, context=128, batch=8),
    "small": GPTSize(dim=256, blocks=4, heads=4, context=128, batch=8),
    "demo": GPTSize(dim=512, blocks=3, heads=8, context=256, batch=4),  # what `lowprec compare` trains by itself
    "medium": GPTSize(dim=512, blocks=4, heads=8, context=256, batch=8),
    "design": GPTSize(dim=768, blocks=4, heads=12, context=256, batch=8, vocab=8192),  # the shape speed is quoted on
}


class Attention(nn.Module):
    """Causal self-attention with one projection for query, key and value."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, tokens, dim = x.shape
        q, k, v = self.qkv(x).view(batch, tokens, 3, self.heads, dim // self.heads).permute(2, 0, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        projected: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, tokens, dim))
        return projected


class MLP(nn.Module):
    """Up to four times the width, GELU, and down again."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(dim, 4 * dim)
        self.act = nn.GELU()
        self.down = nn.Linear(4 * dim, dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.down(self.act(self.up(x)))
        return out


class Block(nn.Module):
    """Attention and MLP, each behind a layer norm and added to the stream."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.attention = Attention(dim, heads)
        self.norm2 = nn.LayerNorm(dim)
        self.mlp = MLP(dim)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        out: torch.Tensor = x + self.mlp(self.norm2(x))
        return out


class GPT(nn.Module):
    """A small GPT.

    Args:
        vocab: number of tokens; 256 for bytes.
        dim: width of the stream.
        blocks: how many blocks.
        heads: attention heads; ``dim`` must divide by it.
        context: longest sequence.
        tie: share the embedding's table with the last layer.

    >>> model = GPT(vocab=256, dim=32, blocks=1, heads=2, context=16)
    >>> model(torch.zeros(2, 16, dtype=torch.long)).shape
    torch.Size([2, 16, 256])
    """

    def __init__(self, vocab: int, dim: int, blocks: int, heads: int, context: int, tie: bool = False) -> None:
        super().__init__()
        if dim % heads:
            raise ValueError(f"a GPT of width {dim} cannot be split into {heads} heads; dim must divide by heads.")
        self.context = context
        self.tokens = nn.Embedding(vocab, dim)
        self.positions = nn.Embedding(context, dim)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(blocks))
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, vocab, bias=False)
        self._start(blocks)
        if tie:
            self.lm_head.weight = self.tokens.weight

    def _start(self, blocks: int) -> None:
        for name, parameter in self.named_parameters():
            if parameter.dim() < 2:
                continue
            std = 0.02 / math.sqrt(2 * blocks) if name.endswith(("out.weight", "down.weight")) else 0.02
            nn.init.normal_(parameter, std=std)
        for module in self.modules():
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)

    @classmethod
    def of_size(cls, size: str | GPTSize, tie: bool = False) -> GPT:
        """The GPT of a named size."""
        shape = size if isinstance(size, GPTSize) else SIZES[size]
        return cls(shape.vocab, shape.dim, shape.blocks, shape.heads, shape.context, tie)

    def forward(self, x: torch.Tensor, y: torch.Tensor | None = None) -> torch.Tensor:
        stream = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            stream = block(stream)
        logits: torch.Tensor = self.lm_head(self.norm(stream))
        return logits if y is None else self.loss(logits, y)

    def loss(self, logits: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy in nats a token."""
        return F.cross_entropy(logits.flatten(0, -2), y.flatten())

    @torch.no_grad()
    def sample(self, prompt: torch.Tensor, count: int, temperature: float = 0.8, seed: int = 0) -> torch.Tensor:
        """Continue one prompt of token numbers by ``count`` tokens."""
        generator = torch.Generator().manual_seed(seed)
        out = prompt.reshape(1, -1)
        for _ in range(count):
            logits = self(out[:, -self.context :])[0, -1].float() / max(temperature, 1e-6)
            token = torch.multinomial(logits.softmax(-1).cpu(), 1, generator=generator)
            out = torch.cat([out, token.to(out.device).reshape(1, 1)], dim=1)
        return out[0]
