"""Save checkpoints, and snapshots of --posthoc_ema, while the training goes on."""

import math
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch

from diffusion_training.batches import Models
from diffusion_training.errors.printing import amount
from diffusion_training.errors.sentences import fail, name_command
from diffusion_training.launch import Launch
from diffusion_training.models import is_adapted
from diffusion_training.stopping import StopSignal
from diffusion_training.training.keeping.checkpoint_copy import make_checkpoint_copy
from diffusion_training.training.keeping.checkpoints import (
    find_checkpoints,
    gather_models,
    get_scale,
    give_parts,
    prune_checkpoints,
    save_checkpoint,
)
from diffusion_training.training.keeping.posthoc import find_snapshot_folders, write_snapshot
from diffusion_training.training.keeping.replicas import check_replicas
from diffusion_training.training.records import Records
from diffusion_training.training.run_folder import RunFolder
from diffusion_training.training.state import TrainState
from diffusion_training.training.step.costs import count_disk
from diffusion_training.training.step.sharding import gather_state


class Saver:
    """Saves a run's state. All processes call all methods, because most wait for the others.

    The training waits for a copy in memory, which a thread of the first process writes.

    lora_metadata: see `make_lora_files`.
    """

    def __init__(
        self,
        launch: Launch,
        run: RunFolder,
        state: TrainState,
        records: Records,
        stop_signal: StopSignal,
        args: Namespace,
        lora_metadata: dict[str, str] | None = None,
    ) -> None:
        self.launch = launch
        self.run = run
        self.state = state
        self.records = records
        self.stop_signal = stop_signal
        self.args = args
        self.lora_metadata = lora_metadata
        self.progress = state.progress
        self.has_saved = False  # whether this process has written a checkpoint
        self.saved_at = self.progress.data_step  # of the last checkpoint
        self.snapshot_at = self.progress.global_step
        # None: the training waits while a checkpoint is written
        self.copy = make_checkpoint_copy(
            launch, state.list_models(), state.models, self.progress.global_step, args
        )

    def save_checkpoint(self) -> None:
        """Save checkpoint-N, if this step has none. After the last step, write its record first.

        Stops with an error if the loss is not finite, the processes' weights differ, or the last
        checkpoint could not be written.
        """
        if self.saved_at == self.progress.data_step:
            return
        self.saved_at = self.progress.data_step
        self.records.check_before_saving()
        with self.records.timed("checkpoint_seconds"):
            self.run.writer.wait("checkpoint")  # the one before, whose copy is overwritten
            self.stop_signal.agree()
            self.begin_checkpoint()
        self.stop_signal.agree()

    def begin_checkpoint(self) -> None:
        """Copy what a checkpoint holds, and let the thread write it; or write it without a copy."""
        state = self.state
        saved = state.list_models()
        if self.launch.num_processes > 1 and not self.launch.shard:
            step = self.progress.global_step
            check_replicas(self.launch.accelerator, state.models, state.averages.ema, step)
        if not self.launch.is_main:
            give_parts(saved, state.optimizer)
            return
        path = self.locate_checkpoint()
        described = state.describe()
        scale = get_scale(self.launch.accelerator)
        write_extra = None
        adapters = [model.adapter for model in state.models.values() if is_adapted(model)]
        if adapters:  # to compare the images of checkpoints
            copies = self.copy.copies if self.copy else saved
            name = self.args.output_name
            name = name and f"{name}-step{self.progress.global_step:08d}"
            write_extra = adapters[0].prepare_files(saved, copies, self.lora_metadata, name)

        def write(
            models: Iterable[tuple[str, torch.nn.Module]], moments: Callable[[], dict[str, Any]]
        ) -> None:
            with self.records.timed("checkpoint_write_seconds", is_pause=False):
                save_checkpoint(path, described, models, moments, scale, write_extra)
            self.report_saved(path)
            self.prune(path)
            if self.run.copies:
                self.run.copies.news.set()

        if self.copy is None:
            self.run.writer.wait()  # for snapshots and samples of the steps before
            write(gather_models(saved), partial(gather_state, state.optimizer))
        else:
            self.copy.take(state.optimizer)
            copied = partial(write, self.copy.models(), self.copy.moments)
            self.run.writer.begin("checkpoint", copied)

    def save_snapshot(self) -> None:
        """Write a snapshot of the averages of --posthoc_ema, if this step has none.

        Call it before `save_checkpoint`: a run that is resumed there then has the snapshot.
        """
        if self.snapshot_at == self.progress.global_step:
            return
        self.snapshot_at = self.progress.global_step
        self.records.check_before_saving()
        with self.records.timed("posthoc_seconds"):
            self.run.writer.wait("snapshot")  # the one before, whose copy is overwritten
            self.stop_signal.agree()
            if self.launch.is_main:
                files = self.state.averages.posthoc.copy(self.launch.device)
                folder = Path(self.args.output_dir)
                write = partial(write_snapshot, folder, self.snapshot_at, files)
                self.run.writer.begin("snapshot", write)

    def save_last(self) -> None:
        """After the last step, save what a resumed run needs, and wait until it is written."""
        if self.args.posthoc_ema and not self.stop_signal.was_stopped:
            self.save_snapshot()
        self.save_checkpoint()
        self.run.writer.wait()
        self.stop_signal.agree()

    def finish(self) -> None:
        """Wait for the samples, the report and the copies of --checkpoints_to."""
        self.run.writer.wait()
        if self.args.checkpoints_to:
            if self.run.copies and self.records.has_begun:  # else they have not begun
                self.run.copies.finish(self.args.checkpoints_to_timeout)
            self.launch.accelerator.wait_for_everyone()  # else torch ends the first process too
        if not self.stop_signal.was_stopped:  # a kill may have prevented it
            self.prune(self.locate_checkpoint())

    def locate_checkpoint(self) -> Path:
        """The folder of this step's checkpoint."""
        return Path(self.args.output_dir, f"checkpoint-{self.progress.global_step}")

    def report_saved(self, path: Path) -> None:
        """Print that a checkpoint is whole; at the first one also what continues from it."""
        sentence = f"Saved {path.name}"
        if not self.has_saved:
            sentence += f": after an interruption, {name_command()} continues from it"
        self.has_saved = True
        self.records.bar.write(sentence)

    def prune(self, saved: Path) -> None:
        """Delete the oldest checkpoints beyond the limit."""
        if self.run.copies:
            self.run.copies.prune(saved)
        elif self.launch.is_main:
            prune_checkpoints(saved, self.args.checkpoints_total_limit)


