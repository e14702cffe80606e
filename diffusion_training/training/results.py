"""What a run makes of its weights for people: measures, report, best weights, the result."""

import importlib.metadata
import platform
import sys
import time
from argparse import Namespace
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeAlias

from accelerate.utils import gather_object

from diffusion_training import __version__
from diffusion_training.batches import Models, Objective, TrainingData
from diffusion_training.errors.sentences import fail
from diffusion_training.launch import Launch
from diffusion_training.stopping import StopSignal, end_stopped
from diffusion_training.training.held_out import log_held_out_loss, measure_held_out_losses
from diffusion_training.training.keeping.best import keep_best
from diffusion_training.training.keeping.posthoc import WIDTHS, list_snapshots, write_losses
from diffusion_training.training.progress import format_duration
from diffusion_training.training.records import Records
from diffusion_training.training.run_folder import RunFolder, end_run, take_requests
from diffusion_training.training.scores.metric_flags import METRICS, TURBO
from diffusion_training.training.showing.card import save_model_card
from diffusion_training.training.showing.report import DescribeModel, save_report
from diffusion_training.training.showing.samples import samples_path
from diffusion_training.training.state import TrainState
from diffusion_training.training.step.costs import describe_trained
from diffusion_training.training.step.sharding import gather_model
from diffusion_training.training.step.signs import judge_end, read_metrics

if TYPE_CHECKING:
    from diffusion_training.training.scores.metrics import Draw, Metrics, Read

# writes the models as a result, into a folder
WriteResult: TypeAlias = Callable[[Models, Path], None]


def open_metrics(
    launch: Launch, dataset: Any, train_rows: Any, held_out: dict[int, int], args: Namespace
) -> "Metrics | None":
    """Return the `Metrics` of --validation_metrics; None without the flag or for --find_lr."""
    if not args.validation_metrics or args.find_lr:
        return None
    # imported here, because few runs measure their samples
    from diffusion_training.training.scores.metrics import Metrics

    return Metrics(launch, dataset, train_rows, held_out, args)


def join_records(own: dict[str, Any], turbo: dict[str, Any] | None = None) -> dict[str, Any]:
    """A record with the figures of samples of a second base, named turbo_clip-t and the like."""
    figures = {
        f"{TURBO}{name}": value
        for name, value in (turbo or {}).items()
        if name.partition("_")[0] in METRICS and name != "copy_real"
    }
    return own | figures


def draws_samples(args: Namespace) -> bool:
    """Whether there are samples to draw: only an unconditional model needs no prompt."""
    is_unconditional = "validation_prompts" not in args
    return is_unconditional or bool(args.validation_prompts and args.num_validation_images)


