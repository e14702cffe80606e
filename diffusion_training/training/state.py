"""The state of a training run: models with averages, optimizer, position, records, signal."""

import contextlib
import importlib.metadata
import math
import platform
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import torch
from accelerate.utils import gather_object

from diffusion_training import __version__
from diffusion_training.batches import Batch, Models, Objective, StepSums, TrainingData
from diffusion_training.errors.printing import amount
from diffusion_training.errors.sentences import CHANGED, fail, name_command
from diffusion_training.launch import Launch, StopSignal, end_stopped, is_launched
from diffusion_training.models import (
    AveragedWeights,
    checkpoint_gradients,
    is_adapted,
    put_on_device,
    start_average,
    update_ema,
)
from diffusion_training.training.held_out import (
    describe_held_out,
    log_held_out_loss,
    measure_held_out_losses,
)
from diffusion_training.training.keeping.best import keep_best
from diffusion_training.training.keeping.checkpoint_copy import make_checkpoint_copy
from diffusion_training.training.keeping.checkpoints import (
    find_checkpoints,
    gather_models,
    get_scale,
    give_parts,
    load_checkpoint,
    load_start,
    prune_checkpoints,
    save_checkpoint,
)
from diffusion_training.training.keeping.posthoc import (
    WIDTHS,
    PosthocEma,
    check_snapshots,
    find_snapshot_folders,
    write_losses,
    write_snapshot,
)
from diffusion_training.training.progress import NextStep, format_duration
from diffusion_training.training.records import Records
from diffusion_training.training.replicas import check_replicas
from diffusion_training.training.run_folder import RunFolder, begin_run, end_run
from diffusion_training.training.scores.metrics import Draw, Metrics, Read, join_records
from diffusion_training.training.showing.card import save_model_card
from diffusion_training.training.showing.metadata import name_readers
from diffusion_training.training.showing.report import DescribeModel, save_report
from diffusion_training.training.showing.samples import samples_path
from diffusion_training.training.step.costs import Costs, count_disk, describe_trained
from diffusion_training.training.step.optimizers import MakeOptimizer, make_lr_scheduler
from diffusion_training.training.step.sharding import gather_model, gather_state, shard
from diffusion_training.training.step.signs import judge_end, read_metrics
from diffusion_training.training.tuning import Plan

Every: TypeAlias = tuple[int | None, int | None]  # (steps, epochs); see `Training.is_due`
# writes the models as a result, into a folder
SaveResult: TypeAlias = Callable[[Models, Path], None]


@dataclass(frozen=True)
class Results:
    """What a run saves and shows of its models, and how often: functions of the script.

    All processes call `draw` and `score`; only the first one calls `save` and `describe`.
    """

    name: str  # of what is saved: "pipeline" or "LoRA"
    files: list[str]  # patterns of its files, for the upload
    save: SaveResult
    describe: DescribeModel  # the texts of report and model card
    draw: Callable[[], None] | None  # samples of the averaged weights, if there are any to draw
    draw_every: Every
    score: Callable[[], None] | None = None  # --validation_metrics
    score_every: int | None = None
    # Was the model trained before this run? Then it is shown before the first step, for comparison.
    is_pretrained: bool = False
    save_epochs: int | None = None  # how often `save` is called before the end


def draws_samples(args: Namespace) -> bool:
    """Whether there are samples to draw: only an unconditional model needs no prompt."""
    is_unconditional = "validation_prompts" not in args
    return is_unconditional or bool(args.validation_prompts and args.num_validation_images)


