"""Make the cache of precompute_latents.py on a Ray cluster: the same files, byte for byte.

    python precompute_latents_ray.py            # the demo, on a Ray of its own on this machine
    python precompute_latents_ray.py --address 10.0.0.1:6379 --num_encoders 64 --gpus_per_encoder 1 \\
        --pretrained_model_name_or_path stable-diffusion-v1-5/stable-diffusion-v1-5 \\
        --train_data_dir /shared/photos --cache_dir /shared/datasets --resolution 512 --center_crop \\
        --mixed_precision bf16 --output_dir /shared/latents-photos

Reads what precompute_latents.py reads, and takes its flags; start it once, with python, on a node of the cluster.
Writes the files that precompute_latents.py writes, into a folder that all nodes share, and either script goes on with
what the other one began: this one imports the other's two stages, so that equal bytes come by construction.
--train_data_dir and --output_dir may be addresses too (s3://, gs://): parquet is read there, a file is one upload.

What stands where, and why:
    parse_args                 the other script's flags, and five for Ray
    transform_part             stage 1, tasks on CPUs: the rows of a part -> pixels and tokens
    Encoder                    stage 2, actors with the models on their devices: pixels and tokens -> a file
    make_parts, make_shards    parts go through both stages, so many at a time, and become shards
    main                       the run in phases
A part is some batches of a shard, cut where the other script cuts them; its name says which rows it holds, so that
it does not matter who makes it, when, or how often (diffusion_training/latents/parts.py). Ray schedules, and the files
are the state: what is whole stays, whoever is killed. How often a process died of a part is counted here.
"""

import argparse
import collections
import contextlib
import functools
import importlib
import io
import json
import os
import pickle
import re
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from accelerate import Accelerator
from tqdm.auto import tqdm

from diffusion_training import check_version

check_version("0.1.0", Path(__file__).name)  # before more of it is imported, which may not be there

from diffusion_training.arguments import make_parser, number, parse_demo
from diffusion_training.cluster import connect, find_modules, work_off
from diffusion_training.data.captions import count_tokens, look_at_captions, say_cut, say_emptied, say_equal
from diffusion_training.data.rows import load_rows
from diffusion_training.errors import Refused, end_if_stopped, explained, fail, in_one_sentence
from diffusion_training.files import find_differences
from diffusion_training.latents.cache import check_skipped, describe_damage, finish_cache, open_cache
from diffusion_training.latents.columns import count_rows
from diffusion_training.latents.encoders import describe_models, load_models, place_encoders
from diffusion_training.latents.parts import (
    PART_BYTES,
    TRIES,
    Part,
    attempt,
    begin_cache,
    fetch_cache,
    find_missing,
    name_part,
    read_parts,
    upload_finished,
    write_shard_to,
    writing_part,
)
from diffusion_training.latents.passes import (
    find_batch_size,
    find_begun,
    set_batch_size,
    split_caches,
    take_resolutions,
    write_each,
)
from diffusion_training.latents.plan import name_shard, plan_cache
from diffusion_training.latents.remote_rows import RemoteRows
from diffusion_training.remote import is_address, list_files, reading, remove
from diffusion_training.training.launch import keep_memory
from precompute_latents import DEMO, TransformedRows, add_flags, check_args, describe_encoders, encode, encode_all

try:
    import ray
except ImportError:
    sys.exit(f"{Path(__file__).name}: Ray is missing: pip install -r requirements-ray.txt")

CachePart = tuple[int, int, tuple[int, ...]]  # first row, row after the last, the places of caches that it is for
Shard = tuple[int, str]  # the place of a cache, a name
# Flags that the cache knows nothing of
ENGINE = ("num_encoders", "gpus_per_encoder", "accelerator_type", "num_transform_cpus", "address")


