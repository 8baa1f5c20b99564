"""One of two processes of `test_ranks`: data-parallel training where one rank meets what the other does not."""

from __future__ import annotations

import json
import math
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import lowprec as lp
from lowprec.loss_scale import DynamicScale


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))


def flat(model: nn.Module) -> list[float]:
    return torch.cat([p.detach().flatten() for p in model.parameters()]).tolist()


def data(rank: int, step: int) -> torch.Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(100 * step + rank))


def parallel(rank: int) -> dict[str, object]:
    """DDP: a NaN loss on rank 1, an Inf gradient on rank 0; accumulation under no_sync."""
    model = DistributedDataParallel(net())
    model, optimizer = lp.prepare(
        model, torch.optim.SGD(model.parameters(), lr=0.1), "fp16", clip_grad_norm=1.0, loss_scale=DynamicScale(64.0)
    )
    kinds, scales = [], []
    for step in range(6):
        optimizer.zero_grad()
        with optimizer.no_sync():
            optimizer.backward(model(data(rank, 2 * step)).float().square().mean() / 2)
        loss = model(data(rank, 2 * step + 1)).float().square().mean() / 2
        optimizer.backward(loss * (math.nan if (step, rank) == (2, 1) else 1.0))
        if (step, rank) == (4, 0):
            next(model.parameters()).grad[0, 0] = math.inf
            optimizer.gradients.remember()
        optimizer.step()
        kinds.append(optimizer.last_step.kind)
        scales.append(optimizer.loss_scale)
    return {"kinds": kinds, "scales": scales, "weights": flat(model), "norm": optimizer.last_step.grad_norm}


def accumulated(rank: int, low: bool) -> list[float]:
    """Gradients of 16-bit weights gathered under no_sync and shared at the end: the mean over all."""
    model = net().bfloat16() if low else net()
    wrapped = DistributedDataParallel(model)
    wrapped, optimizer = lp.prepare(wrapped, torch.optim.SGD(model.parameters(), lr=0.5), "fp32")
    dtype = torch.bfloat16 if low else torch.float32
    with optimizer.no_sync():
        for step in range(3):
            optimizer.backward(wrapped(data(rank, step).to(dtype)).float().square().mean() / 4)
    optimizer.backward(wrapped(data(rank, 3).to(dtype)).float().square().mean() / 4)
    optimizer.step()
    return flat(model)


def scaler(rank: int) -> dict[str, object]:
    """lp.GradScaler without DDP: a rank's own Inf stops both."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    grad_scaler = lp.GradScaler("cpu", init_scale=8.0)
    before = flat(model)
    grad_scaler.scale(model(data(0, 0)).sum()).backward()
    if rank == 0:
        model[0].weight.grad[0, 0] = math.inf
    grad_scaler.step(optimizer)
    grad_scaler.update()
    return {"skipped": grad_scaler.last_step.skipped, "moved": flat(model) != before, "scale": grad_scaler.get_scale()}


def sharded(rank: int) -> dict[str, object]:
    """FSDP2 over two processes: each has half; the norm is that of the whole."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh("cpu", (2,))
    model = lp.apply(net(), "bf16")
    fully_shard(model, mesh=mesh)
    optimizer: object = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, prepared = lp.prepare(model, optimizer, clip_grad_norm=0.5, loss_scale=DynamicScale(16.0))
    prepared.backward(model(data(0, 0)).float().square().mean())
    prepared.step()
    norm = prepared.last_step.grad_norm
    prepared.zero_grad()
    prepared.backward(model(data(0, 0)).float().square().mean())
    if rank == 1:
        next(model.parameters()).grad.to_local()[0] = math.nan
        prepared.gradients.remember()
    prepared.step()
    return {"norm": norm, "kind": prepared.last_step.kind, "scale": prepared.loss_scale}


def main(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    results = {
        "parallel": parallel(rank),
        "accumulated": accumulated(rank, False),
        "accumulated_low": accumulated(rank, True),
        "scaler": scaler(rank),
        "sharded": sharded(rank),
    }
    (folder / f"{rank}.json").write_text(json.dumps(results))
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))
