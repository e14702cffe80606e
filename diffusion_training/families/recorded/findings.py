"""What a recorded pipeline makes of captions and references, found out with its text encoders.

1. `TextParts` runs the pipeline's own code up to the end of `encode_prompt`, or further.
2. `probe_readers` finds how captions are cut.
3. `probe_references` tells how the pipeline uses references, the images that an edit starts from.
4. `turn_guidance_off` finds the arguments with which the denoiser is called for captions alone.
5. `describe_captions` tells what becomes of a caption (see text_tensors.py) and how samples are
   drawn with guidance.
6. What 3 to 5 tell is plain JSON, the findings of a recorded family, and is kept in cache.json.
"""

import copy
import itertools
import math
from contextlib import suppress
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from PIL import Image
from transformers import PreTrainedTokenizerBase

from diffusion_training.errors.printing import amount
from diffusion_training.families.recorded.calls import PROBED_SIDES, measure_noise
from diffusion_training.families.recorded.pipeline_run import (
    ONE_FRAME,
    SWITCHED_OFF,
    PipelineCode,
    PipelineTrace,
)
from diffusion_training.families.recorded.reference_latents import (
    as_argument,
    join_alone,
    make_blanks,
    measure_side,
)
from diffusion_training.families.recorded.tape import Unrecordable
from diffusion_training.families.recorded.text_tensors import (
    LONG,
    SHORT,
    TextTensor,
    describe_guided,
    describe_result,
    is_equal,
    list_numbers,
    rebuild_results,
    stack_rows,
    take_rows,
)
from diffusion_training.models import list_tensors

GUIDANCE = ("true_cfg_scale", "guidance_scale")  # arguments of pipelines
# of pipelines, for the images that an edit starts from
IMAGE_ARGUMENTS = ("image", "images", "condition_image", "control_image", "image_reference")
PROBED_SCALE = 4.0
ROUNDING = 1.25  # how many more tokens a reference may have than a square with as many pixels


class TextParts(torch.nn.Module):
    """The text encoders of a pipeline with its tokenizers, as one module."""

    def __init__(
        self,
        code: PipelineCode,
        models: dict[str, Any],
        others: dict[str, Any],
        options: dict[str, Any],
        images: list[Any],
    ) -> None:
        """others: tokenizers and processors. options: arguments of the pipeline.

        images: references, where a caption has none of its own.
        """
        super().__init__()
        self.encoders = torch.nn.ModuleDict(models)
        self.others = others
        self.code = code
        self.options = options
        self.images = images
        self.image_argument = "image"  # of the pipeline, for references

    @property
    def dtype(self) -> torch.dtype:
        return next(self.parameters()).dtype

    @torch.no_grad()
    def record(
        self,
        captions: list[str],
        options: dict[str, Any],
        ends_at: str = "text",
        images: list[Any] | None = None,
        run: PipelineTrace | None = None,
    ) -> PipelineTrace:
        """Run the pipeline's code for captions. options: further arguments of the pipeline.

        images: references of the captions. run: used in place of one that ends at `ends_at`.
        """
        images = self.images if images is None else images
        options = options | ({self.image_argument: as_argument(images)} if images else {})
        self.code.pipeline.own_device = next(self.parameters()).device
        height, width = PROBED_SIDES
        run = run or PipelineTrace(ends_at, torch.zeros)
        self.code(captions, self.options | {"height": height, "width": width} | options, run)
        if not run.encoded:
            raise Unrecordable("it does not encode captions by encode_prompt")
        return run


def probe_readers(parts: TextParts) -> list[partial[Any]]:
    """For each call in which a tokenizer may cut a caption: a function that repeats it."""
    readers: list[partial[Any]] = []
    call = PreTrainedTokenizerBase.__call__

    def watch(self: Any, text: Any = None, *args: Any, **options: Any) -> Any:
        for each in text if isinstance(text, list) else [text]:
            before, found, behind = str(each).partition(SHORT)
            if found and self.is_fast and options.get("truncation"):
                readers.append(partial(read_caption, self, options, before, behind))
        return call(self, text, *args, **options)

    # a pipeline whose code stops is refused later, with a reason
    with patch.object(PreTrainedTokenizerBase, "__call__", watch), suppress(Unrecordable):
        parts.record([SHORT], {})
    return copy.deepcopy(readers)  # a tokenizer can't be called by two threads at once


def read_caption(tokenizer: Any, options: Any, before: str, behind: str, caption: str) -> Any:
    """The encoding of a caption. before, behind: what surrounds it in the tokenizer's text."""
    return tokenizer([before + caption + behind], **options).encodings[0]


