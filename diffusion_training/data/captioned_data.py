"""The opened data of a trainer with captions: what its `main` and the loss read."""

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from diffusion_training.data.captions import count_lengths
from diffusion_training.data.encoders import Latents
from diffusion_training.data.prompts import PromptEmbeds
from diffusion_training.families.base import Encoders, Family


@dataclass(frozen=True)
class Data:
    """The opened data of a run."""

    dataset: Any  # `CaptionedImages` or `CachedLatents`
    family: Family
    latents: Latents
    empty_prompt: dict[str, torch.Tensor]  # for one image, float32, on the device
    # on the device; a cache of tokens needs no VAE, and one of embeddings none of them
    encoders: Encoders | None
    validation: PromptEmbeds | None
    resolution: int
    bucket_step: int | None
    clip_skip: int | None
    caption_weights: list[float] | None
    mask_column: str | None
    num_workers: int  # processes that load the data
    # for the tags in a LoRA's header: at most 10,000, on the first process, none from an address
    captions: Sequence[str] = ()
    class_prompts: PromptEmbeds | None = None  # of --preserve_prior
    classes: tuple[str, ...] = ()  # of a cache made with --class_column
    # references of any values, for one image, as `read_references` adds them to the condition
    references: dict[str, torch.Tensor] = field(default_factory=dict)

    folders: dict[str, Any] = field(default_factory=dict)  # of --data: {folder: its flags}

    @functools.cached_property
    def empty_length(self) -> int:
        """How many tokens the empty prompt has."""
        embeds = self.empty_prompt["prompt_embeds"]
        return int(self.empty_prompt.get("prompt_mask", torch.ones(len(embeds))).sum())

    @property
    def num_lengths(self) -> int:
        """How many lengths `choose_length` gives to the captions of a batch.

        1 if the model sees all padding, or is called with captions of any length.
        """
        if self.family.needs_lengths or "prompt_mask" not in self.empty_prompt:
            return 1
        return count_lengths(len(self.empty_prompt["prompt_embeds"]))

    @property
    def is_followed(self) -> bool:
        """Whether the cache may still be in the making (--follow)."""
        return getattr(self.dataset, "wait_for_images", None) is not None

    @property
    def num_references(self) -> int:
        """How many images an edit starts from."""
        return len(self.references) // 2  # each has an entry for its size

    @property
    def loaded_encoders(self) -> Encoders:
        """The encoders, for a batch of pixels or tokens."""
        assert self.encoders
        return self.encoders

    def modules(self) -> list[torch.nn.Module]:
        """The encoders on the device."""
        return self.encoders.modules() if self.encoders else []

    def settings(self) -> dict[str, Any]:
        """The values that a checkpoint records, under the names of the flags."""
        settings: dict[str, Any] = {
            "resolution": self.resolution,
            "clip_skip": self.clip_skip,
            "caption_weights": self.caption_weights,
            "mask_column": self.mask_column,
            "dataloader_num_workers": self.num_workers,
        }
        if self.folders:
            settings["folders"] = self.folders
        if order := getattr(self.dataset, "order", None):
            settings |= {"order": order, "shuffle_shards": order["shuffle_shards"]}
        return settings
