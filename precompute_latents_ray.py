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
    parse_args   the flags of the other script, and five for Ray
    decode_part  stage 1, tasks on CPUs: the rows of a part of a shard -> pixels and tokens
    Encoder      stage 2, actors with the models: have the parts of a shard decoded, and write it
    make_shards  hands out shards, and counts how often a shard killed its process
    main         the run in phases
A part is a few batches, cut where the other script cuts them. Ray only schedules; the files are the
state. A shard file is either complete or missing, even if a process is killed, so it does not
matter which process makes a shard, when, or how often.
"""

import argparse
import collections
import contextlib
import functools
import heapq
import importlib
import io
import json
import os
import pickle
import re
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from tqdm.auto import tqdm

from diffusion_training import check_version

check_version("0.1.0", Path(__file__).name)  # first: another version may lack the modules below

from diffusion_training.arguments import make_parser, number, parse_demo
from diffusion_training.cluster import connect, find_modules, work_off
from diffusion_training.data.captions import (
    count_tokens,
    look_at_captions,
    say_cut,
    say_emptied,
    say_equal,
)
from diffusion_training.data.rows import load_rows
from diffusion_training.errors import (
    Refused,
    end_if_stopped,
    explain,
    explained,
    fail,
    in_one_sentence,
)
from diffusion_training.files import find_differences
from diffusion_training.latents.cache import (
    check_skipped,
    describe_damage,
    finish_cache,
    open_cache,
)
from diffusion_training.latents.columns import count_rows
from diffusion_training.latents.encoders import describe_models, load_models, place_encoders
from diffusion_training.latents.passes import (
    CacheEncoded,
    find_batch_size,
    find_begun,
    set_batch_size,
    split_caches,
    take_resolutions,
    write_each,
)
from diffusion_training.latents.plan import plan_cache
from diffusion_training.latents.remote_cache import (
    begin_cache,
    fetch_cache,
    upload_finished,
    writing_shard_to,
)
from diffusion_training.latents.remote_rows import RemoteRows
from diffusion_training.remote import is_address, reading, remove
from diffusion_training.training.launch import keep_memory
from precompute_latents import (
    DEMO,
    TransformedRows,
    add_flags,
    check_args,
    describe_encoders,
    encode,
    encode_all,
)

try:
    import ray
except ImportError:
    sys.exit(f"{Path(__file__).name}: Ray is missing: pip install -r requirements-ray.txt")

Made = TypeVar("Made")
Shard = tuple[int, dict[int, str]]  # its number, {index of a cache that lacks it: its file}
Part = tuple[int, int, tuple[int, ...]]  # first row, row after the last, indices of caches
# Bytes of pixels in a part. This keeps a GPU busy, and many parts fit in a node's memory.
PART_BYTES = 2**26
TRIES = 4  # tries to make a shard, if its process dies or raises an exception
DEPTH = 3  # shards in work at an encoder: one is written, one encoded, one decoded
# Flags that are not recorded in the cache.
ENGINE = ("num_encoders", "gpus_per_encoder", "accelerator_type", "num_transform_cpus", "address")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line.

    A bad argument stops the script with one line and status 2 before anything is loaded.
    """
    parser = make_parser(__file__, __doc__)
    add_flags(parser)
    add = parser.add_argument_group("ray").add_argument
    add(
        "--address",
        help="address of a Ray cluster (None: RAY_ADDRESS, or start Ray on this machine)",
    )
    add(
        "--num_encoders",
        type=number(1, 10**5, int),
        help="number of encoders (None: one per GPU, or 1 on CPUs)",
    )
    add(
        "--gpus_per_encoder",
        type=number(0, 8),
        help="GPUs of each encoder; 0: encode on CPUs (None: 1 if there are GPUs)",
    )
    add(
        "--accelerator_type",
        help="Ray's name of the GPU type, such as T4; one type gives equal bytes (None: any)",
    )
    add(
        "--num_transform_cpus",
        type=number(1, 10**6, int),
        help="cores that decode images (None: all that the encoders leave)",
    )

    args = parser.parse_args(argv)
    if args.dataset_name is None and args.train_data_dir is None:
        args = parse_demo(parser, DEMO, argv, launcher="python")
    args.output_dir = args.output_dir.removeprefix("file://")
    # Ray unpacks the folder of `ray job submit --working-dir` there.
    if "/working_dir_files/" in os.path.abspath(args.output_dir):
        parser.error(
            f"Ray deletes {os.path.abspath(args.output_dir)} after the job: "
            "give --output_dir from the root"
        )
    local = argparse.Namespace(**vars(args))
    if is_address(args.train_data_dir):
        for name in ("dataset_config_name", "max_train_samples", "dataset_split"):
            if getattr(args, name) != parser.get_default(name):
                parser.error(
                    f"--{name} is for folders: "
                    f"of --train_data_dir {args.train_data_dir} all parquet is read"
                )
        local.train_data_dir = "."
        if f"{args.output_dir}/".startswith(f"{args.train_data_dir.rstrip('/')}/"):
            parser.error(
                f"--output_dir {args.output_dir} lies in --train_data_dir {args.train_data_dir}"
            )
    check_args(parser, local)
    if args.mixed_precision == "fp16" and args.gpus_per_encoder == 0:
        parser.error("--mixed_precision fp16 needs GPUs: use bf16 or no")
    if args.accelerator_type and args.gpus_per_encoder == 0:
        parser.error("--accelerator_type is of GPUs: leave it out with --gpus_per_encoder 0")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        parser.error("start this script once, with python: Ray starts the processes")
    return args