@dataclass(frozen=True)
class Results:
    """Measures, shows and saves the models of a run. All processes call all methods.

    name: of what is saved: "pipeline" or "LoRA". files: patterns of its files, for the upload.
    write_result, describe: functions of the script, which only the first process calls. describe
    returns the texts of the report and the model card.
    """

    name: str
    files: list[str]
    write_result: WriteResult
    describe: DescribeModel
    launch: Launch
    run: RunFolder
    state: TrainState
    objective: Objective
    dataset: TrainingData
    held_out: dict[int, int]  # see `hold_out`
    records: Records
    stop_signal: StopSignal
    args: Namespace
    metrics: "Metrics | None" = None  # of --validation_metrics
    readers: str = ""  # a sentence on which program reads which file
    advice: str = ""  # a sentence on which file to copy to where
    begun_at: float = field(default_factory=time.monotonic)  # in seconds

    @property
    def step(self) -> int:
        """The number of optimizer steps taken."""
        return self.state.progress.global_step

    def gather_models(self) -> Models:
        """Gather the models to save as a result on the first process."""
        averages = self.state.averages
        return {name: gather_model(averages.get_model(name)) for name in self.state.models}

    def write(self) -> None:
        """Write the result for other programs, on the first process."""
        self.records.check_before_saving()
        with self.records.timed("result_seconds"):
            result = self.gather_models()
            if self.launch.is_main:
                self.write_result(result, Path(self.args.output_dir))

    def lack_samples(self) -> bool:
        """Whether the run resumes a checkpoint whose samples are not there, because of a kill."""
        if self.run.checkpoint is None:
            return False
        # ask the first process: other machines may have an --output_dir of their own
        return not gather_object([samples_path(self.args.output_dir, self.step).exists()])[0]

    def take_requests(self) -> list[str]:
        """The names of the files of `REQUESTS` in --output_dir, which are removed."""
        folder = Path(self.args.output_dir)
        return gather_object(take_requests(folder) if self.launch.is_main else [])

    def measure_held_out(self) -> None:
        """Measure and record the held-out loss, if images are held out.

        Each process takes a share of them.
        """
        if not self.held_out:
            return
        models = {"held_out_loss": self.state.models}
        if self.state.averages.ema:
            models["held_out_loss_ema"] = self.state.averages.ema
        with self.records.timed("held_out_seconds"):
            log_held_out_loss(
                self.launch, self.records, self.dataset, self.held_out, models, self.objective,
                self.stop_signal, self.step,
            )  # fmt: skip

    def compare_widths(self) -> None:
        """With --posthoc_ema and --holdout, measure the held-out loss of averages of some widths.

        Call it at the end, because it overwrites one of the averages.
        """
        if not self.held_out:
            return
        losses = {}
        folder = Path(self.args.output_dir)
        posthoc, is_main = self.state.averages.posthoc, self.launch.is_main
        with self.records.timed("posthoc_seconds"):
            snapshots = list_snapshots(folder) if is_main else []  # checks them, once
            for width in WIDTHS:
                models = posthoc.reconstruct(snapshots, width, is_main)
                measured = measure_held_out_losses(
                    self.launch, self.records, self.dataset, self.held_out, {"": models},
                    self.objective, self.stop_signal,
                )  # fmt: skip
                if measured is None:  # a signal has come
                    return
                losses[width] = sum(measured[""]) / 9
            if is_main:
                best = write_losses(folder, self.step, losses)
                print(
                    f"\nPost-hoc EMA: of {len(losses)} widths, sigma_rel {best:g} has the lowest "
                    f"held-out loss, {losses[best]:.4g}. To write its pipeline: python "
                    f"reconstruct_ema.py {folder} --output_dir {folder}-widths"
                )

    def score(self, draws: "Sequence[Draw]", read: "Read") -> None:
        """Measure and record --validation_metrics, unless this step's are recorded. See `Draw`.

        draws: of the trained base and, if there is one, of the base of --validation_base.
        """
        if self.metrics is None or self.records.metrics.get("step") == self.step:
            return
        records = []
        for draw in draws:
            record = self.metrics.score(self.step, draw, read, self.stop_signal)
            if record is None:  # a signal has come
                return
            records.append(record)
        self.records.add_metrics(join_records(*records))

    def keep_best(self) -> None:
        """With --save_best or --save_best_metric, write best/ if this step is the best so far.

        Weights that this run has not trained are never the best.
        """
        metric = vars(self.args).get("save_best_metric")
        if not self.args.save_best and not metric:
            return
        if self.run.checkpoint is None and self.step == self.records.first_step:
            return
        with self.records.timed("best_seconds"):
            save = partial(self.write_result, self.gather_models())
            if self.launch.is_main:
                record = self.records.metrics if metric else self.records.held_out
                keep_best(Path(self.args.output_dir), record, self.step, save, metric, self.args)

    def report(self) -> None:
        """Let the writer's thread write report.html, with samples and curves so far.

        Agree whether a signal has come.
        """
        with self.records.timed("report_seconds"):
            if self.launch.is_main:
                step = self.step
                facts = self.list_facts()

                def write() -> None:
                    save_report(self.run.script, self.describe, step, self.args, facts)
                    if self.run.copies:
                        self.run.copies.news.set()

                # wandb, for example, takes no picture of a step once it has a later one
                trackers = self.launch.accelerator.trackers
                if any(tracker.name != "tensorboard" for tracker in trackers):
                    self.run.writer.wait("samples")
                self.run.writer.begin("report", write)
        self.stop_signal.agree()

    def list_facts(self) -> dict[str, str]:
        """Facts about the run for the report, besides its flags."""
        progress = self.state.progress
        first_step = self.records.first_step
        since = f" since step {first_step}" if first_step else ""
        images = f"{progress.images_per_step} per step"
        if progress.num_images < sys.maxsize:  # a stream has no epochs
            images = f"{progress.num_images:,}, {images}"
        libraries = ("torch", "diffusers", "transformers", "accelerate")
        versions = [f"{name} {importlib.metadata.version(name)}" for name in libraries]
        python = f"Python {platform.python_version()}"
        fitted = self.args.fitted if "fitted" in self.args else None
        return {
            "processes": self.launch.describe(),
            **({"chosen by --fit": fitted} if fitted else {}),
            "memory in use": self.records.costs.describe().partition(": ")[2],
            "time": f"{format_duration(time.monotonic() - self.begun_at)}{since}",
            "images": images,
            "trained": describe_trained(self.state.models),
            "versions": ", ".join([f"diffusion_training {__version__}", python, *versions]),
        }

    def end(self) -> None:
        """Write the model card, upload, and say what to do next. After a signal, only exit."""
        args = self.args
        self.stop_signal.close()
        if stop := self.stop_signal.agreed:
            end_stopped(self.launch.accelerator, stop, self.step, args.max_train_steps)
        if reason := self.stop_signal.starved_because:
            fail(f"{reason} from step {self.step}")
        if self.launch.is_main:
            save_model_card(self.step, self.describe, args)
        samples = "samples/"
        if not draws_samples(args):
            has_prompts = bool(args.validation_prompts)
            why = "--num_validation_images 0" if has_prompts else "no --validation_prompts"
            samples = f"no samples ({why})"
        duration = format_duration(time.monotonic() - self.begun_at)
        done = f"Done in {duration}: {self.name}, {samples} and report.html are in "
        done += str(args.output_dir)
        if self.readers:
            done += f". {self.readers.replace('`', '')}"
        if self.launch.is_main:
            done += judge_end(read_metrics(args.output_dir))
        report = Path(args.output_dir, "report.html")
        contents = "the samples, and code" if draws_samples(args) else "code"
        done += f"\nNext: open {report} in a browser. It has {contents} that uses the {self.name}"
        if self.advice:
            done += f". {self.advice}"
        end_run(self.launch, self.run, done, self.files, args)
