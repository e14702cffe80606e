"""Prompts of flags, encoded once at the start of a run."""

import math
from argparse import Namespace
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from accelerate.utils import broadcast_object_list

from diffusion_training.data.encoders import encode_caption, encode_empty_prompt, load_encoders
from diffusion_training.data.prompt_file import split_prompt
from diffusion_training.errors.sentences import explained, fail
from diffusion_training.families.base import Base, Encoders, Prompts
from diffusion_training.launch import Launch
from diffusion_training.memory import move
from diffusion_training.models import EXACT

MOST_CLASS_PROMPTS = 32


@dataclass(frozen=True)
class PromptEmbeds:
    """Prompts of a flag, encoded once at the start, in float32 on the CPU."""

    prompts: list[Prompts]  # each [1, ...]
    empty: Prompts  # [1, ...], for guidance
    images: Sequence[list[Any]] = ()  # the references of each prompt, as Pillow's images
    # for each prompt a negative or empty one, if there are negative ones or the text encoder sees
    # the references
    empties: Sequence[Prompts] = ()

    def choose(self, numbers: Sequence[int], device: torch.device) -> tuple[Prompts, Prompts]:
        """Return (the prompts with these numbers, the empty prompt), on the device."""
        chosen = {name: self.stack(name, numbers, device) for name in self.empty}
        own = self.empties[numbers[0]] if self.empties else self.empty
        empty = {name: move(value, device) for name, value in dict[str, Any](own).items()}
        return cast(Prompts, chosen), cast(Prompts, empty)

    def choose_condition(
        self, numbers: Sequence[int], device: torch.device, like: Collection[str]
    ) -> dict[str, torch.Tensor]:
        """Return the prompts with these numbers as parts of a condition `like` a batch's."""
        chosen = {name: self.stack(name, numbers, device) for name in self.empty}
        if "prompt_lengths" in like:
            masks = self.stack("prompt_mask", numbers, torch.device("cpu"))
            chosen["prompt_lengths"] = masks.sum(dim=1)
        return chosen

    def stack(self, name: str, numbers: Sequence[int], device: torch.device) -> torch.Tensor:
        prompts = [dict[str, Any](self.prompts[number]) for number in numbers]
        return move(torch.cat([prompt[name] for prompt in prompts]), device)


def encode_class_prompts(
    launch: Launch, base: Base, encoders: Encoders | None, captions: Sequence[str], args: Namespace
) -> PromptEmbeds | None:
    """Encode --class_prompt or, with --trigger, the captions in which it replaces the trigger.

    They are at most `MOST_CLASS_PROMPTS`, evenly chosen, since T5 takes seconds for one on a CPU.

    captions: of some or all images, on the first process.
    """
    prompts = args.class_prompt
    if args.trigger and launch.is_main:
        with_class = {
            text.replace(args.trigger, prompts[0]) for text in captions if args.trigger in text
        }
        if not with_class:
            fail(
                f"--trigger {args.trigger!r} is in none of {len(captions)} captions: correct it, "
                "or leave it out and give whole prompts as --class_prompt"
            )
        found = sorted(with_class)
        prompts = found[:: math.ceil(len(found) / MOST_CLASS_PROMPTS)]
    return encode_for_all(launch, base, encoders, prompts)


def encode_validation_prompts(
    launch: Launch,
    base: Base,
    encoders: Encoders | None,
    args: Namespace,
    images: Sequence[list[Any]] = (),
) -> PromptEmbeds | None:
    """Encode --validation_prompts, or those of --validation_prompts_file; see `encode_for_all`."""
    if not args.validation_prompts_file:
        return encode_for_all(launch, base, encoders, args.validation_prompts, images)
    texts, values = zip(*map(split_prompt, args.validation_prompts), strict=True)
    negatives = [each.get("negative_prompt", "") for each in values]
    return encode_for_all(launch, base, encoders, [*texts], images, negatives)


def encode_for_all(
    launch: Launch,
    base: Base,
    encoders: Encoders | None,
    prompts: list[str] | None,
    images: Sequence[list[Any]] = (),
    negatives: Sequence[str] = (),
) -> PromptEmbeds | None:
    """Encode the prompts of a flag in float32 on the first process, and send them to all.

    images: the references of each prompt. negatives: the negative prompt of each, empty for none.
    encoders: `EXACT` or in float32; None: loaded here.
    Prompts are encoded one by one, so that the samples of one do not depend on the others.
    """
    if not prompts:
        return None
    sent: list[PromptEmbeds | None] = [None]
    if launch.is_main:
        encoders = encoders or load_encoders(base, EXACT, with_vae=False)

        def encode_empty(references: list[Any] | None = None, negative: str = "") -> Any:
            empty = encode_empty_prompt(encoders, base, references)
            if negative:
                caption: Any = encode_caption(encoders, negative, references)
                return {name: caption[name] for name in empty}
            return {name: embeds[None] for name, embeds in empty.items()}

        of_each = images or [[]] * len(prompts)
        pairs = zip(prompts, of_each, strict=True)
        with explained("the text encoder does not work"):
            encoded = [encode_caption(encoders, *pair) for pair in pairs]
        empties: Sequence[Any] = ()
        if any(negatives) or (images and encoders.family.reads_references):
            empties = [*map(encode_empty, of_each, negatives or [""] * len(prompts))]
        sent = [PromptEmbeds(encoded, encode_empty(), images, empties)]
    if launch.num_processes > 1:
        broadcast_object_list(sent)
    return sent[0]
