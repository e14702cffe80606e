"""How many shards can one driver hand out? Both scripts on Ray, with stubs in place of the work.

    python benchmarks/driver.py                             # some minutes
    python benchmarks/driver.py --shards 1000000            # hours on two cores
    python benchmarks/driver.py --whats cache --shards 12000 --encoders 1000
    python benchmarks/driver.py --whats cache ray_data --shards 10000

The stub of an encoder (cache) or of a download (downloads) writes a few bytes in place of a shard,
and its record. All else is real: Ray, the driver's loop, the files, the restart. A first run stops
before the last shard. A second run finds the missing shard, makes it and finishes. Prints

- shards per second of the first run after its first shard, and the driver's CPU time per shard in
  milliseconds. The stubs need the same cores, so only the CPU time shows the limit of a driver with
  its own core
- seconds of the restart until the missing shards are known, and of the end, when the records are
  merged, with the driver's CPU time of both
- the peak memory of the driver

ray_data: the cache with the two stages on Ray Data, see ray_data.py.
--encoders: number of encoders that the driver serves, which share two processes.
"""

import contextlib
import functools
import hashlib
import io
import itertools
import json
import os
import pickle
import resource
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bench
import numpy as np
import pyarrow as pa

ROWS = 1000  # per shard
PROCESSES = 2  # that run the stubs of encoders
KEYS = pa.schema({"key": pa.string()})
STUB = KEYS.serialize().to_pybytes()  # an Arrow stream, which a restart can read, without rows
SHARD = {"sha256": hashlib.sha256(STUB).hexdigest()}


def write_stub(path, record_path, record):
    Path(path).write_bytes(STUB)
    Path(record_path).write_text(json.dumps(record | SHARD))


