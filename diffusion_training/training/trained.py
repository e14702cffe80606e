"""What a run trains: the models with their averages, the optimizer and the learning rate."""

import shutil
from argparse import Namespace
from functools import partial
from typing import Any

from diffusion_training.batches import Models
from diffusion_training.errors import fail
from diffusion_training.launch import Launch
from diffusion_training.models import checkpoint_gradients, put_on_device, start_average, update_ema
from diffusion_training.training.checkpoints import (
    find_checkpoints,
    load_checkpoint,
    load_start,
    save_checkpoint,
)
from diffusion_training.training.costs import count_disk
from diffusion_training.training.optimizers import make_lr_scheduler, make_optimizer
from diffusion_training.training.replicas import check_replicas
from diffusion_training.training.run_folder import Run
from diffusion_training.training.sharding import gather_model, shard


class Trained:
    """The models of a run and what belongs to them.

    All weights, averages and moments are in float32: autocast only lowers the precision of
    computations.

    models: {name: model}; each is trained, averaged, and saved in a folder of its name.
    averaged: {name: model}, empty without --use_ema.
    called: the wrapped models that a step calls, after `prepare`.
    """

    def __init__(self, launch: Launch, models: Models, settings: Namespace) -> None:
        self.accelerator = launch.accelerator
        self.shard = launch.shard
        self.settings = settings
        self.models = models
        if launch.is_main and not settings.find_lr:  # --find_lr saves nothing
            check_free_space(models, settings)
        if not launch.shard:
            for model in models.values():
                put_on_device(model, launch.device)
        self.averaged = start_average(models) if settings.use_ema else {}
        if launch.shard:  # before the optimizer, so that it gets the parts
            for model in self.saved.values():
                shard(model, launch.device)
        if settings.gradient_checkpointing:
            checkpoint_gradients(models)
        self.optimizer = make_optimizer(models, self.accelerator.scaler, settings)

    @property
    def saved(self) -> Models:
        """The models that a checkpoint holds."""
        return self.models | {f"{name}_ema": model for name, model in self.averaged.items()}

    @property
    def held_out(self) -> dict[str, Models]:
        """The models to measure, by the names of their held-out losses."""
        measured = {"held_out_loss": self.models}
        return measured | ({"held_out_loss_ema": self.averaged} if self.averaged else {})

    def best(self, name: str) -> Any:
        """The model that samples are drawn from: the average, if there is one."""
        return self.averaged.get(name, self.models[name])

    def gather_best(self) -> Models:
        """Gather the models to save as a result on the first process. Call it on every process."""
        return {name: gather_model(self.best(name)) for name in self.models}

    def load(self, run: Run, state: dict[str, Any], settings: dict[str, Any]) -> None:
        """Load the checkpoint that the run resumes, or the weights of --init_from, if any.

        Call it before `prepare`, which wraps the models. settings: see `record_settings`.
        """
        if run.checkpoint:
            load_checkpoint(
                self.accelerator, run.checkpoint, self.saved, self.optimizer, state, settings
            )
        elif run.start:
            load_start(self.accelerator, run.start, self.saved, state, settings)

    def prepare(self, global_step: int) -> None:
        """Wrap the models for devices, processes and precision, and start the schedule."""
        self.lr_scheduler = make_lr_scheduler(self.optimizer, global_step, self.settings)
        self.optimizer = self.accelerator.prepare(self.optimizer)
        prepare = partial(self.accelerator.prepare_model, device_placement=False)
        # sharded models need no DDP: fully_shard reduces the gradients
        self.called = {
            name: prepare(model, evaluation_mode=self.shard) for name, model in self.models.items()
        }
        for model in self.averaged.values():
            prepare(model, evaluation_mode=True)  # autocast as in training

    def advance(self, global_step: int) -> None:
        """Update the averages and the learning rate after an optimizer step."""
        if self.averaged:
            update_ema(self.averaged, self.models, global_step, self.settings)
        self.lr_scheduler.step()

    def save(self, state: dict[str, Any], lora_metadata: dict[str, str] | None = None) -> None:
        """Write a checkpoint, if all processes have the same weights. Call it on every process.

        lora_metadata: see `save_lora`.
        """
        if not self.shard:
            check_replicas(self.accelerator, self.models, self.averaged, state["global_step"])
        save_checkpoint(
            self.accelerator,
            self.saved,
            self.optimizer,
            state,
            self.settings.output_dir,
            lora_metadata,
        )


def check_free_space(models: Models, settings: Namespace) -> None:
    """Stop with an error if --output_dir has no room for the checkpoints and the result.

    There are up to two checkpoints, because the next one is written before an old one is deleted,
    and with --checkpoints_to a third that is being copied. Existing ones need no more room.
    """
    checkpoint, result = count_disk(models, settings.use_ema, settings.optimizer)
    most = 3 if settings.checkpoints_to else 2
    count = max(1, most - len(find_checkpoints(settings.output_dir)))
    needed = count * checkpoint + result
    free = shutil.disk_usage(settings.output_dir).free
    if free < needed:
        what = ("a checkpoint", "two checkpoints", "three checkpoints")[count - 1]
        fail(
            f"--output_dir {settings.output_dir} has {free / 1e9:.3g} GB free, and {what} and the "
            f"result take {needed / 1e9:.3g} GB: make room, or choose another folder"
        )
