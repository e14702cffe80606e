"""Make the cache of precompute_latents.py on a Ray cluster: the same files, byte for byte.

    python precompute_latents_ray.py            # the demo, on a Ray of its own on this machine
    python precompute_latents_ray.py --address 10.0.0.1:6379 --num_encoders 64 --gpus_per_encoder 1 \\
        --pretrained_model_name_or_path stable-diffusion-v1-5/stable-diffusion-v1-5 \\
        --train_data_dir /shared/photos --cache_dir /shared/datasets --resolution 512 --center_crop \\
        --mixed_precision bf16 --output_dir /shared/latents-photos

Reads what precompute_latents.py reads, and takes its flags; start it once, with python, on a node of the cluster.
Writes the files that precompute_latents.py writes, into a folder that all nodes share, and either script goes on with
what the other one began. Copy both: this one imports the other, so that equal bytes come by construction.
--train_data_dir and --output_dir may be addresses too (s3://, gs://): parquet is read there, a file is one upload.

What stands where, and why:
    parse_args                 the other script's flags, and four for Ray
    plan_parts, name_part      a part is some batches of a shard, cut where the other script cuts them; its name says
                               which rows it holds, so that it does not matter who makes it, when, or how often
    attempt                    an end to trying again: what fails TRIES times is said in one sentence
    RemoteRows                 parquet files at an address as a data set: who wants rows reads their row groups
    transform_part             stage 1, tasks on CPUs: the rows of a part -> pixels and tokens
    Encoder                    stage 2, actors with the models on their devices: pixels and tokens -> a file
    reading, writing           files on a disk or at an address; they appear whole or not at all
    write_part, assemble       parts, then of a shard's parts the shard
    make_parts, make_shards    Ray Data moves parts through both stages, and keeps in bounds what waits in memory
    main                       the run in phases
Ray schedules, and the files are the state: what is whole stays, whoever is killed, and nothing else is remembered.
"""

import argparse
import bisect
import contextlib
import functools
import hashlib
import io
import itertools
import json
import logging
import os
import pickle
import re
import shlex
import signal
import socket
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import datasets
import fsspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
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
    args.output_dir = args.output_dir.removeprefix("file://")
    if "/working_dir_files/" in os.path.abspath(args.output_dir):  # where Ray unpacks `ray job submit --working-dir`
        parser.error(f"Ray deletes {os.path.abspath(args.output_dir)} after the job: give --output_dir from the root")
    local = argparse.Namespace(**vars(args))
    if is_address(args.train_data_dir):
        for name in ("dataset_config_name", "max_train_samples", "dataset_split"):
            if getattr(args, name) != parser.get_default(name):
                parser.error(f"--{name} is for folders: of --train_data_dir {args.train_data_dir} all parquet is read")
        local.train_data_dir = "."
        if args.output_dir.startswith(args.train_data_dir.rstrip("/")):
            parser.error(f"--output_dir {args.output_dir} lies in --train_data_dir {args.train_data_dir}")
    single.check_args(parser, local)
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


def find_missing(shards, records, num_rows, there, args):
    """What has to be made: ({shard: [its parts]}, {shard: number of its parts that have no file}, those parts).

    `there`: names of files, among them those of parts that are whole.
    """
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
        fs, mark = fsspec.url_to_fs(str(path))
        while len(marks := fs.cat_file(mark) if fs.isfile(mark) else b"") < TRIES:
            fs.pipe_file(mark, marks + b".")
            try:
                with contextlib.redirect_stderr(io.StringIO()) as said:
                    result = work()
                remove(path)
                return result, None
            except SystemExit:  # a `fail` of the other script: its sentence is what counts, and this process goes on
                reason = " ".join(said.getvalue().split())
            except Exception as error:
                reason = f"{type(error).__name__}: {single.explain(error)}"
            if torch.cuda.is_initialized():
                torch.cuda.empty_cache()
    except Exception as error:  # of the file system, which at an address has its own kinds
        reason = single.explain(error)
    return None, f"{reason} (on {socket.gethostname()})"


