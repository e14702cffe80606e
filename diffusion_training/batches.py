"""The types of a training step's values: a batch, the inputs of model and loss, the sums."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NotRequired, Protocol, TypeAlias, TypedDict, final

import torch

Models: TypeAlias = dict[str, torch.nn.Module]


class Batch(TypedDict):
    """A micro-batch of N images from the loader. Its tensors are on the device."""

    weight: torch.Tensor  # [N], factors of the images' losses; 0 for one that can't be used
    skipped: list[tuple[str, str]]  # (name, reason) of images that can't be used
    waited: NotRequired[tuple[Any, Any]]  # when the wait for this batch began and ended


class ImageBatch(Batch):
    """A batch of images."""

    pixel_values: torch.Tensor  # [N, C, H, W], uint8 from 0 to 255, or float32 from 0 to 1


class TrainingData(Protocol):
    """The rows of a trainer: `RowDataset` and `CachedLatents` have these."""

    sizes: Any  # (height, width) of each row, int [rows, 2]; None if all are equal
    fingerprint: str  # a resumed run prints that it has changed
    holds: str  # what `digest` covers: "images" or "latents"
    num_left_out: int  # images that could not be decoded before the run

    def __len__(self) -> int: ...

    def __getitem__(self, keys: list) -> Any:
        """The batch of the keys (epoch, row, weight); see `step_batches`."""

    def longest(self, row: int) -> Any:
        """A batch of one row, with a caption as long as captions can be."""

    def names(self) -> Iterable[str]:
        """The name of each row, by which images are held out."""

    def digest(self, row: int) -> str:
        """A hash of a row's image, to recognize held-out rows."""


class Captions(TypedDict, total=False):
    """The captions of a batch, as tokens or as embeddings; which parts depends on the family."""

    input_ids: torch.Tensor  # [N, tokens]
    input_ids_2: torch.Tensor
    input_ids_3: torch.Tensor
    prompt_embeds: torch.Tensor  # float16 [N, numbers per row]
    pooled_prompt_embeds: torch.Tensor
    prompt_mask: torch.Tensor  # bool [N, tokens]
    prompt_lengths: list[int]


class Crops(TypedDict):
    """How the images of a batch were cut out, and where their loss counts."""

    flipped: torch.Tensor  # bool [N]
    original_size: NotRequired[torch.Tensor]  # int [N, 2], height and width of the image file
    crop_top_left: NotRequired[torch.Tensor]  # int [N, 2]
    mask: NotRequired[torch.Tensor]  # uint8, 255 where the loss counts; mirrored with the image


@final
class CaptionedBatch(ImageBatch, Captions, Crops):
    """A batch of images with captions."""

    # references, uint8 [N, 3 * references, H, W]; only for a script that asks `open_data` for them
    conditioning_pixel_values: NotRequired[torch.Tensor]


@final
class LatentBatch(Batch, Captions, Crops):
    """A batch of a latent cache."""

    latents: torch.Tensor  # float16 [N, numbers per row]
    latents_shape: list[int]  # channels, height and width of a row's latents
    # latents of the images that an edit starts from, float16 [N, numbers per row], from number 0;
    # and for each (height, width) of the latents, then in pixels, 0 if there is none
    reference_0: NotRequired[torch.Tensor]
    reference_sizes: NotRequired[list[list[int]]]


TextToImageBatch: TypeAlias = CaptionedBatch | LatentBatch


# (models, noisy images, timesteps or shares of noise, condition) -> prediction, float32
Predict: TypeAlias = Callable[
    [Models, torch.Tensor, torch.Tensor, dict[str, torch.Tensor]], torch.Tensor
]


class Prepared(NamedTuple):
    """A batch of N images as inputs for the model and the loss."""

    clean: torch.Tensor  # images or latents: float32 [N, C, H, W] of about unit variance
    condition: dict[str, torch.Tensor]  # {name: [N, ...]}, the model's other inputs
    loss_inputs: dict[str, torch.Tensor]  # {name: [N, ...]}, inputs of the loss only


class StepSums(TypedDict):
    """The sums of this process's step: tensors without dimensions, on the device."""

    loss: torch.Tensor  # sum of weight * loss
    weight: torch.Tensor  # sum of weight
    grad_norm: torch.Tensor  # before clipping
    prior_loss: NotRequired[torch.Tensor]  # sum of weight * loss, in steps of --preserve_prior


class HeldOutLoss(NamedTuple):
    """How `log_held_out_loss` measures. `tenths` are levels of noise, int [N], from 1 to 9."""

    # (images, noise, tenths) -> noisy images
    add_noise: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    # (models, noisy images, tenths, condition, images, noise) -> loss of each image [N]
    error: Callable[..., torch.Tensor]


@dataclass(frozen=True)
class Objective:
    """What a trainer's loss consists of: functions of the script, and networks that only they use.

    The loop calls these functions, and so do the held-out loss, --find_lr, --train_batch_size auto
    and the count of operations.
    """

    prepare: Callable[[Any], Prepared]  # the script's `prepare_batch`
    predict: Predict  # calls the model
    # the script's `compute_loss`, (objective, models, prepared, weight) -> sum of weight * loss
    compute_loss: Callable[["Objective", Models, Prepared, torch.Tensor], torch.Tensor]
    held_out_loss: HeldOutLoss
    prepare_held_out: Callable[[Any], Prepared]  # without what is only for training
    frozen: Models = field(default_factory=dict)  # only the loss uses them; never saved
    encoders: Sequence[torch.nn.Module] = ()  # only `prepare` uses them
    prior: Any = None  # `Prior`, with --preserve_prior: a second loss

    def loss(self, models: Models, prepared: Prepared, weight: torch.Tensor) -> torch.Tensor:
        return self.compute_loss(self, models, prepared, weight)
