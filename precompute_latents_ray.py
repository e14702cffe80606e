"""Make the cache of precompute_latents.py on a Ray cluster: the same files, byte for byte.

    python precompute_latents_ray.py  # the demo; starts Ray on this machine
    python precompute_latents_ray.py --address 10.0.0.1:6379 \\
        --num_encoders 64 --gpus_per_encoder 1 \\
        --pretrained_model_name_or_path stable-diffusion-v1-5/stable-diffusion-v1-5 \\
        --train_data_dir /shared/photos --cache_dir /shared/datasets --resolution 512 \\
        --center_crop --mixed_precision bf16 --output_dir /shared/latents-photos

Start it once, with python, on a node of the cluster. It has the flags, the input and the output of
precompute_latents.py; all nodes must share the output folder. Each script can resume a cache that
the other one began. The bytes are equal because this script imports the two stages of the other.
--train_data_dir and --output_dir may also be addresses (s3://, gs://). At an address the input must
be parquet, and each output file is one upload.

Layout of this file:
    parse_args    the flags of the other script, and four for Ray
    decode_part   stage 1, tasks on CPUs: the rows of a part of a shard -> pixels and tokens
    Encoder.make  on actors with the models: decode a shard in tasks, encode it, write its file
    plan_engine   what an encoder needs, and how many of them the cluster has a place for
    make_shards   hands out shards to encoders
    main          the run in phases
A part is a few batches, cut where the other script cuts them. Ray only schedules; the files are the
state. A shard file is either complete or missing, even if a process is killed, so it does not
matter which process makes a shard, when, or how often. Who makes which shard, and whose fault a
death is, is in diffusion_training/cluster/crew.py, the folder of a cache in remote_cache.py there.
"""

from pathlib import Path

try:
    from diffusion_training import check_version
except ModuleNotFoundError:
    raise SystemExit(
        f"{__file__} needs the package diffusion_training: run `pip install .` in the "
        "script's repository"
    ) from None
check_version("0.1.0", Path(__file__).name)  # first: another version may lack the modules below

import argparse
import contextlib
import functools
import importlib
import io
import itertools
import math
import os
import pickle
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

