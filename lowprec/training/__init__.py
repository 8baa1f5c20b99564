"""The training step: prepare a model and its optimizer, step, guard, save and resume.

    model, optimizer = lp.prepare(model, optimizer, recipe="fp16", clip_grad_norm=1.0)
    loss = loss_fn(model(x), y)
    optimizer.backward(loss); optimizer.step(); optimizer.zero_grad()
    optimizer.last_step         # skipped? why? which tensors? loss scale, gradient norm

`prepare` puts the pieces together, `step` is what runs, `state` and `files` bring it back after a crash.
"""

from __future__ import annotations

from lowprec.training.files import export, load, save
from lowprec.training.guard import Guard, TrainingStoppedError
from lowprec.training.prepare import prepare
from lowprec.training.report import StepReport
from lowprec.training.schedule import follow
from lowprec.training.state import load_state_dict, state_dict
from lowprec.training.step import PreparedOptimizer

__all__ = [
    "Guard",
    "PreparedOptimizer",
    "StepReport",
    "TrainingStoppedError",
    "export",
    "follow",
    "load",
    "load_state_dict",
    "prepare",
    "save",
    "state_dict",
]
