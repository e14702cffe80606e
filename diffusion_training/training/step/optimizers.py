"""Optimizers: made from the flags, and restored exactly from a saved state."""

from argparse import Namespace
from collections.abc import Callable
from typing import Any

import torch
from diffusers.optimization import get_scheduler
from torch.distributed.tensor import DTensor, distribute_tensor

from diffusion_training.batches import Models
from diffusion_training.errors.sentences import explained, fail
from diffusion_training.library_fixes import look_for_lomo_once
from diffusion_training.models import is_block_matrix, list_parameters

# Options that a resumed run takes from its own flags, if its optimizer has them; all others are
# restored.
FLAGS = ("lr", "betas", "eps", "weight_decay")


def make_optimizer(models: Models, args: Namespace) -> torch.optim.Optimizer:
    """Make the --optimizer for all trained parameters of {name: model}.

    adamw8bit keeps AdamW's two moments in 8 bits (arXiv:2110.02861). adafactor keeps no first
    moment, and for the second one only a mean for each row and column (arXiv:1804.04235); it uses
    only the weight decay of the --adam flags. Its updates are as large as AdamW's, so the learning
    rate means the same: it is not scaled by the size of each weight. With --full_bf16 the backward
    pass takes its steps.
    """
    look_for_lomo_once()
    parameters = list_parameters(models)
    if "." in args.optimizer:
        from diffusion_training.training.step.named_optimizers import make_named_optimizer

        return make_named_optimizer(parameters, args)
    shared = {"lr": args.learning_rate, "weight_decay": args.adam_weight_decay}
    if args.optimizer == "adafactor":
        # a rate scaled by each weight's size would wait for the device in every step
        shared |= {"relative_step": False, "scale_parameter": False}
        # imported here, because few runs need them
        if vars(args).get("full_bf16"):
            from diffusion_training.training.step.full_bf16 import FullBf16Adafactor

            return FullBf16Adafactor(models, args.seed, **shared)
        from transformers.optimization import Adafactor

        return Adafactor(parameters, **shared)
    shared |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    if args.optimizer == "muon":
        matrices = []
        others = []
        for model in models.values():
            for name, weight in model.named_parameters():
                if weight.requires_grad:
                    group = matrices if is_block_matrix(name, weight) else others
                    group.append(weight)
        if not matrices:
            fail(
                "--optimizer muon is for transformers, and this model has no transformer blocks: "
                "choose another"
            )
        return MuonAdamW(matrices, others, fused=True, **shared)
    if args.optimizer == "prodigy":
        from diffusion_training.training.step.prodigy import Prodigy

        return Prodigy(parameters, **shared)
    if args.optimizer == "adamw":
        optimizer = torch.optim.AdamW(parameters, **shared, fused=True)
        # After an fp16 overflow the fused kernel could skip the step by itself, unseen by
        # Accelerate. With this, the scaler calls no step then, as with any other optimizer.
        optimizer._step_supports_amp_scaling = False
        return optimizer
    with explained("--optimizer adamw8bit: bitsandbytes does not work"):
        # imported here, because it is optional
        from bitsandbytes.optim import AdamW8bit

        # otherwise the first step makes them so, and a resumed run would have another layout
        for parameter in parameters:
            parameter.data = parameter.data.contiguous()
        return AdamW8bit(parameters, **shared)


class MuonAdamW(torch.optim.Optimizer):
    """Muon for matrices (arXiv:2502.16982) and AdamW for the rest, as a single optimizer.

    So a run schedules, scales and saves one optimizer. Muon's updates are scaled to the size of
    AdamW's, so that one learning rate fits both.
    """

    def __init__(
        self,
        matrices: list[torch.Tensor],
        others: list[torch.Tensor],
        lr: float,
        weight_decay: float,
        **adamw: Any,
    ) -> None:
        shared = {"lr": lr, "weight_decay": weight_decay}
        muon = torch.optim.Muon(matrices, **shared, adjust_lr_fn="match_rms_adamw")
        self.parts: list[torch.optim.Optimizer] = [muon]
        if others:  # the matrices of a LoRA may be all that is trained
            self.parts.append(torch.optim.AdamW(others, **shared, **adamw))
        super().__init__([group for part in self.parts for group in part.param_groups], {})
        self.share()

    def share(self) -> None:
        for part, group in zip(self.parts, self.param_groups, strict=True):
            part.state = self.state
            part.param_groups = [group]

    def step(self, closure: Callable | None = None) -> None:
        for part in self.parts:
            part.step()

    def load_state_dict(self, state_dict: dict) -> None:
        super().load_state_dict(state_dict)
        self.share()


def make_lr_scheduler(
    optimizer: torch.optim.Optimizer, global_step: int, args: Namespace
) -> torch.optim.lr_scheduler.LRScheduler:
    """Return the schedule of --lr_scheduler as it is after `global_step` steps.

    Started this way, update k has the rate f(k). The usual start would waste update 1 on f(0) = 0.
    """
    for group in optimizer.param_groups:  # a schedule that starts after step 0 needs it
        group["initial_lr"] = group["lr"]
    return get_scheduler(
        args.lr_scheduler,
        optimizer,
        step_rules=args.lr_step_rules,
        num_warmup_steps=args.lr_warmup_steps,
        num_training_steps=args.max_train_steps + 1,
        num_cycles=args.lr_num_cycles,
        power=args.lr_power,
        last_epoch=global_step,
    )


def load_optimizer(optimizer: torch.optim.Optimizer, saved: dict) -> None:
    """Load a state of the same kind of optimizer, except for options set by this run's flags."""
    groups = optimizer.state_dict()["param_groups"]
    names = vars(optimizer).get("flags", FLAGS)
    for group, own in zip(saved["param_groups"], groups, strict=True):
        group |= {name: own[name] for name in names if name in own}
    parameters = [weight for group in optimizer.param_groups for weight in group["params"]]
    for number, state in saved["state"].items():
        own = parameters[number]
        for name, value in state.items():
            if torch.is_tensor(value) and value.shape == own.shape:
                if isinstance(own, DTensor):  # --shard: take this process's part
                    value = distribute_tensor(
                        value, own.device_mesh, own.placements, src_data_rank=None
                    )
                # a state saved on CUDA is channels_last, which other devices do not use
                state[name] = torch.empty_like(own, dtype=value.dtype).copy_(value)
    optimizer.load_state_dict(saved)
