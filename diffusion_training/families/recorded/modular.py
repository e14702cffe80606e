"""Pipelines of blocks (`ModularPipeline`, as of FLUX.3), called like the other pipelines.

1. `get_pipeline_class` makes a subclass with `encode_prompt` and a `__call__` of named arguments.
2. `convert_index` turns modular_model_index.json into the form of model_index.json.
3. Blocks with a model for captions alone, as Anima's text_conditioner, belong to `encode_prompt`.
4. Captions stay as they are: a block that rewrites them with a language model is left out.
"""

import contextlib
import functools
import inspect
import logging
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import diffusers
import torch
from diffusers.modular_pipelines import ComponentSpec, ModularPipeline, PipelineState

from diffusion_training.errors.sentences import explained

MOST_TOKENS = 512  # of a caption: FLUX.3 would take 8192, each with 20,480 numbers


def get_pipeline_class(index: dict[str, Any]) -> Any:
    """The class of a pipeline in diffusers, or None. index: model_index.json."""
    name = str(index.get("_class_name"))
    # an older diffusers may import what the installed transformers has no more
    with explained(f"diffusers can't import {name} beside the other libraries installed here"):
        kind: Any = getattr(diffusers, name, None)
    if not (isinstance(kind, type) and issubclass(kind, ModularPipeline)):
        return kind
    name = index.get("_blocks_class_name")
    # as diffusers does for blocks that it does not have
    if not getattr(getattr(diffusers, str(name), None), "block_classes", None):
        name = vars(kind).get("default_blocks_name")
    return adapt(kind, name) if name else kind


@contextlib.contextmanager
def silencing() -> Iterator[None]:
    """Leave out all messages of loggers, also of expected errors.

    Warnings of diffusers and transformers would be about our probes, not the user's captions.
    """
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)


def walk(block: Any) -> Iterator[Any]:
    """A block and all blocks in it."""
    yield block
    for inner in block.sub_blocks.values():
        yield from walk(inner)


class CallableMixin:
    """Mixin that lets a modular pipeline be called like the others."""

    blocks_name: str  # the class of its blocks
    own_blocks: Any  # all but those that encode captions
    text_blocks: list[Any]  # those, in their order
    encoded: list[str]  # their results, except those that one of them reads
    of_text: dict[str, Any]  # {input of the first of these: its default}
    of_images: set[str]  # inputs of the others
    expected: dict[str, Any]  # {part: its ComponentSpec}
    created: dict[str, dict[str, Any]]  # {part that the blocks make: its config}
    can_rewrite: bool  # was there a block that rewrites captions?

    def __init__(self, **parts: Any) -> None:
        with silencing():  # guiders say that they are experimental
            super().__init__(blocks=self.own_blocks)  # type: ignore[call-arg]
        pipeline: Any = self
        # Each part gets a folder of its own, also a scheduler, which keeps --shift. It is read as
        # the part's own class, which is not always the one that the blocks expect.
        pipeline._component_specs |= self.expected | {
            name: ComponentSpec(name, type_hint=type(part))
            for name, part in parts.items()
            if part is not None
        }
        pipeline.register_components(**parts)

    @classmethod
    def _get_signature_keys(cls, kind: Any) -> tuple[set[str], set[str]]:
        """The parts of the pipeline, and those of them that it can do without."""
        return set(cls.expected), set(cls.created)

    def encode_prompt(
        self, prompt: list[str], negative_prompt: list[str] | None = None, **options: Any
    ) -> list[Any]:
        """Encode each caption alone, as the blocks do; shorter rows are padded with zeros."""
        given = self.of_text | options
        given["negative_prompt"] = negative_prompt[0] if negative_prompt else None
        rows = []
        for caption in prompt:
            state = PipelineState()
            for name, value in given.items():
                state.set(name, value)
            state.set("prompt", caption)
            for block in self.text_blocks:
                block(self, state)
            rows.append([state.get(name) for name in self.encoded])
        return [join(column) for column in zip(*rows, strict=True)]

    def draw(self, prompt: list[str], guidance_scale: float = 1.0, **options: Any) -> Any:
        """Draw images of encoded captions, with the guider if there is guidance."""
        pipeline: Any = self
        if "guider" in self.created:
            pipeline.guider.guidance_scale = guidance_scale
            if guidance_scale > 1:
                pipeline.guider.enable()
            else:
                pipeline.guider.disable()
        asked = {name: value for name, value in options.items() if name in self.of_text}
        encoded = self.encode_prompt(prompt, **asked)
        options = {
            name: value
            for name, value in options.items()
            if name not in self.of_text or name in self.of_images
        }
        if "prompt" in self.of_images:  # some of the other blocks read it, too
            options["prompt"] = prompt
        options |= dict(zip(self.encoded, encoded, strict=True))
        state = super().__call__(**options)  # type: ignore[misc]
        return SimpleNamespace(images=state.get("images"))

    def set_progress_bar_config(self, **options: Any) -> None:
        """Of all blocks, also those inside of others."""
        for block in walk(self.own_blocks):
            if hasattr(block, "set_progress_bar_config"):
                block.set_progress_bar_config(**options)

    def save_pretrained(self, folder: Any) -> None:
        super().save_pretrained(str(folder), overwrite_modular_index=True)  # type: ignore[misc]