# -------------------------------------------------------------------------------------------------
# the two stages


@functools.lru_cache(1)  # a worker process keeps the data set open
def open_rows(pickled: bytes) -> TransformedRows:
    """The `TransformedRows` of this run; a node without the driver's files loads the data set.

    Raises ValueError if the node then finds other data than the driver.
    """
    caches, column, channels, tokenizers, fingerprint, rows = pickle.loads(pickled)
    try:
        rows = pickle.loads(rows)  # holds the paths of the files, no pixels
    except OSError:
        rows, _ = load_rows(caches[0], others=[caches[0].caption_column])
        if rows._fingerprint != fingerprint:
            raise ValueError(
                "this node reads other data: let all nodes share the folder --cache_dir"
            ) from None
    return TransformedRows(rows, tokenizers, column, channels, caches)


def decode_part(part: Part, pickled: bytes) -> list[dict]:
    """Stage 1 as a task: the rows of a part -> batches of `TransformedRows`, as NumPy arrays."""
    rows, (first, end, places) = open_rows(pickled), part
    many = count_rows(rows.caches[0])
    keys = [
        [(0, row) for row in range(start, min(start + many, end))]
        for start in range(first, end, many)
    ]
    return [
        map_tensors(batch, lambda x: x.numpy())
        for some in keys
        for batch in rows[places, some]["batches"]
    ]


def map_tensors(batch: dict, change: Callable) -> dict[str, Any]:
    """Apply `change` to all tensors or arrays of a batch, including those in lists."""
    one = lambda x: change(x) if isinstance(x, torch.Tensor | np.ndarray) else x  # noqa: E731
    return {name: [*map(one, x)] if isinstance(x, list) else one(x) for name, x in batch.items()}


def attempt(work: Callable[[], Made]) -> tuple[Made | None, str | None]:
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


def list_parts(shard: Shard, job: argparse.Namespace) -> list[Part]:
    """The parts of a shard, in order."""
    number, paths = shard
    begin = number * job.caches[0].rows_per_shard
    end = min(job.num_rows, begin + job.caches[0].rows_per_shard)
    return [
        (first, min(first + job.part_rows, end), tuple(paths))
        for first in range(begin, end, job.part_rows)
    ]


