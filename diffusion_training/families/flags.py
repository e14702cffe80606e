"""Flags for pipelines and their parts. Imports only the standard library."""

from diffusion_training.arguments import COUNT, PATH, Add, number
from diffusion_training.families.names import DEFAULT_FAMILY, DEFAULT_FLOW_FAMILY, FACTS


def add_family_flags(add: Add) -> None:
    """Add the flags for model family and caption length, which `open_base` reads."""
    add(
        "--model_family",
        choices=[*FACTS],
        help="model family (default: the pipeline's; without a pipeline, or for a new transformer "
        f"with a U-Net's VAE and text encoder, {DEFAULT_FLOW_FAMILY} in train_flow.py, elsewhere "
        f"{DEFAULT_FAMILY})",
    )
    limits = [
        f", {family.max_tokens} for {name}" for name, family in FACTS.items() if family.max_tokens
    ]
    add(
        "--max_sequence_length",
        type=COUNT,
        help="maximum number of tokens of a caption; the rest is cut off "
        f"(default: the pipeline's{''.join(limits)})",
        useless_with="--class_column",
    )


def add_encoder_flags(add: Add) -> None:
    """Add the flags for encoders other than the pipeline's, which `open_base` reads."""
    usual = FACTS[DEFAULT_FAMILY].vae_classes
    classes = ", ".join(usual)
    for name, family in FACTS.items():
        if family.vae_classes != usual:
            classes += f"; for {name} {', '.join(family.vae_classes)}"
    add(
        "--vae_name_or_path",
        "--pretrained_vae_model_name_or_path",  # the name in diffusers' scripts
        type=PATH,
        help="VAE to use instead of the pipeline's: hub id, folder, or .safetensors file as "
        "ComfyUI reads it, of one of these classes: "
        f"{classes}",
    )
    add(
        "--text_encoder_name_or_path",
        type=PATH,
        help="text encoder to use instead of the pipeline's, with its tokenizer: hub id or folder; "
        "or a .safetensors file of one of the pipeline's, as ComfyUI reads it",
    )
    add(
        "--single_file_config",
        type=PATH,
        help="configs for a pipeline in one .safetensors file: hub id or folder (default: those "
        "of its family)",
    )
    add(
        "--tokenizer_name_or_path",
        type=PATH,
        help="tokenizer, if it is not stored with the text encoder: hub id or folder",
        useless_with="--class_column",
    )
    add(
        "--clip_skip",
        type=number(1, 100, int),
        help="number of final CLIP layers to skip; 2 in kohya's scripts and A1111 is 1 here "
        "(default: skip none)",
    )


def add_pipeline_flags(add: Add) -> None:
    """Add the flags for the pretrained pipeline, which `open_base` reads."""
    add(
        "--pretrained_model_name_or_path",
        type=PATH,
        help="pretrained pipeline: hub id or folder; text-to-image U-Nets also from one "
        ".safetensors file",
    )
    add(
        "--revision",
        help="branch, tag or commit of the models on the hub",
        needs="--pretrained_model_name_or_path",
        useless_with="--pretrained_model_name_or_path FILE",
    )
    add(
        "--variant", help="variant of the weight files to load, such as fp16 for *.fp16.safetensors"
    )
