"""Optimizers: made as the flags say, and any state loaded to the bit."""

import torch
from diffusers.optimization import get_scheduler

from diffusion_training.errors import explained
from diffusion_training.training.models import list_parameters

# What a resumed run takes from its own flags, wherever an optimizer has it; all else goes on as it was saved. Without
# `fused`, a run that was saved in bf16 and goes on in fp16 would pass over the scaler.
FLAGS = ("lr", "initial_lr", "betas", "eps", "weight_decay", "fused")


def make_optimizer(models, scaler, args):
    """The --optimizer of all that is trained in {name: model}; `scaler`: that of fp16, or None.

    adamw8bit keeps AdamW's two moments in 8 bits (arXiv:2110.02861), adafactor a mean for each row and column of the
    second and nothing of the first (arXiv:1804.04235): of the --adam flags it reads the weight decay only.
    """
    parameters = list_parameters(models)
    groups = [{"params": parameters, "initial_lr": args.learning_rate}]  # as a resumed schedule needs
    shared = {"lr": args.learning_rate, "weight_decay": args.adam_weight_decay}
    if args.optimizer == "adafactor":
        return torch.optim.Adafactor(groups, **shared)
    shared |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon}
    if args.optimizer == "adamw":  # fused skips fp16 overflows by itself, unseen by Accelerate
        return torch.optim.AdamW(groups, **shared, fused=scaler is None)
    with explained("--optimizer adamw8bit: bitsandbytes does not work"):
        from bitsandbytes.optim import AdamW8bit  # here, because who needs none of it need not have it

        for parameter in parameters:  # or its first step would do it, and a resumed run go on in another layout
            parameter.data = parameter.data.contiguous()
        return AdamW8bit(groups, **shared)


def make_lr_scheduler(optimizer, global_step, args):
    """The schedule of --lr_scheduler, on its way since `global_step` steps.

    Started there, update k has the rate f(k); the usual start would waste update 1 on f(0) = 0.
    """
    return get_scheduler(
        args.lr_scheduler, optimizer, step_rules=args.lr_step_rules, num_warmup_steps=args.lr_warmup_steps,
        num_training_steps=args.max_train_steps + 1, num_cycles=args.lr_num_cycles, power=args.lr_power,
        last_epoch=global_step,
    )  # fmt: skip


def load_optimizer(optimizer, saved):
    """Load what `state_dict` gave of an optimizer of the same kind, but for what the flags of this run say."""
    for group, own in zip(saved["param_groups"], optimizer.state_dict()["param_groups"], strict=True):
        group |= {name: own[name] for name in FLAGS if name in own}
    optimizer.load_state_dict(saved)
    for parameter, state in optimizer.state.items():  # saved channels_last on CUDA, which other devices are not
        for name, value in state.items():
            if torch.is_tensor(value) and value.shape == parameter.shape:
                state[name] = torch.empty_like(parameter, dtype=value.dtype).copy_(value)
