"""The base of a training: opened, and with the weights of --transformer_file in their place."""

from argparse import Namespace
from dataclasses import replace

from accelerate import PartialState

from diffusion_training.families.base import Base, Record
from diffusion_training.families.opening import open_base


def open_trained_base(args: Namespace, script: str, record: Record | None = None) -> Base:
    """See `open_base`. script: the trainer's file name."""
    base = open_base(args, script, record=record)
    family, file = base.family, vars(args).get("transformer_file")
    if file:
        from diffusion_training.families.transformer_file import unpack_transformer

        base = replace(base, transformer=unpack_transformer(file, base, args.cache_dir))
    if family.is_distilled(base) and not vars(args).get("training_adapter"):
        PartialState().print(
            f"{file or base.name} was distilled to sample in few steps. Training undoes that, and "
            f"samples get blurred. Train the {family.title} that it was made from; a LoRA fits "
            "both. Or give --training_adapter, a LoRA that undoes the distillation while you train."
        )
    return base