class Encoder:
    """Stage 2 as an actor: has shards decoded by tasks, encodes them, and writes their files.

    The models are loaded once. Up to DEPTH calls of `make` run at the same time: while one encodes,
    the previous one writes its rows, and tasks decode the rows of the next one. For `job`, see
    `main`.
    """

    def __init__(self, job: argparse.Namespace) -> None:
        self.job, self.args = job, job.caches[0]
        self.device = torch.device("cuda" if ray.get_gpu_ids() else "cpu")
        if self.device.type == "cpu":
            keep_memory()
        transformers.utils.logging.disable_progress_bar()
        self.decode = ray.remote(max_retries=0, scheduling_strategy="SPREAD", **job.task)(
            decode_part
        )
        # For each shard, in order, the parts that are not yet given to a task.
        self.queue: list[list[Part]] = []
        # The parts that are given to a task and not yet encoded, with Ray's reference.
        self.decoding: dict[Part, Any] = {}
        self.turn = threading.Condition()
        _, self.reason = attempt(self.load_models)

    def load_models(self) -> None:
        """Load the models; raises ValueError if they differ from the driver's."""
        vae, text_encoders, tokenizers = load_models(self.args, torch.float32)
        described = describe_models(vae, text_encoders, tokenizers)
        if differences := find_differences(
            {name: self.job.settings[name] for name in described}, described
        ):
            raise ValueError(f"the models are other ones here ({', '.join(differences)})")
        self.exact_models = vae, text_encoders
        self.models = place_encoders(self.exact_models, self.device, self.args)

    def make(self, shard: Shard) -> dict[str, Any]:
        """Write a shard's file in each cache.

        Returns {"records": {index of the cache: record}, "failed": the reason or None, "waited":
        seconds spent waiting for images, "busy": seconds spent on the rest}.
        """
        spent = dict.fromkeys(("waited", "busy"), 0.0)

        def write() -> dict[int, dict]:
            with contextlib.closing(self.encode(shard, spent)) as encoded:
                return write_each(writing_shard_to, shard[1], encoded)

        records, reason = (None, self.reason) if self.reason else attempt(write)
        return {"records": records, "failed": reason, **spent}

    def encode(self, shard: Shard, spent: dict[str, float]) -> Generator[CacheEncoded]:
        """Wait until the previous shards are encoded, then yield the results of `encode_all`."""
        parts = list_parts(shard, self.job)
        left = list(parts)
        with self.turn:
            self.queue.append(left)
            self.turn.wait_for(lambda: self.queue[0] is left)
        try:
            # The number of threads changes the order of sums, and so the bits.
            torch.set_num_threads(self.job.threads)
            begin = time.perf_counter()
            yield from encode_all(
                self.load(parts, spent), self.models, self.exact_models, self.job.caches
            )
            spent["busy"] += time.perf_counter() - begin - spent["waited"]
        finally:
            with self.turn:
                self.queue.pop(0)
                self.turn.notify_all()
            for part in parts:  # some are left if encoding failed
                self.decoding.pop(part, None)

    def load(self, parts: list[Part], spent: dict[str, float]) -> Iterator[dict]:
        """Yield batches like `load_batches`, with their tensors on the way to the device."""

        def move(array: np.ndarray) -> torch.Tensor:
            tensor = torch.tensor(array)  # a copy, because Ray's shared memory is read-only
            return (tensor.pin_memory() if self.device.type == "cuda" else tensor).to(
                self.device, non_blocking=True
            )

        self.decode_ahead()
        for part in parts:
            begin = time.perf_counter()
            try:
                batches = ray.get(self.decoding.pop(part))
            except Exception as error:
                reason = explain(getattr(error, "cause", None) or error)
                raise RuntimeError(
                    f"rows {part[0]} to {part[1] - 1} could not be decoded: {reason}"
                ) from error
            spent["waited"] += time.perf_counter() - begin
            self.decode_ahead()
            yield from (map_tensors(batch, move) for batch in batches)

    def decode_ahead(self) -> None:
        """Start tasks for the next parts, up to the number of cores per encoder."""
        for left in list(self.queue):
            while left and len(self.decoding) < self.job.ahead:
                part = left.pop(0)
                self.decoding[part] = self.decode.remote(part, self.job.rows)
        if self.decoding:
            # With no timeout to wait, this only makes Ray start to send the results to this node.
            ray.wait(list(self.decoding.values()), num_returns=len(self.decoding), timeout=0)

    def find_batch_size(self) -> tuple[int | None, str, str | None]:
        """--batch_size auto: returns (size or None, the printed table, the reason of a failure)."""

        def find() -> int:
            if self.reason:
                fail(self.reason)
            rows = open_rows(ray.get(self.job.rows))
            return find_batch_size(Accelerator(cpu=True), self.device, rows, self.models, encode)

        with contextlib.redirect_stdout(io.StringIO()) as said:
            size, reason = attempt(find)
        return size, said.getvalue(), reason