from diffusion_training.arguments import Flags, is_address, make_parser, number, parse_demo
from diffusion_training.cluster.connection import (
    TRIES,
    Gauges,
    check_ray_args,
    connect,
    is_lost_machine,
    list_own_modules,
)
from diffusion_training.latents.cache_flags import add_cache_flags, check_cache_args


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line.

    A bad argument stops the script with one line and status 2 before anything is loaded.
    """
    parser = make_parser(__file__, __doc__, "docs/cluster.md")
    add_cache_flags(parser)
    add = parser.add_argument_group("ray").add_argument
    add(
        "--address",
        help="address of a Ray cluster (default: RAY_ADDRESS, or start Ray on this machine)",
    )
    add(
        "--num_encoders",
        type=number(1, 10**5, int),
        help="maximum number of encoding processes; those without room on the cluster wait "
        "(default: one per GPU, or 1 on CPUs)",
    )
    add(
        "--gpus_per_encoder",
        type=number(0, 8),
        help="GPUs of each encoder, such as 0.5; 0 encodes on CPUs (default: 1 if there are GPUs)",
    )
    add(
        "--accelerator_type",
        help="use only GPUs of this type (Ray's name, such as T4), so that a cache always has the "
        "same bytes (default: any type)",
    )

    args = parser.parse_args(argv)
    if args.dataset_name is None and args.train_data_dir is None:
        from precompute_latents import choose_demo  # its imports take seconds

        args = parse_demo(parser, choose_demo(args.model_family), argv)
    output_dir = args.output_dir.removeprefix("file://")
    check_ray_args(parser, args.address, output_dir)
    local = {**vars(args), "output_dir": output_dir}
    if is_address(args.train_data_dir):
        for name in ("dataset_config_name", "dataset_split"):
            if getattr(args, name) != parser.get_default(name):
                parser.error(
                    f"--{name} is for folders: all parquet files at --train_data_dir "
                    f"{args.train_data_dir} are read"
                )
        local["train_data_dir"] = "."  # the checks of folders can't handle addresses
        if f"{output_dir}/".startswith(f"{args.train_data_dir.rstrip('/')}/"):
            parser.error(
                f"--output_dir {output_dir} lies in --train_data_dir {args.train_data_dir}"
            )
    check_cache_args(parser, argparse.Namespace(**local))
    if args.mixed_precision == "fp16" and args.gpus_per_encoder == 0:
        parser.error("--mixed_precision fp16 needs GPUs: use bf16 or no")
    if args.accelerator_type and args.gpus_per_encoder == 0:
        parser.error(
            "--accelerator_type chooses GPUs, but --gpus_per_encoder 0 uses none: remove one"
        )
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        parser.error("start this script once, with python: Ray starts the processes")
    return parser.freeze(args, output_dir=output_dir)


# --help and mistakes in the flags end here, at once: the imports below take seconds. Importing this
# file parses nothing, so that tests, Ray's workers and loader processes can do so.
if __name__ == "__main__":
    args = parse_args()

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from tqdm.auto import tqdm

from diffusion_training.cluster.crew import Crew
from diffusion_training.cluster.remote_cache import Destination, writing_shard_to
from diffusion_training.cluster.remote_rows import RemoteRows
from diffusion_training.data.captions import report_emptied, report_equal, sample_captions
from diffusion_training.data.encoders import describe_models, load_encoders, place_encoders
from diffusion_training.data.folders import count_references
from diffusion_training.data.rows import ImageRows, load_rows
from diffusion_training.errors.faults import explain
from diffusion_training.errors.printing import amount, print_once
from diffusion_training.errors.sentences import Refused, fail, in_one_sentence
from diffusion_training.families.base import Encoders
from diffusion_training.families.opening import open_base
from diffusion_training.families.recording import record_family
from diffusion_training.latents.cache import describe_rows, find_begun
from diffusion_training.latents.cache_size import describe_size, measure_captions
from diffusion_training.latents.passes import LatentRows, try_batch_sizes
from diffusion_training.latents.plan import PlannedCache, plan_caches
from diffusion_training.latents.settings import compare_settings, name_shard
from diffusion_training.launch import keep_memory
from diffusion_training.memory import move
from diffusion_training.models import EXACT
from precompute_latents import TransformedRows, describe_encoders, encode, encode_all, write_each

try:
    import ray
    from ray.util import placement_group, remove_placement_group
    from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy
except ImportError:
    sys.exit(f"{Path(__file__).name}: Ray is missing: pip install -r requirements-ray.txt")

Result = TypeVar("Result")
Shard = tuple[int, tuple[int, ...]]  # its number, indices of the caches that lack it
Part = tuple[int, int, tuple[int, ...]]  # first row, row after the last, indices of caches
# Bytes of pixels in a part. This keeps a GPU busy, and many parts fit in a node's memory.
PART_BYTES = 2**26
DEPTH = 3  # shards per encoder at a time: one is written, one encoded, one decoded
PATIENCE = 10  # seconds that an encoder waits for images before its own core decodes them
# Flags that are not recorded in the cache
ENGINE = ("num_encoders", "gpus_per_encoder", "accelerator_type", "address")


# -------------------------------------------------------------------------------------------------
# the two stages


class Engine(NamedTuple):
    """The resources of a Ray cluster that the two stages use."""

    num_encoders: int  # at most
    ahead: int  # parts of a shard that are decoded ahead, by as many tasks of stage 1
    place: dict[str, float]  # resources of an encoder and of one task of stage 1
    task_memory: int  # bytes that a task of stage 1 reserves


@dataclass(frozen=True)
class Job:
    """The values that all workers need, pickled once."""

    args: Flags  # with absolute paths, because workers start in other folders
    caches: list[PlannedCache]
    models: dict[str, Any]  # the driver's, described in the precision that encodes
    num_rows: int
    rows: Any  # Ray's reference to the bytes of `PickledRows`
    threads: int  # of the driver
    engine: Engine
    folders: list[str]  # of the caches
    part_rows: int  # rows of a part

    def locate(self, number: int, indices: tuple[int, ...]) -> dict[int, str]:
        """{index of a cache: its file of a shard}."""
        name = name_shard(number, self.caches[0].settings)
        return {index: f"{self.folders[index]}/{name}" for index in indices}


class PickledRows(NamedTuple):
    """The data set as a worker opens it."""

    args: Flags
    caches: list[PlannedCache]
    tokenizers: Any
    fingerprint: str
    rows: bytes  # paths of the files, no pixels


@functools.lru_cache(1)  # a worker process keeps the data set open
def open_rows(pickled: bytes) -> TransformedRows:
    """The `TransformedRows` of this run; a node without the driver's files loads the data set.

    Raises ValueError if the node then finds other data.
    """
    given: PickledRows = pickle.loads(pickled)
    try:
        rows = pickle.loads(given.rows)
    except OSError:
        rows = load_rows(given.args, others=[given.args.caption_column]).rows
        if rows._fingerprint != given.fingerprint:
            raise ValueError(
                "this node finds different data: share the folder --cache_dir among all nodes"
            ) from None
    return TransformedRows(rows, given.tokenizers, given.caches)


def decode_part(part: Part, pickled: bytes) -> list[dict]:
    """Stage 1, as a Ray task: the rows of a part -> batches of `TransformedRows`, in NumPy."""
    dataset = open_rows(pickled)
    first, end, caches = part
    per_batch = dataset.caches[0].rows_per_batch
    decoded = []
    for start in range(first, end, per_batch):
        keys = [(0, row) for row in range(start, min(start + per_batch, end))]
        for batch in dataset[caches, keys]["batches"]:
            decoded.append(map_tensors(batch, lambda tensor: tensor.numpy()))
    return decoded


def name_rows(numbers: range, pickled: Any) -> list[str]:
    """The keys that rows have in a cache, on any node. pickled: Ray's reference, see `Job.rows`."""
    return open_rows(ray.get(pickled)).name_rows(numbers)


