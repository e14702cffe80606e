"""The training loop and the end of a run, which all trainers share."""

import importlib.metadata
import platform
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from accelerate.utils import gather_object

from diffusion_training import __version__
from diffusion_training.batches import Batch, Models
from diffusion_training.launch import Launch, StopSignal, end_stopped, is_launched
from diffusion_training.training.best import keep_best
from diffusion_training.training.card import save_model_card
from diffusion_training.training.checkpoints import prune_checkpoints
from diffusion_training.training.costs import describe_trained
from diffusion_training.training.held_out import describe_held_out
from diffusion_training.training.metadata import name_readers
from diffusion_training.training.progress import Progress, format_duration
from diffusion_training.training.records import Records
from diffusion_training.training.report import About, Description, save_report
from diffusion_training.training.run_folder import Run, begin_run, end_run
from diffusion_training.training.samples import samples_path
from diffusion_training.training.trained import Trained
from diffusion_training.training.tuning import Step


@dataclass(frozen=True)
class Results:
    """A trainer's functions for its results.

    save(best, folder): writes the pipeline, or the LoRA, for other programs, on the first process.
    best: {name: model}, averaged if possible.
    log_held_out_loss(): measures it, and adds it to the records.
    log_validation(): draws samples, and returns their roughness; None on other processes, and if
    none were drawn.
    describe(about, settings): the texts of the model card and the report.
    """

    name: str  # "pipeline" or "LoRA"
    files: list[str]  # patterns of the files to upload
    save: Callable[[Models, Path], None]
    log_held_out_loss: Callable[[], None]
    log_validation: Callable[[], float | None]
    describe: Callable[[About, Namespace], Description]


def record_settings(
    settings: Namespace, launch: Launch, progress: Progress, dataset: Any, held_out: dict[int, int]
) -> dict[str, Any]:
    """The settings that a checkpoint records, for a resumed run to compare."""
    return {
        **vars(settings),
        "num_processes": launch.num_processes,
        "num_images": progress.num_images,
        "data": dataset.fingerprint,
        **describe_held_out(launch.accelerator, dataset, held_out, settings.holdout),
    }


def draws_samples(settings: Namespace) -> bool:
    """Whether there are samples to draw: only an unconditional model needs no prompt."""
    is_unconditional = "validation_prompts" not in settings
    return is_unconditional or bool(settings.validation_prompts and settings.num_validation_images)