# ------------------------------------------------------------------------------------------------- stage 1: the data


class RemoteRows:
    """All rows of the parquet files in a folder at an address, in the order of their names.

    Like what `load_rows` returns for a copy on a disk, but holds only names and counts, and reads rows when asked for.
    """

    def __init__(self, args):
        url, schema, self.starts = args.train_data_dir.rstrip("/"), None, [0]
        with single.explained(f"--train_data_dir {url} can't be read"):
            fs, root = fsspec.url_to_fs(url)
            fs.invalidate_cache()
            found = {path[len(root) + 1 :]: describe(info) for path, info in fs.find(root, detail=True).items()}
            names = [name for name in sorted(found) if name.endswith(".parquet")]
            # What `datasets` overlooks on a disk is no data, such as the tables of download_images.py
            names = [name for name in names if not any(part.startswith((".", "__")) for part in name.split("/"))]
            if not names:
                raise FileNotFoundError("it holds no parquet files")
            self.files = [(f"{url}/{name}", found[name]) for name in names]
            with ThreadPoolExecutor(32) as pool:
                for parquet, rows in pool.map(lambda file: open_parquet(*file), self.files):
                    if schema and parquet.schema_arrow.remove_metadata() != schema.remove_metadata():
                        raise ValueError(f"{names[len(self.starts) - 1]} has other columns than {names[0]}")
                    schema = schema or parquet.schema_arrow
                    self.starts.append(self.starts[-1] + rows[-1])
        described = json.dumps([(name, found[name]) for name in names])
        self._fingerprint = hashlib.sha256(described.encode()).hexdigest()[:16]
        features = datasets.Features.from_arrow_schema(schema)
        images = [name for name, feature in features.items() if isinstance(feature, datasets.Image)]
        column = args.image_column or ("image" if "image" in features or len(images) != 1 else images[0])
        self.columns = (column, args.caption_column)
        if missing := [name for name in self.columns if name not in features]:
            choose = "choose with --image_column and --caption_column"
            single.fail(f"{url} has no column {missing[0]!r} but {', '.join(features)}: {choose}")
        if not len(self):
            single.fail(f"{url} holds no images")

    def __len__(self):
        return self.starts[-1]

    def __getitem__(self, rows):
        """{column: its values} of a list of rows."""
        values = {name: [] for name in self.columns}
        for row in rows:
            number = bisect.bisect_right(self.starts, row) - 1
            row -= self.starts[number]
            _, starts = open_parquet(*self.files[number])
            group = bisect.bisect_right(starts, row) - 1
            for name, column in read_group(*self.files[number], group, self.columns).items():
                values[name].append(column[row - starts[group]].as_py())
        return values


def describe(info):
    """What tells an object from another of its name, without reading it."""
    return tuple(str(info.get(name)) for name in ("size", "ETag", "etag", "mtime"))


@contextlib.contextmanager
def named(url):
    """What fails inside says where."""
    try:
        yield
    except Exception as error:
        raise ValueError(f"{url}: {single.explain(error)}") from error


@functools.lru_cache(2)
def open_parquet(url, described):
    """(parquet file, the first rows of its groups and the number of rows), if it is still what was `describe`d."""
    with named(url):
        fs, path = fsspec.url_to_fs(url)
        if describe(fs.info(path)) != described:
            raise ValueError("it has changed")
        parquet = pq.ParquetFile(fs.open(path, cache_type="none"))
        groups = range(parquet.num_row_groups)
        return parquet, [0, *itertools.accumulate(parquet.metadata.row_group(i).num_rows for i in groups)]


