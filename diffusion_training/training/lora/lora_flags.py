"""Flags for LoRA and --preserve_prior, and their checks. Imports only the standard library."""

import argparse
import contextlib
import os
import re
from pathlib import Path
from typing import Any

from diffusion_training.arguments import (
    COUNT,
    PATH,
    SWITCH,
    Add,
    OrNo,
    Parser,
    check_package,
    number,
)

ADAPTER_CONFIG = "adapter_config.json"  # as PEFT names it


def file_name(text: str) -> str:
    """An argparse type: a name for a LoRA file, with or without .safetensors."""
    name = text.removesuffix(".safetensors")
    if not re.fullmatch(r"[^./\\*?\[\]][^/\\*?\[\]]*", name) or len(os.fsencode(name)) > 200:
        raise argparse.ArgumentTypeError(
            f"{text} is no name for a file in --output_dir: give one without / \\ * ? [ ] and "
            "without a dot at the start, such as dog"
        )
    if name == "pytorch_lora_weights":
        raise argparse.ArgumentTypeError(f"{text} is the file for diffusers: choose another name")
    return name


def add_lora_flags(add: Add) -> None:
    """Add the flags that `add_lora` and `load_network_weights` read."""
    add(
        "--rank",
        "--lora_rank",
        type=number(1, 4096, int, "no"),
        action=OrNo,
        help="train a LoRA of this rank, such as 16 (default: no, train the whole model; on "
        "resuming, that of the checkpoint)",
    )
    add(
        "--lora_type",
        choices=["lora", "lokr"],
        default="lora",
        help="lokr: train a LoKr, the Kronecker product of two small matrices, for ComfyUI and "
        "diffusers 0.42 (arXiv:2309.14859)",
        needs="--rank",
    )
    add(
        "--lokr_factor",
        type=number(1, 4096, int),
        default=8,
        help="with --lora_type lokr, size of the smaller matrix; the larger one has the size of "
        "the layer, divided by it, and is trained whole if --rank is at least half of that",
        needs="--lora_type lokr",
    )
    add(
        "--lora_alpha",
        type=number(1e-3, 1e6),
        help="the LoRA's output is multiplied by alpha / rank: a larger alpha makes it stronger "
        "(default: the rank; on resuming, that of the checkpoint)",
        needs="--rank",
    )
    add(
        "--lora_layers",
        help="layers that get a LoRA: attention, attention_mlp, all, or ends of module names, such "
        "as to_q,to_v,ff.net.2 (default: those of the model in docs/lora.md, for most "
        "attention_mlp; on resuming, those of the checkpoint)",
        needs="--rank",
    )
    add(
        "--lora_dropout",
        type=number(0, 0.999),
        default=0.0,
        help="probability with which each input of the LoRA is set to 0 in training",
        needs="--rank",
    )
    add(
        "--use_dora",
        **SWITCH,
        help="train a DoRA, a LoRA that also trains the magnitudes of the weights: slower "
        "(arXiv:2402.09353); ComfyUI applies that of a U-Net, not that of a transformer",
        needs="--rank",
    )
    add(
        "--use_rslora",
        **SWITCH,
        help="rsLoRA: multiply the LoRA's output by alpha / sqrt(rank), so that a higher rank does "
        "not learn more slowly (arXiv:2312.03732)",
        needs="--rank",
    )
    add(
        "--output_name",
        type=file_name,
        help="name of the LoRA file for ComfyUI and A1111: dog gives dog.safetensors, and "
        "dog-step00000500.safetensors in a checkpoint (default: "
        "pytorch_lora_weights_kohya.safetensors; of a transformer the file for diffusers)",
        needs=("--rank", "--output_kohya_format"),
    )
    add(
        "--network_weights",
        type=PATH,
        help="LoRA file to continue training from, or the output folder of a run with --rank",
        needs="--rank",
    )
    add(
        "--base_precision",
        choices=["int8", "nf4", "no"],
        action=OrNo,
        help="with --rank, precision of the frozen base model, to save memory: int8 takes 1 byte a "
        "weight, nf4 about half a byte and needs bitsandbytes (default: that of --mixed_precision)",
        needs="--rank",
    )
    add(
        "--training_adapter",
        type=PATH,
        help="with --rank, a LoRA file that is part of the base in training, but not in samples "
        "and result: it undoes the distillation of a turbo, so that training does not",
        needs="--rank",
    )
    add(
        "--blocks_to_swap",
        type=number(1, 10**4, int, "all", "no"),
        action=OrNo,
        help="with --rank, number of the denoiser's blocks, or all, whose frozen weights stay in "
        "the host's memory, to save the GPU's: each is copied to the GPU when it computes; "
        "includes gradient checkpointing",
        needs="--rank",
    )
    add(
        "--preserve_prior",
        **SWITCH,
        help="keep what the base model predicts for --class_prompt, so that the LoRA changes only "
        "what it is taught",
        needs="--rank",
    )
    add(
        "--class_prompt",
        nargs="+",
        help="with --preserve_prior, one or more prompts for what must not change, such as 'a "
        "photo of a dog'; each image of a step takes one of them; with --trigger only the class, "
        "such as dog",
        needs="--preserve_prior",
    )
    add(
        "--trigger",
        help="words in the captions for what the LoRA learns, such as 'sks dog'; the prompts that "
        "must not change are then the captions with --class_prompt in place of these words",
        needs="--preserve_prior",
    )
    add(
        "--prior_loss_weight",
        type=number(1e-6, 1e6),
        default=1.0,
        help="weight of the loss of --preserve_prior",
        needs="--preserve_prior",
    )
    add(
        "--prior_every",
        type=COUNT,
        default=1,
        help="add the loss of --preserve_prior only every so many steps, multiplied by this "
        "number; such a step costs three more passes",
        needs="--preserve_prior",
    )