class Loop:
    """A run from its first step to its end."""

    def __init__(
        self,
        launch: Launch,
        run: Run,
        trained: Trained,
        progress: Progress,
        records: Records,
        results: Results,
        settings: Namespace,
        recorded: dict[str, Any],
        lora_metadata: dict[str, str] | None = None,
    ) -> None:
        """recorded: see `record_settings`. lora_metadata: see `save_lora`."""
        self.launch = launch
        self.run = run
        self.trained = trained
        self.progress = progress
        self.records = records
        self.results = results
        self.settings = settings
        self.recorded = recorded
        self.has_folder = False
        self.lora_metadata = lora_metadata
        self.begun_at = time.monotonic()  # in seconds
        self.first_step = progress.global_step

    def list_facts(self) -> dict[str, str]:
        """Facts about the run for the report, besides its settings."""
        since = f" since step {self.first_step}" if self.first_step else ""
        images = f"{self.progress.images_per_step} per step"
        if self.progress.num_images < sys.maxsize:  # a stream has no epochs
            images = f"{self.progress.num_images:,}, {images}"
        libraries = ("torch", "diffusers", "transformers", "accelerate")
        versions = [f"{name} {importlib.metadata.version(name)}" for name in libraries]
        python = f"Python {platform.python_version()}"
        costs = self.records.costs
        return {
            "processes": self.launch.describe(),
            "memory in use": costs.describe().partition(": ")[2] if costs else "",
            "time": f"{format_duration(time.monotonic() - self.begun_at)}{since}",
            "images": images,
            "trained": describe_trained(self.trained.models),
            "versions": ", ".join([f"diffusion_training {__version__}", python, *versions]),
        }

    def save_checkpoint(self) -> None:
        state = self.progress.state() | {"settings": self.recorded}
        self.trained.save(state, self.lora_metadata)
        self.prune()
        if self.run.copies:
            self.run.copies.wake()

    def prune(self) -> None:
        """Delete the oldest checkpoints beyond the limit."""
        saved = Path(self.settings.output_dir, f"checkpoint-{self.progress.global_step}")
        if self.run.copies:
            self.run.copies.prune(saved)
        elif self.launch.is_main:
            prune_checkpoints(saved, self.settings.checkpoints_total_limit)

    def save_result(self) -> None:
        best = self.trained.gather_best()
        if self.launch.is_main:
            self.results.save(best, Path(self.settings.output_dir))

    def evaluate(self, stop_signal: StopSignal, is_result: bool = True) -> int:
        """Measure the held-out loss; write best/, samples and report. Returns a signal, or 0.

        is_result: whether this run has trained the weights; otherwise they are never the best.
        """
        step = self.progress.global_step
        settings = self.settings
        self.results.log_held_out_loss()
        if settings.save_best and is_result:
            save = partial(self.results.save, self.trained.gather_best())
            if self.launch.is_main:
                keep_best(Path(settings.output_dir), self.records.held_out, step, save)
        if draws_samples(settings):
            roughness = self.results.log_validation()
            if is_result:
                self.records.check_samples(roughness, step)
        if self.launch.is_main:
            launcher = "accelerate launch" if is_launched() else "python"
            describe = self.results.describe
            save_report(self.run.script, describe, step, settings, self.list_facts(), launcher)
        if self.run.copies:
            self.run.copies.wake()
        return stop_signal.agree()

    def evaluate_first(
        self,
        stop_signal: StopSignal,
        samples_every: tuple[int | None, int | None],
        is_pretrained: bool,
    ) -> int:
        """Call `evaluate` before the first step, if needed. Returns a signal, or 0.

        A pretrained model is shown as it was before training, for comparison. It is not a result of
        this run, so it is never the best. A resumed run draws the samples that a kill prevented.
        """
        step = self.progress.global_step
        resumed = self.run.checkpoint is not None
        if resumed:
            # ask the first process: other machines may have an --output_dir of their own
            has_samples = samples_path(self.settings.output_dir, step).exists()
            is_needed = self.progress.is_due(*samples_every) and not gather_object([has_samples])[0]
        else:
            is_needed = is_pretrained and self.settings.validate_first
        if not is_needed:
            return 0
        self.claim_folder()
        with self.records.paused():
            return self.evaluate(stop_signal, is_result=resumed)

    def claim_folder(self) -> None:
        """Replace the files of an earlier run, as soon as there are new ones."""
        if self.has_folder:
            return
        self.has_folder = True
        if self.launch.is_main:
            begin_run(self.run, Path(self.settings.output_dir))
        self.records.begin()
        if self.run.copies:
            self.run.copies.begin(self.run.reached)

    def take_step(self, step: Step, batches: Iterator[Batch]) -> None:
        """Take the next optimizer step, and record its result."""
        trained = self.trained
        progress = self.progress
        epoch = progress.epoch
        images, micro_batches = progress.next_step()
        sums = step(
            trained.called, trained.optimizer, batches, micro_batches, progress.data_step,
            self.records.measure_inputs,
        )  # fmt: skip
        progress.advance(images, not self.launch.accelerator.optimizer_step_was_skipped)
        if progress.stepped:  # else fp16 overflowed: the scaler lowers its scale
            self.records.add(sums, images, epoch, trained.lr_scheduler.get_last_lr()[0])
            trained.advance(progress.global_step)
        self.claim_folder()

    def train(
        self,
        step: Step,
        batches: Iterator[Batch],
        stop_signal: StopSignal,
        samples_every: tuple[int | None, int | None],
        is_pretrained: bool = False,
        save_epochs: int | None = None,
    ) -> int:
        """Train to the end. Returns a signal that stopped it, or 0.

        samples_every: (steps, epochs) between samples. save_epochs: epochs between results.
        is_pretrained: whether the weights had been trained before this run.
        """
        progress = self.progress
        records = self.records
        settings = self.settings
        stop = stop_signal.agree()  # a signal may have come before
        if not stop:
            stop = self.evaluate_first(stop_signal, samples_every, is_pretrained)
        for model in self.trained.models.values():
            model.train()
        while progress.global_step < settings.max_train_steps and not stop:
            self.take_step(step, batches)
            stop = stop_signal.agree()
            due = progress.what_is_due(settings, samples_every, save_epochs, stop)
            if due.log or due.checkpoint or due.result:  # the only wait for the device
                records.update(progress.global_step, due.log, due.last)
            with records.paused():
                if due.checkpoint:  # before the samples, which may take too long
                    self.save_checkpoint()
                if due.result:
                    self.save_result()
                if due.samples:
                    stop = self.evaluate(stop_signal)
            if stop and not due.checkpoint:  # it stopped the samples; a resumed run draws them
                records.update(progress.global_step, False, due.last)
                self.save_checkpoint()
        records.bar.close()
        return stop

    def finish(self, stop: int, stop_signal: StopSignal) -> None:
        """Write and evaluate the results, and end the run; after a signal, end it at once."""
        settings = self.settings
        step = self.progress.global_step
        output_dir = Path(settings.output_dir)
        self.claim_folder()  # in case no step was left
        if not stop:
            self.save_result()  # before the samples, which may take too long
            stop = self.evaluate(stop_signal)
        if settings.checkpoints_to:
            if self.run.copies:
                self.run.copies.finish()
            self.launch.accelerator.wait_for_everyone()  # else torch ends the first process too
        stop_signal.close()
        if stop:
            end_stopped(self.launch.accelerator, stop, step, settings.max_train_steps)
        self.prune()  # a kill may have prevented it
        if self.launch.is_main:
            save_model_card(step, self.results.describe, settings)
        samples = "samples/"
        if not draws_samples(settings):
            has_prompts = bool(settings.validation_prompts)
            why = "--num_validation_images 0" if has_prompts else "no --validation_prompts"
            samples = f"no samples ({why})"
        duration = format_duration(time.monotonic() - self.begun_at)
        name = self.results.name
        done = f"Done in {duration}: {name}, {samples} and report.html are in {output_dir}"
        if readers := name_readers(settings, for_unet="unet" in self.trained.models):
            done += f". {readers.replace('`', '')}"
        report = output_dir / "report.html"
        done += (
            f"\nNext: open {report} in a browser. It has the samples, and code that uses the {name}"
        )
        end_run(self.launch, self.run, done, self.results.files, settings)
