"""How far a run is, and what is due. Arithmetic only."""

import math
from typing import Any, NamedTuple

from diffusion_training.errors.sentences import fail
from diffusion_training.order import Order


def format_duration(seconds: float) -> str:
    """Format a duration, such as "58 s", "4 min 10 s", "2 h 5 min"."""
    minutes, rest = divmod(round(seconds), 60)
    if minutes == 0:
        return f"{rest} s"
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


class NextStep(NamedTuple):
    """A step that is about to be taken, on all processes together."""

    number: int  # of steps begun before it, also those that fp16 skipped; it keys the randomness
    epoch: int  # of its images, counted from 0
    images: int
    micro_batches: int


class Progress:
    """How far a run is.

    `global_step` counts optimizer steps, `data_step` also those that fp16 skipped. `images_seen` is
    the position in the data.

    state: see `read_state`.
    num_images: images per epoch.
    images_per_micro_batch: on all processes together.
    order: the `Order` of the images; it matters only if they have several sizes.
    """

    def __init__(
        self,
        state: dict,
        num_images: int,
        images_per_micro_batch: int,
        accumulation_steps: int,
        order: Order | None = None,
    ) -> None:
        self.global_step = state["global_step"]
        self.data_step = state["data_step"]
        self.images_seen = state["images_seen"]
        self.num_images = num_images
        self.images_per_micro_batch = images_per_micro_batch
        self.images_per_step = images_per_micro_batch * accumulation_steps
        self.stepped = True
        self.order = order if order and order.num_sizes > 1 else None
        # (epoch, its rows in the order of their batches)
        self.arranged: tuple[Any, Any] = None, None
        # With several image sizes, the order depends on the batch sizes. A resumed run keeps those
        # of its start.
        self.cuts = state.get("cuts") or (self.images_per_step, images_per_micro_batch)

    @property
    def epoch(self) -> int:
        """The epoch of the next image, counted from 0."""
        return self.images_seen // self.num_images

    @property
    def steps_per_epoch(self) -> int:
        return math.ceil(self.num_images / self.images_per_step)

    def next_step(self) -> NextStep:
        """Return the next step; an epoch's last step takes the images that are left.

        Its size depends on `images_seen` alone, so a resumed run takes the same steps.
        """
        epoch = self.epoch
        images = min(self.images_per_step, self.num_images - self.images_seen % self.num_images)
        if self.order is None:
            micro_batches = math.ceil(images / self.images_per_micro_batch)
        else:
            if self.arranged[0] != epoch:
                self.arranged = epoch, self.order.arrange(epoch, *self.cuts)
            start = self.images_seen % self.num_images
            rows = self.arranged[1][start : start + images]
            micro_batches = len(self.order.cut(rows, self.images_per_micro_batch))
        return NextStep(self.data_step, epoch, images, micro_batches)

    def advance(self, images: int, stepped: bool) -> None:
        """Record a step; `stepped` is False if fp16 skipped it because of an overflow."""
        self.data_step += 1
        self.images_seen += images
        self.stepped = stepped
        self.global_step += stepped
        overflows = self.data_step - self.global_step
        # a few at the start are normal: the scaler is looking for its scale
        if overflows > 50 + self.data_step / 100:
            fail(
                f"{overflows} of {self.data_step} fp16 steps overflowed: use bf16 or a lower "
                "--learning_rate"
            )

    def is_due(self, steps: int | None, epochs: int | None = None) -> bool:
        """Return whether something that comes every `steps` steps is due now.

        If `steps` is None, it comes every `epochs` epochs. A skipped step counts only for epochs:
        otherwise, the same step would be due twice.
        """
        if steps is not None:
            return self.stepped and self.global_step > 0 and self.global_step % steps == 0
        return epochs is not None and self.images_seen % (epochs * self.num_images) == 0

    def last_step(self, num_epochs: int) -> int:
        """Return the step at which `num_epochs` end: the steps so far plus those still to do."""
        images_left = self.num_images - self.images_seen % self.num_images
        rest_of_epoch = math.ceil(images_left / self.images_per_step)
        return self.data_step + rest_of_epoch + (num_epochs - self.epoch - 1) * self.steps_per_epoch

    def num_epochs(self, last_step: int) -> int:
        """Return the number of epochs that a run begins until a step, if fp16 skips no more."""
        images_left = self.num_images - self.images_seen % self.num_images
        later_steps = last_step - self.global_step - math.ceil(images_left / self.images_per_step)
        return self.epoch + 1 + max(0, math.ceil(later_steps / self.steps_per_epoch))

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores."""
        state = {
            "global_step": self.global_step,
            "data_step": self.data_step,
            "images_seen": self.images_seen,
        }
        return state | ({"cuts": self.cuts} if self.order else {})
