"""The state of a training run: the models on the device, their averages, and all that is saved."""

from argparse import Namespace
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator

from diffusion_training.batches import Models, TrainingData
from diffusion_training.blocks import checkpoint_gradients
from diffusion_training.launch import Launch
from diffusion_training.models import AveragedWeights, put_on_device, start_average, update_ema
from diffusion_training.training.held_out import describe_held_out
from diffusion_training.training.keeping.checkpoints import load_checkpoint, load_start
from diffusion_training.training.keeping.posthoc import PosthocEma, check_snapshots
from diffusion_training.training.progress import Progress
from diffusion_training.training.run_folder import RunFolder
from diffusion_training.training.step.sharding import shard


class Averages:
    """Averages of the trained weights: the EMA of --use_ema, and those of --posthoc_ema.

    trained: {name: model}. ema: {name: its average}; empty without --use_ema.
    """

    def __init__(self, launch: Launch, trained: Models, args: Namespace) -> None:
        self.trained = trained
        self.ema = start_average(trained) if args.use_ema else {}
        # Averages compute under autocast, too. They are wrapped in place, so their weights keep
        # their names, and without DDP, which only trained models need.
        for average in self.ema.values():
            launch.accelerator.prepare_model(average, device_placement=False, evaluation_mode=True)
        self.posthoc = PosthocEma(trained, () if args.find_lr else args.posthoc_ema or ())
        self.args = args

    @cached_property
    def weights(self) -> AveragedWeights:
        """Listed at the first step: --shard replaces the parameters of before."""
        return AveragedWeights.of(self.ema, self.trained)

    def update(self, progress: Progress, num_images: int) -> None:
        """Move the averages after a step. After an fp16 overflow, only --posthoc_ema counts it."""
        self.posthoc.update(num_images)
        if self.ema and progress.stepped:
            update_ema(self.weights, progress.global_step, self.args)

    def models(self) -> Models:
        """The averages as a checkpoint holds them."""
        averaged = {f"{name}_ema": model for name, model in self.ema.items()}
        return averaged | self.posthoc.models()

    def get_model(self, name: str) -> torch.nn.Module:
        """The model to draw from and to save: the EMA with --use_ema, else the trained one."""
        return self.ema.get(name, self.trained[name])


def place_models(launch: Launch, models: Models, args: Namespace) -> Averages:
    """Put the models on the device (--shard: a part on each process), to be trained and averaged.

    What is trained is in float32, as are its averages and gradients: autocast only lowers the
    precision of computations. With --full_bf16 it is in bfloat16.
    """
    if not launch.shard:
        for model in models.values():
            put_on_device(model, launch.device)
    for model in models.values():
        model.train()
    averages = Averages(launch, models, args)
    if launch.shard:
        for model in (models | averages.models()).values():
            shard(model, launch.device)
    checkpoint_gradients(models, args)
    return averages


def describe_settings(
    launch: Launch,
    progress: Progress,
    dataset: TrainingData,
    held_out: dict[int, int],
    args: Namespace,
) -> dict[str, Any]:
    """What a checkpoint records of its run, for a resumed run to compare. On all processes.

    held_out: see `hold_out`.
    """
    return {
        **vars(args),
        "num_processes": launch.num_processes,
        "num_images": progress.num_images,
        "data": dataset.fingerprint,
        **describe_held_out(launch.accelerator, dataset, held_out, args.holdout),
    }


@dataclass(frozen=True)
class TrainState:
    """What a checkpoint holds; the state of fp16's scaler is added.

    The rest of a resumed run follows from it: the schedule of the learning rate, the order of the
    data, and all random numbers.
    """

    models: Models  # that are trained; each is saved in a folder of its name
    averages: Averages
    optimizer: torch.optim.Optimizer
    progress: Progress  # the position in the run and in the data
    settings: dict[str, Any]  # see `describe_settings`

    def list_models(self) -> Models:
        """The models that a checkpoint holds, by the names of their folders."""
        return self.models | self.averages.models()

    def describe(self) -> dict[str, Any]:
        """What trainer_state.json holds. `plan.saved_state` has it in a resumed run."""
        state = self.progress.state() | {"settings": self.settings}
        if self.averages.posthoc.averages:
            state["posthoc_images"] = self.averages.posthoc.images
        return state

    def load(
        self, accelerator: Accelerator, run: RunFolder, state: dict[str, Any], args: Namespace
    ) -> None:
        """Load the checkpoint that the run resumes, or the weights of --init_from.

        Call it before Accelerate wraps the models. state: what `describe` returned.
        """
        if run.init_checkpoint:
            load_start(accelerator, run.init_checkpoint, self.list_models(), state, self.settings)
        if not run.checkpoint:
            return
        load_checkpoint(
            accelerator, run.checkpoint, self.list_models(), self.optimizer, state, self.settings
        )
        posthoc = self.averages.posthoc
        posthoc.images = state.get("posthoc_images", 0)
        if accelerator.is_main_process and not args.find_lr:
            every = args.posthoc_ema_steps or args.checkpointing_steps
            folder, step = Path(args.output_dir), self.progress.global_step
            check_snapshots(folder, run.checkpoint, step, args.posthoc_ema, every)
