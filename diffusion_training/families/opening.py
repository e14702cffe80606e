"""The base of a run, opened once: where its models come from, and which family they belong to."""

import os
import warnings
from argparse import Namespace
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import diffusers

from diffusion_training.arguments import list_values
from diffusion_training.errors.sentences import explained, fail
from diffusion_training.families.base import Base, Family, Record
from diffusion_training.families.known import find_family, load_family
from diffusion_training.families.names import DEFAULT_FAMILY, DEFAULT_FLOW_FAMILY, FACTS
from diffusion_training.repositories import MODEL_FILES, Repository, open_repository

INDEX_FILES = (diffusers.DiffusionPipeline.config_name, diffusers.ModularPipeline.config_name)
# diffusers' load_config passes an argument that does nothing
warnings.filterwarnings("ignore", ".*local_dir_use_symlinks", UserWarning)


def open_base(
    args: Namespace,
    trained_by: str | None = None,
    num_references: int = 0,
    record: Record | None = None,
) -> Base:
    """Read model_index.json, and find the family. A base in a single file is unpacked first.

    num_references: references per row of the images that a cache is made of; a trainer reads them
    from a cache, and passes none. record: `record_family`, for pipelines without a family of their
    own; None in a script that trains none of them. Stops with an error if `trained_by` is not the
    script that trains the family.
    """
    name = args.pretrained_model_name_or_path
    base = find_base(args, num_references)
    index = base.index
    class_name = index.get("_class_name", "")
    if isinstance(class_name, list):  # [a file in the pipeline's folder, a class in it]
        class_name, own = class_name[-1], None
    else:
        own = find_family(class_name)  # of the pipeline
    guidance = vars(args).get("embedded_guidance_scale")
    if class_name and own is None:
        if record is None:
            script = FACTS[DEFAULT_FLOW_FAMILY].script
            fail(f"{name} is a {class_name}, which can't be trained here: try {script}")
        base = record(base, 1.0 if guidance is None else guidance)
        own = base.family
    chosen = vars(args).get("model_family")
    wanted = load_family(chosen) if chosen else None
    if trained_by == FACTS[DEFAULT_FLOW_FAMILY].script and wanted is None:
        # a new model of the default family may borrow VAE and text encoder of another pipeline
        usual = load_family(DEFAULT_FLOW_FAMILY)
        borrows = own is None or (own.script != trained_by and own.name in usual.borrows_from)
        wanted = usual if borrows else own
    if wanted and own and own.name not in (wanted.name, *wanted.borrows_from):
        fail(f"--model_family {wanted.name} does not fit {name}, a {class_name}: leave it out")
    family = wanted or own or load_family(DEFAULT_FAMILY)
    if trained_by and family.script != trained_by:
        fail(f"{name} is a pipeline of the family {family.name}: train it with {family.script}")
    flags = {
        "--embedded_guidance_scale": (guidance, family.embedded_guidance),
        "--max_sequence_length": (base.max_tokens, family.max_tokens),
        "--clip_skip": (args.clip_skip, family.has_clip_skip),
    }
    for flag, (value, is_read) in flags.items():
        if value is not None and not is_read:
            fail(f"{flag} {value} does nothing for {family.title}: leave it out")
    if num_references and not family.takes_references:
        refuse_references(family, args)
    base = replace(base, family=family)
    if sentence := family.find_fault(base):
        fail(sentence)
    return base