@functools.lru_cache(2)  # the rows of one part, and of the next, lie side by side
def read_group(url, described, group, columns):
    """{column: array} of a row group, the first of `columns` as undecoded images."""
    with named(url):
        table = open_parquet(url, described)[0].read_row_group(group, columns).combine_chunks()
        arrays = {name: table[name].chunk(0) for name in columns}
        return arrays | {columns[0]: datasets.Image(decode=False).cast_storage(arrays[columns[0]])}


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
    tries = f"{folder}/{name_part(first, end, args)}.transform"
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
        if self.device.type == "cpu":
            single.keep_memory()
        torch.set_num_threads(threads)  # other sums, other bits: as many as the driver has, and so as the other script
        transformers.utils.logging.disable_progress_bar()
        tries = f"{folder}/encoder-{ray.get_runtime_context().get_actor_id()}.start"
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
        path, reason = f"{self.folder}/{name_part(first, end, self.args)}", block["failed"][0].as_py() or self.reason
        if not reason:
            _, reason = attempt(lambda: write_part(path, self.encode(block)), f"{path}.encode")
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


def is_address(path):
    """Whether a path is one of fsspec's, such as s3://bucket/latents, and not on a disk."""
    return "://" in str(path)


def remove(path):
    """Delete a file, if it is there."""
    fs, path = fsspec.url_to_fs(str(path))
    with contextlib.suppress(FileNotFoundError):
        fs.rm_file(path)


def list_files(folder):
    """Names of all files in a folder, also in folders in it."""
    fs, root = fsspec.url_to_fs(str(folder).rstrip("/"))
    fs.invalidate_cache()
    return sorted(path[len(root) + 1 :] for path in fs.find(root))


def upload(source, path):
    """Send a file of this disk to an address, in one piece."""
    fs, path = fsspec.url_to_fs(path)
    fs.put_file(str(source), path)


@contextlib.contextmanager
def writing(path):
    """A file on this disk to write, which then is `path`, whole or not at all: renamed, or by one upload."""
    with tempfile.TemporaryDirectory() if is_address(path) else contextlib.nullcontext() as work:
        unfinished = Path(work, "file") if work else single.name_unfinished(Path(path))
        try:
            yield unfinished
            if work:
                return upload(unfinished, path)
            with unfinished.open("rb") as file:
                os.fsync(file.fileno())
            unfinished.replace(path)
        finally:
            unfinished.unlink(missing_ok=True)


@contextlib.contextmanager
def reading(path):
    """The file `path` on this disk: itself, or a copy if it is at an address. There is none if there is none there."""
    with tempfile.TemporaryDirectory() if is_address(path) else contextlib.nullcontext() as work:
        if work:
            fs, there = fsspec.url_to_fs(path)
            path = f"{work}/{path.rsplit('/', 1)[1]}"
            with contextlib.suppress(FileNotFoundError):
                fs.get_file(there, path)
        yield Path(path)


def write_part(path, encoded):
    """Write what `encode_all` yields for a part, whole or not at all: record batches, and with each the rest of it."""
    with writing(path) as unfinished, contextlib.ExitStack() as stack:
        file, writer = stack.enter_context(unfinished.open("wb")), None
        for first, rows, skipped, counts in encoded:
            writer = writer or stack.enter_context(pa.ipc.new_stream(file, rows.schema))
            about = {"first": first, "skipped": skipped, "counts": counts}
            writer.write_batch(rows, custom_metadata={"about": json.dumps(about)})


def read_part(path):
    """Yield what was written by `write_part`."""
    with reading(path) as copy, pa.memory_map(str(copy)) as file, pa.ipc.open_stream(file) as reader:
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
        except (pa.ArrowInvalid, KeyError, ValueError, FileNotFoundError) as error:
            remove(path)
            raise ValueError(f"{path} is damaged or gone; the same command makes it again") from error
    if count:
        raise ValueError(f"the parts hold {count} rows too few")


def write_shard(path, encoded):
    """`write_shard` of the other script; for an address on this disk first, and then an upload each of both files."""
    if not is_address(path):
        return single.write_shard(Path(path), encoded)
    folder, name = path.rsplit("/", 1)
    with tempfile.TemporaryDirectory() as work:
        Path(work, "unfinished").mkdir()
        record = single.write_shard(Path(work, name), encoded)
        upload(f"{work}/{name}", path)
        upload(f"{work}/unfinished/{name}.json", f"{folder}/unfinished/{name}.json")
    return record