def probe_references(parts: TextParts) -> dict[str, Any]:
    """How the pipeline uses references; {} if there are none, and none are needed.

    It is called without them, and with them under each name of `IMAGE_ARGUMENTS` that it has.
    """
    names = [name for name in IMAGE_ARGUMENTS if name in parts.code.has]
    if not names:
        return {}
    faults: dict[str | None, str] = {}  # {argument, or None: why the call fails}
    alone = None
    try:
        alone = parts.record([SHORT], {}, "denoiser", images=[])
    except Unrecordable as error:
        faults[None] = str(error)
    if alone and not parts.images:
        return {}
    if any(name in parts.code.has for name in ONE_FRAME):
        raise Unrecordable(
            f"it makes a video of {names[0]}, which stills can't teach: choose a pipeline that "
            f"draws from text alone ({faults[None]})"
        )
    count = len(parts.images)
    parts.images = parts.images or make_blanks([PROBED_SIDES])
    for name in names:
        parts.image_argument = name
        try:
            white = try_references(parts)
        except Unrecordable as error:
            faults[name] = str(error)
            continue
        black = [Image.new("RGB", image.size) for image in parts.images]
        other = parts.record([SHORT], {}, images=black)
        runs = filter(None, (white, other, alone))
        first, *texts = (list_tensors(run.encoded[0]) for run in runs)
        are_read = not all(is_equal_list(first, each) for each in texts)
        found: dict[str, Any] = {
            "count": len(parts.images),
            "are_needed": alone is None,
            "are_read": are_read,
        }
        return found | ({"name": name} if name != "image" else {})
    raise Unrecordable(describe_faults(faults, count))


def describe_faults(faults: dict[str | None, str], count: int) -> str:
    """Why a pipeline can't be called, without references and with so many."""
    calls: dict[str, list[str]] = {}  # {fault: the calls that have it}
    for name, fault in faults.items():
        calls.setdefault(fault, []).append(f"with {name}=" if name else "without an image")
    said = [f"{', '.join(how)}, {fault}" for fault, how in calls.items()]
    return f"it can't be called with {amount(count, 'reference')}: " * (count > 0) + "; ".join(said)


def try_references(parts: TextParts) -> PipelineTrace:
    """Call the pipeline with references as large as those of a cache, which `parts` then has.

    Raises Unrecordable if its denoiser does not get each number of their latents, beside the noise.
    """
    side = measure_side(parts.record([SHORT], {}, "denoiser").pixels)
    # of these, some text encoders have more tokens than of smaller ones
    parts.images = make_blanks([(side, side)] * len(parts.images))
    run = parts.record([SHORT], {}, "denoiser")
    shapes = [latents.shape for latents in run.latents]
    texts = run.encoded
    zeros, noises, references = (
        list_numbers(parts.record([SHORT], {}, run=each).calls)
        for each in (
            PipelineTrace("denoiser", torch.zeros, texts=texts),
            PipelineTrace("denoiser", torch.ones, texts=texts),
            PipelineTrace(
                "denoiser", torch.zeros, texts=texts, references=[*map(torch.ones, shapes)]
            ),
        )
    )
    if not len(zeros) == len(noises) == len(references):
        raise Unrecordable("its denoiser gets other arguments for other references")
    of_noise, of_references = noises != zeros, references != zeros
    count = sum(map(math.prod, shapes))
    # twice as many with guidance
    is_beside = of_references.any() and int(of_references.sum()) % count == 0
    if not is_beside or (of_noise & of_references).any():
        raise Unrecordable("its denoiser does not get references beside the noise, as edits do")
    wide = {"height": PROBED_SIDES[1], "width": PROBED_SIDES[0]}
    again = PipelineTrace("denoiser", torch.zeros, texts=texts)
    if parts.record([SHORT], wide, run=again).latents[0].shape != shapes[0]:
        raise Unrecordable("it resizes references to the size of the result, which edits do not")
    return run


def is_equal_list(some: list[torch.Tensor], others: list[torch.Tensor]) -> bool:
    return len(some) == len(others) and all(map(is_equal, some, others))


def turn_guidance_off(parts: TextParts) -> dict[str, Any]:
    """Arguments with which the denoiser is called once, for the captions alone."""
    for name, part in parts.code.pipeline.components.items():
        if hasattr(part, "disable") and "guider" in name:
            part.disable()
    names = [name for name in GUIDANCE if name in parts.code.has]
    for values in itertools.product((1.0, 0.0), repeat=len(names)):
        off = dict(zip(names, values, strict=True))
        run = parts.record([SHORT], off, "step")
        measure_noise(run)
        if not is_guided(run):
            return off
    raise Unrecordable("its denoiser is always called with guidance")


