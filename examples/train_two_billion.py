"""Train a transformer of two billion parameters in less than 20 GiB, on a CPU.

fp32 AdamW would need 16 bytes a parameter, 32 GiB before the first activation. Under msamp-O3 a linear weight takes
1 byte (fp8) + 2 (fp16 master) + 1 (fp8 gradient) + 3 (fp8 and fp16 states). Two things keep the peak there:

* the model is built a layer at a time, each converted before the next exists, so there is never a full fp32 model;
* weight gradients are written in fp8 as they are produced, a chunk of rows at a time, and activations are recomputed.

    python examples/train_two_billion.py            # a small model, the same code, in seconds
    python examples/train_two_billion.py --full     # two billion parameters; needs 20 GiB and patience
"""

from __future__ import annotations

import argparse
import resource
import time

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import lowprec as lp
from lowprec import gradients, storage
from lowprec.optim import AdamW


class Block(nn.Module):
    """Causal attention and MLP, each behind a norm."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.up, self.down = nn.Linear(dim, 4 * dim, bias=False), nn.Linear(4 * dim, dim, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.out(F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class Transformer(nn.Module):
    """A byte-level transformer whose blocks are recomputed in the backward pass."""

    def __init__(self, dim: int, context: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(256, dim), nn.Embedding(context, dim)
        self.blocks = nn.ModuleList()
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, 256, bias=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        stream = self.tokens(x) + self.positions.weight[: x.shape[1]]
        for block in self.blocks:
            stream = checkpoint(block, stream, use_reentrant=False)
        return F.cross_entropy(self.head(self.norm(stream)).float().flatten(0, 1), y.flatten())


def build(dim: int, blocks: int, heads: int, context: int, recipe: lp.Recipe) -> Transformer:
    """The model, converted block by block."""
    model = Transformer(dim, context)
    for _ in range(blocks):
        block = Block(dim, heads)
        for name, p in block.named_parameters():
            if p.ndim == 2:
                nn.init.normal_(p, std=0.02 / (2 * blocks) ** 0.5 if name.startswith(("out", "down")) else 0.02)
        lp.apply(block, recipe)
        storage.convert(block, recipe)
        model.blocks.append(block)
    return model


def peak_gib() -> float:
    """Largest resident memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def main() -> list[float]:
    parser = argparse.ArgumentParser(description="Train two billion parameters in less than 20 GiB.")
    parser.add_argument("--full", action="store_true", help="two billion parameters")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    dim, blocks, heads, context, batch = (2560, 26, 20, 64, 1) if options.full else (64, 2, 2, 32, 2)
    torch.manual_seed(0)
    recipe = lp.recipe("msamp-O3").replace(update="stochastic")
    start = time.perf_counter()
    model = build(dim, blocks, heads, context, recipe)
    count = sum(p.numel() for p in model.parameters())
    rate = 1e-4 if options.full else 3e-3
    optimizer = AdamW(model.parameters(), lr=rate, states=recipe.states, master=recipe.master, update=recipe.update)
    print(f"{count / 1e9:.3f} billion parameters, built in {time.perf_counter() - start:.0f} s, {peak_gib():.2f} GiB")
    text = torch.frombuffer(bytearray((__doc__ or "").encode()), dtype=torch.uint8).long()
    losses = []
    for step in range(options.steps):
        began = time.perf_counter()
        at = torch.arange(batch)[:, None] * 131 % (len(text) - context - 1) + torch.arange(context)
        loss = model(text[at], text[at + 1])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        print(
            f"step {step:3}  loss {losses[-1]:.4f}  {time.perf_counter() - began:.1f} s  peak {peak_gib():.2f} GiB",
            flush=True,
        )
    stored = sum(1 for _ in gradients.sinks(model.parameters()))
    assert losses[-1] < losses[0], "the loss did not fall"
    print(
        f"{stored} weight gradients stored in fp8; peak {peak_gib():.2f} GiB; fp32 AdamW: {16 * count / 2**30:.1f} GiB"
    )
    return losses


if __name__ == "__main__":
    main()