def find_base(args: Namespace, num_references: int) -> Base:
    """Find the folders of a base and read its index. Its family is not known yet."""
    repositories: dict[str | None, Repository] = {}
    files = {"VAE": "", "text encoder": ""}  # the paths of those that are one file

    def find_folder(path: str | None, kind: str, first: tuple[str, ...]) -> str | None:
        if path is None or os.path.isdir(path):
            return path
        if os.path.isfile(path):  # such as ComfyUI's
            if kind in files and args.pretrained_model_name_or_path:
                files[kind] = path
                return None
            advice = f"a {kind} of its own must be a folder or a hub id"
            if kind in files:
                advice = "its config is the pipeline's: give --pretrained_model_name_or_path too"
            fail(f"{path} is a file, and {advice}")
        revision = args.revision if kind == "pipeline" else None
        with explained(f"{path} can't be opened as a {kind}"):
            repository = open_repository(path, first, revision, args.cache_dir)
        repositories[str(repository.folder)] = repository
        return str(repository.folder)

    source = find_folder(open_source(args), "pipeline", INDEX_FILES)
    base = Base(
        family=Family(),
        name=args.pretrained_model_name_or_path,
        source=source,
        index=read_index(source),
        vae=find_folder(args.vae_name_or_path, "VAE", MODEL_FILES),
        text_encoder=find_folder(args.text_encoder_name_or_path, "text encoder", MODEL_FILES),
        tokenizer=find_folder(args.tokenizer_name_or_path, "tokenizer", MODEL_FILES),
        variant=args.variant,
        repositories=repositories,
        clip_skip=args.clip_skip,
        max_tokens=vars(args).get("max_sequence_length"),
        num_references=num_references,
        resolution=max(side or 0 for side in list_values(vars(args).get("resolution"))),
    )
    if any(files.values()):
        from diffusion_training.families.transformer_file import (  # here: few runs need it
            unpack_text_encoder,
            unpack_transformer,
        )

        if path := files["VAE"]:
            base.unpacked["vae"] = unpack_transformer(path, base, args.cache_dir, "vae")
        if path := files["text encoder"]:
            base.unpacked.update(unpack_text_encoder(path, base, args.cache_dir))
    return base


def refuse_references(family: Family, args: Namespace) -> NoReturn:
    """Stop with an error, because the images have references that the family can't train."""
    flags = vars(args)
    is_asked = flags.get("conditioning_image_column") or flags.get("conditioning_data_dir")
    what = "leave out the flag that gives them" if is_asked else "move photo.control.png elsewhere"
    fail(
        f"the images have references, which a {family.pipeline} can't be trained on: {what}, or "
        "choose a model that edits images (docs/editing.md)"
    )


def read_index(source: str | None) -> dict[str, Any]:
    """model_index.json of a pipeline, or modular_model_index.json; {} for a folder of models."""
    if source is None or not any(Path(source, name).exists() for name in INDEX_FILES):
        return {}
    with explained(f"{source} can't be opened as a pipeline"):
        if not Path(source, INDEX_FILES[0]).exists():  # of a pipeline of blocks
            return diffusers.ModularPipeline.load_config(source)
        index = diffusers.DiffusionPipeline.load_config(source)
        if not isinstance(index, dict):
            raise ValueError("model_index.json lists no parts")
        for name, entry in index.items():
            # other entries are settings of the pipeline
            is_part = name.startswith(("scheduler", "text_encoder", "tokenizer", "vae"))
            if is_part and not (isinstance(entry, list) and len(entry) == 2):
                raise ValueError(
                    f"model_index.json has {entry!r} for {name}, not a library and a class"
                )
        return index


def open_source(args: Namespace) -> str | None:
    """--pretrained_model_name_or_path, or the folder into which a single file is unpacked."""
    source = args.pretrained_model_name_or_path
    config = args.single_file_config
    if source is None or not os.path.isfile(source):
        if config:
            fail(
                f"--single_file_config is for a base in one file, and {source} is not a file: "
                "leave it out"
            )
        return source
    if not source.endswith(".safetensors"):
        fail(
            f"{source} can't be opened: get its .safetensors version, in bf16 or float16, because "
            "a .ckpt can run any program, and GGUF is read as --transformer_file only"
        )
    if args.variant:
        fail(f"--variant {args.variant} does nothing for a single file, {source}: leave it out")
    from diffusion_training.families.single_file import unpack_pipeline

    return unpack_pipeline(source, config, args.cache_dir)
