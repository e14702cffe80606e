"""python -m diffusion_training lora: what a LoRA file holds (info), and a base with it (merge)."""

import argparse
import math
import shutil
from pathlib import Path

import diffusers
import torch

from diffusion_training.arguments import PATH, Parser, number
from diffusion_training.errors.sentences import explained, fail, in_one_sentence
from diffusion_training.families.base import MAGNITUDE
from diffusion_training.families.flags import add_pipeline_flags
from diffusion_training.families.opening import open_base
from diffusion_training.families.recording import record_family
from diffusion_training.files import saving
from diffusion_training.models import is_component, load_weights, read_precision
from diffusion_training.training.lora.lora_files import (
    DORA_SCALE,
    LOKR_W1,
    LOKR_W2,
    LOKR_W2_A,
    LOKR_W2_B,
    LORA_A,
    LORA_B,
    LoraFile,
    read_lora_file,
)

# of `open_base`: they change nothing in the denoiser
OTHER_FLAGS = [f"{part}_name_or_path" for part in ("vae", "text_encoder", "tokenizer")]
OTHER_FLAGS += ["clip_skip", "single_file_config"]


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    parser = Parser(
        prog="python -m diffusion_training lora", description=__doc__, allow_abbrev=False
    )
    add = parser.add_argument
    add("action", choices=["info", "merge"])
    add("file", type=PATH, help="a LoRA, DoRA or LoKr that --network_weights reads")
    add_pipeline_flags(add)
    add("--cache_dir", type=PATH, help="folder for what is fetched from the hub")
    add("--strength", type=number(-100, 100), default=1.0, help="of the LoRA in the merged model")
    add("--output_dir", type=PATH, help="folder for the merged pipeline")
    parser.set_defaults(**dict.fromkeys(OTHER_FLAGS))
    args = parser.parse_args(argv)
    if not args.pretrained_model_name_or_path:
        parser.error("give the base of the LoRA: --pretrained_model_name_or_path")
    if args.action == "merge" and not args.output_dir:
        parser.error("give a folder for the merged pipeline: --output_dir")
    return args


def merge_layer(weight: torch.Tensor, layer: str, file: LoraFile) -> torch.Tensor:
    """The weight of a layer with the LoRA at strength 1, in float32.

    Raises ValueError or RuntimeError if the layer has another size.
    """
    parts = {
        part: value.float().flatten(min(1, value.dim() - 1))
        for part, value in file.layers[layer].items()
    }
    if LOKR_W1 in parts:
        w2 = parts[LOKR_W2] if LOKR_W2 in parts else parts[LOKR_W2_A] @ parts[LOKR_W2_B]
        product = torch.kron(parts[LOKR_W1], w2)
    else:
        product = parts[LORA_B] @ parts[LORA_A]
    if product.shape != weight.flatten(1).shape:  # `view_as` takes all that have as many numbers
        raise ValueError(f"{layer} has another width")
    merged = weight + file.scales[layer] * product.view_as(weight)
    for name in parts.keys() & {MAGNITUDE, DORA_SCALE}:
        magnitude = parts[name]
        is_of_inputs = name == DORA_SCALE and len(magnitude) != len(weight)
        if is_of_inputs or magnitude.numel() != len(weight):
            raise ValueError(f"its {layer}.{name} does not have one number for each output")
        is_relative = name == DORA_SCALE and file.is_relative
        norms = (weight if is_relative else merged).flatten(1).norm(dim=1)
        factor = magnitude.flatten() / norms
        merged = merged * factor.view(-1, *[1] * (weight.dim() - 1))
    return merged


@torch.no_grad()
@in_one_sentence
def main(args: argparse.Namespace) -> None:
    base = open_base(args, record=record_family)
    folder = base.family.folder
    kind = getattr(diffusers, base.family.model)
    merges = args.action == "merge"
    source, options = base.locate(None, folder, with_weights=merges)
    if merges and Path(args.output_dir).resolve() == Path(str(source)).resolve():
        fail(f"--output_dir {args.output_dir} is the base: choose another folder")
    with explained(f"{source} holds no {kind.__name__}"), torch.device("meta"):
        model = kind.from_config(kind.load_config(source, subfolder=folder))
    with explained(f"{args.file} can't be used"):
        file = read_lora_file(args.file, model, folder, base.family.convert_lora)
    ranks = {len(parts.get(LORA_A, parts.get(LOKR_W2_B, ()))) for parts in file.layers.values()}
    kinds = {part for parts in file.layers.values() for part in parts}
    print(
        f"{len(file.layers)} layers of the {kind.__name__}, of {' and '.join(sorted(kinds))}; rank "
        f"{min(ranks)} to {max(ranks)}; alpha / rank {min(file.scales.values()):g} to "
        f"{max(file.scales.values()):g}; {file.num_left_out} weights for text encoders are skipped"
    )
    for name, value in sorted(file.header.items()):
        print(f"{name}: {value:.200}")
    if not merges:
        return
    with explained(f"{source} holds no {kind.__name__}"):
        dtype = read_precision(source, kind=kind, **options)
        model = load_weights(kind, source, dtype, **options)
    rounding = change = 0.0
    for layer in file.layers:
        weight = model.get_submodule(layer).weight
        before = weight.float()
        with explained(f"{args.file} can't be merged"):
            merged = before + args.strength * (merge_layer(before, layer, file) - before)
            change += (merged - before).square().sum().item()
            weight.copy_(merged)
            rounding += (weight.float() - merged).square().sum().item()
            if not math.isfinite(rounding):
                raise ValueError(f"the weights of {layer} would be beyond the range of {dtype}")
    for part, entry in base.index.items():
        if is_component(entry):
            base.locate(None, part)  # fetches it
    Path(args.output_dir).mkdir(parents=True, exist_ok=True)
    with saving(args.output_dir, args.output_dir) as unfinished:
        shutil.copytree(str(source), unfinished, dirs_exist_ok=True)
        shutil.rmtree(unfinished / folder)
        model.save_pretrained(unfinished / folder)
    share = (rounding / change) ** 0.5 if change else 0.0
    print(
        f"{args.output_dir} is the pipeline with the LoRA at strength {args.strength:g}. Rounding "
        f"to {dtype} changed the LoRA by {share:.2g} of its norm"
    )


if __name__ == "__main__":
    main(parse_args())
