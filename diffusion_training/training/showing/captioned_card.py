"""The texts of card and report about a text-to-image pipeline, or a LoRA for one."""

import json
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import diffusers

from diffusion_training.data.prompt_file import split_prompt
from diffusion_training.families.base import Family
from diffusion_training.models import DTYPE
from diffusion_training.training.showing.readers import name_readers
from diffusion_training.training.showing.report import About, Description, write_usage

# Code for a transformer that lacks diffusers' methods for adapters: its class gets them.
ADD_ADAPTERS = (
    "from diffusers.loaders import PeftAdapterMixin",
    "kind = type(pipeline.transformer)",
    'pipeline.transformer.__class__ = type("Adaptable", (kind, PeftAdapterMixin), {})',
)


def describe_text_to_image(
    family: Family,
    part: str,
    is_new: bool,
    about: About,
    args: Namespace,
    setup: Sequence[str] = (),
    call: str = "",
    references: int = 0,
    bases: Sequence[Any] = (),
    classes: Sequence[str] = (),
) -> Description:
    """Return the texts about a text-to-image pipeline, or a LoRA for one, with example code.

    part: a word for the trained model, such as U-Net. setup: lines of code before the pipeline's
    call. call: further arguments of the pipeline, as code. references: how many images an edit
    starts from; 0 for text to image. bases: see `choose_sample_bases`; for the second one there is
    code too, which comes first. classes: names of those that replace captions.
    """
    if classes and not args.validation_prompts:
        about = replace(about, prompt=json.dumps(classes[0]))
    if args.validation_prompts_file and not args.instance_prompt:
        about = replace(about, prompt=json.dumps(split_prompt(args.validation_prompts[0])[0]))
    trained_on = f"`{about.data}`\nfor {about.step} steps"
    how = "trained from scratch" if is_new else "fine-tuned"
    what = f"The {part} of this {family.title} pipeline was {how} on {trained_on}."
    if about.base:
        what += f" The other models are those of\n`{about.base}`."
    if args.rank:
        kind = "LoKr" if args.lora_type == "lokr" else "LoRA"
        what = f"A {kind} of rank {args.rank} for the {part} of `{about.base}`,\n"
        if about.transformer_file:
            what += f"with the weights of `{about.transformer_file}`, "
        what += f"trained on {trained_on}."
    if references:
        files = ", ".join(f'load_image("{number + 1}.png")' for number in range(references))
        call += f", {family.image_argument}={files if references == 1 else f'[{files}]'}"
    if readers := name_readers(args, family.model):
        what += f"\n{readers}"

    def write_code(base: Any = None) -> str:
        """Code that draws as samples were drawn with one of `bases`; None: as the flags say."""
        is_other = base is not None and base.prefix
        source = str(about.base if args.rank else about.name)
        variant = args.variant if args.rank else None
        before = [*setup]
        own = base.family if is_other else family
        steps = base.num_inference_steps if is_other else args.num_inference_steps
        scale = base.guidance_scale if is_other else args.guidance_scale
        # the file that the transformer is read from
        file = vars(args).get("transformer_file"), about.transformer_file
        if is_other and about.validation_base and base.base.transformer:
            file = args.validation_base, about.validation_base
        elif is_other and about.validation_base:
            source, variant, before = about.validation_base, base.base.variant, []
            file = None, None
        before += own.usage_before(args.clip_skip)
        if args.rank:
            lora = about.validation_lora if is_other else None
            before = [*load_adapters(own, about.name, lora, args.lora_type == "lokr"), *before]
        if is_other and base.sampler:
            name, options = base.sampler
            given = "".join(f", {key}={json.dumps(value)}" for key, value in options.items())
            before.append(
                f"pipeline.scheduler = {name}.from_config(pipeline.scheduler.config{given})"
            )
        opener = "DiffusionPipeline.from_pretrained"
        if source.endswith(".safetensors"):
            opener = f"{own.pipeline}.from_single_file"
        transformer = []
        path, shown = file
        if path and shown and args.rank:
            from diffusion_training.families.transformer_file import write_loading

            transformer = write_loading(own.model, path, shown, source, DTYPE)
        guidance = own.guidance_args(scale)
        if own.has_guider and "guidance_scale" in guidance:
            scale = guidance.pop("guidance_scale")
            before = [f"pipeline.guider.guidance_scale = {scale:g}", *before]
        drawn = call_pipeline(about, args.resolution, steps, guidance)
        max_tokens = vars(args).get("max_sequence_length")
        drawn += own.usage(args.resolution, args.clip_skip, max_tokens) + call
        more = f', variant="{variant}"' if variant else ""
        return write_usage(
            source, drawn, before, opener, own.precision, more, args.resolution,
            blocks=own.blocks, can_rewrite=own.can_rewrite, dtype_name=DTYPE,
            transformer=transformer, first_image=own.first_image,
        )  # fmt: skip

    usage = write_code()
    for other in bases[1:]:
        what += f"\nSamples were also drawn with {other.describe()}."
        usage = f"# {other.describe()}\n{write_code(other)}\n\n# {bases[0].describe()}\n{usage}"
    paths = {about.base: args.pretrained_model_name_or_path}
    paths[about.validation_base] = args.validation_base
    for shown, path in paths.items():
        if args.rank and shown != path:  # a card cuts paths
            usage = f'# Put the path or the id of this base in place of "{shown}"\n{usage}'
    tag = family.title.lower().replace(" ", "-").replace(".", "")
    task = "image-to-image" if references else "text-to-image"
    tags = [task, tag, "diffusers-training"]
    base = None if is_new else args.pretrained_model_name_or_path
    return Description(tags + ["lora"] * bool(args.rank), what, usage, base)


def call_pipeline(about: About, side: int, num_steps: int, guidance: dict[str, float]) -> str:
    """Return the arguments of a text-to-image pipeline that draw as the samples were drawn."""
    numbers = {"height": side, "width": side, "num_inference_steps": num_steps}
    given = (f"{name}={value:g}" for name, value in (numbers | guidance).items())
    return ", ".join([f"prompt={about.prompt}", *given])


def load_adapters(family: Family, path: str, other: str | None, is_lokr: bool) -> list[str]:
    """Code that loads a trained LoRA into a pipeline, and the LoRA `other` if there is one."""
    # some pipelines have this method, as PRX's, and a model that can't take a LoRA
    takes_lora = hasattr(getattr(diffusers, family.model), "load_lora_adapter")
    is_whole = takes_lora and hasattr(getattr(diffusers, family.pipeline), "load_lora_weights")
    is_whole = is_whole and not is_lokr  # most pipelines' load_lora_weights refuses a LoKr
    owner = "pipeline" if is_whole else f"pipeline.{family.folder}"
    named = {path: "trained"} | ({other: "speed"} if other else {})
    lines = [] if takes_lora else [*ADD_ADAPTERS]
    for file, name in named.items():
        more = f', adapter_name="{name}"' if other else ""
        if is_whole:
            lines.append(f"pipeline.load_lora_weights({json.dumps(file)}{more})")
            continue
        weights = ', weight_name="pytorch_lora_weights.safetensors"' if file == path else ""
        lines.append(
            f'{owner}.load_lora_adapter({json.dumps(file)}, prefix="{family.folder}"{weights}'
            f"{more})  # diffusers 0.42 or newer"
        )
    if other:
        lines.append(f"{owner}.set_adapters({json.dumps([*named.values()])})")
    return lines
