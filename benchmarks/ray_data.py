"""Could Ray Data schedule precompute_latents_ray.py? The speed of both, and what faults do to them.

    python benchmarks/ray_data.py speed     # minutes on two cores
    python benchmarks/ray_data.py faults    # some ten minutes
    python benchmarks/driver.py --whats cache ray_data --shards 10000

`make_shards` below replaces the function of precompute_latents_ray.py: one `map` of tasks decodes
the images of a shard, one `map` of actors encodes and writes it, with Ray Data's defaults. All else
is the script's: flags, files, records, the resume.

speed: both make the cache of the demo's digits, in turns. Prints seconds of the whole script and of
its shards after the first, and CPU seconds of all processes, of the driver, and of Ray's own
servers. Ends with an error if a byte of a shard differs.

faults: a fault in shard 3 of 29, or at the start of an encoder. Prints how the run ended, the
shards that were complete, and how many processes tried to encode. A run that has not ended after
--limit seconds is killed.
"""

import contextlib
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Generator
from pathlib import Path
from typing import Any

import bench
import psutil
import ray
import ray.data
import torch

import precompute_latents_ray as script
from diffusion_training.errors.stop_signals import end_if_stopped
from precompute_latents import encode_all

ENGINES = ["ray_core", "ray_data"]
# {fault: what happens}; a worker process reads the name from the environment
FAULTS = {
    "decode": "a shard kills its decoding task each time",
    "encode": "a shard kills its encoder each time",
    "start": "each encoder is killed while it starts",
    "exit": "an encoder exits by itself once",
    "driver": "the driver is killed after 4 shards; the same command again",
    "gpu": "no node has a GPU",
}
FAULT = os.environ.get("RAY_DATA_FAULT")
NOTES = Path(os.environ.get("RAY_DATA_NOTES", ""))  # a folder with a file for each event
BAD_SHARD = 3
FLAGS = [
    f"--train_data_dir={bench.ROOT}/demo/digits",
    f"--pretrained_model_name_or_path={bench.ROOT}/demo/models",
    "--batch_size=16",
    "--rows_per_shard=64",
]


def fail_on_purpose(fault: str, shard: int = BAD_SHARD) -> None:
    """Kill this process if it has to show a fault; exit by itself, once, for "exit"."""
    if fault != FAULT or shard != BAD_SHARD:
        return
    if fault == "exit":
        with contextlib.suppress(FileExistsError):
            (NOTES / "exited").touch(exist_ok=False)
            sys.exit(0)
        return
    os.kill(os.getpid(), signal.SIGKILL)


# -------------------------------------------------------------------------------------------------
# the two stages on Ray Data


def decode_shard(row: dict[str, Any], job_ref: list) -> dict[str, Any]:
    """Stage 1, as a task of Ray Data: all batches of a shard, as one value."""
    job, shard = ray.get(job_ref[0]), pickle.loads(row["shard"])
    fail_on_purpose("decode", shard[0])
    pickled = ray.get(job.rows)

    def decode() -> list[dict]:
        parts = script.list_parts(shard, job)
        return [batch for part in parts for batch in script.decode_part(part, pickled)]

    batches, reason = script.attempt(decode)
    return row | {"batches": pickle.dumps(batches, protocol=5), "reason": reason or ""}


class ShardEncoder(script.Encoder):
    """Stage 2, as an actor of Ray Data: encode and write a shard."""

    def __init__(self, job_ref: list) -> None:  # without the tasks that the script's encoder starts
        (NOTES / f"encoder-{os.getpid()}").touch()
        fail_on_purpose("start")
        self.job = ray.get(job_ref[0])
        self.device = torch.device("cuda" if ray.get_gpu_ids() else "cpu")
        _, self.reason = script.attempt(self.load_models)

    def __call__(self, row: dict[str, Any]) -> dict[str, Any]:
        shard = number, _ = pickle.loads(row["shard"])
        for fault in ("encode", "exit"):
            fail_on_purpose(fault, number)

        def move(array: Any) -> torch.Tensor:
            return torch.tensor(array).to(self.device)

        def write() -> dict[int, dict]:
            torch.set_num_threads(self.job.threads)
            batches = (script.map_tensors(batch, move) for batch in pickle.loads(row["batches"]))
            encoded = encode_all(batches, self.encoders, self.load_exact, self.job.caches)
            paths = self.job.locate(*shard)
            rows = script.list_rows(number, self.job)
            return script.write_each(script.writing_shard_to, paths, rows, encoded)

        begin = time.perf_counter()
        records, reason = None, row["reason"] or self.reason
        if not reason:
            records, reason = script.attempt(write)
        spent = {"waited": 0.0, "busy": time.perf_counter() - begin}
        return {"result": pickle.dumps((number, {"records": records, "failed": reason, **spent}))}