@ray.remote(num_cpus=0, scheduling_strategy="SPREAD")
def assemble(path, parts, count):
    """Turn parts into a shard as the other script writes it. Returns (its record, None), or (None, why not)."""
    folder, name = path.rsplit("/", 1)
    done = attempt(lambda: write_shard(path, read_parts(parts, count)), f"{folder}/unfinished/{name}.assemble")
    if done[0]:
        with contextlib.suppress(Exception):  # what stays is deleted at the end
            for part in parts:
                remove(part)
    return done


@ray.remote(num_cpus=0.5, scheduling_strategy="SPREAD")
def check_shards(paths, records):
    """What `describe_damage` says of shards that have a record."""
    damages = []
    for path in paths:
        with reading(path) as copy:
            damages.append(single.describe_damage(copy, records))
    return damages


# ------------------------------------------------------------------------------------------------- the run


def make_absolute(args):
    """The flags as workers need them, which start in other folders: paths that exist here from the root."""
    names = ["dataset_name", "train_data_dir", "cache_dir", *(name for name in vars(args) if "name_or_path" in name)]
    values = {name: getattr(args, name) for name in names}
    paths = {name: os.path.abspath(value) for name, value in values.items() if value and os.path.isdir(value)}
    return argparse.Namespace(**vars(args) | paths)


def start_ray(args, weight_bytes):
    """Start or find Ray. Returns (encoders, what a task of each stage takes, tasks of stage 1, a sentence on all)."""
    if not ray.is_initialized():
        address = args.address or os.environ.get("RAY_ADDRESS", "")
        with single.explained(f"Ray can't be started{f' or found at {address}' if address else ''}"):
            if re.fullmatch(r"[^/]+:\d+", address):  # Ray itself would take minutes to find nobody there
                socket.create_connection(address.rsplit(":", 1), timeout=10).close()
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
    memory, kinds = 2**30 + 4 * PART_BYTES, ("CPU", "GPU", "memory")
    needs = {"a task that decodes": (1, 0, memory), "an encoder": (0, per_encoder, memory + 2 * weight_bytes)}
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    for what, need in needs.items():
        if not any(all(node.get(kind, 0) >= x for kind, x in zip(kinds, need, strict=True)) for node in nodes):
            need = f"{need[0]} CPUs, {need[1]:g} GPUs and {need[2] / 1e9:.1f} GB"
            single.fail(f"{what} needs {need}, and no node of Ray has that: it would wait for ever")
    resources = [dict(zip(("num_cpus", "num_gpus", "memory"), need, strict=True)) for need in needs.values()]
    where = f"{per_encoder:g} GPUs" if per_encoder else f"{torch.get_num_threads()} CPU threads"
    found = f"{len(nodes)} nodes, {cpus:g} CPUs, {gpus:g} GPUs"
    sentence = f"Ray: {found}; {count} encoders of {where}, {num_tasks} tasks that decode"
    return count, resources, num_tasks, sentence


def find_damaged(folder, shards, records):
    """{name: why it must be made again} of the shards that have a record, checked on all nodes."""
    names = [name for name in shards if name in records]
    groups = [names[i : i + 16] for i in range(0, len(names), 16)]
    damages, progress_bar = {}, tqdm(total=len(names), desc="Checking", disable=not names, leave=False)
    pending = {}
    while groups or pending:
        while groups and len(pending) < 1000:
            group = groups.pop()
            paths = [f"{folder}/{name}" for name in group]
            pending[check_shards.remote(paths, {name: records[name] for name in group})] = group
        (ref, *_), _ = ray.wait(list(pending))
        group = pending.pop(ref)
        damages |= {name: damage for name, damage in zip(group, ray.get(ref), strict=True) if damage}
        progress_bar.update(len(group))
    progress_bar.close()
    return damages