def add_validation_base_flags(add: Add) -> None:
    """Add the flags that `open_other_base` reads."""
    add(
        "--validation_base",
        type=PATH,
        help="with --rank, a pipeline made from the base that draws in few steps, such as "
        "Tongyi-MAI/Z-Image-Turbo, or its transformer in one .safetensors file: the samples are "
        "also drawn with it and the LoRA",
        needs=(
            "--rank",
            "--validation_prompts or --validation_metrics",
            "--num_validation_images or --validation_metrics",
        ),
    )
    add(
        "--validation_lora",
        type=PATH,
        help="with --rank, a LoRA file with which the base draws in few steps (Lightning, Hyper, "
        "LCM): the samples are also drawn with it and the trained LoRA",
        needs=(
            "--rank",
            "--validation_prompts or --validation_metrics",
            "--num_validation_images or --validation_metrics",
        ),
    )
    add(
        "--validation_base_steps",
        type=COUNT,
        help="denoising steps per sample with --validation_base or --validation_lora (default: as "
        "its name says; else 8 if it is distilled, or the pipeline's own)",
        needs="--validation_base or --validation_lora",
    )
    add(
        "--validation_base_guidance",
        type=number(1, 1000),
        help="guidance scale with --validation_base or --validation_lora; 1: no guidance (default: "
        "1 if it is distilled, else the pipeline's own)",
        needs="--validation_base or --validation_lora",
    )


def read_settings(folder: Path) -> dict[str, Any]:
    """The settings of the LoRA in a checkpoint's folder; {} if there is none.

    Raises ValueError if the file is damaged.
    """
    # here, because it needs more than Python
    from diffusion_training.files import fits, parse_json

    path = folder / ADAPTER_CONFIG
    if not path.is_file():  # a pipe might never end
        return {}
    settings = parse_json(path.read_text())
    alpha = (int, float)
    for form in (
        {"peft_type": str, "r": int, "target_modules": [str]},
        ({"lora_alpha": alpha}, {"alpha": alpha}),  # the second one of a LoKr
    ):
        if not fits(settings, form) or settings["r"] < 1:
            raise ValueError(f"{folder.name}/{ADAPTER_CONFIG} does not have a LoRA's settings")
    return settings


def read_rank(args: argparse.Namespace) -> int | None:
    """The rank of the LoRA in the local checkpoint that a run resumes; None if it has no LoRA."""
    given = args.resume_from_checkpoint
    folders = [Path(args.output_dir, given), Path(given)]
    if given == "latest":
        found = Path(args.output_dir).glob("checkpoint-*/trainer_state.json")
        steps = {path.parent.name.removeprefix("checkpoint-"): path.parent for path in found}
        folders = [steps[step] for step in sorted(filter(str.isdecimal, steps), key=int)[-1:]]
    for path in (path for folder in folders for path in folder.glob(f"*/{ADAPTER_CONFIG}")):
        # the run reads the file once more
        with contextlib.suppress(OSError, ValueError):
            if settings := read_settings(path.parent):
                return settings["r"]
    return None


def check_lora_args(parser: Parser, args: argparse.Namespace) -> None:
    """Stop with an error if the flags of `add_lora_flags` do not fit together."""
    is_given = "rank" in parser.own  # --rank no trains the whole model
    if args.rank is None and args.resume_from_checkpoint and not is_given:
        args.rank = read_rank(args)
    if args.base_precision == "nf4":
        check_package(parser, "--base_precision nf4", "bitsandbytes", "choose int8")
    if args.lora_type == "lokr":
        for name in ("use_dora", "use_rslora", "lora_dropout"):
            if vars(args)[name]:
                parser.error(f"--{name} can't be combined with --lora_type lokr: leave one out")
    if args.base_precision and args.use_dora:
        parser.error("--use_dora needs the exact weights of the base: leave --base_precision out")
    if args.training_adapter and args.use_dora:
        parser.error("--use_dora needs the base as it is: leave --training_adapter out")
    check_prior_args(parser, args)
    check_swap_args(parser, args)
    if args.validation_lora and args.lora_type == "lokr":
        parser.error("--validation_lora can't be combined with --lora_type lokr: leave one out")


def check_swap_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Stop with an error if the base can't be swapped as --blocks_to_swap asks."""
    if args.blocks_to_swap and args.base_precision == "nf4":
        parser.error(
            "--blocks_to_swap can't be combined with --base_precision nf4: choose int8, or leave "
            "it out"
        )
    if args.blocks_to_swap and args.compile:
        parser.error("--blocks_to_swap can't be compiled: leave --compile out")


def check_prior_args(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Stop with an error if the flags of --preserve_prior do not fit together."""
    if not args.preserve_prior:
        return
    if not args.class_prompt:
        parser.error(
            "--preserve_prior needs --class_prompt: prompts for what must not change, such as 'a "
            "photo of a dog'"
        )
    if args.trigger is not None and (not args.trigger or len(args.class_prompt) > 1):
        parser.error(
            "--trigger needs words, and one --class_prompt that replaces them in the captions"
        )
    for prompt in args.class_prompt:
        if args.trigger in prompt if args.trigger else prompt == args.instance_prompt:
            parser.error(
                f"--class_prompt {prompt!r} is what the LoRA must learn: describe what must not "
                "change, such as 'dog' for 'sks dog'"
            )