def check_free_space(launch: Launch, models: Models, args: Namespace) -> None:
    """Stop with an error if --output_dir has no room for the checkpoints and the result.

    There are up to two checkpoints, because the next one is written before an old one is deleted,
    and with --checkpoints_to a third that is being copied. Existing ones need no more room, nor do
    existing snapshots of --posthoc_ema. --find_lr saves nothing.
    """
    if not launch.is_main or args.find_lr:
        return
    widths = args.posthoc_ema or ()
    checkpoint, result = count_disk(models, args.use_ema + len(widths), args.optimizer)
    most = 3 if args.checkpoints_to else 2
    count = max(1, most - len(find_checkpoints(args.output_dir)))
    needed = count * checkpoint + result
    if widths:
        every = args.posthoc_ema_steps or args.checkpointing_steps
        existing = len(find_snapshot_folders(args.output_dir))
        snapshots = max(0, math.ceil(args.max_train_steps / every) - existing)
        size = snapshots * len(widths) * result // 2  # in float16
        what = amount(snapshots, "more snapshot" if existing else "snapshot")
        print(f"Post-hoc EMA: {size / 1e9:.3g} GB for {what}")
        needed += size
    free = shutil.disk_usage(args.output_dir).free
    if free < needed:
        what = ("a checkpoint", "two checkpoints", "three checkpoints")[count - 1]
        fail(
            f"--output_dir {args.output_dir} has {free / 1e9:.3g} GB free, and {what} and the "
            f"result take {needed / 1e9:.3g} GB: make room, or choose another folder"
        )