@ray.remote(num_cpus=0.5, scheduling_strategy="SPREAD", max_retries=0)
def check_shards(paths: list[str], records: dict[str, dict]) -> list[str | None]:
    """Call `describe_damage` on shards that have a record."""
    damages = []
    for path in paths:
        with reading(path) as copy:
            damages.append(describe_damage(copy, records))
    return damages


# -------------------------------------------------------------------------------------------------
# the run


def make_absolute(args: argparse.Namespace) -> argparse.Namespace:
    """The flags with absolute paths, because workers start in other folders.

    Values that are no existing path, such as hub ids, stay as they are.
    """
    names = ["dataset_name", "train_data_dir", "cache_dir", "single_file_config"]
    names += [name for name in vars(args) if "name_or_path" in name]
    values = {name: getattr(args, name) for name in names}
    paths = {
        name: os.path.abspath(value)
        for name, value in values.items()
        if value and os.path.exists(value)
    }
    return argparse.Namespace(**vars(args) | paths)


def plan_engine(args: argparse.Namespace, weight_bytes: int) -> tuple[int, list[dict], int, str]:
    """Fit the two stages to the resources of the Ray cluster.

    Returns (number of encoders, resources of a stage 1 task and of an encoder, number of stage 1
    tasks, a sentence that describes all this). Stops the script if no node has enough.
    """
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    type_key = f"accelerator_type:{args.accelerator_type}"
    # The nodes on which encoders may run.
    own = [node for node in nodes if args.accelerator_type is None or type_key in node]
    if not own:
        types = {
            key.split(":")[1]
            for node in nodes
            for key in node
            if key.startswith("accelerator_type:")
        }
        fail(
            f"no node of Ray has --accelerator_type {args.accelerator_type}, "
            f"but {', '.join(sorted(types)) or 'none'}"
        )
    cpus, gpus = ray.cluster_resources().get("CPU", 0), sum(node.get("GPU", 0) for node in own)
    per_encoder = args.gpus_per_encoder if args.gpus_per_encoder is not None else float(gpus > 0)
    if per_encoder == 0 and args.mixed_precision == "fp16":
        fail("fp16 does nothing on a CPU, or is very slow: use --mixed_precision bf16 or no")
    count = args.num_encoders or max(1, int(gpus / per_encoder) if per_encoder else 1)
    # Encoders reserve no cores. If they did, a small node might not have enough left for a task of
    # stage 1, which would wait for ever. Instead, the number of tasks of stage 1 is limited to the
    # cores that the encoders do not use.
    busy = count * (1 if per_encoder else torch.get_num_threads())
    num_tasks = args.num_transform_cpus or max(1, int(cpus - busy))
    memory, kinds = 2**30 + 4 * PART_BYTES, ("CPU", "GPU", "memory")
    needs = {
        "a task that decodes": (1, 0, memory),
        "an encoder": (0, per_encoder, memory + 2 * weight_bytes),
    }
    for what, need in needs.items():
        able = own if what == "an encoder" else nodes
        if not any(
            all(node.get(kind, 0) >= x for kind, x in zip(kinds, need, strict=True))
            for node in able
        ):
            need = f"{need[0]} CPUs, {need[1]:g} GPUs and {need[2] / 1e9:.1f} GB"
            fail(f"{what} needs {need}, and no node of Ray has that: it would wait for ever")
    resources = [
        dict(zip(("num_cpus", "num_gpus", "memory"), need, strict=True)) for need in needs.values()
    ]
    if args.accelerator_type:
        resources[1]["accelerator_type"] = args.accelerator_type
    where = f"{per_encoder:g} GPUs" if per_encoder else f"{torch.get_num_threads()} CPU threads"
    found = f"Ray: {len(nodes)} nodes, {cpus:g} CPUs, {gpus:g} GPUs"
    return (
        count,
        resources,
        num_tasks,
        f"{found}; {count} encoders of {where}, {num_tasks} tasks that decode",
    )