@functools.cache
@silencing()
def adapt(kind: Any, blocks_name: str) -> Any:
    """A subclass of a modular pipeline that is called like the other pipelines of diffusers.

    blocks_name: their class. If it has no block named text_encoder, the result is the pipeline's
    class itself, without `encode_prompt`.
    """
    blocks = getattr(diffusers, blocks_name)()
    can_rewrite = blocks.sub_blocks.pop("prompt_upsampler", None) is not None
    expected = {spec.name: spec for spec in blocks.expected_components}
    text_block = blocks.sub_blocks.pop("text_encoder", None)
    if text_block is None:
        return kind
    first = {each.name for each in text_block.intermediate_outputs}
    text_blocks = [text_block, *take_readers(blocks, first)]
    read = {each.name for block in text_blocks[1:] for each in block.inputs}
    results = [
        each.name
        for block in text_blocks
        for inner in walk(block)
        if not inner.sub_blocks and has_model(inner)  # others resize references, as the VAE's do
        for each in inner.intermediate_outputs
    ]
    # QwenImageLayered writes a caption where there is none
    encoded = [name for name in dict.fromkeys(results) if name not in read | {"prompt"}]
    of_text = {each.name: each.default for each in text_block.inputs}
    created = {}
    for name, spec in expected.items():
        if spec.default_creation_method == "from_config":
            part = spec.create()
            created[name] = {"_class_name": type(part).__name__} | dict(getattr(part, "config", {}))
    of_images = {each.name: each.default for each in blocks.inputs if each.name}
    inputs = of_text | of_images
    defaults = {name: value for name, value in inputs.items() if name not in encoded}
    limit = {}
    if "max_sequence_length" in defaults:
        limit["max_sequence_length"] = min(MOST_TOKENS, defaults["max_sequence_length"])
        defaults |= limit
    if "guider" in created:
        defaults["guidance_scale"] = created["guider"]["guidance_scale"]

    def call(self: Any, **options: Any) -> Any:
        return self.draw(**limit | options)

    named = [inspect.Parameter("self", inspect.Parameter.POSITIONAL_ONLY)]
    named += [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=value)
        for name, value in defaults.items()
    ]
    call.__signature__ = inspect.Signature(named)  # type: ignore[attr-defined]
    names = {
        "blocks_name": blocks_name,
        "own_blocks": blocks,
        "text_blocks": text_blocks,
        "encoded": encoded,
    }
    names |= {"of_text": of_text, "expected": expected, "created": created}
    names |= {"of_images": {*of_images}}
    names |= {"can_rewrite": can_rewrite, "__call__": call, "__module__": kind.__module__}
    return type(kind.__name__, (CallableMixin, kind), names)


def take_readers(blocks: Any, results: set[str]) -> list[Any]:
    """Remove the blocks with a model that read nothing but results of captions.

    Returns them, once each: the same block is in those for images and for edits.
    """
    taken = {}
    for block in walk(blocks):
        for name, inner in list(block.sub_blocks.items()):
            if has_model(inner) and results.issuperset(each.name for each in inner.inputs):
                taken[name] = block.sub_blocks.pop(name)
    return list(taken.values())


def has_model(block: Any) -> bool:
    """Whether a block calls a model besides the denoiser and the VAE."""
    return any(
        issubclass(spec.type_hint or object, torch.nn.Module)
        for spec in block.expected_components
        if spec.name not in ("transformer", "vae")
    )


def convert_index(config: dict[str, Any]) -> dict[str, Any]:
    """modular_model_index.json as model_index.json would list it, without unused parts.

    Its entry _created has the configs of parts that have no folder, since the blocks make them.
    """
    names = ("_class_name", "_blocks_class_name")
    index: dict[str, Any] = {name: config[name] for name in names if config.get(name)}
    kind = get_pipeline_class(index)
    used = getattr(kind, "expected", {})
    for part, entry in config.items():
        if part in used and isinstance(entry, list) and len(entry) == 3:
            # a part without a class is null, or is only named by where it is
            if entry[1]:
                index[part] = entry[:2]
            elif entry[2].get("pretrained_model_name_or_path"):
                index[part] = list(entry[2]["type_hint"])
    scheduler = getattr(kind, "created", {}).get("scheduler")
    if scheduler and "scheduler" not in index:
        index["scheduler"] = ["diffusers", scheduler["_class_name"]]
        index["_created"] = {"scheduler": scheduler}
    return index


def join(rows: Sequence[Any]) -> Any:
    """Results of captions that were encoded alone, [1, tokens, ...] each, as one tensor.

    A block may return a list with a tensor for each caption instead; the result is such a list.
    """
    if isinstance(rows[0], list):
        return [tensor for row in rows for tensor in row]
    tensors = [row.squeeze(0) for row in rows if row is not None]
    return torch.nn.utils.rnn.pad_sequence(tensors, batch_first=True) if tensors else None
