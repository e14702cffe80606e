"""Which program reads which file of a LoRA or a pipeline, in sentences."""

from argparse import Namespace
from pathlib import Path

# what ComfyUI's own loader did with a LoRA of each denoiser
COMFYUI = Path(__file__).with_name("comfyui.tsv")


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
