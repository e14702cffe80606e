"""The headers of files for other programs: what A1111, ComfyUI and sd-scripts show of a model.

They hold no dates and no local paths, so that a repeated run writes the same bytes.
"""

import json
import sys
from argparse import Namespace
from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch

from diffusion_training.families.base import Family
from diffusion_training.training.showing.report import name_run

MOST_TAGS = 500  # in a header; A1111 shows 24


def describe_file(
    family: Family,
    model: torch.nn.Module,
    scheduler: Any,
    captions: Sequence[str],
    num_images: int,
    args: Namespace,
) -> dict[str, str]:
    """The header of a LoRA with kohya's names, or of a model in a single file.

    captions: of some or all images. num_images: per epoch; sys.maxsize if it is not known.
    """
    about = name_run(0, args, local=False)
    resolution = args.resolution
    predicts_velocity = scheduler.config.prediction_type == "v_prediction"
    architecture = family.name_architecture(model, predicts_velocity)
    original = "https://github.com/Stability-AI/generative-models"
    header = {
        "modelspec.sai_model_spec": "1.0.0",
        "modelspec.architecture": f"{architecture}/lora" if args.rank else architecture,
        "modelspec.implementation": "diffusers" if args.rank else original,
        "modelspec.title": args.output_name or about.name,
        "modelspec.resolution": f"{resolution}x{resolution}",
        "modelspec.prediction_type": "v" if predicts_velocity else scheduler.config.prediction_type,
    }
    if not args.rank:
        return header
    header |= family.describe_for_sd_scripts(model)
    header["ss_output_name"] = args.output_name or about.name
    header["ss_sd_model_name"] = str(about.base)
    header["ss_resolution"] = f"({resolution}, {resolution})"
    # sd-scripts also counts the last layer
    header["ss_clip_skip"] = str(args.clip_skip + 1 if args.clip_skip else None)
    if num_images < sys.maxsize:
        header["ss_num_train_images"] = str(num_images)
        folders = {about.data: {"n_repeats": 1, "img_count": num_images}}
        header["ss_dataset_dirs"] = json.dumps(folders)
    if tags := count_tags(captions):
        header["ss_tag_frequency"] = json.dumps({about.data: tags})
    return header


def count_tags(captions: Sequence[str]) -> dict[str, int]:
    """Count each tag (text between commas) in the captions, as sd-scripts does."""
    tags = (tag.strip().lower() for caption in captions for tag in caption.split(","))
    counts = Counter(filter(None, tags))
    return dict(sorted(counts.items(), key=lambda pair: (-pair[1], pair[0]))[:MOST_TAGS])
