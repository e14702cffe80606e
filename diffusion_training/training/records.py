"""What a run reports: metrics.jsonl, trackers, progress bar, skipped images, waiting for data."""

import contextlib
import functools
import json
import math
import os
import shutil
import sys
import time
from argparse import Namespace
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
import xxhash
from accelerate import Accelerator
from accelerate.utils import gather_object
from tqdm.auto import tqdm

from diffusion_training.batches import Batch, Models, Objective, Prepared, StepSums
from diffusion_training.errors.sentences import explained, fail, surviving
from diffusion_training.files import saving
from diffusion_training.loading import seconds_between
from diffusion_training.models import is_adapted
from diffusion_training.training.keeping.checkpoints import find_checkpoints
from diffusion_training.training.progress import NextStep, Progress, format_duration
from diffusion_training.training.run_folder import RunFolder, begin_run
from diffusion_training.training.step.costs import Costs
from diffusion_training.training.step.sharding import is_sharded, whole
from diffusion_training.training.step.signs import (
    Inputs,
    find_signs,
    iterate_metrics,
    measure_constant,
    read_metrics,
)

# names of what `measure_images` returns
MEASURED = (*Inputs._fields, "count")


class Records:
    """Collects and reports how a run is doing.

    `watch` and `add` only collect, as `measure_inputs` does after the first batch.

    models: those that are trained. num_left_out: images that could not be decoded before the run.
    objective: to compare the loss with that of a constant prediction.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        run: RunFolder,
        progress: Progress,
        models: Models,
        objective: Objective,
        costs: Costs,
        num_left_out: int,
        args: Namespace,
    ) -> None:
        self.accelerator = accelerator
        self.output_dir = Path(args.output_dir)
        self.args = args
        self.run = run
        self.has_begun = False
        self.progress = progress
        self.first_step = progress.global_step
        self.updated_at = progress.data_step  # at the last `update`
        self.held_out: dict[str, float] = {}
        self.metrics: dict[str, Any] = {}
        self.signs: set[str] = set()
        self.skipped: set[int] = set()  # hashes of their names
        self.num_records = 0
        self.epoch_losses: dict[int, tuple[float, int]] = {}  # {epoch: (sum, number of records)}
        for record in self.read_kept():
            if "held_out_loss" in record:
                self.held_out = record
            if "metric_images" in record:
                self.metrics = record
            self.signs |= record.get("signs", {}).keys()
            self.skipped |= set(map(hash_name, record.get("skipped", ())))
            if "loss" in record:
                self.add_epoch_loss(record["epoch"], record["loss"])
        init_trackers(accelerator, args, run.checkpoint_step)
        # In the log of a job, or on a terminal without a width, a bar would be one endless line.
        self.shows_lines = not (sys.stderr.isatty() and shutil.get_terminal_size().columns)
        self.num_epochs = progress.num_epochs(args.max_train_steps)
        self.bar = tqdm(
            file=open(os.devnull, "w") if self.shows_lines else None,
            total=args.max_train_steps,
            initial=self.first_step,
            desc="Steps",
            disable=not accelerator.is_main_process,
            # no steps per second, so that the rest fits into 80 columns
            bar_format="{l_bar}{bar}| {n_fmt}/{total_fmt} [{elapsed}<{remaining}{postfix}]",
        )
        # since the last record; "clipped" and "steps" count steps
        names = ("loss", "weight", "grad_norm", "clipped", "steps", "prior_loss", "prior_weight")
        self.sums = {name: torch.zeros((), device=accelerator.device) for name in names}
        self.first_images = torch.zeros(len(MEASURED), device=accelerator.device)
        self.num_measured = 0
        self.waits: list[Any] = []
        self.num_images = 0
        self.seconds: dict[str, float] = {}  # of the last checkpoint, samples, ...; see `timed`
        self.start = time.perf_counter()
        self.example = ""  # a skipped image, for a sentence
        self.unrecorded: dict[str, str] = {}  # those that no record has yet
        self.new_skipped: dict[str, str] = {}  # those that only this process knows
        self.num_left_out = num_left_out
        self.first_inputs: Prepared | None = None  # some of the first images
        self.objective = objective
        self.any_decoded = run.checkpoint is not None
        self.models = models
        adapters = [model.adapter for model in models.values() if is_adapted(model)]
        self.lora_b = adapters[0].list_b(models) if adapters else []
        self.costs = costs
        self.has_printed_memory = False

    def read_kept(self) -> Iterator[dict]:
        """Read the records of the run that is resumed. They may not fit into memory."""
        if self.run.checkpoint:
            yield from iterate_metrics(self.run.checkpoint.parent, self.first_step)

    def begin(self) -> None:
        """Before the first file is written, remove what an earlier run has left.

        metrics.jsonl begins without the records after the checkpoint, which come again.
        """
        if self.has_begun:
            return
        self.has_begun = True
        if self.accelerator.is_main_process:
            begin_run(self.run, self.output_dir)
            with (
                saving(self.output_dir, "metrics.jsonl") as unfinished,
                (unfinished / "metrics.jsonl").open("w") as file,
            ):
                file.writelines(json.dumps(record) + "\n" for record in self.read_kept())
        if self.run.copies:
            self.run.copies.begin(self.run.checkpoint_step)

    def add_epoch_loss(self, epoch: int, loss: float) -> None:
        """Add the loss of a record to its epoch; only the epoch before it is kept, too."""
        total, count = self.epoch_losses.pop(epoch, (0.0, 0))
        before = [*self.epoch_losses.items()][-1:]
        self.epoch_losses = dict([*before, (epoch, (total + loss, count + 1))])
        self.num_records += 1

    def watch(self, batches: Iterable[Batch]) -> Iterator[Batch]:
        """Pass batches on; note images that could not be decoded, and how long each batch took."""
        for batch in batches:
            self.new_skipped.update(batch["skipped"])
            self.waits.append(batch["waited"])
            yield batch

    def measure_inputs(self, prepared: Prepared, weight: torch.Tensor) -> None:
        """Measure the first images that the models get."""
        if self.num_measured >= 100:  # a hundred per process are enough
            return
        self.num_measured += len(prepared.clean)
        self.first_images += measure_images(prepared, weight)
        # `any` waits for the device, once
        if self.accelerator.is_main_process and self.first_inputs is None and weight.any():
            self.first_inputs = take_first(prepared, 16)

    def add(self, sums: StepSums, step: NextStep, lr: float) -> None:
        """Add what `train_step` returned for a step."""
        self.begin()
        norm = whole(sums["grad_norm"])
        added = {
            "loss": sums["loss"],
            "weight": sums["weight"],
            "grad_norm": norm,
            "clipped": norm > (self.args.max_grad_norm or math.inf),
            "steps": 1,
        }
        if "prior_loss" in sums:
            added |= {"prior_loss": sums["prior_loss"], "prior_weight": sums["weight"]}
        for name, value in added.items():
            self.sums[name] += value
        self.num_images += step.images
        self.epoch = step.epoch
        self.lr = lr
        self.bar.update(1)  # only counts: showing the loss would wait for the device

    def add_held_out(self, step: int, losses: dict[str, float]) -> None:
        """Record a held-out loss."""
        self.held_out = {"step": step, **losses}
        self.write(self.held_out)

    def add_metrics(self, record: dict[str, Any]) -> None:
        """Record what `Metrics` has measured."""
        self.metrics = record
        self.write(record)

    @contextlib.contextmanager
    def timed(self, name: str, is_pause: bool = True) -> Iterator[None]:
        """Let the next record have the seconds that the block took, under `name`.

        Pauses of the training are left out of the bar's estimate of a step, but not of images per
        second. They write files, so `begin` comes first.
        """
        if is_pause:
            self.begin()
        begin = time.perf_counter()
        yield
        self.seconds[name] = pause = time.perf_counter() - begin
        if is_pause and not self.bar.disable:
            self.bar.start_t += pause
            self.bar.last_print_t += pause

    def gather(self) -> dict[str, float]:
        """Wait for the device. Returns the sums over all processes, by their names."""
        device = self.accelerator.device
        norms = torch._foreach_norm(self.lora_b) if self.lora_b else [torch.ones((), device=device)]
        learned = torch.stack([norm.to(device) for norm in norms]).sum()
        measured = dict(zip(MEASURED, self.first_images, strict=True))
        sums = {"learned": learned, **self.sums, **measured}
        values = self.accelerator.reduce(torch.stack(list(sums.values()))).tolist()
        return dict(zip(sums, values, strict=True))

    def log(self) -> None:
        """Write a record of the steps since the last one, for the trackers too.

        Call it before a save of the same step: afterwards it writes nothing.
        """
        self.update(log=True)

    def check_before_saving(self) -> None:
        """Before a save, check the loss. After the last step, write its record."""
        is_last = self.progress.global_step == self.args.max_train_steps
        self.update(log=is_last and self.progress.stepped)

    def update(self, log: bool) -> None:
        """Wait for the device and check the steps since the last record, only once in a step.

        log: write a record.
        """
        if self.updated_at == self.progress.data_step:
            return
        self.updated_at = self.progress.data_step
        step = self.progress.global_step
        last = step == self.args.max_train_steps
        sums = self.gather()
        for name, reason in gather_object(sorted(self.new_skipped.items())):
            hashed = hash_name(name)
            if hashed not in self.skipped and self.accelerator.is_main_process:
                self.unrecorded[name] = reason
                self.skipped.add(hashed)
                self.bar.write(f"Skipped {name} ({reason})", file=sys.stderr)
            self.example = self.example or f", for example {name} ({reason})"
        self.new_skipped = {}
        self.any_decoded = self.any_decoded or sums["weight"] > 0
        if self.accelerator.is_main_process and not self.has_printed_memory:
            self.bar.write(self.costs.describe())
            if said := self.costs.describe_attention():
                self.bar.write(said)
            self.has_printed_memory = True
        self.check(step, sums, last)
        if not log or sums["weight"] == 0:
            return
        record = self.make_record(step, sums, last)
        more = {"skipped": self.unrecorded}
        if last or self.num_records.bit_count() == 1:  # seldom, because all records are read
            records = [*read_metrics(self.output_dir), record]
            more = {"signs": self.find_new_signs(records, sums)} | more
        self.write(record | {name: value for name, value in more.items() if value})
        for total in self.sums.values():  # each record covers the steps since the last one
            total.zero_()
        self.unrecorded = {}
        self.seconds = {}
        self.waits = []
        self.num_images = 0

    def check(self, step: int, sums: dict[str, float], last: bool) -> None:
        """Stop with an error, before saving, if images are unusable or the loss is not finite."""
        # 100 in a row, or all of the first epoch
        none_of_epoch = not self.any_decoded and (last or self.epoch > 0)
        if sums["weight"] == 0 and (self.num_images >= 100 or none_of_epoch):
            fail(f"none of the last {self.num_images} images could be used{self.example}")
        if not math.isfinite(sums["loss"] + sums["grad_norm"]):
            self.run.writer.wait()  # perhaps of a checkpoint
            checkpoints = find_checkpoints(self.output_dir)
            newest = checkpoints[-1] if checkpoints else "none"
            advice = "try a lower --learning_rate or more --lr_warmup_steps"
            if not math.isfinite(sums["mean_square"]):
                what = "latents" if "latents_dir" in self.args else "images"
                advice = (
                    f"the {what} that the model gets are not finite, so look at the data and, if "
                    "--mixed_precision is fp16, use bf16 or no"
                )
            fail(f"the loss is not finite at step {step} (last checkpoint: {newest}); {advice}")

    def make_record(self, step: int, sums: dict[str, float], last: bool) -> dict[str, Any]:
        """Make the record of the steps since the last one, and show it in the bar."""
        now = time.perf_counter()
        duration = now - self.start
        self.start = now
        waited = sum(seconds_between(*wait) for wait in self.waits)
        epoch = self.epoch + 1  # in records and on the terminal they count from 1
        record = {
            "step": step,
            "epoch": epoch,
            "loss": sums["loss"] / sums["weight"],
            "lr": self.lr,
            "grad_norm": sums["grad_norm"] / sums["steps"],
            "clipped": sums["clipped"] / sums["steps"],  # share of the steps
            "images_per_second": self.num_images / duration,
            "data_wait": waited / duration,  # share of the time
            "skipped_images": len(self.skipped) + self.num_left_out,
            **self.seconds,
        }
        if sums["prior_weight"]:
            record["prior_loss"] = sums["prior_loss"] / sums["prior_weight"]
        self.add_epoch_loss(epoch, record["loss"])
        _, count = self.epoch_losses[epoch]
        # with the first record of an epoch, the epoch before it has ended
        ended = epoch if last or count > 1 else [*self.epoch_losses][0]
        if last or ended != epoch:
            total, count = self.epoch_losses[ended]
            record["epoch_loss"] = total / count
        if self.accelerator.is_main_process:
            record |= self.costs.measure(record["images_per_second"])
        # the terminal cuts off its right end
        is_stream = vars(self.args).get("streaming")
        shown = "" if is_stream else f"epoch {epoch} of {self.num_epochs}, "
        shown += (
            f"loss {record['loss']:.3g}, waiting {record['data_wait']:.0%}, "
            f"{record['images_per_second']:.3g} img/s"
        )
        if self.held_out:
            shown += f", held out {self.held_out['held_out_loss']:.3g}"
        if "mfu" in record:
            shown += f", {record['mfu']:.0%} of the peak"
        shown += f", lr {self.lr:.1e}"
        self.bar.set_postfix_str(shown)
        if self.bar.disable:
            return record
        if "epoch_loss" in record and count > 1 and not is_stream:
            self.bar.write(f"Epoch {ended} of {self.num_epochs}: mean loss {total / count:.4g}")
        if self.shows_lines:
            steps = self.bar.n - self.bar.initial
            left = self.bar.format_dict["elapsed"] / steps * (self.bar.total - self.bar.n)
            self.bar.write(
                f"Step {step:,} of {self.bar.total:,}: {shown}, {format_duration(left)} left"
            )
        return record

    def find_new_signs(self, records: list[dict], sums: dict[str, float]) -> dict[str, str]:
        """Print and return the signs of trouble that were not found yet, on the first process.

        sums: see `gather`.
        """
        if not self.accelerator.is_main_process:
            return {}
        inputs = Inputs()
        if sums["count"]:
            inputs = Inputs(*(sums[name] / sums["count"] for name in Inputs._fields))
        signs = find_signs(records, inputs, self.args, sums["learned"], lambda: self.constant_loss)
        new = {kind: text for kind, text in signs.items() if kind not in self.signs}
        self.signs |= new.keys()
        for text in new.values():
            self.bar.write(f"Worth a look: {text}", file=sys.stderr)
        return new

    @functools.cached_property
    def constant_loss(self) -> float:
        """The loss of a constant prediction; nan if unknown."""
        # all processes must call a sharded module; the constant replaces only the first one
        is_callable = len(self.models) == 1 or not any(map(is_sharded, self.models.values()))
        if not is_callable or self.first_inputs is None:
            return math.nan
        return measure_constant(self.objective, self.models, self.first_inputs)

    def write(self, record: dict[str, Any]) -> None:
        """Add a record to metrics.jsonl and the trackers."""
        if self.accelerator.is_main_process:
            with (self.output_dir / "metrics.jsonl").open("a") as file:
                file.write(json.dumps(record) + "\n")
        numbers = {
            key: value for key, value in record.items() if key not in ("step", "signs", "skipped")
        }
        with surviving(f"--report_to {self.args.report_to} failed; metrics.jsonl has all records"):
            self.accelerator.log(numbers, step=record["step"])


def hash_name(name: str) -> int:
    """A number for an image's name, which takes less memory."""
    return xxhash.xxh3_64_intdigest(name.encode(errors="surrogatepass"))


