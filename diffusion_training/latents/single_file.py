"""A base model in one file, as Stable Diffusion and SDXL are often shared.

It is unpacked once, into a folder.
"""

import os
from argparse import Namespace
from pathlib import Path

import diffusers
import torch
import xxhash
from diffusers import StableDiffusionPipeline, StableDiffusionXLPipeline
from filelock import FileLock
from huggingface_hub.constants import HF_HOME
from safetensors import safe_open
from safetensors.torch import save_file

from diffusion_training.errors import explained, fail
from diffusion_training.files import clean, saving


def open_base(args: Namespace) -> str | None:
    """Return --pretrained_model_name_or_path, or for a file the pipeline folder made of it.

    The folder is in --cache_dir. The first process that needs it makes it with diffusers, from
    configs of the hub or of --single_file_config. Everything else works as with a folder: a cache
    made with one fits the other.
    """
    source, config = args.pretrained_model_name_or_path, args.single_file_config
    if source is None or not os.path.isfile(source):
        if config:
            fail(
                f"--single_file_config is for a base in one file, and {source} is none: leave "
                "it out"
            )
        return source
    if not source.endswith(".safetensors"):
        fail(
            f"{source} can't be opened: a .ckpt may run any program, so have it converted to "
            ".safetensors"
        )
    if args.variant:
        fail(f"--variant {args.variant} chooses among files, and {source} is one: leave it out")
    with explained(f"{source} can't be read"), safe_open(source, "pt") as file:
        names = set(file.keys())
        parts = {name.split(".")[0] for name in names}
    if "model.diffusion_model.input_blocks.0.0.weight" not in names or not parts & {
        "cond_stage_model",
        "conditioner",
    }:
        fail(
            f"{source} holds no Stable Diffusion 1, 2 or XL with U-Net, VAE and text encoders, "
            "as they were published"
        )
    kind = StableDiffusionXLPipeline if "conditioner" in parts else StableDiffusionPipeline
    about = os.stat(source)
    key = [
        os.path.realpath(source),
        about.st_size,
        about.st_mtime_ns,
        config,
        diffusers.__version__,
    ]
    key += [path.read_text() for path in sorted(Path(config or os.devnull).rglob("*.json"))]
    root = Path(args.cache_dir or HF_HOME) / "single_files"
    folder = root / f"{Path(source).stem}-{xxhash.xxh3_64_hexdigest(repr(key).encode())}"
    with explained(
        f"{source} can't be unpacked; --single_file_config says where the configs of its family are"
    ):
        root.mkdir(parents=True, exist_ok=True)
        with FileLock(root / ".lock"):  # other processes wait, and then find the folder
            if not folder.exists():
                clean(root)
                pipeline = kind.from_single_file(source, config=config, cache_dir=args.cache_dir)
                modules = {
                    name: x
                    for name, x in pipeline.components.items()
                    if isinstance(x, torch.nn.Module)
                }
                for module in modules.values():  # diffusers ignores missing weights
                    for name, weight in module.named_parameters():
                        if weight.is_meta:
                            raise ValueError(f"the {type(module).__name__} has no {name}")
                with saving(root, folder) as unfinished:
                    pipeline.save_pretrained(unfinished / folder.name)
                    # transformers writes weights only on the first process
                    for name, module in modules.items():
                        if not list((unfinished / folder.name / name).glob("*.safetensors")):
                            module.config.save_pretrained(unfinished / folder.name / name)
                            weights = {
                                key: value.contiguous()
                                for key, value in module.state_dict().items()
                            }
                            save_file(
                                weights,
                                unfinished / folder.name / name / "model.safetensors",
                                {"format": "pt"},
                            )
    return str(folder)
