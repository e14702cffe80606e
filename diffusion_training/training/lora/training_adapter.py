"""--training_adapter: a LoRA that is part of a distilled base while it is trained.

Training a turbo undoes its distillation, and samples get blurred. A training adapter is a LoRA that
undoes it before: with it, the base draws in many steps. The new LoRA learns beside it, and is used
without it.
"""

from typing import Any

import torch

from diffusion_training.errors.sentences import explained
from diffusion_training.families.base import Family
from diffusion_training.training.lora.lora import Merge
from diffusion_training.training.lora.lora_files import (
    LORA_A,
    LORA_B,
    read_plain_lora,
    tell_left_out,
)


def read_training_adapter(
    path: str,
    kind: Any,
    source: str,
    family: Family,
    subfolder: str = "",
    variant: str | None = None,
) -> Merge:
    """Read the file. Stops with an error if it does not fit a base of class `kind` at `source`."""
    config = kind.load_config(source, subfolder=subfolder)
    with torch.device("meta"), explained(f"--training_adapter {path} can't be used"):
        file = read_plain_lora(path, kind.from_config(config), family)
    tell_left_out(file, "--training_adapter")

    def merge(name: str, weight: torch.Tensor) -> torch.Tensor:
        layer = name.removesuffix(".weight")
        if layer == name or layer not in file.layers:
            return weight
        a, b = (file.layers[layer][part].flatten(1).float() for part in (LORA_A, LORA_B))
        return weight.float() + (file.scales[layer] * (b @ a)).view_as(weight)

    return merge
