"""Make the cache of precompute_latents.py on a Ray cluster: the same files, byte for byte.

    python precompute_latents_ray.py            # the demo, on a Ray of its own on this machine
    python precompute_latents_ray.py --address 10.0.0.1:6379 --num_encoders 64 --gpus_per_encoder 1 \\
        --pretrained_model_name_or_path stable-diffusion-v1-5/stable-diffusion-v1-5 \\
        --train_data_dir /shared/photos --cache_dir /shared/datasets --resolution 512 --center_crop \\
        --mixed_precision bf16 --output_dir /shared/latents-photos

Reads what precompute_latents.py reads, and takes its flags; start it once, with python, on a node of the cluster.
Writes the files that precompute_latents.py writes, into a folder that all nodes share, and either script goes on with
what the other one began. Copy both: this one imports the other, so that equal bytes come by construction.

What stands where, and why:
    parse_args                 the other script's flags, and four for Ray
    plan_parts, name_part      a part is some batches of a shard, cut where the other script cuts them; its name says
                               which rows it holds, so that it does not matter who makes it, when, or how often
    attempt                    an end to trying again: what fails TRIES times is said in one sentence
    transform_part             stage 1, tasks on CPUs: the rows of a part -> pixels and tokens
    Encoder                    stage 2, actors with the models on their devices: pixels and tokens -> a file
    write_part, assemble       the files: parts, then of a shard's parts the shard
    make_parts, make_shards    Ray Data moves parts through both stages, and keeps in bounds what waits in memory
    main                       the run in phases
Ray schedules, and the files are the state: what is whole stays, whoever is killed, and nothing else is remembered.
"""

import argparse
import contextlib
import functools
import io
import json
import logging
import os
import pickle
import shlex
import signal
import socket
import sys
import time
from pathlib import Path

import numpy as np
import pyarrow as pa
import torch
import transformers
from accelerate import Accelerator
from tqdm.auto import tqdm

import precompute_latents as single

try:
    import ray
except ImportError:
    sys.exit(f"{Path(__file__).name}: Ray is missing: pip install -r requirements-ray.txt")

# The workers get both files, so that only the libraries have to be on all nodes.
RUNTIME_ENV = {"py_modules": [str(Path(single.__file__).resolve()), str(Path(__file__).resolve())]}
ENGINE = ("num_encoders", "gpus_per_encoder", "num_transform_cpus", "address")  # flags that the cache knows nothing of
TENSORS = {"pixel_values": torch.uint8, "input_ids": torch.int64}
PART_BYTES = 2**26  # of pixels in a part: enough to keep a GPU busy, and a node's memory holds many of them
TRIES = 4  # of a part, if the process that makes it dies or raises
TRIES_OF = (".transform", ".encode", ".assemble", ".start")  # files that count them

# ------------------------------------------------------------------------------------------------- the flags


def parse_args(argv=None):
    """Parse and check the command line: a bad argument ends with one line and status 2 before anything is loaded."""
    parser = single.make_parser()
    parser.description = __doc__.split("\n")[0]
    add = parser.add_argument_group("ray").add_argument
    add("--address", help="of a cluster (None: RAY_ADDRESS, or a Ray of its own)")
    add("--num_encoders", type=single.number(1, 10**5, int), help="(None: one per GPU, or 1 on CPUs)")
    add("--gpus_per_encoder", type=single.number(0, 8), help="0: encode on CPUs (None: 1 if there are any)")
    add("--num_transform_cpus", type=single.number(1, 10**6, int), help="cores that decode (None: all that are left)")

    args = parser.parse_args(argv)
    if args.dataset_name is None and args.train_data_dir is None:
        command = shlex.split(single.DEMO) + (sys.argv[1:] if argv is None else argv)
        print(f"No data given: this is the demo, short for\npython {Path(__file__).name} {shlex.join(command)}")
        args = parser.parse_args(command)
    for name in ("output_dir", "train_data_dir"):
        if "://" in str(getattr(args, name)):
            parser.error(f"--{name} {getattr(args, name)} is an address: give a folder that all nodes share")
    single.check_args(parser, args)
    if args.mixed_precision == "fp16" and args.gpus_per_encoder == 0:
        parser.error("--mixed_precision fp16 needs GPUs: use bf16 or no")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        parser.error("start this script once, with python: Ray starts the processes")
    return args