def parse_args(argv: list[str] | None = None) -> argparse.Namespace:
    """Parse and check the command line: a bad argument ends with one line and status 2 before anything is loaded."""
    parser = make_parser(__file__, __doc__)
    add_flags(parser)
    add = parser.add_argument_group("ray").add_argument
    add("--address", help="of a cluster (None: RAY_ADDRESS, or a Ray of its own)")
    add("--num_encoders", type=number(1, 10**5, int), help="(None: one per GPU, or 1 on CPUs)")
    add("--gpus_per_encoder", type=number(0, 8), help="0: encode on CPUs (None: 1 if there are any)")
    add(
        "--accelerator_type", help="kind of the encoders' GPUs in Ray's words, such as T4, for equal bytes (None: any)"
    )
    add("--num_transform_cpus", type=number(1, 10**6, int), help="cores that decode (None: all that are left)")

    args = parser.parse_args(argv)
    if args.dataset_name is None and args.train_data_dir is None:
        args = parse_demo(parser, DEMO, argv, launcher="python")
    args.output_dir = args.output_dir.removeprefix("file://")
    if "/working_dir_files/" in os.path.abspath(args.output_dir):  # where Ray unpacks `ray job submit --working-dir`
        parser.error(f"Ray deletes {os.path.abspath(args.output_dir)} after the job: give --output_dir from the root")
    local = argparse.Namespace(**vars(args))
    if is_address(args.train_data_dir):
        for name in ("dataset_config_name", "max_train_samples", "dataset_split"):
            if getattr(args, name) != parser.get_default(name):
                parser.error(f"--{name} is for folders: of --train_data_dir {args.train_data_dir} all parquet is read")
        local.train_data_dir = "."
        if f"{args.output_dir}/".startswith(f"{args.train_data_dir.rstrip('/')}/"):
            parser.error(f"--output_dir {args.output_dir} lies in --train_data_dir {args.train_data_dir}")
    check_args(parser, local)
    if args.mixed_precision == "fp16" and args.gpus_per_encoder == 0:
        parser.error("--mixed_precision fp16 needs GPUs: use bf16 or no")
    if args.accelerator_type and args.gpus_per_encoder == 0:
        parser.error("--accelerator_type is of GPUs: leave it out with --gpus_per_encoder 0")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        parser.error("start this script once, with python: Ray starts the processes")
    return args


# ------------------------------------------------------------------------------------------------- the two stages


@functools.lru_cache(1)  # a worker process keeps the data set open
def open_rows(pickled: bytes) -> TransformedRows:
    """The `TransformedRows` of this run. Where the driver's files are not, a node loads the data set by itself."""
    caches, column, channels, tokenizers, fingerprint, rows = pickle.loads(pickled)
    try:
        rows = pickle.loads(rows)  # no pixels, only where they are
    except OSError:
        rows, _ = load_rows(caches[0], others=[caches[0].caption_column])
        if rows._fingerprint != fingerprint:
            raise ValueError("this node reads other data: let all nodes share the folder --cache_dir") from None
    return TransformedRows(rows, tokenizers, column, channels, caches)


def transform_part(part: CachePart, pickled: bytes) -> list[dict] | str | None:
    """Stage 1 as a task: the rows of a part (first, end, caches) -> batches of `TransformedRows`, or why it can't."""

    def load() -> Iterator[dict]:
        rows, (first, end, places) = open_rows(pickled), part
        many = count_rows(rows.caches[0])
        for start in range(first, end, many):
            made = rows[places, [(0, row) for row in range(start, min(start + many, end))]]
            yield from (map_tensors(batch, lambda x: x.numpy()) for batch in made["batches"])

    batches, reason = attempt(lambda: list(load()))
    return reason or batches or []


def map_tensors(batch: dict, change: Callable) -> dict[str, Any]:
    """A batch with `change` called on its tensors or arrays, also on those in lists."""
    one = lambda x: change(x) if isinstance(x, torch.Tensor | np.ndarray) else x  # noqa: E731
    return {name: [*map(one, x)] if isinstance(x, list) else one(x) for name, x in batch.items()}


