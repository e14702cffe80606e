"""Save a pipeline as a folder, and as one file for other programs; which program reads what."""

import json
import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import torch
from diffusers import DiffusionPipeline, ModularPipeline
from safetensors.torch import save_file

from diffusion_training.errors.sentences import explained, fail
from diffusion_training.files import saving, sort_header
from diffusion_training.models import is_finite

SINGLE_FILE = "single_file.safetensors"  # of --output_single_file
# what ComfyUI's own loader did with a LoRA of each denoiser
COMFYUI = Path(__file__).with_name("comfyui.tsv")


def save_pipeline(pipeline: DiffusionPipeline, output_dir: str | Path) -> None:
    """Write the pipeline folder; an existing one stays until the new one is complete."""
    model = getattr(pipeline, "unet", None) or pipeline.transformer
    if not all(map(is_finite, model.parameters())):
        fail(
            "the weights are not finite, so they are not saved; an earlier pipeline is kept: try a "
            "lower --learning_rate",
            alone=True,
        )
    with saving(output_dir, f"the pipeline in {output_dir}") as unfinished:
        pipeline.save_pretrained(unfinished)
        name_source(unfinished, None)
        # a local path that a model was loaded from is private
        for path in unfinished.glob("*/config.json"):
            config = json.loads(path.read_text())
            if os.path.exists(config.pop("_name_or_path", "")):
                path.write_text(json.dumps(config, indent=2) + "\n")


def name_source(folder: str | Path, repository: str | None) -> None:
    """Write into the index of a modular pipeline where its parts are; None: in its own folder."""
    path = Path(folder, ModularPipeline.config_name)
    if not path.exists():
        return
    index = json.loads(path.read_text())
    for entry in index.values():
        if isinstance(entry, list):
            entry[2]["pretrained_model_name_or_path"] = repository
    path.write_text(json.dumps(index, indent=2) + "\n")


def save_single_file(
    weights: dict[str, torch.Tensor], metadata: dict[str, str], output_dir: str | Path
) -> None:
    """Write a model as one file, beside its pipeline folder. weights: see `Family.merge`."""
    with saving(output_dir, f"the single file in {output_dir}") as unfinished:
        save_file(weights, unfinished / SINGLE_FILE, {"format": "pt", **metadata})
        sort_header(unfinished / SINGLE_FILE)


def save_whole(
    pipeline: DiffusionPipeline,
    merge: Callable[[DiffusionPipeline], dict[str, torch.Tensor]],
    folder: Path,
    metadata: dict[str, str] | None,
) -> None:
    """Write the pipeline. With `metadata`, also write it as one file with that header.

    merge: `Family.merge`, which returns the weights of all parts under the names of such a file.
    """
    save_pipeline(pipeline, folder)
    if metadata is not None:
        with explained("--output_single_file can't be written; the pipeline was saved"):
            weights = merge(pipeline)
        save_single_file(weights, metadata, folder)


def list_lora_files(args: Namespace) -> list[str]:
    """Patterns of the files of a LoRA, for the upload."""
    return ["pytorch_lora_weights*", *filter(None, [args.output_name and name_second(args)])]


def name_second(args: Namespace) -> str:
    """The name of a LoRA's file for other programs than diffusers."""
    return f"{args.output_name or 'pytorch_lora_weights_kohya'}.safetensors"


def ask_comfyui(denoiser: str) -> str:
    """What ComfyUI does with a LoRA for this class: reads, skips, was not tried with."""
    answers = dict(line.split("\t")[::2] for line in COMFYUI.read_text().splitlines())
    return answers.get(denoiser, "was not tried with")


def advise_copy(args: Namespace, denoiser: str) -> str:
    """A sentence on whether ComfyUI reads a LoRA, and which file to copy there; or empty."""
    flags = vars(args)
    for_unet = "output_kohya_format" in flags
    is_whole = flags.get("output_kohya_format") if for_unet else not flags.get("use_dora")
    if not flags.get("rank") or not is_whole:
        return ""
    answer = ask_comfyui(denoiser)
    sentence = f"ComfyUI {answer} this LoRA"
    if answer == "skips":
        return sentence
    file = name_second(args) if for_unet or args.output_name else "pytorch_lora_weights.safetensors"
    name = f"{args.output_name or Path(args.output_dir).resolve().name}.safetensors"
    return f"{sentence}: copy {args.output_dir}/{file} to models/loras/{name}"


def name_readers(args: Namespace, denoiser: str) -> str:
    """A sentence on which program reads which file; empty if there is only a pipeline folder."""
    flags = vars(args)
    if not flags.get("rank"):
        if not flags.get("output_single_file"):
            return ""
        return "`single_file.safetensors` is for ComfyUI and A1111, the folder for diffusers."
    file = "`pytorch_lora_weights.safetensors`"
    if "output_kohya_format" not in args:  # no U-Net
        also = " and ComfyUI" if ask_comfyui(denoiser) == "reads" else ""
        if args.use_dora:
            also = " (ComfyUI leaves out the magnitudes of this DoRA)"
        is_for = f"and `{name_second(args)}`, the same file, are" if args.output_name else "is"
        return f"{file} {is_for} for diffusers{also}."
    if not args.output_kohya_format:
        return f"{file} is for diffusers; other programs need --output_kohya_format."
    programs = "ComfyUI, A1111 and sd-scripts"
    if args.use_dora or args.lora_type == "lokr":
        programs = "ComfyUI"
    return (
        f"{file} is for diffusers, `{name_second(args)}` for {programs}"
        f"{' (A1111 and sd-scripts do not support this DoRA)' if args.use_dora else ''}."
    )