def make_shards(
    missing: dict[int, tuple[int, ...]],
    job: script.Job,
    show: Any,
    decode: Any = decode_shard,
    encoder: type = ShardEncoder,
) -> Generator[tuple[int, dict]]:
    """Replaces `make_shards` of precompute_latents_ray.py."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    context.print_on_execution_start = False
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    job_ref = [ray.put(job)]
    rows = [{"shard": pickle.dumps(shard)} for shard in sorted(missing.items())]
    if not rows:
        return
    gpus = job.engine.place["GPU"]
    shards = ray.data.from_items(rows, override_num_blocks=len(rows))
    results = shards.map(decode, fn_kwargs={"job_ref": job_ref}, num_cpus=1).map(
        encoder,
        fn_constructor_args=(job_ref,),
        compute=ray.data.ActorPoolStrategy(min_size=1, max_size=job.engine.num_encoders),
        # An encoder shares its core with a task, as those of the script do
        **({"num_gpus": gpus} if gpus else {"num_cpus": 0.01}),
    )
    for row in results.iter_rows():
        end_if_stopped()
        yield pickle.loads(row["result"])


# -------------------------------------------------------------------------------------------------
# the script's own stages, with the same faults


def decode_part(part: script.Part, pickled: bytes) -> list[dict]:
    rows_per_shard = pickle.loads(pickled).caches[0].rows_per_shard
    if part[1] > part[0]:  # not the empty part that opens the data
        fail_on_purpose("decode", part[0] // rows_per_shard)
    return script.decode_part(part, pickled)


class Encoder(script.Encoder):
    def __init__(self, job: script.Job) -> None:
        (NOTES / f"encoder-{os.getpid()}").touch()
        fail_on_purpose("start")
        super().__init__(job)
        task = ray.remote(max_retries=0, num_cpus=1, memory=job.engine.task_memory)(decode_part)
        self.decode_here, self.decode_anywhere = task, task.options(scheduling_strategy="SPREAD")

    def make(self, shard: script.Shard) -> dict[str, Any]:
        for fault in ("encode", "exit"):
            fail_on_purpose(fault, shard[0])
        return super().make(shard)


# -------------------------------------------------------------------------------------------------
# runs


def sum_cpu_seconds() -> dict[str, float]:
    """CPU seconds of this process and of those that it has started and that live."""
    seconds = {"driver": sum(psutil.Process().cpu_times()[:2]), "servers": 0.0, "workers": 0.0}
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            kind = "workers" if process.name().startswith("ray::") else "servers"
            seconds[kind] += sum(process.cpu_times()[:2])
    return seconds


def run_once(engine: str, flags: list[str]) -> None:
    """Make a cache in this process, and print what it took as JSON in the last line."""
    found = {}
    if engine == "ray_data":
        script.make_shards = make_shards
    elif FAULT:
        script.Encoder = Encoder
    make, connect = script.make_shards, script.connect

    def timed(*args: Any) -> Generator[tuple[int, dict]]:
        begin = None
        for result in make(*args):
            yield result
            begin = begin or time.perf_counter()
            found["shards"] = time.perf_counter() - begin

    def connect_small(*args: Any) -> Any:
        disconnect = connect(*args, num_cpus=2, object_store_memory=400 * 2**20)

        def count_and_disconnect() -> None:
            found.update(sum_cpu_seconds())
            disconnect()

        return count_and_disconnect

    script.make_shards, script.connect = timed, connect_small
    begin = time.perf_counter()
    script.main(script.parse_args(flags))
    found["all"] = time.perf_counter() - begin
    print("\n" + json.dumps(found), flush=True)


def start(engine: str, flags: list[str], log: Path, fault: str = "") -> subprocess.Popen:
    """Start `run_once` in a process of its own, which writes to `log`."""
    code = f"import ray_data; ray_data.run_once({engine!r}, {flags})"
    environment = {"RAY_AUTH_MODE": "disabled", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    environment |= os.environ
    environment |= {"RAY_DATA_FAULT": fault, "RAY_DATA_NOTES": str(log.parent)}
    environment["PYTHONPATH"] = f"{Path(__file__).parent}{os.pathsep}{bench.ROOT}"
    with open(log, "a") as file:
        return subprocess.Popen(
            [sys.executable, "-c", code],
            stdout=file,
            stderr=file,
            env=environment,
            start_new_session=True,
        )


def end(process: subprocess.Popen, signum: int = signal.SIGKILL) -> None:
    """End a driver, and then the processes of Ray that it has started."""
    with contextlib.suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
        process.send_signal(signum)
        process.wait()
        _, alive = psutil.wait_procs(children, timeout=20)  # they notice that the driver is gone
        for child in alive:
            child.kill()


def read_shards(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("data-*.arrow"))}


def measure_speed(flags: list[str], rounds: int) -> Generator[list[str]]:
    """Yield the rows of a table."""
    shards = None
    for number in range(rounds):
        for engine in ENGINES:
            with tempfile.TemporaryDirectory() as folder:
                out, log = Path(folder, "out"), Path(folder, "log")
                process = start(engine, [*flags, f"--output_dir={out}"], log)
                if process.wait():
                    sys.exit(log.read_text()[-3000:])
                found = json.loads(log.read_text().splitlines()[-1])
                made = read_shards(out)
            if (shards := shards or made) != made:
                sys.exit(f"{engine} has made other bytes")
            cpu = [found[kind] for kind in ("driver", "servers", "workers")]
            numbers = [found["all"], found["shards"], sum(cpu), *cpu]
            yield [str(number + 1), engine, *(f"{value:.1f}" for value in numbers)]


def try_fault(engine: str, fault: str, flags: list[str], limit: float) -> list[str]:
    """Run with a fault. Returns a row of the table."""
    with tempfile.TemporaryDirectory() as folder:
        out, log = Path(folder, "out"), Path(folder, "log")
        flags = [*flags, f"--output_dir={out}"]
        if fault == "gpu":
            flags += ["--num_encoders=1", "--gpus_per_encoder=1"]
        begin = time.perf_counter()
        process = start(engine, flags, log, fault)
        if fault == "driver":
            while process.poll() is None and len(read_shards(out)) < 4:
                time.sleep(0.1)
            end(process)
            whole = {
                name for name in read_shards(out) if (out / f"unfinished/{name}.json").exists()
            }
            log.write_text(f"killed with {len(whole)} shards\n")
            process = start(engine, flags, log, fault)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(limit)
        ended = "no end" if process.poll() is None else f"status {process.returncode}"
        seconds = time.perf_counter() - begin
        end(process)
        said = [line for line in log.read_text().replace("\r", "\n").splitlines() if line.strip()]
        encoders = len(list(Path(folder).glob("encoder-*")))
        made = len(read_shards(out))
    cells = [f"{ended}, {seconds:.0f} s", str(made), str(encoders), said[-1][:250] if said else ""]
    return [FAULTS[fault], engine, *(cell.replace("|", "/") for cell in cells)]


def main(argv: list[str] | None = None) -> None:
    parser = bench.make_parser(
        __doc__,
        size=None,
        mixed_precision=None,
        batch_size=None,
        steps=None,
        rounds=2,
        resolution=64,
    )
    parser.add_argument("what", choices=["speed", "faults"])
    parser.add_argument("--limit", type=float, default=100, help="seconds")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=ENGINES)
    parser.add_argument("--faults", nargs="+", choices=list(FAULTS), default=list(FAULTS))
    cli = parser.parse_args(argv)
    title = f"{bench.machine()}; Ray {ray.__version__}"
    flags = [*FLAGS, f"--resolution={cli.resolution}"]
    if cli.what == "speed":
        header = ["round", "engine", "whole script, s", "shards after the first, s"]
        header += ["CPU s", "of the driver", "of Ray's servers", "of workers"]
        bench.show(title, header, measure_speed(flags, cli.rounds))
        return
    header = ["fault", "engine", "end", "shards of 29", "encoders' processes", "last line"]
    rows = (
        try_fault(engine, fault, flags, cli.limit) for fault in cli.faults for engine in cli.engines
    )
    bench.show(title, header, rows)


if __name__ == "__main__":
    main()