class Encoder:
    """Stage 2 as an actor: what stage 1 made of a part -> its file, in each cache. Loads the models once."""

    def __init__(self, caches: list[argparse.Namespace], folders: list[str], settings: dict, threads: int) -> None:
        self.args, self.caches, self.folders = caches[0], caches, folders
        self.device = torch.device("cuda" if ray.get_gpu_ids() else "cpu")
        if self.device.type == "cpu":
            keep_memory()
        torch.set_num_threads(threads)  # other sums, other bits: as many as the driver has, and so as the other script
        transformers.utils.logging.disable_progress_bar()
        _, self.reason = attempt(lambda: self.load_models(settings))
        self.idle_since = time.perf_counter()

    def load_models(self, settings: dict) -> None:
        """Load what the driver loaded, and make sure that it is the same."""
        vae, text_encoders, tokenizers = load_models(self.args, torch.float32)
        described = describe_models(vae, text_encoders, tokenizers)
        if differences := find_differences({name: settings[name] for name in described}, described):
            raise ValueError(f"the models are other ones here ({', '.join(differences)})")
        self.exact_models = vae, text_encoders
        self.models = place_encoders(self.exact_models, self.device, self.args)

    def make(self, part: CachePart, batches: list[dict] | str) -> dict[str, Any]:
        """Write a part's files. Returns {"part", "failed": why not, "busy", "waited": seconds}."""
        begin, reason = time.perf_counter(), batches if isinstance(batches, str) else self.reason
        if not reason:
            first, end, places = part
            paths = {place: f"{self.folders[place]}/{name_part(first, end, self.args)}" for place in places}
            models = self.models, self.exact_models, self.caches
            _, reason = attempt(lambda: write_each(writing_part, paths, encode_all(self.load(batches), *models)))
        waited, self.idle_since = begin - self.idle_since, time.perf_counter()
        return {"part": part, "failed": reason, "busy": self.idle_since - begin, "waited": waited}

    def find_batch_size(self, pickled: bytes) -> tuple[int | None, str, str | None]:
        """--batch_size auto. Returns (the size, the table that was printed, why there is none)."""

        def find() -> int:
            if self.reason:
                fail(self.reason)
            return find_batch_size(accelerator, self.device, rows, self.models, encode)

        with contextlib.redirect_stdout(io.StringIO()) as said:
            accelerator, rows = Accelerator(cpu=True), open_rows(pickled)
            size, reason = attempt(find)
        return size, said.getvalue(), reason

    def load(self, batches: Iterable) -> Iterator[dict]:
        """Batches as `load_batches` yields them, with their tensors on the way to the device."""

        def move(array: np.ndarray) -> torch.Tensor:
            tensor = torch.tensor(array)  # a copy: Ray's memory is not to be written to
            return (tensor.pin_memory() if self.device.type == "cuda" else tensor).to(self.device, non_blocking=True)

        return (map_tensors(batch, move) for batch in batches)


@ray.remote(num_cpus=0, scheduling_strategy="SPREAD")
def assemble(path: str, parts: list[str], count: int) -> tuple[dict | None, str | None]:
    """Turn parts into a shard as the other script writes it. Returns (its record, None), or (None, why not)."""
    done = attempt(lambda: write_shard_to(path, read_parts(parts, count)))
    if done[0]:
        with contextlib.suppress(Exception):  # what stays is deleted at the end
            for part in parts:
                remove(part)
    return done


@ray.remote(num_cpus=0.5, scheduling_strategy="SPREAD", max_retries=0)
def check_shards(paths: list[str], records: dict[str, dict]) -> list[str | None]:
    """What `describe_damage` says of shards that have a record."""
    damages = []
    for path in paths:
        with reading(path) as copy:
            damages.append(describe_damage(copy, records))
    return damages


# ------------------------------------------------------------------------------------------------- the run