def make_parts(parts, rows, folder, settings, engine, args):
    """Send parts [(first, end)] through both stages; yields {"first", "end", "failed", ...} of each as it is done.

    `rows`: the data set for `open_rows`; `engine`: what `start_ray` decided.
    """
    if not parts:
        return
    num_encoders, (resources, encoder_resources), num_tasks = engine
    first, end = np.array(parts).T
    items = pa.table({"first": first, "end": end})
    # Some parts a task, one after the other, or the driver has too many tasks to keep in mind; but work for all cores.
    step = min(256, max(1, int(len(parts) / 8 / ray.cluster_resources().get("CPU", 1))))
    # Two parts at an encoder: the next one is there before this one is done. More would only fill the memory.
    pool = ray.data.ActorPoolStrategy(size=min(num_encoders, len(parts)), max_tasks_in_flight_per_actor=2)
    shared = {"folder": folder, "args": args}
    blocks = ray.data.from_arrow([items.slice(i, step) for i in range(0, len(items), step)]).map_batches(
        transform_part, fn_kwargs={"pickled": rows, **shared}, batch_size=1, batch_format="pyarrow",
        compute=ray.data.TaskPoolStrategy(size=num_tasks), **resources,
    )  # fmt: skip
    done = blocks.map_batches(
        Encoder, fn_constructor_kwargs={**shared, "settings": settings, "threads": torch.get_num_threads()},
        batch_size=1, batch_format="pyarrow", zero_copy_batch=True, compute=pool, **encoder_resources,
    )  # fmt: skip
    yield from done.iter_rows()


def make_shards(missing, left, done, settings, folder, args, progress_bar):
    """Turn parts into shards as soon as a shard's parts are there; yields (its name, its record) of each shard.

    `missing`, `left`: of `find_missing`; `done`: the rows that `make_parts` yields.
    """
    pending = {}

    def submit(name):
        paths = [f"{folder}/unfinished/{name_part(*part, args)}" for part in missing[name]]
        count = missing[name][-1][1] - missing[name][0][0]
        pending[assemble.remote(f"{folder}/{name}", paths, count)] = name

    def collect(all_of_them=False):
        while pending:
            ready, _ = ray.wait(list(pending), timeout=None if all_of_them or len(pending) > 100 else 0)
            if not ready:
                return
            name = pending.pop(ready[0])
            record, reason = ray.get(ready[0])
            if reason:
                single.fail(f"{name} could not be written: {reason}; the same command goes on from what is whole")
            yield name, record

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


def fetch_cache(url, folder):
    """Copy what there is of a cache at an address, but for its shards and parts, into a folder on this disk.

    Returns whether there is one.
    """
    with single.explained(f"--output_dir {url} can't be read"):
        names = list_files(url)
        if names and "cache.json" not in names:
            single.fail(f"--output_dir {url} holds {names[0]} and no latent cache: choose another address")
        fs, root = fsspec.url_to_fs(url)
        small = [name for name in names if not name.endswith((".arrow", ".part", *TRIES_OF))]
        fs.get([f"{root}/{name}" for name in small], [f"{folder}/{name}" for name in small])
    return "cache.json" in names


def begin_cache(folder, url):
    """Send what `open_cache` has begun to an address, unless another run has just begun there."""
    with single.explained(f"--output_dir {url} can't be written to, or another run has just begun there"):
        fs, root = fsspec.url_to_fs(url)
        fs.put_file(f"{folder}/cache.json", f"{root}/cache.json", mode="create")
        upload(f"{folder}/run.args", f"{url}/run.args")