def is_guided(run: PipelineTrace) -> bool:
    """Whether the denoiser was called twice, or with more latents than the caption has."""
    given = sum(tensor.numel() for tensor in list_tensors(next(iter(run.calls[0].values()))))
    noise = math.prod(run.noise_shapes[0])
    # references are in the same argument, or in one of their own
    expected = noise, noise + sum(latents.numel() for latents in run.latents)
    return len(run.calls) > 1 or given not in expected


def describe_captions(
    parts: TextParts, references: dict[str, Any], most_tokens: int
) -> dict[str, Any]:
    """All findings. references: see `probe_references`. most_tokens: of a caption, 0 if unknown."""
    off = turn_guidance_off(parts)
    most = parts.options.get("max_sequence_length", most_tokens or None)
    if most and references.get("are_read"):
        # references have tokens too, and more if they are no squares, since sides are rounded
        embeds, *_ = list_tensors(parts.record([SHORT], off).encoded[0])
        most += math.ceil(ROUNDING * embeds.shape[1])
    structure, described = describe_result(partial(record_together, parts, off), most)
    findings = {"off": off, "structure": structure, "parts": described}
    findings |= {"references": references} if references else {}
    findings["guided"] = probe_guidance(parts, off, structure, described)
    findings["own"] = {
        name: value for name, value in SWITCHED_OFF.items() if name in parts.code.has
    }
    return findings | parts.options


def check_findings(findings: dict[str, Any]) -> None:
    """Raise an error if findings from a file are not as `describe_captions` returns them."""
    parts, guided = findings["parts"], findings["guided"]
    used: list[TextTensor] = []
    check_structure(findings["structure"], parts, ("caption",), used)
    if any(part not in used or used.count(part) > 1 for part in parts):
        raise ValueError("its parts are not those of its structure")
    off = findings["off"]
    if not off.keys() <= {*GUIDANCE} or any(type(value) is not float for value in off.values()):
        raise ValueError(f"guidance is turned off by {off}")
    if not findings["own"].items() <= SWITCHED_OFF.items():
        raise ValueError(f"the pipeline is called with {findings['own']}")
    if guided is not None:
        if guided["from_zero"] is not (off[guided["name"]] == 0):
            raise ValueError(f"guidance is turned on by {guided}")
        check_structure(guided["results"], parts, ("caption", "empty"), used)
    if about := findings.get("references"):
        are_flags = all(type(about[name]) is bool for name in ("are_needed", "are_read"))
        if not are_flags or type(about["count"]) is not int or about["count"] < 1:
            raise ValueError(f"its references are {about}")


def check_structure(
    node: Any, parts: list[TextTensor], sources: tuple[str, ...], used: list[TextTensor]
) -> None:
    """Raise an error if the structure of results has other parts than `parts`. Adds them to `used`.

    sources: what its parts may be `of`.
    """
    if isinstance(node, list):
        for each in node:
            check_structure(each, parts, sources, used)
    elif isinstance(node, dict):
        dtype = getattr(torch, node["mask" if "mask" in node else "dtype"])
        part: Any = {**node, "of": "caption"}
        is_known = "mask" in node or part in parts
        if node["of"] not in sources or not is_known or not isinstance(dtype, torch.dtype):
            raise ValueError(f"its structure has an unknown part: {node}")
        if "mask" not in node:
            used.append(part)


def record_together(parts: TextParts, off: dict[str, Any], captions: list[str]) -> Any:
    """The results of captions that are encoded together, or, beside references, alone."""
    if parts.images:
        return join_alone([parts.record([caption], off).encoded[0] for caption in captions])
    return parts.record(captions, off).encoded[0]


def probe_guidance(
    parts: TextParts, off: dict[str, Any], structure: Any, described: list[TextTensor]
) -> dict[str, Any] | None:
    """The argument that turns guidance on, and what encode_prompt returns then.

    None if samples can't be drawn with guidance, of a caption and an empty prompt of any length.
    """
    alone, longer = (parts.record([text], off).encoded[0] for text in (SHORT, LONG))
    sources = {
        of: stack_rows(described, [take_rows(structure, result)])
        for of, result in (("caption", alone), ("empty", longer))
    }
    for name in off:
        asked = turn_on(off, name)
        try:
            run = parts.record([SHORT], asked, "step")
            if is_guided(run):
                results = [describe_guided(each, structure, alone) for each in run.encoded]
                texts = [rebuild_results(each, sources) for each in results]
                again = PipelineTrace("step", torch.zeros, texts=texts)
                parts.record([SHORT], asked, run=again)
                return {"name": name, "results": results, "from_zero": off[name] == 0}
        except Unrecordable:
            continue
    return None


def turn_on(off: dict[str, Any], name: str) -> dict[str, Any]:
    """Arguments of a pipeline with guidance, by the argument `name`."""
    return off | {name: PROBED_SCALE, "negative_prompt": [""]}