def make_absolute(args: argparse.Namespace) -> argparse.Namespace:
    """The flags as workers need them, which start in other folders: paths that exist here from the root."""
    names = ["dataset_name", "train_data_dir", "cache_dir", *(name for name in vars(args) if "name_or_path" in name)]
    values = {name: getattr(args, name) for name in names}
    paths = {name: os.path.abspath(value) for name, value in values.items() if value and os.path.isdir(value)}
    return argparse.Namespace(**vars(args) | paths)


def plan_engine(args: argparse.Namespace, weight_bytes: int) -> tuple[int, list[dict], int, str]:
    """What Ray has room for: (encoders, what a task of each stage takes, tasks of stage 1, a sentence on all)."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    type_key = f"accelerator_type:{args.accelerator_type}"
    own = [node for node in nodes if args.accelerator_type is None or type_key in node]  # where encoders may be
    if not own:
        types = {key.split(":")[1] for node in nodes for key in node if key.startswith("accelerator_type:")}
        fail(
            f"no node of Ray has --accelerator_type {args.accelerator_type}, but {', '.join(sorted(types)) or 'none'}"
        )
    cpus, gpus = ray.cluster_resources().get("CPU", 0), sum(node.get("GPU", 0) for node in own)
    per_encoder = args.gpus_per_encoder if args.gpus_per_encoder is not None else float(gpus > 0)
    if per_encoder == 0 and args.mixed_precision == "fp16":
        fail("fp16 does nothing on a CPU, or is very slow: use --mixed_precision bf16 or no")
    count = args.num_encoders or max(1, int(gpus / per_encoder) if per_encoder else 1)
    # Encoders reserve no cores: what small nodes have left might not hold a task of stage 1, which would then wait for
    # ever. Instead, stage 1 is given no more tasks than there are cores that the encoders do not keep busy.
    busy = count * (1 if per_encoder else torch.get_num_threads())
    num_tasks = args.num_transform_cpus or max(1, int(cpus - busy))
    memory, kinds = 2**30 + 4 * PART_BYTES, ("CPU", "GPU", "memory")
    needs = {"a task that decodes": (1, 0, memory), "an encoder": (0, per_encoder, memory + 2 * weight_bytes)}
    for what, need in needs.items():
        able = own if what == "an encoder" else nodes
        if not any(all(node.get(kind, 0) >= x for kind, x in zip(kinds, need, strict=True)) for node in able):
            need = f"{need[0]} CPUs, {need[1]:g} GPUs and {need[2] / 1e9:.1f} GB"
            fail(f"{what} needs {need}, and no node of Ray has that: it would wait for ever")
    resources = [dict(zip(("num_cpus", "num_gpus", "memory"), need, strict=True)) for need in needs.values()]
    if args.accelerator_type:
        resources[1]["accelerator_type"] = args.accelerator_type
    where = f"{per_encoder:g} GPUs" if per_encoder else f"{torch.get_num_threads()} CPU threads"
    found = f"Ray: {len(nodes)} nodes, {cpus:g} CPUs, {gpus:g} GPUs"
    return count, resources, num_tasks, f"{found}; {count} encoders of {where}, {num_tasks} tasks that decode"


def find_damaged(folder: str, shards: list[str], records: dict[str, dict]) -> dict[str, str]:
    """{name: why it must be made again} of the shards that have a record, checked on all nodes."""
    names, damages = [name for name in shards if name in records], {}
    groups = [names[i : i + 16] for i in range(0, len(names), 16)]

    def check(group: list[str]) -> Any:
        return check_shards.remote([f"{folder}/{name}" for name in group], {name: records[name] for name in group})

    checked = work_off(groups, check, lambda: 1000)
    for group, found, reason in tqdm(checked, total=len(groups), desc="Checking", disable=not names, leave=False):
        if reason:
            fail(f"{group[0]} could not be checked: {reason}")
        damages |= {name: damage for name, damage in zip(group, found, strict=True) if damage}
    return damages


def make_parts(
    parts: list[CachePart], rows: bytes, folders: list[str], settings: dict, engine: Sequence,
    caches: list[argparse.Namespace],
) -> Generator[dict]:  # fmt: skip
    """Send parts [(first, end, caches)] through both stages; yields what `Encoder.make` returns of each as it is done.

    `rows`: for `open_rows`; `engine`: of `plan_engine`. No more waits in memory than tasks and encoders have at hand.
    """
    num_encoders, (resources, encoder_resources), num_tasks = engine
    transform = ray.remote(max_retries=0, scheduling_strategy="SPREAD", **resources)(transform_part)
    encoder = ray.remote(scheduling_strategy="SPREAD", **encoder_resources)(Encoder)
    shared = [ray.put(x) for x in (caches, folders, settings, torch.get_num_threads())]
    encoders = [(encoder.remote(*shared), {}) for _ in range(min(num_encoders, len(parts)))]
    most = num_tasks + len(encoders)
    left, transforming, ready, tries, rows = list(parts)[::-1], {}, [], collections.Counter(), ray.put(rows)
    try:
        while left or transforming or ready or any(queue for _, queue in encoders):
            while left and len(transforming) < num_tasks and len(transforming) + len(ready) < most:
                part = left.pop()
                transforming[transform.remote(part, rows)] = part
            for depth in (1, 2):  # two parts at an encoder: the next one is there before this one is done
                for actor, queue in encoders:
                    if ready and len(queue) < depth:
                        batch, part = ready.pop(0)
                        queue[actor.make.remote(part, batch)] = part
            first = {next(iter(queue)): number for number, (_, queue) in enumerate(encoders) if queue}
            done, _ = ray.wait([*transforming, *first], timeout=1, fetch_local=False)
            end_if_stopped()
            for ref in done:
                if ref in transforming:
                    ready.append((ref, transforming.pop(ref)))  # or why not, which its encoder says
                    continue
                queue = encoders[first[ref]][1]
                part = queue.pop(ref)
                try:
                    yield ray.get(ref)
                except ray.exceptions.RayError as error:  # a process died, or its node, also of stage 1
                    again, reason = [part], str(error).strip().splitlines()[-1][:200]
                    if isinstance(error, ray.exceptions.RayActorError):
                        encoders[first[ref]] = (encoder.remote(*shared), {})
                        again += queue.values()  # Ray does not say of which it died
                    left += again[::-1]
                    tries.update(again)
                    for part in again:
                        if tries[part] == TRIES:
                            yield {"part": part, "failed": f"its process died, did it run out of memory? ({reason})"}
    finally:
        for actor, _ in encoders:
            ray.kill(actor)
        for ref in transforming:
            ray.cancel(ref, force=True)


def try_batch_sizes(pickled: bytes, settings: dict, engine: Sequence, caches: list[argparse.Namespace]) -> int:
    """--batch_size auto, found by an encoder on its device."""
    encoder = ray.remote(scheduling_strategy="SPREAD", **engine[1][1])(Encoder)
    encoder = encoder.remote(caches, [], settings, torch.get_num_threads())
    size, said, reason = ray.get(encoder.find_batch_size.remote(pickled))
    ray.kill(encoder)
    print(said, end="", flush=True)
    return size or fail(reason)


def make_shards(
    missing: dict[Shard, list[Part]], left: dict[Shard, int], done: Iterator[dict], settings: dict, folders: list[str],
    args: argparse.Namespace, progress_bar: tqdm,
) -> Generator[tuple[Shard, dict]]:  # fmt: skip
    """Turn parts into shards as soon as a shard's parts are there; yields (place, name), its record, of each shard.

    `missing`, `left`: of `find_missing`, with the places of caches; `done`: the rows that `make_parts` yields.
    """
    pending, busy, waited = {}, 0.0, 0.0

    def submit(shard: Shard) -> None:
        folder = folders[shard[0]]
        paths = [f"{folder}/unfinished/{name_part(*part, args)}" for part in missing[shard]]
        count = missing[shard][-1][1] - missing[shard][0][0]
        pending[assemble.remote(f"{folder}/{shard[1]}", paths, count)] = shard

    def collect(most: int) -> Iterator[tuple[Shard, dict]]:
        while pending:
            ready, _ = ray.wait(list(pending), timeout=None if len(pending) > most else 0)
            if not ready:
                return
            shard, (record, reason) = pending.pop(ready[0]), ray.get(ready[0])
            if reason:
                fail(f"{shard[1]} could not be written: {reason}; the same command goes on from what is whole")
            yield shard, record

    try:
        for shard in [shard for shard, count in left.items() if count == 0]:  # stopped before they became a shard
            submit(shard)
            yield from collect(100)
        for row in done:
            first, end, places = row["part"]
            if row["failed"]:
                named = f"rows {first} to {end - 1} could not be made, tried {TRIES} times"
                fail(f"{named}: {row['failed']}; the same command goes on from what is whole")
            busy, waited = busy + row["busy"], waited + row["waited"]
            progress_bar.set_postfix_str(f"{waited / (busy + waited):.1%} waiting for images", refresh=False)
            progress_bar.update((end - first) * len(places))
            for shard in [(place, name_shard(first // args.rows_per_shard, settings)) for place in places]:
                left[shard] -= 1
                if left[shard] == 0:
                    submit(shard)
            yield from collect(100)
        yield from collect(0)
    finally:
        if pending:  # on the way out: what is being written becomes whole, if that does not take long
            ray.wait(list(pending), num_returns=len(pending), timeout=5)


@in_one_sentence
def main(args: argparse.Namespace) -> None:
    """Make the cache; ends with status 130 or 143 after Ctrl-C or SIGTERM, with 1 and a sentence if it can't go on."""
    transformers.utils.logging.disable_progress_bar()
    args.mixed_precision = args.mixed_precision or "no"
    engine, args = args, argparse.Namespace(**{name: x for name, x in vars(args).items() if name not in ENGINE})
    accelerator = Accelerator(cpu=True)  # of one process, which is what `open_cache` asks it about

    # The driver finds out what the models are and make, on its CPU: they are hashed here, and the encoders compare.
    sides = take_resolutions(args)
    vae, text_encoders, tokenizers = load_models(args, torch.float32)
    empty_prompt, settings = describe_encoders(vae, text_encoders, tokenizers, args)
    channels = vae.config.in_channels
    weight_bytes = sum(4 * weight.numel() for model in (vae, text_encoders) for weight in model.parameters())
    plans = split_caches(vae, settings, sides, args)
    caches, pixels = [each for each, _ in plans], sum(side**2 for side in sides)
    del vae, text_encoders
    if is_address(args.train_data_dir):
        rows, texts = RemoteRows(args), []
        column = rows.columns[0]
    else:
        rows, column = load_rows(args, others=[args.caption_column])
        texts = look_at_captions(rows, args.caption_column)
    say_equal(texts, args)
    say_emptied(tokenizers, texts)
    tokens = count_tokens(tokenizers, texts)
    for each, settings in plans:
        shards, sentence = plan_cache(rows, settings, tokens, each)
        print(sentence if len(plans) == 1 else f"{each.output_dir}: {sentence}")
    if args.dry_run:
        return

    # Ray before the cache, which is not to be begun if there are no nodes for it.
    disconnect = connect(engine.address, find_modules(Encoder, TransformedRows, Refused))
    *engine, sentence = plan_engine(engine, weight_bytes)
    print(sentence, flush=True)
    remote = is_address(args.output_dir)
    folders = [each.output_dir.rstrip("/") if remote else os.path.abspath(each.output_dir) for each in caches]
    copies = [tempfile.TemporaryDirectory() if remote else None for _ in caches]  # of what is small in the folders
    output_dirs = [Path(copy.name if copy else folder) for folder, copy in zip(folders, copies, strict=True)]
    begun = [remote and fetch_cache(*pair) for pair in zip(folders, output_dirs, strict=True)]
    locks, missing, left, wanted, skipped, num_there = [], {}, {}, {}, [], 0
    data = column, channels, tokenizers, rows._fingerprint, pickle.dumps(rows)
    try:
        if args.batch_size == "auto":
            there = [make_absolute(each) for each in caches]
            size = find_begun(output_dirs) or try_batch_sizes(pickle.dumps((there, *data)), settings, engine, there)
            set_batch_size(size, args, *caches)
        for place, (each, settings) in enumerate(plans):
            folder, output_dir = folders[place], output_dirs[place]
            lock, _, records = open_cache(accelerator, settings, each, output_dir if remote else None)
            locks += [lock] if lock else []  # there is one: this is the only process
            if remote and not begun[place]:
                begin_cache(output_dir, folder)

            # What is missing: of shards that have no record, or are damaged, the parts that have no file.
            for name, damage in find_damaged(folder, shards, records).items():
                print(f"{folder}/{name} {damage}: making it again", flush=True)
                del records[name]
            names = list_files(f"{folder}/unfinished")
            of_shards, counts, to_make = find_missing(shards, records, len(rows), names, args, pixels)
            if of_shards:
                remove(f"{folder}/state.json")  # an unfinished cache does not open
            missing |= {(place, name): parts for name, parts in of_shards.items()}
            left |= {(place, name): count for name, count in counts.items()}
            for part in to_make:
                wanted.setdefault(part, []).append(place)
            skipped.append([entry for record in records.values() for entry in record["skipped"]])
            num_there += len(rows) - sum(end - first for first, end in to_make)

        # Make it. Parts come back in any order, and are put together by their names.
        there = [make_absolute(each) for each in caches]
        pickled, unfinished = pickle.dumps((there, *data)), [f"{folder}/unfinished" for folder in folders]
        parts = [(*part, tuple(places)) for part, places in wanted.items()]
        done = make_parts(parts, pickled, unfinished, settings, engine, there)
        progress_bar = tqdm(total=len(rows) * len(plans), initial=num_there, desc="Images", unit="img")
        made = make_shards(missing, left, done, settings, folders, args, progress_bar)
        with contextlib.closing(made), contextlib.closing(done):
            for (place, name), record in made:
                if remote:
                    (output_dirs[place] / "unfinished" / f"{name}.json").write_text(json.dumps(record))
                skipped[place] += record["skipped"]
                check_skipped(skipped[place], len(rows), args.max_skipped)
        progress_bar.close()

        # The records become one cache.json.
        for folder, output_dir, each in zip(folders, output_dirs, caches, strict=True):
            with explained(f"{folder} could not be finished; its shards are whole, the same command goes on"):
                cache = finish_cache(output_dir, empty_prompt, args.max_skipped)
                if remote:
                    upload_finished(output_dir, folder)
            say_cut(cache["captions_cut"], cache["rows"], cache["prompt_embeds_shape"][0])
            print(f"Done: {cache['rows']:,} rows, {cache['skipped']:,} skipped, are in {each.output_dir}")
    except Exception as error:  # Ray's are long; the last line with an error's name says what happened
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = next((line for line in lines[::-1] if re.match(r"[\w.]+(Error|Exception)\b", line)), lines[-1])
        fail(f"Ray could not go on ({reason}); the same command goes on from here")
    finally:
        disconnect()
        for output_dir, lock in zip(output_dirs, locks, strict=False):  # as many as were opened
            for leftover in output_dir.rglob(".tmp-*"):  # of workers that ended with this process
                leftover.unlink(missing_ok=True)
            lock.release(force=True)
    for output_dir in output_dirs:
        (output_dir / ".lock").unlink(missing_ok=True)  # some versions of filelock have deleted it


if __name__ == "__main__":
    this = importlib.import_module(Path(__file__).stem)  # under its name, by which workers import it
    this.main(this.parse_args())
