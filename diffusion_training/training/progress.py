"""Where a run is, and what is due: arithmetic only."""

import math
from typing import Any

from diffusion_training.errors import fail
from diffusion_training.order import Order


class Progress:
    """Where a run is: `global_step` counts optimizer steps, `data_step` also those that fp16 skipped, and
    `images_seen` is where the data goes on.

    state: of `read_state`. num_images: of an epoch. images_per_micro_batch: on all processes together. order: the
    `Order` of the images, None of a stream.
    """

    def __init__(
        self,
        state: dict,
        num_images: int,
        images_per_micro_batch: int,
        accumulation_steps: int,
        order: Order | None = None,
    ) -> None:
        self.global_step, self.data_step = state["global_step"], state["data_step"]
        self.images_seen, self.num_images = state["images_seen"], num_images
        self.images_per_micro_batch = images_per_micro_batch
        self.images_per_step = images_per_micro_batch * accumulation_steps
        self.stepped, self.order = True, order
        self.arranged: tuple[Any, Any] = None, None  # an epoch, and its rows in the order of their batches
        # Of the run's start: they cut an order of several sizes, which other batches must not change
        self.cuts = state.get("cuts") or (self.images_per_step, images_per_micro_batch)

    @property
    def epoch(self) -> int:
        """The epoch that the next image is of, counted from 0."""
        return self.images_seen // self.num_images

    def next_step(self) -> tuple[int, int]:
        """(images, micro-batches) of the next step: the last one of an epoch takes what is left.

        This follows from `images_seen` alone, so that a resumed run agrees.
        """
        images = min(self.images_per_step, self.num_images - self.images_seen % self.num_images)
        if self.order is None or self.order.num_sizes == 1:
            return images, math.ceil(images / self.images_per_micro_batch)
        if self.arranged[0] != self.epoch:
            self.arranged = self.epoch, self.order.arrange(self.epoch, *self.cuts)
        start = self.images_seen % self.num_images
        return images, len(self.order.cut(self.arranged[1][start : start + images], self.images_per_micro_batch))

    def advance(self, images: int, stepped: bool) -> None:
        """Take note of a step; not `stepped` is one that fp16 has skipped, because it overflowed."""
        self.data_step, self.images_seen, self.stepped = self.data_step + 1, self.images_seen + images, stepped
        self.global_step += stepped
        overflows = self.data_step - self.global_step
        if overflows > 50 + self.data_step / 100:  # some at the start are how the scaler finds its scale
            fail(f"{overflows} of {self.data_step} fp16 steps overflowed: use bf16 or a lower --learning_rate")

    def is_due(self, steps: int | None, epochs: int | None = None) -> bool:
        """Whether what comes every so many `steps`, or if that is None every so many `epochs`, comes now.

        A step that was skipped counts for epochs only, or what is due at a step would be due again.
        """
        if steps is not None:
            return self.stepped and self.global_step > 0 and self.global_step % steps == 0
        return epochs is not None and self.images_seen % (epochs * self.num_images) == 0

    def last_step(self, num_epochs: int) -> int:
        """The step at which `num_epochs` end: the steps so far, and those for the images that are left."""
        steps_per_epoch = math.ceil(self.num_images / self.images_per_step)
        rest_of_epoch = math.ceil((self.num_images - self.images_seen % self.num_images) / self.images_per_step)
        return self.data_step + rest_of_epoch + (num_epochs - self.epoch - 1) * steps_per_epoch

    def state(self) -> dict[str, Any]:
        """What a checkpoint keeps."""
        state = {"global_step": self.global_step, "data_step": self.data_step, "images_seen": self.images_seen}
        return state | ({"cuts": self.cuts} if self.order and self.order.num_sizes > 1 else {})