def find_damaged(folder: str, shards: list[str], records: dict[str, dict]) -> dict[str, str]:
    """Check the shards that have a record, on all nodes; returns {name: damage} of the bad ones."""
    names, damages = [name for name in shards if name in records], {}
    groups = [names[i : i + 16] for i in range(0, len(names), 16)]

    def check(group: list[str]) -> Any:
        return check_shards.remote(
            [f"{folder}/{name}" for name in group], {name: records[name] for name in group}
        )

    checked = work_off(groups, check, lambda: 1000)
    for group, found, reason in tqdm(
        checked, total=len(groups), desc="Checking", disable=not names, leave=False
    ):
        if reason:
            fail(f"{group[0]} could not be checked: {reason}")
        damages |= {name: damage for name, damage in zip(group, found, strict=True) if damage}
    return damages


def make_shards(
    missing: dict[int, dict[int, str]], job: argparse.Namespace, num_encoders: int, resources: dict
) -> Generator[tuple[int, dict]]:
    """Have encoders make the missing shards, {number: {index of a cache: file}}.

    Yields (number, result of `Encoder.make`) in any order. A shard whose process died TRIES times
    yields {"failed": reason}.
    """
    actor, job = (
        ray.remote(max_concurrency=DEPTH, scheduling_strategy="SPREAD", **resources)(Encoder),
        ray.put(job),
    )
    encoders = [actor.remote(job) for _ in range(min(num_encoders, len(missing)))]
    left, pending, tries = sorted(missing), {}, collections.Counter()
    try:
        while left or pending:
            load = collections.Counter(place for _, place, _ in pending.values())
            # Ray does not tell which shard killed a process. All shards that the process had are
            # therefore tried again one at a time.
            load.update({place: DEPTH for number, place, _ in pending.values() if tries[number]})
            for depth in range(DEPTH):
                for place, encoder in enumerate(encoders):
                    if left and load[place] == depth and (depth == 0 or not tries[left[0]]):
                        number = heapq.heappop(left)
                        pending[encoder.make.remote((number, missing[number]))] = (
                            number,
                            place,
                            encoder,
                        )
                        load[place] += DEPTH if tries[number] else 1
            done, _ = ray.wait(list(pending), timeout=1, fetch_local=False)
            end_if_stopped()
            for ref in done:
                number, place, encoder = pending.pop(ref)
                try:
                    yield number, ray.get(ref)
                except ray.exceptions.RayError as error:  # the process or the node died
                    if encoders[place] is encoder:
                        encoders[place] = actor.remote(job)
                    tries[number] += 1
                    heapq.heappush(left, number)
                    if tries[number] == TRIES:
                        reason = str(error).strip().splitlines()[-1][:200]
                        yield (
                            number,
                            {"failed": f"its process died {TRIES} times, of memory? ({reason})"},
                        )
    finally:
        for encoder in encoders:
            ray.kill(encoder)