def init_trackers(accelerator: Accelerator, args: Namespace, reached: int) -> None:
    """Start the trackers of --report_to, with the flags in a form that they accept.

    A resumed run continues the tracker's run, and logs no step twice.

    reached: the step of the checkpoint, or -1.
    """
    values = {}
    for name, value in vars(args).items():
        if isinstance(value, list):
            value = " | ".join(map(str, value))
        if value is not None:
            values[name] = json.dumps(value) if isinstance(value, dict) else value
    uses_wandb = args.report_to in ("wandb", "all")
    advice = "run `wandb login`, set WANDB_MODE=offline, or " if uses_wandb else ""
    with explained(f"--report_to {args.report_to} does not work: {advice}pass --report_to none"):
        options = {
            "wandb": {"dir": args.output_dir, "id": args.tracker_id, "resume": "allow"},
            "tensorboard": {"purge_step": reached + 1},  # later steps are recorded again
        }
        accelerator.init_trackers(args.tracker_project_name, values, options)


def take_first(prepared: Prepared, count: int) -> Prepared:
    """The first images of a batch, with their conditions and loss inputs."""
    images, condition, loss_inputs = prepared
    cut = [{key: part[key][:count].clone() for key in part} for part in (condition, loss_inputs)]
    return Prepared(images[:count].clone(), *cut)


@torch.no_grad()
def measure_images(prepared: Prepared, weight: torch.Tensor) -> torch.Tensor:
    """Return sums over images of their lowest and highest values, mean squares, and count.

    They are weighted by `weight` [N].
    """
    values = prepared.clean.flatten(1)
    low, high = values.aminmax(dim=1)
    measures = [low, high, values.square().mean(dim=1), torch.ones_like(low)]
    return weight @ torch.stack(measures, dim=1)
