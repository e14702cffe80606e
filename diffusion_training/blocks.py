"""The repeated blocks of a model: checkpointed, compiled one for all, in 16 bits on the host."""

import sys
from argparse import Namespace
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from diffusion_training.batches import Models
from diffusion_training.errors.sentences import fail
from diffusion_training.memory import is_gpu


def compute_in_float32(model: torch.nn.Module) -> bool:
    """Let a model with weights of 16 bits compute as if they were in float32, with the same bits.

    The weights of a block (of a ModuleList) are in float32 only while the block runs, all others
    from now on. So a text encoder of 8 billion weights takes 17 GB of the host's memory, not 33.

    Returns False, and leaves the model as it is, if it has computed numbers of its own in 16 bits.
    """
    from_file = model.state_dict().keys()
    for name, buffer in model.named_buffers():
        if buffer.is_floating_point() and buffer.itemsize < 4 and name not in from_file:
            return False
    blocks = list_outer_blocks(model)
    in_blocks = {id(weight) for block in blocks for weight in block.parameters()}
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.is_floating_point() and id(tensor) not in in_blocks:
            tensor.data = tensor.data.float()
    for block in blocks:
        block.register_forward_pre_hook(widen)
        block.register_forward_hook(narrow)
    model.requires_grad_(False)  # a graph would keep the weights in float32
    return True