class Training:
    """The state of a run. The loop, which says what happens when, is in each trainer's `main`.

    All processes call all methods, because most of them wait for the others.

    models: {name: model} that are trained; each is averaged, and saved in a folder of its name.
        What is trained is in float32, as are its averages and gradients: autocast only lowers the
        precision of computations. With --full_bf16 it is in bfloat16.
    averaged: {name: its average}; empty without --use_ema.
    progress: the position in the run and in the data.
    """

    def __init__(
        self,
        launch: Launch,
        run: RunFolder,
        plan: Plan,
        models: Models,
        objective: Objective,
        dataset: TrainingData,
        held_out: dict[int, int],
        make_optimizer: MakeOptimizer,
        args: Namespace,
        lora_metadata: dict[str, str] | None = None,
    ) -> None:
        """Put the models on the device, make averages and optimizer, and load the checkpoint.

        Call it before Accelerate wraps the models.

        held_out: see `hold_out`. make_optimizer: it gets the models when they are on the device;
        schedule, checkpoints and a resumed run follow from its result. args: see `complete_args`.
        lora_metadata: see `make_lora_files`.
        """
        self.launch = launch
        self.run = run
        self.models = models
        self.objective = objective
        self.dataset = dataset
        self.held_out = held_out
        self.args = args
        self.lora_metadata = lora_metadata
        self.progress = plan.progress
        self.begun_at = time.monotonic()  # in seconds
        self.first_step = plan.progress.global_step
        self.has_folder = False
        self.starved = ""  # why --follow ends the run
        self.has_saved = False  # whether this process has written a checkpoint
        # `data_step` at the last update of the records, and at the last checkpoint
        self.updated_at = self.saved_at = plan.progress.data_step
        self.posthoc_at = self.first_step  # the step of the last snapshot of --posthoc_ema
        # what a checkpoint records, for a resumed run to compare
        self.recorded = {
            **vars(args),
            "num_processes": launch.num_processes,
            "num_images": plan.progress.num_images,
            "data": dataset.fingerprint,
            **describe_held_out(launch.accelerator, dataset, held_out, args.holdout),
        }
        if launch.is_main and not args.find_lr:  # --find_lr saves nothing
            check_free_space(models, args)
        if not launch.shard:
            for model in models.values():
                put_on_device(model, launch.device)
        # Averages compute under autocast, too. They are wrapped in place, so their weights keep
        # their names, and without DDP, which only trained models need.
        self.averaged = start_average(models) if args.use_ema else {}
        for average in self.averaged.values():
            launch.accelerator.prepare_model(average, device_placement=False, evaluation_mode=True)
        widths = () if args.find_lr else args.posthoc_ema or ()
        self.posthoc = PosthocEma(models, widths)
        self.posthoc_every = args.posthoc_ema_steps or args.checkpointing_steps
        if launch.shard:  # before the optimizer, so that it gets the parts
            for model in self.saved.values():
                shard(model, launch.device)
        if args.gradient_checkpointing:
            checkpoint_gradients(models)
        self.optimizer = make_optimizer(models, args)
        if run.checkpoint:
            load_checkpoint(
                launch.accelerator, run.checkpoint, self.saved, self.optimizer, plan.state,
                self.recorded,
            )  # fmt: skip
            self.posthoc.images = plan.state.get("posthoc_images", 0)
            if launch.is_main and not args.find_lr:
                folder = Path(args.output_dir)
                check_snapshots(
                    folder, run.checkpoint, self.step, args.posthoc_ema, self.posthoc_every
                )
        elif run.init_checkpoint:
            load_start(
                launch.accelerator, run.init_checkpoint, self.saved, plan.state, self.recorded
            )
        self.ema = AveragedWeights.of(self.averaged, models) if self.averaged else None
        self.lr_scheduler = make_lr_scheduler(self.optimizer, self.step, args)
        # None: the training waits while a checkpoint is written
        self.checkpoint_copy = make_checkpoint_copy(launch, self.saved, models, self.step, args)
        self.writer = ThreadPoolExecutor(1)  # its thread writes checkpoints, on the first process
        self.writing: Future[None] | None = None  # the last checkpoint
        self.writing_posthoc: Future[None] | None = None  # the last snapshot of --posthoc_ema
        CHANGED.callback(self.writer.shutdown)  # a run that fails waits for it, too
        self.costs = Costs(
            launch,
            models,
            self.averaged | self.posthoc.models(),
            objective,
            args.optimizer,
            args.allow_tf32,
        )

    @property
    def step(self) -> int:
        """The number of optimizer steps taken."""
        return self.progress.global_step

    @property
    def saved(self) -> Models:
        """The models that a checkpoint holds."""
        averaged = {f"{name}_ema": model for name, model in self.averaged.items()}
        return self.models | averaged | self.posthoc.models()

    def ema_or_model(self, name: str) -> torch.nn.Module:
        """The model that is drawn from and saved as a result: the average with --use_ema."""
        return self.averaged.get(name, self.models[name])

    # ---- before the loop

    def begin(self, loaded: Iterable[Batch]) -> Iterator[Batch]:
        """Start the records and trackers, and train the models from now on.

        A signal then stops the run after its step. Returns the batches, watched: the records note
        skipped images and the wait for each batch.
        """
        launch = self.launch
        self.records = Records(
            launch.accelerator, self.step, self.dataset.num_left_out, self.run.checkpoint,
            self.args, self.models, self.costs, self.objective, self.wait_for_writer,
        )  # fmt: skip
        self.stop_signal = StopSignal(launch.num_processes, launch.shard)
        self.stop_signal.agree()  # one may have come before
        for model in self.models.values():
            model.train()
        return self.records.watch(loaded)

    def show_first(self, results: Results) -> None:
        """Before the first step, show a pretrained model as it is (--validate_first).

        A resumed run shows what a kill prevented.
        """
        if not self.has_steps():
            return
        if self.run.checkpoint is None:
            if results.is_pretrained and self.args.validate_first:
                self.show(results, is_result=False)
                self.show_metrics(results, is_result=False)
            return
        # ask the first process: other machines may have an --output_dir of their own
        has_samples = samples_path(self.args.output_dir, self.step).exists()
        if self.is_due(*results.draw_every) and not gather_object([has_samples])[0]:
            self.show(results)
        if self.is_due(results.score_every):  # `score_samples` does nothing if they are there
            self.show_metrics(results)

    # ---- in the loop

    def continues(self) -> bool:
        """Whether to take a step: some are left, and no signal has come.

        With --follow, wait until the cache has its images; the run ends if none come.
        """
        wait = getattr(self.dataset, "wait_for_images", None)
        if wait and self.has_steps():
            self.starved = wait(self.progress, self.stop_signal, self.records)
        return self.has_steps()

    def has_steps(self) -> bool:
        """Whether steps are left, and nothing has stopped the run."""
        return self.step < self.args.max_train_steps and self.is_complete()

    def advance(self, step: NextStep, sums: StepSums) -> None:
        """Count a step that was taken, and agree with all processes whether a signal has come.

        Update averages and learning rate too, except after an fp16 overflow, when the optimizer
        has skipped the step and the scaler lowers its scale.
        """
        stepped = not self.launch.accelerator.optimizer_step_was_skipped
        self.progress.advance(step.images, stepped)
        self.posthoc.update(step.images)
        if stepped:
            self.records.add(sums, step.images, step.epoch, self.lr_scheduler.get_last_lr()[0])
            if self.ema:
                update_ema(self.ema, self.step, self.args)
            self.lr_scheduler.step()
        self.claim_folder()
        self.agree()

    def agree(self) -> None:
        """Agree with all processes whether a signal has come.

        If a checkpoint could not be written, all of them stop here.
        """
        ended = [each for each in (self.writing_posthoc, self.writing) if each and each.done()]
        self.stop_signal.agree(any(each.exception() for each in ended))
        if self.stop_signal.has_failed:
            self.wait_for_writer()  # raises the error
            self.stop_signal.agree()  # other processes wait here until the first one has ended

    def wait_for_writer(self) -> None:
        """Wait until all checkpoints are written. Raises the error if that failed."""
        for writing in (self.writing_posthoc, self.writing):
            if writing:
                writing.result()

    def is_due(self, steps: int | None, epochs: int | None = None) -> bool:
        """Whether something is due that comes every `steps` steps or, if None, `epochs` epochs."""
        return self.progress.is_due(steps, epochs)

    def log(self) -> None:
        """Write a record of the steps since the last one. This waits for the device.

        Call it before `save_checkpoint`, which reads the same sums.
        """
        self.update_records(log=True)

    def update_records(self, log: bool) -> None:
        """Wait for the device and check the loss, only once in a step. log: write a record."""
        if self.updated_at != self.progress.data_step:
            self.updated_at = self.progress.data_step
            self.records.update(self.step, log, self.step == self.args.max_train_steps)

    def save_what_is_due(self, results: Results) -> None:
        """Save a checkpoint every --checkpointing_steps or epochs, and others of the flags' files.

        These are snapshots of --posthoc_ema and, every `save_epochs`, the result. A copy of a
        checkpoint or snapshot is taken; a thread of the first process writes it meanwhile.
        """
        if self.is_due(self.posthoc_every):
            self.save_posthoc()
        epochs = self.args.checkpointing_epochs
        if self.is_due(None if epochs else self.args.checkpointing_steps, epochs):
            self.save_checkpoint()
        if self.is_due(None, results.save_epochs) and self.has_steps():
            self.save_result(results.save)

    def show_what_is_due(self, results: Results) -> None:
        """Show metrics and samples if it is time; those of the last step come with the result."""
        if self.is_due(results.score_every) and self.has_steps():
            self.show_metrics(results)
        if self.is_due(*results.draw_every) and self.has_steps():
            self.show(results)

    def save_last(self) -> None:
        """Save what a resumed run needs of the last step, and wait until all is written."""
        if self.is_complete():
            self.save_posthoc()  # unless this step has a snapshot already
        self.save_checkpoint()

    def save_posthoc(self) -> None:
        """Write a snapshot of the averages of --posthoc_ema. A thread writes a copy of them.

        Call it before `save_checkpoint`: a run that is resumed there then has the snapshot.
        """
        if not self.posthoc.averages or self.posthoc_at == self.step:
            return
        self.posthoc_at = self.step
        self.update_records(log=self.step == self.args.max_train_steps and self.progress.stepped)
        with self.timed("posthoc_seconds"):
            if self.writing_posthoc:  # the one before, whose copy is overwritten
                self.writing_posthoc.result()
            self.agree()
            if self.launch.is_main:
                folder = Path(self.args.output_dir)
                files = self.posthoc.copy(self.launch.device)
                self.writing_posthoc = self.writer.submit(write_snapshot, folder, self.step, files)

    def save_checkpoint(self) -> None:
        """Save checkpoint-N, if this step has none. After the last step, write its record first.

        The training only waits for a copy in memory, which a thread writes. After the last step,
        or a signal, it waits until that is done.

        Stops with an error if the loss is not finite, the processes' weights differ, or the last
        checkpoint could not be written.
        """
        progress = self.progress
        if self.saved_at != progress.data_step:
            self.saved_at = progress.data_step
            self.update_records(log=self.step == self.args.max_train_steps and progress.stepped)
            with self.timed("checkpoint_seconds"):
                if self.writing:  # the one before, whose copy is overwritten
                    self.writing.result()
                self.agree()
                self.begin_checkpoint()
        if not self.has_steps():
            self.wait_for_writer()
        self.agree()

    def begin_checkpoint(self) -> None:
        """Copy what a checkpoint holds, and let the thread write it; or write it without a copy."""
        if not self.launch.shard:
            check_replicas(self.launch.accelerator, self.models, self.averaged, self.step)
        if not self.launch.is_main:
            give_parts(self.saved, self.optimizer)
            return
        path = Path(self.args.output_dir, f"checkpoint-{self.step}")
        state = self.progress.state() | {"settings": self.recorded}
        if self.posthoc.averages:
            state["posthoc_images"] = self.posthoc.images
        scale = get_scale(self.launch.accelerator)
        write_extra = None
        if any(map(is_adapted, self.models.values())):  # to compare the images of checkpoints
            from diffusion_training.training.lora.lora import make_lora_files, write_lora_files

            write_extra = partial(write_lora_files, make_lora_files(self.saved, self.lora_metadata))
        posthoc = self.writing_posthoc

        def write(
            models: Iterable[tuple[str, torch.nn.Module]], moments: Callable[[], dict[str, Any]]
        ) -> None:
            if posthoc:  # without its snapshot, a checkpoint is incomplete
                posthoc.result()
            with self.records.timed("checkpoint_write_seconds", is_pause=False):
                save_checkpoint(path, state, models, moments, scale, write_extra)
            self.report_saved(path)
            self.prune(path)
            if self.run.copies:
                self.run.copies.news.set()

        if self.checkpoint_copy is None:
            write(gather_models(self.saved), partial(gather_state, self.optimizer))
        else:
            self.checkpoint_copy.take(self.saved, self.optimizer)
            self.writing = self.writer.submit(
                write, self.checkpoint_copy.models(), self.checkpoint_copy.moments
            )

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

    @contextlib.contextmanager
    def timed(self, name: str) -> Iterator[None]:
        """Record how many seconds the block took, under `name`, with the next record.

        The block writes files, so an earlier run's are replaced first.
        """
        self.claim_folder()
        with self.records.timed(name):
            yield

    def claim_folder(self) -> None:
        """Before the first file is written, remove what an earlier run has left."""
        if self.has_folder:
            return
        self.has_folder = True
        if self.launch.is_main:
            begin_run(self.run, Path(self.args.output_dir))
        self.records.begin()
        if self.run.copies:
            self.run.copies.begin(self.run.checkpoint_step)

    # ---- results

    def is_complete(self) -> bool:
        """After the loop: whether nothing has stopped the run: no signal, no lack of shards."""
        return not self.stop_signal.agreed and not self.starved

    def gather_result(self) -> Models:
        """Gather the models to save as a result on the first process."""
        return {name: gather_model(self.ema_or_model(name)) for name in self.models}

    def save_result(self, save: SaveResult) -> None:
        """Write the result for other programs, on the first process."""
        self.update_records(log=False)
        with self.timed("result_seconds"):
            result = self.gather_result()
            if self.launch.is_main:
                save(result, Path(self.args.output_dir))

    def show(self, results: Results, is_result: bool = True) -> None:
        """Measure the held-out loss, draw samples, write the report.

        With --save_best, keep the weights in best/ if the held-out loss is the lowest so far.

        is_result: whether this run has trained the weights.
        """
        self.measure_held_out()  # each process takes a share of the images
        if is_result:
            self.keep_best(results.save)
        if results.draw:
            with self.timed("samples_seconds"):  # in the next record
                results.draw()
        self.report(results.describe)

    def show_metrics(self, results: Results, is_result: bool = True) -> None:
        """Measure --validation_metrics, if there are any, and write the report.

        With --save_best_metric, keep the weights in best/ if they are the best so far.
        """
        if results.score is None:
            return
        with self.timed("metrics_seconds"):
            results.score()
        if is_result:
            self.keep_best(results.save)
        self.report(results.describe)

    def measure_held_out(self) -> None:
        """Measure and record the held-out loss, if images are held out."""
        if not self.held_out:
            return
        models = {"held_out_loss": self.models}
        if self.averaged:
            models["held_out_loss_ema"] = self.averaged
        with self.timed("held_out_seconds"):
            log_held_out_loss(
                self.launch, self.records, self.dataset, self.held_out, models, self.objective,
                self.stop_signal, self.step,
            )  # fmt: skip

    def compare_widths(self) -> None:
        """With --posthoc_ema and --holdout, measure the held-out loss of averages of some widths.

        Call it at the end, because it overwrites one of the averages.
        """
        if not self.posthoc.averages or not self.held_out:
            return
        losses = {}
        folder = Path(self.args.output_dir)
        with self.timed("posthoc_seconds"):
            for width in WIDTHS:
                models = self.posthoc.reconstruct(folder, width, self.launch.is_main)
                measured = measure_held_out_losses(
                    self.launch, self.records, self.dataset, self.held_out, {"": models},
                    self.objective, self.stop_signal,
                )  # fmt: skip
                if measured is None:  # a signal has come
                    return
                losses[width] = sum(measured[""]) / 9
            if self.launch.is_main:
                best = write_losses(folder, self.step, losses)
                print(
                    f"\nPost-hoc EMA: of {len(losses)} widths, sigma_rel {best:g} has the lowest "
                    f"held-out loss, {losses[best]:.4g}. To write its pipeline: python "
                    f"reconstruct_ema.py {folder} --output_dir {folder}-widths"
                )

    def score_samples(self, metrics: Metrics | None, draws: Sequence[Draw], read: Read) -> None:
        """Measure and record --validation_metrics, unless this step's are recorded. See `Draw`.

        draws: of the trained base and, if there is one, of the base of --validation_base.
        """
        if metrics is None or self.records.metrics.get("step") == self.step:
            return
        records = []
        for draw in draws:
            record = metrics.score(self.step, draw, read, self.stop_signal)
            if record is None:  # a signal has come
                return
            records.append(record)
        self.records.add_metrics(join_records(*records))

    def keep_best(self, save: SaveResult) -> None:
        """With --save_best or --save_best_metric, write best/ if this step is the best so far."""
        metric = vars(self.args).get("save_best_metric")
        if not self.args.save_best and not metric:
            return
        with self.timed("best_seconds"):
            best = partial(save, self.gather_result())
            if self.launch.is_main:
                record = self.records.metrics if metric else self.records.held_out
                keep_best(Path(self.args.output_dir), record, self.step, best, metric, self.args)

    def report(self, describe: DescribeModel) -> None:
        """Write report.html, with samples and curves so far; agree whether a signal has come."""
        with self.timed("report_seconds"):
            if self.launch.is_main:
                launcher = "accelerate launch" if is_launched() else "python"
                facts = self.list_facts()
                save_report(self.run.script, describe, self.step, self.args, facts, launcher)
        if self.run.copies:
            self.run.copies.news.set()
        self.agree()

    def list_facts(self) -> dict[str, str]:
        """Facts about the run for the report, besides its flags."""
        since = f" since step {self.first_step}" if self.first_step else ""
        images = f"{self.progress.images_per_step} per step"
        if self.progress.num_images < sys.maxsize:  # a stream has no epochs
            images = f"{self.progress.num_images:,}, {images}"
        libraries = ("torch", "diffusers", "transformers", "accelerate")
        versions = [f"{name} {importlib.metadata.version(name)}" for name in libraries]
        python = f"Python {platform.python_version()}"
        return {
            "processes": self.launch.describe(),
            "memory in use": self.costs.describe().partition(": ")[2],
            "time": f"{format_duration(time.monotonic() - self.begun_at)}{since}",
            "images": images,
            "trained": describe_trained(self.models),
            "versions": ", ".join([f"diffusion_training {__version__}", python, *versions]),
        }

    # ---- the end

    def finish(self, results: Results) -> None:
        """Save and show the result of a run that no signal has stopped, and end the run.

        The result is saved before its samples are drawn, so that a kill can't lose it. Then come
        the model card, --push_to_hub and the last words. After a signal, exit with its status.
        """
        self.records.bar.close()
        if self.is_complete():
            self.save_result(results.save)
            self.show_metrics(results)
            self.show(results)
            self.compare_widths()  # --posthoc_ema
        self.end(results)

    def end(self, results: Results) -> None:
        """Write the model card, upload, and say what to do next. After a signal, only exit."""
        args = self.args
        name = results.name
        accelerator = self.launch.accelerator
        stop = self.stop_signal.agreed
        if args.checkpoints_to:
            if self.run.copies and self.has_folder:  # they have begun
                self.run.copies.finish(args.checkpoints_to_timeout)
            accelerator.wait_for_everyone()  # else torch ends the first process too
        self.stop_signal.close()
        if stop:
            end_stopped(accelerator, stop, self.step, args.max_train_steps)
        if self.starved:
            fail(f"{self.starved} from step {self.step}")
        # a kill may have prevented it
        self.prune(Path(args.output_dir, f"checkpoint-{self.step}"))
        if self.launch.is_main:
            save_model_card(self.step, results.describe, args)
        samples = "samples/"
        if not draws_samples(args):
            has_prompts = bool(args.validation_prompts)
            why = "--num_validation_images 0" if has_prompts else "no --validation_prompts"
            samples = f"no samples ({why})"
        duration = format_duration(time.monotonic() - self.begun_at)
        done = f"Done in {duration}: {name}, {samples} and report.html are in {args.output_dir}"
        if readers := name_readers(args, for_unet="unet" in self.models):
            done += f". {readers.replace('`', '')}"
        if self.launch.is_main:
            done += judge_end(read_metrics(args.output_dir))
        report = Path(args.output_dir, "report.html")
        contents = "the samples, and code" if draws_samples(args) else "code"
        done += f"\nNext: open {report} in a browser. It has {contents} that uses the {name}"
        end_run(self.launch, self.run, done, results.files, args)


def check_free_space(models: Models, args: Namespace) -> None:
    """Stop with an error if --output_dir has no room for the checkpoints and the result.

    There are up to two checkpoints, because the next one is written before an old one is deleted,
    and with --checkpoints_to a third that is being copied. Existing ones need no more room, nor do
    existing snapshots of --posthoc_ema.
    """
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