# ------------------------------------------------------------------------------------------------- the work, by name


def plan_parts(start, end, args):
    """Cut the rows of a shard into parts: [(first row, row after the last)]. Batches begin where they always do."""
    batch_bytes = 3 * args.resolution**2 * args.batch_size
    step = args.batch_size * max(1, PART_BYTES // batch_bytes)
    return [(first, min(first + step, end)) for first in range(start, end, step)]


def name_part(first, end, args):
    """The file of a part. Its name holds all that may differ between two runs on one cache."""
    return f"rows-{first}-{end}-by-{args.batch_size}.part"


def find_missing(shards, records, num_rows, folder, args):
    """What has to be made: ({shard: [its parts]}, {shard: number of its parts that have no file}, those parts)."""
    there = {path.name for path in folder.glob("*.part")}
    missing, left, parts = {}, {}, []
    for number, name in enumerate(shards):
        if name not in records:
            start = number * args.rows_per_shard
            of_shard = plan_parts(start, min(num_rows, start + args.rows_per_shard), args)
            todo = [part for part in of_shard if name_part(*part, args) not in there] if there else of_shard
            missing[name], left[name] = of_shard, len(todo)
            parts += todo
    return missing, left, parts


def attempt(work, path):
    """Call `work` up to TRIES times. Returns (its result, None), or (None, why it failed the last time).

    Each try leaves a mark in the file `path`, which outlives the process: a part that ends every process that touches
    it (out of memory, say) would else come back for ever, as Ray repeats what dies.
    """
    reason = f"the process that worked on it died {TRIES} times; did it run out of memory?"
    try:
        while not path.exists() or path.stat().st_size < TRIES:
            with path.open("a") as file:
                file.write(".")
            try:
                with contextlib.redirect_stderr(io.StringIO()) as said:
                    result = work()
                path.unlink(missing_ok=True)
                return result, None
            except SystemExit:  # a `fail` of the other script: its sentence is what counts, and this process goes on
                reason = " ".join(said.getvalue().split())
            except Exception as error:
                reason = f"{type(error).__name__}: {single.explain(error)}"
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
    except OSError as error:
        reason = str(error)
    return None, f"{reason} (on {socket.gethostname()})"


# ------------------------------------------------------------------------------------------------- stage 1: the data


@functools.lru_cache(1)  # a worker process keeps the data set open
def open_rows(pickled):
    """The `TransformedRows` of this run. Where the driver's files are not, a node loads the data set by itself."""
    args, column, channels, tokenizer, fingerprint, rows = pickle.loads(pickled)
    try:
        rows = pickle.loads(rows)  # no pixels, only where they are
    except OSError:
        rows, _ = single.load_rows(args, others=[args.caption_column])
        if rows._fingerprint != fingerprint:
            raise ValueError("this node reads other data: let all nodes share the folder --cache_dir") from None
    return single.TransformedRows(rows, tokenizer, column, channels, args)


def transform_part(item, pickled, folder, args):
    """Stage 1 as a task: a table with {"first", "end"} of one part -> a table with all of its pixels in one row."""
    first, end = item["first"][0].as_py(), item["end"][0].as_py()
    tries = Path(folder, name_part(first, end, args)).with_suffix(".transform")
    batch, reason = attempt(lambda: open_rows(pickled)[[(0, row) for row in range(first, end)]], tries)
    tensors, about = {}, ""
    if reason is None:
        about = json.dumps({name: batch[name] for name in ("row", "key", "text", "skipped", "cut")})
        tensors = {name: batch[name].numpy().tobytes() for name in TENSORS}
    columns = {"first": first, "end": end, "failed": reason or "", "about": about}
    return pa.table({name: [x] for name, x in columns.items()} | {name: [tensors.get(name, b"")] for name in TENSORS})


# ------------------------------------------------------------------------------------------------- stage 2: the models


class Encoder:
    """Stage 2 as an actor: a part's block -> its file, and one row that says so. Loads the models once."""

    def __init__(self, args, folder, settings, threads):
        self.args, self.folder = args, folder
        self.device = torch.device("cuda" if ray.get_gpu_ids() else "cpu")
        torch.set_num_threads(threads)  # other sums, other bits: as many as the driver has, and so as the other script
        transformers.utils.logging.disable_progress_bar()
        tries = Path(folder, f"encoder-{ray.get_runtime_context().get_actor_id()}.start")
        _, self.reason = attempt(functools.partial(self.load_models, settings), tries)
        self.idle_since = time.perf_counter()

    def load_models(self, settings):
        """Load what the driver loaded, and make sure that it is the same."""
        *self.exact_models, tokenizer = single.load_models(self.args, torch.float32)
        described = single.describe_models(*self.exact_models, tokenizer)
        if differences := single.find_differences({name: settings[name] for name in described}, described):
            raise ValueError(f"the models are other ones here ({', '.join(differences)})")
        self.models = single.place_encoders(self.exact_models, self.device, self.args)

    def __call__(self, block):
        begin = time.perf_counter()
        first, end = block["first"][0].as_py(), block["end"][0].as_py()
        path, reason = Path(self.folder, name_part(first, end, self.args)), block["failed"][0].as_py() or self.reason
        if not reason:
            _, reason = attempt(lambda: write_part(path, self.encode(block)), path.with_suffix(".encode"))
        done = {"first": first, "end": end, "failed": reason or "", "waited": begin - self.idle_since}
        self.idle_since = time.perf_counter()
        return pa.table({name: [x] for name, x in {**done, "busy": self.idle_since - begin}.items()})

    def encode(self, block):
        """What `encode_all` yields for a part."""
        return single.encode_all(self.cut(block), self.models, self.exact_models, self.args)

    def cut(self, block):
        """Cut a part into batches as `load_batches` yields them: lists, and tensors on their way to the device."""
        part, count = json.loads(block["about"][0].as_py()), block["end"][0].as_py() - block["first"][0].as_py()
        shapes = {"pixel_values": [count, -1, self.args.resolution, self.args.resolution], "input_ids": [count, -1]}
        for name, dtype in TENSORS.items():
            data = bytearray(block[name][0].as_buffer())  # a copy: Ray's memory is not to be written to
            part[name] = torch.frombuffer(data, dtype=dtype).view(shapes[name])
        for i in range(0, count, self.args.batch_size):
            batch = {name: values[i : i + self.args.batch_size] for name, values in part.items()}
            for name in TENSORS:
                tensor = batch[name].pin_memory() if self.device.type == "cuda" else batch[name]
                batch[name] = tensor.to(self.device, non_blocking=True)
            yield batch


# ------------------------------------------------------------------------------------------------- the files


def write_part(path, encoded):
    """Write what `encode_all` yields for a part, whole or not at all: record batches, and with each the rest of it."""
    unfinished = single.name_unfinished(path)
    try:
        with contextlib.ExitStack() as stack:
            file, writer = stack.enter_context(unfinished.open("wb")), None
            for first, rows, skipped, counts in encoded:
                writer = writer or stack.enter_context(pa.ipc.new_stream(file, rows.schema))
                about = {"first": first, "skipped": skipped, "counts": counts}
                writer.write_batch(rows, custom_metadata={"about": json.dumps(about)})
        with unfinished.open("rb") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def read_part(path):
    """Yield what was written by `write_part`."""
    with pa.memory_map(str(path)) as file, pa.ipc.open_stream(file) as reader:
        for rows, metadata in reader.iter_batches_with_custom_metadata():
            about = json.loads(metadata[b"about"])
            yield about["first"], rows, about["skipped"], about["counts"]


def read_parts(paths, count):
    """Yield what was written for a shard of `count` rows; a part that can't be read is deleted, to be made again."""
    for path in paths:
        try:
            for item in read_part(path):
                count -= len(item[1]) + len(item[2])
                yield item
        except (pa.ArrowInvalid, KeyError, ValueError) as error:
            path.unlink(missing_ok=True)
            raise ValueError(f"{path} was damaged ({error}); the same command makes it again") from error
    if count:
        raise ValueError(f"the parts hold {count} rows too few")


@ray.remote(num_cpus=0, scheduling_strategy="SPREAD")
def assemble(path, parts, count):
    """Write a shard from its parts as the other script writes it. Returns (its record, None), or (None, why not)."""
    tries = path.parent / "unfinished" / f"{path.name}.assemble"
    return attempt(lambda: single.write_shard(path, read_parts(parts, count)), tries)


@ray.remote(num_cpus=0.5, scheduling_strategy="SPREAD")
def check_shards(paths, records):
    """What `describe_damage` says of shards that have a record."""
    return [single.describe_damage(path, records) for path in paths]


# ------------------------------------------------------------------------------------------------- the run


def make_absolute(args):
    """The flags as workers need them, which start in other folders: paths that exist here from the root."""
    names = ["dataset_name", "train_data_dir", "cache_dir", *(name for name in vars(args) if "name_or_path" in name)]
    values = {name: getattr(args, name) for name in names}
    paths = {name: os.path.abspath(value) for name, value in values.items() if value and os.path.isdir(value)}
    return argparse.Namespace(**vars(args) | paths)


def start_ray(args):
    """Start or find Ray. Returns (number of encoders, resources of each, tasks of stage 1, a sentence on it)."""
    if not ray.is_initialized():
        with single.explained(f"Ray can't be started{f' or found at {args.address}' if args.address else ''}"):
            ray.init(args.address, runtime_env=RUNTIME_ENV, logging_level="error", log_to_driver=False)
    context = ray.data.DataContext.get_current()
    logging.getLogger("ray.data").setLevel("CRITICAL")  # it says at length what it is about to do
    context.enable_progress_bars = False
    context.target_max_block_size = 1  # byte: a row is never split, so each part, which is a row, becomes a block
    found = ray.cluster_resources()
    cpus, gpus = found.get("CPU", 0), found.get("GPU", 0)
    per_encoder = args.gpus_per_encoder if args.gpus_per_encoder is not None else float(gpus > 0)
    if per_encoder == 0 and args.mixed_precision == "fp16":
        single.fail("fp16 does nothing on a CPU, or is very slow: use --mixed_precision bf16 or no")
    count = args.num_encoders or max(1, int(gpus / per_encoder) if per_encoder else 1)
    # Encoders reserve no cores: what small nodes have left might not hold a task of stage 1, which would then wait for
    # ever. Instead, stage 1 is given no more tasks than there are cores that the encoders do not keep busy.
    busy = count * (1 if per_encoder else torch.get_num_threads())
    num_tasks = args.num_transform_cpus or max(1, int(cpus - busy))
    nodes = sum(node["Alive"] for node in ray.nodes())
    where = f"{per_encoder:g} GPUs" if per_encoder else f"{torch.get_num_threads()} CPU threads"
    sentence = (
        f"Ray: {nodes} nodes, {cpus:g} CPUs, {gpus:g} GPUs; {count} encoders of {where}, {num_tasks} tasks that decode"
    )
    return count, {"num_cpus": 0, "num_gpus": per_encoder}, num_tasks, sentence


def find_damaged(output_dir, shards, records):
    """{name: why it must be made again} of the shards that have a record, checked on all nodes."""
    paths = [output_dir / name for name in shards if name in records]
    groups = [paths[i : i + 16] for i in range(0, len(paths), 16)]
    damages, progress_bar = {}, tqdm(total=len(paths), desc="Checking", disable=not paths, leave=False)
    pending = {}
    while groups or pending:
        while groups and len(pending) < 1000:
            group = groups.pop()
            pending[check_shards.remote(group, {path.name: records[path.name] for path in group})] = group
        (ref, *_), _ = ray.wait(list(pending))
        group = pending.pop(ref)
        damages |= {path.name: damage for path, damage in zip(group, ray.get(ref), strict=True) if damage}
        progress_bar.update(len(group))
    progress_bar.close()
    return damages


def make_parts(parts, rows, folder, settings, weight_bytes, encoders, args):
    """Send parts [(first, end)] through both stages; yields {"first", "end", "failed", ...} of each as it is done.

    `rows`: the data set for `open_rows`; `encoders`: what `start_ray` decided.
    """
    if not parts:
        return
    num_encoders, resources, num_tasks = encoders
    first, end = np.array(parts).T
    items = pa.table({"first": first, "end": end})
    # Some parts a task, one after the other, or the driver has too many tasks to keep in mind; but work for all cores.
    step = min(256, max(1, int(len(parts) / 8 / ray.cluster_resources().get("CPU", 1))))
    # Two parts at an encoder: the next one is there before this one is done. More would only fill the memory.
    pool = ray.data.ActorPoolStrategy(size=num_encoders, max_tasks_in_flight_per_actor=2)
    shared = {"folder": folder, "args": args}
    blocks = ray.data.from_arrow([items.slice(i, step) for i in range(0, len(items), step)]).map_batches(
        transform_part, fn_kwargs={"pickled": rows, **shared}, batch_size=1, batch_format="pyarrow", num_cpus=1,
        memory=2**30 + 4 * PART_BYTES, compute=ray.data.TaskPoolStrategy(size=num_tasks),
    )  # fmt: skip
    done = blocks.map_batches(
        Encoder, fn_constructor_kwargs={**shared, "settings": settings, "threads": torch.get_num_threads()},
        batch_size=1, batch_format="pyarrow", zero_copy_batch=True, compute=pool,
        memory=2**30 + 4 * PART_BYTES + 2 * weight_bytes, **resources,
    )  # fmt: skip
    yield from done.iter_rows()


def make_shards(missing, left, done, settings, output_dir, args, progress_bar):
    """Turn parts into shards as soon as a shard's parts are there; yields the record of each shard.

    `missing`, `left`: of `find_missing`; `done`: the rows that `make_parts` yields.
    """
    folder, pending = output_dir / "unfinished", {}

    def submit(name):
        paths = [folder / name_part(*part, args) for part in missing[name]]
        count = missing[name][-1][1] - missing[name][0][0]
        pending[assemble.remote(output_dir / name, paths, count)] = (name, paths)

    def collect(all_of_them=False):
        while pending:
            ready, _ = ray.wait(list(pending), timeout=None if all_of_them or len(pending) > 100 else 0)
            if not ready:
                return
            name, paths = pending.pop(ready[0])
            record, reason = ray.get(ready[0])
            if reason:
                single.fail(f"{name} could not be written: {reason}; the same command goes on from what is whole")
            for path in paths:
                path.unlink(missing_ok=True)
            yield record

    busy, waited = 0.0, 0.0
    try:
        for name in [name for name, count in left.items() if count == 0]:  # stopped before they became a shard
            submit(name)
            yield from collect()
        for row in done:
            if row["failed"]:
                named = f"rows {row['first']} to {row['end'] - 1} could not be made, tried {TRIES} times"
                single.fail(f"{named}: {row['failed']}; the same command goes on from what is whole")
            busy, waited = busy + row["busy"], waited + row["waited"]
            progress_bar.set_postfix_str(f"{waited / (busy + waited):.1%} waiting for images", refresh=False)
            progress_bar.update(row["end"] - row["first"])
            name = single.name_shard(row["first"], settings)
            left[name] -= 1
            if left[name] == 0:
                submit(name)
            yield from collect()
        yield from collect(all_of_them=True)
    finally:
        if pending:  # on the way out: what is being written becomes whole, if that does not take long
            ray.wait(list(pending), num_returns=len(pending), timeout=5)


def main(args):
    """Make the cache; ends with status 130 or 143 after Ctrl-C or SIGTERM, with 1 and a sentence if it can't go on."""
    transformers.utils.logging.disable_progress_bar()
    args.mixed_precision = args.mixed_precision or "no"
    engine, args = args, argparse.Namespace(**{name: x for name, x in vars(args).items() if name not in ENGINE})
    accelerator = Accelerator(cpu=True)  # of one process, which is what `open_cache` asks it about

    # The driver finds out what the models are and make, on its CPU: they are hashed here, and the encoders compare.
    *exact_models, tokenizer = single.load_models(args, torch.float32)
    empty_prompt, settings = single.describe_encoders(*exact_models, tokenizer, args)
    channels = exact_models[0].config.in_channels
    weight_bytes = sum(4 * weight.numel() for model in exact_models for weight in model.parameters())
    del exact_models
    rows, column = single.load_rows(args, others=[args.caption_column])
    single.say_equal(single.look_at_captions(rows, args))
    shards, sentence = single.plan_cache(rows, empty_prompt, settings, args)
    print(sentence)
    if args.dry_run:
        return

    # Ray before the cache, which is not to be begun if there are no nodes for it.
    was_there = ray.is_initialized()
    *encoders, sentence = start_ray(engine)
    print(sentence, flush=True)
    output_dir = Path(args.output_dir).resolve()
    lock, _, records = single.open_cache(accelerator, settings, args)
    folder = output_dir / "unfinished"
    handlers = {number: signal.signal(number, single.stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        for tries in [path for path in folder.iterdir() if path.suffix in TRIES_OF]:  # a new run tries anew
            tries.unlink()

        # What is missing: of shards that have no record, or are damaged, the parts that have no file.
        for name, damage in find_damaged(output_dir, shards, records).items():
            print(f"{output_dir / name} {damage}: making it again", flush=True)
            del records[name]
        missing, left, parts = find_missing(shards, records, len(rows), folder, args)
        if missing:
            (output_dir / "state.json").unlink(missing_ok=True)  # an unfinished cache does not open

        # Make it. Parts come back in any order, and are put together by their names.
        there = make_absolute(args)
        pickled = pickle.dumps((there, column, channels, tokenizer, rows._fingerprint, pickle.dumps(rows)))
        done = make_parts(parts, pickled, folder, settings, weight_bytes, encoders, there)
        num_left = sum(end - first for first, end in parts)
        skipped = [entry for record in records.values() for entry in record["skipped"]]
        progress_bar = tqdm(total=len(rows), initial=len(rows) - num_left, desc="Images", unit="img")
        made = make_shards(missing, left, done, settings, output_dir, args, progress_bar)
        with contextlib.closing(made), contextlib.closing(done):
            for record in made:
                skipped += record["skipped"]
                single.check_skipped(skipped, len(rows), args.max_skipped)
        progress_bar.close()

        # The records become one cache.json.
        with single.explained(f"{output_dir} could not be finished; its shards are whole, the same command goes on"):
            cache = single.finish(output_dir, empty_prompt, args.max_skipped)
        single.say_cut(cache["captions_cut"], cache["rows"], cache["prompt_embeds_shape"][0])
        print(f"Done: {cache['rows']:,} rows, {cache['skipped']:,} skipped, are in {args.output_dir}")
    except Exception as error:  # Ray's are long; their last line says what happened
        reason = (str(error).strip() or type(error).__name__).splitlines()[-1]
        single.fail(f"Ray could not go on ({reason}); the same command goes on from here")
    finally:
        if not was_there:
            ray.shutdown()
        for leftover in output_dir.rglob(".tmp-*"):  # of workers that ended with this process
            leftover.unlink(missing_ok=True)
        lock.release()
        for number, handler in handlers.items():
            signal.signal(number, handler)
    (output_dir / ".lock").unlink()


if __name__ == "__main__":
    import precompute_latents_ray  # once more, under its name: workers import it, and have no such __main__

    precompute_latents_ray.main(precompute_latents_ray.parse_args())