def map_tensors(batch: Any, change: Callable) -> dict[str, Any]:
    """Apply `change` to all tensors or arrays of a batch, including those in lists."""

    def apply(value: Any) -> Any:
        if isinstance(value, list):
            return [apply(part) for part in value]
        return change(value) if isinstance(value, torch.Tensor | np.ndarray) else value

    return {name: apply(value) for name, value in batch.items()}


def attempt(work: Callable[[], Result]) -> tuple[Result | None, str | None]:
    """Call `work` up to TRIES times.

    Returns (its result, None), or (None, the reason of the last failure).
    """
    for _ in range(TRIES):
        try:
            return work(), None
        except Refused as refused:  # keep its sentence; an actor must not exit
            reason = str(refused)
        except Exception as error:
            reason = f"{type(error).__name__}: {explain(error)}"
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
    return None, f"{reason} (on {socket.gethostname()}, tried {TRIES} times)"


def list_rows(number: int, job: Job) -> range:
    """The rows of a shard."""
    first = number * job.caches[0].rows_per_shard
    return range(first, min(job.num_rows, first + job.caches[0].rows_per_shard))


def list_parts(shard: Shard, job: Job) -> list[Part]:
    """The parts of a shard, in order."""
    number, indices = shard
    rows = list_rows(number, job)
    firsts = rows[:: job.part_rows]
    return [(first, min(first + job.part_rows, rows.stop), indices) for first in firsts]


