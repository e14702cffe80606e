"""Check that all processes have the same weights. DDP relies on it, without a check."""

import time

import torch
from accelerate import Accelerator

from diffusion_training.batches import Models
from diffusion_training.errors.sentences import fail


def list_replicas(models: Models, averaged: Models) -> dict[str, torch.Tensor]:
    """Return what every process computes for itself: trained weights, then their averages."""
    replicas = {}
    for group, end in ((models, ""), (averaged, "_ema")):
        for name, model in group.items():
            for key, trained in models[name].named_parameters():
                if trained.requires_grad:
                    replicas[f"{name}{end}/{key}"] = model.get_parameter(key)
    return replicas


def sum_bits(tensor: torch.Tensor) -> torch.Tensor:
    """The sum of a tensor's numbers, their bits read as integers: int64, a scalar on its device.

    Unlike a sum of floats, it does not depend on the order, and any single bit changes it.
    """
    integers = getattr(torch, f"int{8 * tensor.element_size()}")
    return tensor.detach().view(integers).sum(dtype=torch.int64)


def check_replicas(accelerator: Accelerator, models: Models, averaged: Models, step: int) -> None:
    """End the run if a weight or average differs between processes. Call it on every process.

    Only the first process writes checkpoints, so another one's weights would be lost at the next
    resume, and until then it computes gradients of another model.
    """
    replicas = list_replicas(models, averaged)
    sums = torch.stack([sum_bits(tensor) for tensor in replicas.values()])
    rows = accelerator.gather(sums).view(accelerator.num_processes, -1).tolist()
    for name, values in zip(replicas, zip(*rows, strict=True), strict=True):
        others = [str(rank) for rank, value in enumerate(values) if value != values[0]]
        if others:
            # torch 2.11 can hang at exit if gloo's thread has not finished the last gather
            time.sleep(0.1)
            fail(
                f"the processes no longer train the same model: at step {step}, {name} of process "
                f"0 differs from {', '.join(others)}. No checkpoint was written; resume the last "
                "one with --resume_from_checkpoint latest. If this happens again, a device is "
                "faulty, or the devices are not of one kind"
            )