def finish_cache(folder, url):
    """Send what `finish` has written to an address, in its order."""
    names = ("run.args", "skipped.jsonl", "empty_prompt.npy", "cache.json", "dataset_info.json", "state.json")
    for name in names:
        upload(f"{folder}/{name}", f"{url}/{name}")
    fs, root = fsspec.url_to_fs(url)
    fs.invalidate_cache()
    if fs.exists(f"{root}/unfinished"):
        fs.rm(f"{root}/unfinished", recursive=True)


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
    if is_address(args.train_data_dir):
        rows = RemoteRows(args)
        column = rows.columns[0]
    else:
        rows, column = single.load_rows(args, others=[args.caption_column])
        single.say_equal(single.look_at_captions(rows, args))
    shards, sentence = single.plan_cache(rows, empty_prompt, settings, args)
    print(sentence)
    if args.dry_run:
        return

    # Ray before the cache, which is not to be begun if there are no nodes for it.
    was_there = ray.is_initialized()
    *engine, sentence = start_ray(engine, weight_bytes)
    print(sentence, flush=True)
    remote = is_address(args.output_dir)
    folder = args.output_dir.rstrip("/") if remote else os.path.abspath(args.output_dir)
    copy = tempfile.TemporaryDirectory() if remote else None  # of what is small in the folder
    output_dir = Path(copy.name if remote else folder)
    begun = fetch_cache(folder, output_dir) if remote else None
    lock, _, records = single.open_cache(accelerator, settings, args, output_dir if remote else None)
    handlers = {number: signal.signal(number, single.stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        if remote and not begun:
            begin_cache(output_dir, folder)
        there = list_files(f"{folder}/unfinished")
        for name in there:
            if name.endswith(TRIES_OF):  # a new run tries anew
                remove(f"{folder}/unfinished/{name}")

        # What is missing: of shards that have no record, or are damaged, the parts that have no file.
        for name, damage in find_damaged(folder, shards, records).items():
            print(f"{folder}/{name} {damage}: making it again", flush=True)
            del records[name]
        missing, left, parts = find_missing(shards, records, len(rows), there, args)
        if missing:
            remove(f"{folder}/state.json")  # an unfinished cache does not open

        # Make it. Parts come back in any order, and are put together by their names.
        there = make_absolute(args)
        pickled = pickle.dumps((there, column, channels, tokenizer, rows._fingerprint, pickle.dumps(rows)))
        done = make_parts(parts, pickled, f"{folder}/unfinished", settings, engine, there)
        num_left = sum(end - first for first, end in parts)
        skipped = [entry for record in records.values() for entry in record["skipped"]]
        progress_bar = tqdm(total=len(rows), initial=len(rows) - num_left, desc="Images", unit="img")
        made = make_shards(missing, left, done, settings, folder, args, progress_bar)
        with contextlib.closing(made), contextlib.closing(done):
            for name, record in made:
                if remote:
                    (output_dir / "unfinished" / f"{name}.json").write_text(json.dumps(record))
                skipped += record["skipped"]
                single.check_skipped(skipped, len(rows), args.max_skipped)
        progress_bar.close()

        # The records become one cache.json.
        with single.explained(f"{folder} could not be finished; its shards are whole, the same command goes on"):
            cache = single.finish(output_dir, empty_prompt, args.max_skipped)
            if remote:
                finish_cache(output_dir, folder)
        single.say_cut(cache["captions_cut"], cache["rows"], cache["prompt_embeds_shape"][0])
        print(f"Done: {cache['rows']:,} rows, {cache['skipped']:,} skipped, are in {args.output_dir}")
    except Exception as error:  # Ray's are long; the last line with an error's name says what happened
        lines = str(error).strip().splitlines() or [type(error).__name__]
        reason = next((line for line in lines[::-1] if re.match(r"[\w.]+(Error|Exception)\b", line)), lines[-1])
        single.fail(f"Ray could not go on ({reason}); the same command goes on from here")
    finally:
        for thread in threading.enumerate():  # that of Ray Data would ask a Ray that is gone, which ends the process
            if thread.name.startswith("StreamingExecutor"):
                thread.join(10)
        if not was_there:
            ray.shutdown()
        for leftover in output_dir.rglob(".tmp-*"):  # of workers that ended with this process
            leftover.unlink(missing_ok=True)
        lock.release(force=True)
        for number, handler in handlers.items():
            signal.signal(number, handler)
    (output_dir / ".lock").unlink()


if __name__ == "__main__":
    import precompute_latents_ray  # once more, under its name: workers import it, and have no such __main__

    precompute_latents_ray.main(precompute_latents_ray.parse_args())