class Encoder:
    """The stages of a shard, in an actor that loads the models once: see `make`.

    Up to DEPTH calls of `make` run at the same time: while one encodes, the previous one writes its
    rows, and tasks decode the rows of the next one.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.device = torch.device("cuda" if ray.get_gpu_ids() else "cpu")
        if self.device.type == "cpu":
            keep_memory()
        transformers.utils.logging.disable_progress_bar()
        task = ray.remote(max_retries=0, num_cpus=1, memory=job.engine.task_memory)(decode_part)
        # on the core that is reserved for this encoder, or on any core of the cluster
        self.decode_here, self.decode_anywhere = task, task.options(scheduling_strategy="SPREAD")
        # the last task on the own core; this one opens the data while the models load
        self.own_task = self.decode_here.remote((0, 0, ()), job.rows)
        self.assigning = threading.Lock()  # of the own core: up to DEPTH threads decode shards
        self.turn = threading.Lock()  # of the shard that is encoded
        _, self.reason = attempt(self.load_models)

    def make(self, shard: Shard) -> dict[str, Any]:
        """Make a shard: its file in each cache that lacks it.

        Returns {"records": {index of the cache: record}, "failed": the reason or None, "waited":
        seconds spent waiting for images, "busy": all other seconds}.
        """
        spent = dict.fromkeys(("waited", "busy"), 0.0)

        def make_files() -> dict[int, dict]:
            batches = self.decode(shard, spent)  # tasks begin now, also if another shard is encoded
            with contextlib.closing(self.encode(batches, spent)) as encoded:
                rows = list_rows(shard[0], self.job)
                return write_each(writing_shard_to, self.job.locate(*shard), rows, encoded)

        records, reason = (None, self.reason) if self.reason else attempt(make_files)
        return {"records": records, "failed": reason, **spent}

    def decode(self, shard: Shard, spent: dict[str, float]) -> Iterator[Any]:
        """Let tasks read and decode a shard, some parts ahead. Returns its batches, in order.

        Their tensors are on the way to the device.
        """
        parts, ahead = list_parts(shard, self.job), self.job.engine.ahead
        tasks = {part: self.start_task(part) for part in parts[:ahead]}

        def to_device(array: np.ndarray) -> torch.Tensor:
            # torch.tensor copies it, because Ray's shared memory is read-only
            return move(torch.tensor(array), self.device)

        def load() -> Iterator[Any]:
            for part, later in itertools.zip_longest(parts, parts[ahead:]):
                begin = time.perf_counter()
                batches = self.get_decoded(part, tasks.pop(part))
                spent["waited"] += time.perf_counter() - begin
                if later:
                    tasks[later] = self.start_task(later)
                if tasks:  # does not wait, but makes Ray start to send results to this node
                    ray.wait(list(tasks.values()), num_returns=len(tasks), timeout=0)
                yield from (map_tensors(batch, to_device) for batch in batches)

        return load()

    def encode(self, batches: Iterator[Any], spent: dict[str, float]) -> Generator[LatentRows]:
        """As `encode_all`, when no other shard is being encoded."""
        with self.turn:
            # The number of threads changes the order of sums, and so the bits.
            torch.set_num_threads(self.job.threads)
            begin = time.perf_counter()
            yield from encode_all(batches, self.encoders, self.load_exact, self.job.caches)
            spent["busy"] += time.perf_counter() - begin - spent["waited"]

    def start_task(self, part: Part) -> Any:
        """Let a task decode a part: on the own core if it is idle, or on one that Ray finds."""
        with self.assigning:
            if not ray.wait([self.own_task], timeout=0)[0]:
                return self.decode_anywhere.remote(part, self.job.rows)
            task = self.own_task = self.decode_here.remote(part, self.job.rows)
            return task

    def get_decoded(self, part: Part, task: Any) -> list[dict]:
        """Wait for the batches of a part. Raises RuntimeError if they can't be decoded."""
        while True:
            tasks = [task]
            try:
                if not ray.wait(tasks, timeout=PATIENCE)[0]:  # perhaps Ray finds no core for it
                    tasks.append(self.decode_here.remote(part, self.job.rows))
                return ray.get(ray.wait(tasks)[0][0])
            except Exception as error:
                if not is_lost_machine(error):
                    rows = f"rows {part[0]} to {part[1] - 1}"
                    reason = explain(getattr(error, "cause", None) or error)
                    raise RuntimeError(f"{rows} could not be decoded: {reason}") from error
                task = self.decode_here.remote(part, self.job.rows)

    def load_models(self) -> None:
        """Load the models; raise ValueError if they differ from the driver's."""
        args = self.job.args
        settings = self.job.caches[0].settings
        base = open_base(args, num_references=count_references(args), record=record_family)
        base = replace(base, family=base.family.restore_findings(settings))

        def load(dtype: torch.dtype, drivers: dict[str, Any]) -> Encoders:
            encoders = load_encoders(base, dtype)
            if differences := compare_settings(drivers, describe_models(encoders)):
                raise ValueError(
                    f"the models on this node differ from the driver's ({', '.join(differences)})"
                )
            return encoders

        dtype = getattr(torch, settings["dtype"])
        self.encoders = load(dtype, self.job.models)
        self.load_exact = None
        if dtype != torch.float32:
            self.load_exact = functools.cache(functools.partial(load, torch.float32, settings))
        place_encoders(self.encoders, self.device, args.compile)

    def try_batch_sizes(self) -> tuple[int | None, str, str | None]:
        """For --batch_size auto: return (size or None, printed table, error message or None)."""

        def find() -> int:
            if self.reason:
                fail(self.reason)
            rows = open_rows(ray.get(self.job.rows))
            return try_batch_sizes(Accelerator(cpu=True), self.device, rows, self.encoders, encode)

        with contextlib.redirect_stdout(io.StringIO()) as printed:
            size, reason = attempt(find)
        return size, printed.getvalue(), reason