def list_outer_blocks(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The modules in the model's ModuleLists, without those inside of such a module."""
    blocks: list[torch.nn.Module] = []
    inside: set[torch.nn.Module] = set()
    for module in model.modules():
        if isinstance(module, torch.nn.ModuleList) and module not in inside:
            blocks += module
            inside.update(module.modules())
    return blocks


def widen(block: torch.nn.Module, inputs: Any) -> None:
    """Before a block runs, see `compute_in_float32`."""
    for weight in block.parameters():
        if weight.is_floating_point() and weight.itemsize < 4:
            weight.stored = weight.data  # type: ignore[attr-defined]
            weight.data = weight.data.float()


def narrow(block: torch.nn.Module, inputs: Any, output: Any) -> None:
    """After a block has run, see `compute_in_float32`."""
    for weight in block.parameters():
        if hasattr(weight, "stored"):
            weight.data = weight.stored
            del weight.stored


def list_blocks(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """Return {name: block} of a model's repeated blocks."""
    kinds = {*getattr(model, "_repeated_blocks", ())}
    blocks = {
        name: block
        for name, block in model.named_modules()
        if kinds & {kind.__name__ for kind in type(block).__mro__}  # --shard makes subclasses
    }
    if not blocks:  # diffusers does not name their classes, as those of Stable Diffusion 3 and PRX
        for name, child in model.named_children():
            if isinstance(child, torch.nn.ModuleList):
                blocks |= {f"{name}.{number}": block for number, block in enumerate(child)}
    return blocks


def list_compiled(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The repeated blocks, to compile one for all; none if they are not nearly all of a model.

    The ResNets and norms of a U-Net are in no repeated block, so it would stay uncompiled in part:
    71 % of Stable Diffusion's, 15 % of SDXL's. In transformers it is less than 6 %.
    """
    blocks = [*list_blocks(model).values()]
    kinds = {type(block).__name__ for block in blocks}
    if len(kinds) > 1 and kinds.isdisjoint(getattr(model, "_repeated_blocks", ())):
        return []  # such as the levels of a U-Net
    inside = {id(weight): weight.numel() for block in blocks for weight in block.parameters()}
    total = sum(weight.numel() for weight in model.parameters())
    return blocks if sum(inside.values()) > 0.9 * total else []


def list_segments(model: torch.nn.Module) -> dict[str, torch.nn.Module]:
    """{name: module}: what is checkpointed and swapped one at a time. None is inside another one.

    These are a transformer's repeated blocks, and a U-Net's ResNets and attentions. An attention of
    several blocks, as SDXL has, counts as its blocks: they need less memory one at a time.
    """
    blocks = list_blocks(model)
    segments = {}
    for name, module in model.named_modules():
        if name.split(".")[-2:-1] in (["resnets"], ["attentions"]):  # the lists of a U-Net's levels
            own = {key: block for key, block in blocks.items() if key.startswith(f"{name}.")}
            segments |= own if len(own) > 1 else {name: module}
    return segments or blocks


# torch's kernels of attention. Without one, as for some masks, it consists of products of matrices,
# which --keep_attention does not know.
ATTENTION = [
    getattr(torch.ops.aten, f"_scaled_dot_product_{name}").default
    for name in (
        "flash_attention", "efficient_attention", "cudnn_attention", "flash_attention_for_cpu",
        "fused_attention_overrideable",
    )
]  # fmt: skip


class Checkpointed:
    """A segment's `forward` with gradient checkpointing: the backward pass calls it again.

    The forward pass keeps only the inputs, which reach the segment as the model passes them. The
    switches of the models themselves are not used, because theirs may differ: in diffusers 0.42,
    Chroma's leaves out the mask of padding.

    options: of torch's function.
    """

    def __init__(self, forward: Callable[..., Any]) -> None:
        self.forward = forward
        self.options: dict[str, Any] = {"use_reentrant": False}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return self.forward(*args, **kwargs)
        # Named arguments as a positional one: only there does torch look for the devices whose
        # random numbers, of dropout, it has to draw again.
        return checkpoint(self.compute, kwargs, *args, **self.options)

    def compute(self, kwargs: dict[str, Any], *args: Any) -> Any:
        return self.forward(*args, **kwargs)


def checkpoint_gradients(models: Models, args: Namespace) -> None:
    """Turn on gradient checkpointing, if and as the flags say.

    With --blocks_to_swap all segments have it already; --checkpoint_blocks turns it off for those
    beyond its number that are not swapped. Stops with an error if no model has segments.

    args: --gradient_checkpointing, --checkpoint_blocks, which wins, and --keep_attention.
    """
    number = args.checkpoint_blocks or (sys.maxsize if args.gradient_checkpointing else 0)
    if not number and not any(hasattr(model, "block_swap") for model in models.values()):
        return
    lists = {model: [*list_segments(model).values()] for model in models.values()}
    if number and not any(lists.values()):
        names = " and ".join(type(model).__name__ for model in lists)
        fail(f"gradient checkpointing: {names} has no repeated blocks: leave the flag out")
    for model, segments in lists.items():
        for segment in segments[:number]:
            if not isinstance(segment.forward, Checkpointed):
                segment.forward = Checkpointed(segment.forward)
        swap = getattr(model, "block_swap", None)
        for place, segment in enumerate(segments):
            if swap and args.checkpoint_blocks and place >= number and not swap.weights[place]:
                segment.forward = segment.forward.forward
            elif args.keep_attention and isinstance(segment.forward, Checkpointed):
                contexts = partial(create_selective_checkpoint_contexts, ATTENTION)
                segment.forward.options["context_fn"] = contexts


# the flags of a plan, which win over --fit
PLANS = ("gradient_checkpointing", "checkpoint_blocks", "blocks_to_swap")


def chooses_plan(device: torch.device, args: Namespace) -> bool:
    """Whether --fit chooses which blocks are checkpointed and swapped: on a GPU, without PLANS."""
    flags = vars(args)
    return bool(flags.get("fit")) and is_gpu(device) and not any(map(flags.get, PLANS))


def describe_memory_plan(settings: dict[str, Any]) -> str:
    """The flags of a run that choose which blocks are checkpointed and swapped; --fit's if it has.

    settings: those of a checkpoint, or of the run.
    """
    if settings.get("fitted"):
        return settings["fitted"]
    given = {name: settings.get(name) for name in (*PLANS, "keep_attention")}
    words = [
        f"--{name}{'' if value is True else f' {value}'}" for name, value in given.items() if value
    ]
    return " ".join(words) or "no gradient checkpointing"


def list_checkpointed(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The segments of a model that have gradient checkpointing."""
    return [each for each in model.modules() if isinstance(each.forward, Checkpointed)]