def try_batch_sizes(job: argparse.Namespace, resources: dict) -> int:
    """--batch_size auto: have an encoder find the size on its device."""
    encoder = ray.remote(scheduling_strategy="SPREAD", **resources)(Encoder).remote(job)
    size, said, reason = ray.get(encoder.find_batch_size.remote())
    ray.kill(encoder)
    print(said, end="", flush=True)
    return size or fail(reason)


@in_one_sentence
def main(args: argparse.Namespace) -> None:
    """Make the cache.

    The exit status is 130 after Ctrl-C, 143 after SIGTERM, and 1 after an error, with one line
    that tells the reason.
    """
    transformers.utils.logging.disable_progress_bar()
    args.mixed_precision = args.mixed_precision or "no"
    flags, args = (
        args,
        argparse.Namespace(**{name: x for name, x in vars(args).items() if name not in ENGINE}),
    )
    accelerator = Accelerator(cpu=True)  # one process, as `open_cache` needs to know

    # The driver loads and hashes the models on its CPU. The encoders compare their models with
    # these hashes.
    sides = take_resolutions(args)
    vae, text_encoders, tokenizers = load_models(args, torch.float32)
    empty_prompt, settings = describe_encoders(vae, text_encoders, tokenizers, args)
    channels = vae.config.in_channels
    weight_bytes = sum(
        4 * weight.numel() for model in (vae, text_encoders) for weight in model.parameters()
    )
    if is_address(args.train_data_dir):
        rows, texts = RemoteRows(args), []
        column = rows.columns[0]
    else:
        rows, column = load_rows(args, others=[args.caption_column])
        texts = look_at_captions(rows, args.caption_column)
    # This needs the rows: they tell whether there are masks.
    plans = split_caches(vae, settings, sides, args)
    caches = [each for each, _ in plans]
    del vae, text_encoders
    say_equal(texts, args)
    say_emptied(tokenizers, texts)
    tokens = count_tokens(tokenizers, texts)
    for each, settings in plans:
        shards, sentence = plan_cache(rows, settings, tokens, each)
        print(sentence if len(plans) == 1 else f"{each.output_dir}: {sentence}")
    if args.dry_run:
        return

    # Connect to Ray first, so that no cache is begun if there are no nodes to make it.
    disconnect = connect(flags.address, find_modules(Encoder, TransformedRows, Refused))
    num_encoders, (task, resources), num_tasks, sentence = plan_engine(flags, weight_bytes)
    print(sentence, flush=True)
    remote = is_address(args.output_dir)
    folders = [
        each.output_dir.rstrip("/") if remote else os.path.abspath(each.output_dir)
        for each in caches
    ]
    # Local copies of the small files of remote folders.
    copies = [tempfile.TemporaryDirectory() if remote else None for _ in caches]
    output_dirs = [
        Path(copy.name if copy else folder) for folder, copy in zip(folders, copies, strict=True)
    ]
    begun = [remote and fetch_cache(*pair) for pair in zip(folders, output_dirs, strict=True)]
    locks, missing, skipped = [], {}, []
    there = [make_absolute(each) for each in caches]
    data = column, channels, tokenizers, rows._fingerprint, pickle.dumps(rows)
    job = argparse.Namespace(caches=there, settings=settings, num_rows=len(rows))
    job.rows, job.threads, job.task = (
        ray.put(pickle.dumps((there, *data))),
        torch.get_num_threads(),
        task,
    )
    try:
        if args.batch_size == "auto":
            set_batch_size(
                find_begun(output_dirs) or try_batch_sizes(job, resources), args, *caches, *there
            )
            job.rows = ray.put(pickle.dumps((there, *data)))
        for place, (each, settings) in enumerate(plans):
            folder, output_dir = folders[place], output_dirs[place]
            lock, _, records = open_cache(
                accelerator, settings, each, output_dir if remote else None
            )
            locks += [lock] if lock else []  # always a lock, since this is the only process
            if remote and not begun[place]:
                begin_cache(output_dir, folder)

            # Find the missing shards: those without a record, and damaged ones.
            for name, damage in find_damaged(folder, shards, records).items():
                print(f"{folder}/{name} {damage}: making it again", flush=True)
                del records[name]
            if lacking := [number for number, name in enumerate(shards) if name not in records]:
                remove(f"{folder}/state.json")  # an unfinished cache does not open
            for number in lacking:
                missing.setdefault(number, {})[place] = f"{folder}/{shards[number]}"
            skipped.append([entry for record in records.values() for entry in record["skipped"]])

        # Make the missing shards.
        many = count_rows(args)
        job.part_rows = many * max(1, PART_BYTES // (3 * sum(side**2 for side in sides) * many))
        job.ahead = max(1, num_tasks // min(num_encoders, max(1, len(missing))))
        counts = {
            number: min(args.rows_per_shard, len(rows) - number * args.rows_per_shard)
            for number in missing
        }
        total = len(rows) * len(plans)
        done = total - sum(len(paths) * counts[number] for number, paths in missing.items())
        progress_bar = tqdm(total=total, initial=done, desc="Images", unit="img")
        busy = waited = 0.0
        # Start the worker processes now: they open the data while the encoders load their models.
        begin = ray.remote(max_retries=0, scheduling_strategy="SPREAD", **task)(decode_part)
        for _ in range(min(num_tasks, len(missing))):
            begin.remote((0, 0, ()), job.rows)
        with contextlib.closing(make_shards(missing, job, num_encoders, resources)) as made:
            for number, shard in made:
                if shard["failed"]:
                    first = number * args.rows_per_shard
                    named = f"rows {first} to {first + counts[number] - 1} could not be made"
                    fail(f"{named}: {shard['failed']}; the same command goes on from what is whole")
                busy, waited = busy + shard["busy"], waited + shard["waited"]
                progress_bar.set_postfix_str(
                    f"{waited / (busy + waited):.1%} waiting for images", refresh=False
                )
                progress_bar.update(counts[number] * len(missing[number]))
                for place, record in shard["records"].items():
                    if remote:
                        (output_dirs[place] / "unfinished" / f"{shards[number]}.json").write_text(
                            json.dumps(record)
                        )
                    skipped[place] += record["skipped"]
                    check_skipped(skipped[place], len(rows), args.max_skipped)
        progress_bar.close()

        # Write the records into one cache.json.
        for folder, output_dir, each in zip(folders, output_dirs, caches, strict=True):
            with explained(
                f"{folder} could not be finished; its shards are whole, the same command goes on"
            ):
                cache = finish_cache(output_dir, empty_prompt, args.max_skipped)
                if remote:
                    upload_finished(output_dir, folder)
            say_cut(cache["captions_cut"], cache["rows"], cache["prompt_embeds_shape"][0])
            print(
                f"Done: {cache['rows']:,} rows, {cache['skipped']:,} skipped, "
                f"are in {each.output_dir}"
            )
    except Exception as error:
        # Ray's messages are long. The last line with the name of an error tells the cause.
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = next(
            (line for line in lines[::-1] if re.match(r"[\w.]+(Error|Exception)\b", line)),
            lines[-1],
        )
        fail(f"Ray could not go on ({reason}); the same command goes on from here")
    finally:
        disconnect()
        for output_dir, lock in zip(output_dirs, locks, strict=False):  # some may not be locked yet
            for leftover in output_dir.rglob(".tmp-*"):  # from workers that were stopped
                leftover.unlink(missing_ok=True)
            lock.release(force=True)
    for output_dir in output_dirs:
        # missing_ok: some versions of filelock delete the file themselves.
        (output_dir / ".lock").unlink(missing_ok=True)


if __name__ == "__main__":
    # Run the module under its own name, not as __main__, since workers import it by that name.
    this = importlib.import_module(Path(__file__).stem)
    this.main(this.parse_args())