# -------------------------------------------------------------------------------------------------
# the run


def make_absolute(args: argparse.Namespace) -> Flags:
    """The flags with absolute paths, because workers start in other folders.

    Values that are not existing paths, such as hub ids, are not changed.
    """
    names = ["dataset_name", "train_data_dir", "cache_dir", "single_file_config"]
    names += [name for name in vars(args) if "name_or_path" in name]
    paths = {}
    for name in names:
        value = getattr(args, name)
        if value and os.path.exists(value):
            paths[name] = os.path.abspath(value)
    return Flags(**vars(args) | paths)


def plan_engine(args: argparse.Namespace, weight_bytes: int) -> tuple[Engine, str]:
    """Fit the two stages to the Ray cluster. Returns the engine and its description.

    Stops the script if no node has enough resources, unless --num_encoders asks for more nodes.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    kind = args.accelerator_type and f"accelerator_type:{args.accelerator_type}"
    own = [node for node in nodes if not kind or kind in node]
    later = "if the cluster will have such nodes, give --num_encoders"
    if not own and not args.num_encoders:
        keys = {key for node in nodes for key in node if key.startswith("accelerator_type:")}
        types = ", ".join(sorted(key.split(":")[1] for key in keys)) or "none"
        wanted = f"no node of Ray has --accelerator_type {args.accelerator_type}"
        fail(f"{wanted}; there is {types}: {later}")
    cpus = sum(node.get("CPU", 0) for node in nodes)
    gpus = sum(node.get("GPU", 0) for node in own)
    per_encoder = args.gpus_per_encoder
    if per_encoder is None:
        per_encoder = float(gpus > 0 or kind is not None)
    if per_encoder == 0 and args.mixed_precision == "fp16":
        fail("fp16 does nothing on a CPU, or is very slow: use --mixed_precision bf16 or no")
    if 0 < per_encoder < 1:  # an encoder never uses parts of two GPUs
        per_encoder = int(1e4 / int(1 / per_encoder)) / 1e4
    count = args.num_encoders or max(1, int(gpus / per_encoder) if per_encoder else 1)
    # Of the DEPTH shards of an encoder one needs no tasks any more. Ray holds back the tasks that
    # find no core.
    ahead = max(2, math.ceil(cpus / count / (DEPTH - 1)))
    memory = 2**30 + 4 * PART_BYTES
    # The CPU is for the task. An encoder reserves none, because a machine may have only one.
    place = {"CPU": 1, "GPU": per_encoder, "memory": 2 * memory + weight_bytes}
    if kind:
        place[kind] = 0.001  # as much as Ray's own option takes
    engine = Engine(count, ahead, place, memory)

    needs = {name: need for name, need in place.items() if need}
    fit = sum(min(int(node.get(name, 0) / needs[name]) for name in needs) for node in nodes)
    size = f"{per_encoder:g} GPUs, 1 CPU and {place['memory'] / 1e9:.1f} GB"
    if not fit and not args.num_encoders:
        fail(f"an encoder and a task need {size}, and no node of Ray has that: {later}")
    device = f"{per_encoder:g} GPUs" if per_encoder else f"{torch.get_num_threads()} CPU threads"
    sentences = (
        f"Ray: {len(nodes)} nodes, {cpus:g} CPUs, {gpus:g} GPUs; {count} encoders of {device}"
    )
    if fit < count:
        sentences += f"\nRay has a place for {fit} of {count} encoders ({size} each)"
        sentences += "; the others wait for more nodes"
    return engine, sentences


def place_encoder(job: Any, engine: Engine) -> tuple[Any, Any]:
    """Start an encoder in a placement group. Returns (the actor, the group).

    Ray reserves the place of the encoder and of one task together, so encoders can't take the
    places of all tasks. Until a node has room for the group, the actor waits, and Ray requests a
    node from an autoscaler.
    """
    group = placement_group([engine.place])
    actor = ray.remote(
        max_concurrency=DEPTH,
        max_task_retries=-1,  # of a lost connection, until Ray knows how the encoder died
        num_cpus=0,
        num_gpus=engine.place["GPU"],
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            group, placement_group_capture_child_tasks=True
        ),
    )(Encoder)
    return actor.remote(job), group


def count_weight_bytes(encoders: Encoders, dtype: torch.dtype) -> int:
    """The bytes of the weights of all models in a precision."""
    weights = (weight for model in encoders.modules() for weight in model.parameters())
    return dtype.itemsize * sum(weight.numel() for weight in weights)


def make_shards(
    missing: dict[int, tuple[int, ...]], job: Job, show: Callable[[int, int], None]
) -> Generator[tuple[int, dict]]:
    """Have encoders make the missing shards, {number: indices of the caches that lack it}.

    Yields (number, result of `Encoder.make`) in any order, see `Crew.make_shards`.
    """
    start_encoder = functools.partial(place_encoder, ray.put(job), job.engine)
    return Crew(missing, start_encoder, job.engine.num_encoders, DEPTH).make_shards(show)


def measure_batch_size(job: Job) -> int:
    """For --batch_size auto: let an encoder find the size on its device."""
    encoder, group = place_encoder(job, job.engine)
    size, printed, reason = ray.get(encoder.try_batch_sizes.remote())
    remove_placement_group(group)
    print(printed, end="", flush=True)
    return size or fail(reason)


class CrewProgress:
    """The progress bar, with its numbers also as gauges of Ray's metrics."""

    def __init__(self, total: int, done: int) -> None:
        self.bar = tqdm(total=total, initial=done, desc="Images", unit="img")
        self.busy = self.waited = 0.0  # seconds of the encoders
        self.encoders = (0, 0)  # at work, and those to come
        self.gauges = Gauges(
            "precompute_latents",
            rows_done="Rows that are in the cache",
            rows_per_second="Rows per second, as in the progress bar",
            waiting_share="Share of time that encoders waited for images",
            encoders_at_work="Encoders that have a place and have loaded the models",
            encoders_waiting="Encoders that start or wait for a place",
        )

    def add(self, rows: int, result: dict[str, Any]) -> None:
        """Count the rows of a result of `Encoder.make`."""
        self.busy += result["busy"]
        self.waited += result["waited"]
        self.bar.update(rows)
        self.show(*self.encoders)

    def show(self, at_work: int, waiting: int) -> None:
        """Show how many encoders are at work, and how many start or wait for a place."""
        is_new, self.encoders = self.encoders != (at_work, waiting), (at_work, waiting)
        share = self.waited / (self.busy + self.waited) if self.busy else 0.0
        phrases = [f"{share:.1%} waiting for images"] if self.busy else []
        phrases.append(amount(at_work, "encoder"))
        if waiting:
            phrases.append(f"{waiting} starting or waiting for a place")
        self.bar.set_postfix_str(", ".join(phrases), refresh=is_new)
        self.gauges.set(
            rows_done=self.bar.n,
            rows_per_second=self.bar.format_dict["rate"],
            waiting_share=share,
            encoders_at_work=at_work,
            encoders_waiting=waiting,
        )