class Encoder:
    """Replaces `Encoder` of precompute_latents_ray.py. stops: whether the last shard fails."""

    def __init__(self, job, stops):
        self.job = job
        self.last = -(-job.num_rows // ROWS) - 1 if stops else None

    def make(self, shard):
        number, indices = shard
        if number == self.last:
            return {"records": None, "failed": "a stub", "waited": 0.0, "busy": 1.0}
        record = {"rows": ROWS, "encoded_again": 0, "captions_cut": 0, "skipped": []}
        record |= SHARD | {"checksums": "0" * 32}
        for path in self.job.locate(number, indices).values():
            folder, name = os.path.split(path)
            write_stub(path, f"{folder}/unfinished/{name}.json", record)
        return {"records": dict.fromkeys(indices, record), "failed": None, "waited": 0, "busy": 1.0}


class Rows:
    """Replaces `RemoteRows`."""

    column_names = ("image",)
    _fingerprint = "a stub"

    def __init__(self, count):
        self.count = count

    def __len__(self):
        return self.count

    def name_rows(self, numbers):
        return [f"row {number}" for number in numbers]


def timed(seconds, name, function):
    """Wrap `function` so that it stores its time in `seconds`."""

    @functools.wraps(function)
    def noted(*args, **options):
        begin, cpu = time.perf_counter(), time.process_time()
        result = function(*args, **options)
        seconds[name] = time.perf_counter() - begin
        seconds[f"{name}, CPU"] = time.process_time() - cpu
        return result

    return noted


def watched(seconds, function):
    """Wrap a generator function so that it stores the time from its first result to its last."""

    @functools.wraps(function)
    def noted(*args, **options):
        begin = None
        for number, result in enumerate(function(*args, **options)):
            yield result
            now = time.perf_counter(), time.process_time()
            begin = begin or now
            seconds["made"] = number
            seconds["make"], seconds["CPU"] = np.subtract(now, begin).tolist()

    return noted


def prepare_cache(folder, shards, encoders, stops, seconds):
    """Put stubs into precompute_latents_ray.py. Returns (the module, flags of a run)."""
    import precompute_latents_ray as script

    handles, turns = [], itertools.count()

    def place_encoder(job, engine):
        if len(handles) < PROCESSES:
            actor = script.ray.remote(max_concurrency=script.DEPTH, num_cpus=0)(Encoder)
            handles.append(actor.remote(job, stops))
        return handles[next(turns) % PROCESSES], None

    script.place_encoder = place_encoder
    # Removing an encoder must not end the process, because it serves other encoders too.
    script.ray.util.remove_placement_group = lambda group: None
    script.RemoteRows = lambda args: Rows(shards * ROWS)
    script.decode_part = lambda part, pickled: []
    script.make_shards = watched(seconds, script.make_shards)
    for name in ("open", "finish"):
        timing = timed(seconds, name, getattr(script.Destination, name))
        setattr(script.Destination, name, timing)
    flags = [f"--pretrained_model_name_or_path={bench.ROOT}/demo/models", "--resolution=8"]
    flags += ["--train_data_dir=memory://stub", f"--rows_per_shard={ROWS}"]
    return script, [*flags, f"--num_encoders={encoders}", f"--output_dir={folder}"]


def prepare_ray_data(folder, shards, encoders, stops, seconds):
    """Put stubs into `make_shards` of ray_data.py. Returns (the module, flags of a run)."""
    import ray_data

    script, flags = prepare_cache(folder, shards, encoders, stops, seconds)

    class ShardEncoder(Encoder):
        def __init__(self, job_ref):
            super().__init__(ray_data.ray.get(job_ref[0]), stops)

        def __call__(self, row):
            shard = pickle.loads(row["shard"])
            return {"result": pickle.dumps((shard[0], self.make(shard)))}

    def decode(row, job_ref):
        return row

    make_shards = functools.partial(ray_data.make_shards, decode=decode, encoder=ShardEncoder)
    script.make_shards = watched(seconds, make_shards)
    return script, flags


def prepare_downloads(folder, shards, encoders, stops, seconds):
    """Put stubs into download_images.py. Returns (the module, flags of a run)."""
    import fsspec

    import download_images as script

    def download_shard(item, args, folder, schema, copied=None):
        if stops and item["last"] == shards * ROWS:
            return {"error": "a stub"}
        record = {"images": ROWS, "bytes": len(STUB), "table": item["table"], "failures": []}
        name = item["name"]
        path = f"{folder}/__download__/records/{name.removesuffix('.parquet')}.json"
        write_stub(f"{folder}/{name}", path, record)
        return {"rows": ROWS, "images": ROWS, "received": 1, "failures": {}}

    download_shard.__module__ = script.__name__
    script.download_shard = download_shard
    script.list_tables = lambda args: (fsspec.filesystem("file"), ["/stub"])
    script.describe_download = lambda *args: ({"shards": shards}, ["stub"])
    table = {"source": "a stub", "copy": "a stub", "rows": shards * ROWS}
    table["schema"] = pa.schema({"url": pa.string(), "text": pa.string()})
    script.copy_tables = lambda *args, **options: [table]
    script.run_items = watched(seconds, script.run_items)
    for name, step in {"choose_items": "open", "gather": "finish"}.items():
        setattr(script, name, timed(seconds, step, getattr(script, name)))
    flags = ["--input=stub", f"--rows_per_shard={ROWS}", "--connections=1"]
    return script, [*flags, f"--output_dir={folder}"]


def run_once(what, folder, shards, encoders, stops):
    """Run a script with stubs, in this process. Returns seconds and MiB."""
    seconds = {}
    prepare = {"cache": prepare_cache, "ray_data": prepare_ray_data, "downloads": prepare_downloads}
    script, flags = prepare[what](folder, shards, encoders, stops, seconds)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            script.main(script.parse_args(flags))
            ended = True
        except SystemExit:
            ended = False
    if ended == stops or (stops and "a stub" not in printed.getvalue()):
        sys.exit(printed.getvalue()[-3000:])
    return seconds | {"MiB": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024}


def measure(what, shards, encoders):
    """Do both runs, each in its own process. Returns a row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        found = []
        for stops in (True, False):
            settings = [what, f"{folder}/out", shards, encoders, stops]
            code = f"import driver, json; print(json.dumps(driver.run_once(*{settings})))"
            environment = {"RAY_AUTH_MODE": "disabled", "HF_HUB_OFFLINE": "1", **os.environ}
            environment["PYTHONPATH"] = f"{Path(__file__).parent}{os.pathsep}{bench.ROOT}"
            command = [sys.executable, "-c", code]
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            if done.returncode:
                sys.exit(done.stderr[-3000:])
            found.append(json.loads(done.stdout.splitlines()[-1]))
    first, again = found
    return [
        what,
        f"{shards:,}",
        f"{first['made'] / first['make']:.0f}",
        f"{1000 * first['CPU'] / first['made']:.2f}",
        *(
            f"{again[step]:.0f}, {1000 * again[f'{step}, CPU'] / shards:.2f}"
            for step in ("open", "finish")
        ),
        f"{max(first['MiB'], again['MiB']):,.0f}",
    ]


def main(argv=None):
    parser = bench.make_parser(
        __doc__, size=None, mixed_precision=None, batch_size=None, steps=None, rounds=None
    )
    parser.add_argument("--shards", type=int, nargs="+", default=[1000, 10_000, 100_000])
    parser.add_argument("--whats", nargs="+", default=["cache", "downloads"])
    parser.add_argument("--encoders", type=int, default=PROCESSES)
    cli = parser.parse_args(argv)
    header = ["", "shards", "shards/s", "driver's CPU, ms per shard"]
    header += ["restart, s; CPU, ms per shard", "end, s; CPU, ms per shard", "most memory, MiB"]
    rows = (measure(what, count, cli.encoders) for what in cli.whats for count in cli.shards)
    bench.show(f"{bench.machine()}; {cli.encoders} encoders", header, rows)


if __name__ == "__main__":
    main()