@in_one_sentence
def main(args: argparse.Namespace) -> None:
    """Make the cache.

    Exit status: 130 after Ctrl-C, 143 after SIGTERM, 1 after an error, printed in one line.
    """
    transformers.utils.logging.disable_progress_bar()
    mixed_precision = args.mixed_precision or "no"
    recorded = Flags(**{name: value for name, value in vars(args).items() if name not in ENGINE})
    accelerator = Accelerator(cpu=True)  # for `open_cache`: there is one process

    # The driver loads and hashes the models on its CPU, `EXACT` and in the precision that encodes.
    # The encoders compare theirs with these hashes, and load float32 only if rows need it.
    base = open_base(args, num_references=count_references(args), record=record_family)
    if base.num_references:
        fail("images to edit (references) can't be encoded on Ray yet: use precompute_latents.py")
    encoders = load_encoders(base, EXACT)
    empty_prompt, described = describe_encoders(base, encoders, args, mixed_precision)
    texts = []
    if is_address(args.train_data_dir):
        remote_rows = RemoteRows(args)
        images = ImageRows(remote_rows, remote_rows.column_names[0], args.mask_column)
    else:
        images = load_rows(args, others=[args.caption_column])
        texts = sample_captions(images.rows, args.caption_column, args.caption_prefix)
    launch_flags = {"mixed_precision": mixed_precision}
    caches = plan_caches(recorded, images, encoders, described, launch_flags)
    tokenizers = encoders.tokenizers
    report_equal(texts, args)
    report_emptied(tokenizers, texts)
    lengths = measure_captions(tokenizers, texts)
    for cache in caches:
        sentence = describe_size(cache.settings, lengths, compare=args.dry_run)
        print(sentence if len(caches) == 1 else f"{cache.output_dir}: {sentence}")
    if args.dry_run:
        dataset = TransformedRows(images.rows, encoders.tokenizers, caches)
        for cache in caches:
            print_once(describe_rows(cache, dataset.name_rows))
        return
    models, weight_bytes = described, count_weight_bytes(encoders, torch.float32)
    if (dtype := getattr(torch, described["dtype"])) != torch.float32:
        base = replace(base, family=encoders.family)  # it has found out what it needs
        del encoders  # before the same models are loaded in 16 bits
        encoders = load_encoders(base, dtype)
        models = describe_models(encoders)
        weight_bytes += count_weight_bytes(encoders, dtype)  # a row may need float32 as well
    del encoders

    # Connect to Ray first, so that no cache is begun if there are no nodes to make it.
    disconnect = connect(args.address, list_own_modules(Encoder, TransformedRows, Refused))
    engine, sentences = plan_engine(args, weight_bytes)
    print(sentences, flush=True)
    destinations = [Destination(cache) for cache in caches]
    # the models of one commit, also if a branch on the hub moves meanwhile
    pinned = {"revision": base.commit or args.revision}
    absolute, num_rows = Flags(**vars(make_absolute(recorded)) | pinned), len(images.rows)
    pickled_rows, fingerprint = pickle.dumps(images.rows), images.rows._fingerprint
    threads, folders = torch.get_num_threads(), [each.folder for each in destinations]

    def make_job(caches: list[PlannedCache], part_rows: int) -> Job:
        rows = PickledRows(absolute, caches, tokenizers, fingerprint, pickled_rows)
        put = ray.put(pickle.dumps(rows))
        return Job(absolute, caches, models, num_rows, put, threads, engine, folders, part_rows)

    try:
        if args.batch_size == "auto":
            size = find_begun(each.local for each in destinations)
            size = size or measure_batch_size(make_job(caches, 0))
            print(f"Batch size: {size}", flush=True)
            caches = [cache.with_batch_size(size) for cache in caches]
        per_batch = caches[0].rows_per_batch
        row_bytes = 3 * sum(cache.transform.resolution**2 for cache in caches)
        job = make_job(caches, per_batch * max(1, PART_BYTES // (row_bytes * per_batch)))
        names = functools.partial(name_rows, pickled=job.rows)
        missing: dict[int, tuple[int, ...]] = {}
        for index, (destination, cache) in enumerate(zip(destinations, caches, strict=True)):
            for shard in destination.open(accelerator, cache, empty_prompt, names):
                missing[shard] = (*missing.get(shard, ()), index)

        # Each shard goes to an encoder. There, `Encoder.make` lets tasks read and decode its rows
        # (`decode_part`), encodes them (`encode_all`) and writes its files (`write_each`). Only
        # their records come back, in any order.
        total = num_rows * len(caches)
        to_make = sum(len(list_rows(n, job)) * len(indices) for n, indices in missing.items())
        progress = CrewProgress(total, total - to_make)
        with contextlib.closing(make_shards(missing, job, progress.show)) as made:
            for number, result in made:
                rows = list_rows(number, job)
                if reason := result["failed"]:
                    sentence = f"rows {rows[0]} to {rows[-1]} could not be made: {reason}"
                    fail(f"{sentence}; run the same command to resume")
                progress.add(len(rows) * len(missing[number]), result)
                shard = name_shard(number, caches[0].settings)
                for index, record in result["records"].items():
                    destinations[index].add(shard, record, num_rows, args.max_skipped)
        progress.bar.close()
        for destination in destinations:
            destination.finish(empty_prompt, args.max_skipped)
    except Exception as error:
        # Ray's messages are long. The last line with the name of an error has the cause.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        named = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
        reason = (named or lines)[-1]
        fail(f"Ray stopped ({reason}); run the same command to resume")
    finally:
        disconnect()
        for destination in destinations:
            destination.close()
    for destination in destinations:
        # missing_ok: some versions of filelock delete the file themselves.
        (destination.local / ".lock").unlink(missing_ok=True)


if __name__ == "__main__":
    # Run the module under its own name, not as __main__, since workers import it by that name.
    importlib.import_module(Path(__file__).stem).main(args)
