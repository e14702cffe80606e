"""Run any trainer on Ray Train, with as many workers as a Ray cluster has at the moment.

    python train_on_ray.py     # the demo of train_unconditional.py, by two workers on this machine
    python train_on_ray.py --address 10.0.0.1:6379 --min_workers 2 --max_workers 8 \\
        train_flow.py --pretrained_model_name_or_path black-forest-labs/FLUX.2-klein-base-4B \\
        --latents_dir /shared/latents --output_dir /shared/klein

Start it once, with python, on a machine of the cluster. A worker is one process of the trainer, on
a GPU of its own. When a worker or a machine is lost or added, all workers start again from the last
checkpoint. The order of the data does not depend on their number, so every image still comes once
an epoch. All machines must share --output_dir.

Layout of this file:
    parse_args  the flags of this script, then the trainer and its flags
    run_worker  in each worker of Ray Train: starts the trainer in another process
    watch       in the driver: prints the workers' events, and decides when to give up
    main        the run in phases
Ray Train only decides how many workers there are, and starts them. The trainer saves, resumes and
splits the data among its processes, as it does under any launcher.
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
import ast
import contextlib
import importlib
import importlib.util
import inspect
import io
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
import uuid
from argparse import Namespace
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from diffusion_training.arguments import COUNT, Flags, Parser, make_parser, number, parse_demo
from diffusion_training.cluster.connection import Gauges, check_ray_args, connect, list_own_modules
from diffusion_training.cluster.supervisor import save_and_end, start_trainer, wait_until_free
from diffusion_training.errors.faults import explain
from diffusion_training.errors.printing import amount
from diffusion_training.errors.sentences import (
    PEER_ENDED,
    Refused,
    explained,
    fail,
    in_one_sentence,
)
from diffusion_training.errors.stop_signals import end_if_stopped

# The command line without arguments
DEMO = "--cpu --max_workers 2 train_unconditional.py"
RECORDED = ("step", "loss", "images_per_second")  # what `watch` shows of a record
RESUME = ["--resume_from_checkpoint", "latest"]
TAIL = 20_000  # characters at the end of an output in which an error is looked for
# How the sentence begins that ends a trainer. The name may be that of a script which it imports.
SENTENCE = re.compile(r"[^\s:]+\.py: ")
# what torchrun sets in the environment of each process
RANKS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "GROUP_RANK",
    "GROUP_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
)


def parse_args(argv: list[str] | None = None) -> Flags:
    """Parse and check the command line, and that of the trainer.

    A bad argument stops the script with one line and status 2 before anything is started.
    """
    parser = make_parser(__file__, __doc__, "docs/cluster.md")
    add = parser.add_argument_group("trainer").add_argument
    add("script", help="file of the trainer, such as train_flow.py")
    add(
        "flags",
        nargs=argparse.REMAINDER,
        help="flags of the trainer; this script adds --resume_from_checkpoint latest",
    )
    add = parser.add_argument_group("workers").add_argument
    add("--min_workers", type=COUNT, default=1, help="smallest number of workers")
    add("--max_workers", type=COUNT, required=True, help="required: largest number of workers")
    add("--cpu", action="store_true", help="train on CPUs (default: a GPU for each worker)")
    add(
        "--cpus_per_worker",
        type=number(1, 10**4, int),
        default=1,
        help="cores that Ray reserves for each worker; with --cpu also its threads",
    )
    add(
        "--resize_seconds",
        type=number(1, 10**6),
        default=60,
        help="look for more workers every so many seconds; if there are any, the trainers save "
        "and restart",
    )
    add(
        "--save_seconds",
        type=number(1, 10**5),
        default=120,
        help="seconds that a trainer has to finish its step and save, before it is killed",
    )
    add(
        "--max_failures",
        type=number(0, 10**6, int),
        default=8,
        help="allowed restarts in a row without a new checkpoint; one more ends the job",
    )
    add = parser.add_argument_group("ray").add_argument
    add(
        "--address",
        help="address of a Ray cluster (default: RAY_ADDRESS, or start Ray on this machine)",
    )

    if sys.argv[1:] if argv is None else argv:
        args = parser.parse_args(argv)
    else:
        args = parse_demo(parser, DEMO, argv)
    if args.min_workers > args.max_workers:
        parser.error(f"--min_workers {args.min_workers} exceeds --max_workers {args.max_workers}")
    if int(os.environ.get("WORLD_SIZE", 1)) > 1:
        parser.error("start this script once, with python: Ray starts the processes")
    path, parse_flags = load_parser(parser, args.script)
    with contextlib.redirect_stdout(io.StringIO()):  # the trainer prints it again
        own = parse_flags(args.flags)
        for name in ("resume_from_checkpoint", "output_dir"):
            if not hasattr(own, name):
                parser.error(f"{args.script} is not a trainer: it has no --{name}")
        given = own.resume_from_checkpoint
        flags = parse_flags([*args.flags, *RESUME])
    if given not in (None, "latest"):
        parser.error(
            f"leave --resume_from_checkpoint {given} out: each restart would resume from it again, "
            "and this script always resumes from the latest checkpoint"
        )
    check_ray_args(parser, args.address, flags.output_dir)
    output_dir = os.path.abspath(flags.output_dir)
    found = {"script": path, "output_dir": output_dir, "trainer": flags}
    return Flags(**vars(args) | found)


def load_parser(parser: Parser, script: str) -> tuple[str, Callable[[list[str]], Namespace]]:
    """Return the path of a trainer, in the working directory or beside this script; its parse_args.

    Its file is run only to where it parses its own flags, because the imports below take seconds.
    """
    places = [Path(script), Path(__file__).parent / script]
    path = next((path.resolve() for path in places if os.path.isfile(path)), None)
    if path is None or path.suffix != ".py":
        parser.error(f"{script} is not a trainer: give the path of a file such as train_flow.py")
    sys.path.insert(0, str(path.parent))
    try:
        tree = ast.parse(path.read_bytes(), str(path))
    except (OSError, SyntaxError) as error:
        parser.error(f"{path} can't be read: {error}")
    guards = (i for i, node in enumerate(tree.body) if ast.unparse(node).startswith("if __name__"))
    tree.body = tree.body[: next(guards, None)]
    names: dict[str, Any] = {"__name__": path.stem, "__file__": str(path)}
    exec(compile(tree, path, "exec"), names)
    parse_flags = names.get("parse_args")
    if not callable(parse_flags) or not inspect.signature(parse_flags).parameters:
        parser.error(f"{script} is not a trainer: it has no parse_args that takes a list of flags")
    return str(path), parse_flags


# --help and mistakes in the flags end here, at once: the imports below take seconds. Importing this
# file parses nothing, so that tests, Ray's workers and loader processes can do so.
if __name__ == "__main__":
    args = parse_args()

from filelock import BaseFileLock, FileLock, Timeout

from diffusion_training.files import check_output_dir, delete, delete_if_empty, fits, parse_json

try:
    import ray.train
    from ray.train.backend import Backend
    from ray.train.collective import broadcast_from_rank_zero
    from ray.train.torch import TorchConfig, TorchTrainer
    from ray.util.queue import Queue
    from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy
except ImportError:
    sys.exit(
        f"{Path(__file__).name}: Ray is missing, or too old: pip install -r requirements-ray.txt"
    )


# -------------------------------------------------------------------------------------------------
# the workers


class Event(NamedTuple):
    """A message from a worker to the driver."""

    kind: str  # "started"; "lost": all workers start again; "failed": the job ends
    text: str
    workers: int = 0  # of "started"


@dataclass(frozen=True)
class RayJob:
    """The job, as the driver sends it to the workers."""

    script: str  # path on the driver's machine
    flags: list[str]
    folder: str  # working directory of the trainers
    output_dir: str
    token: str  # name of a file in `shared`: a machine that lacks it has another --output_dir
    host: str  # the driver's machine
    cpu: bool
    save_seconds: float

    @property
    def shared(self) -> Path:
        """The folder of this script in --output_dir."""
        return Path(self.output_dir, ".ray")

    @property
    def busy(self) -> str:
        """The error message if another process writes to --output_dir."""
        advice = "end it, or choose another --output_dir"
        return f"another process is writing to {self.output_dir}: {advice}"

    @property
    def lock(self) -> str:
        """A file that every supervisor locks until its trainer has ended."""
        return str(self.shared / "lock")

    @property
    def over(self) -> Path:
        """A file that appears when the job ends: trainers save and end, and none starts."""
        return self.shared / "over"

    def log(self, rank: int) -> Path:
        """A file with the output of a worker's trainers."""
        return self.shared / f"log-{rank}"


class NoBackend(Backend):
    """No process group, because the trainers make it. NCCL has to see all GPUs of a machine."""

    share_cuda_visible_devices = True


class OnlyRanks(TorchConfig):
    """Ray Train only numbers the workers. Its torch setup would take memory of each GPU."""

    @property
    def backend_cls(self) -> type[Backend]:
        return NoBackend

    @property
    def train_func_context(self) -> type:
        return contextlib.nullcontext


def run_worker(config: dict[str, Any]) -> None:
    """Start the trainer as one rank of the group, and wait for its end.

    Raises RuntimeError if all workers have to start again. Returns if the job has ended, with or
    without an error; Ray Train ends when all workers have returned.
    """
    job = config["job"]
    events = config["events"]
    environment = join_group(job, events)
    event = run_trainer(job, environment) if environment else None
    if event is None:
        return
    events.put(event)
    if event.kind == "failed":
        with contextlib.suppress(FileNotFoundError):  # this machine has another --output_dir
            job.over.touch()
    if not job.over.exists():
        raise RuntimeError(event.text)


def join_group(job: RayJob, events: Queue) -> dict[str, str] | None:
    """Wait for the other workers, and until the trainers of the previous group have ended.

    Returns the environment of this rank's trainer, or None if no trainer has to start.
    """
    context = ray.train.get_context()
    address = None
    if context.get_world_rank() == 0 and not job.over.exists():
        if wait_until_free(job.lock, job.save_seconds + 60):
            with socket.socket() as listener:
                listener.bind(("", 0))
                address = ray.util.get_node_ip_address(), listener.getsockname()[1]
            count = context.get_world_size()
            events.put(Event("started", amount(count, "worker"), count))
        else:
            events.put(Event("failed", job.busy))
    address = broadcast_from_rank_zero(address)
    if address is None:
        return None
    # without the ranks of another launcher, for example of one that started Ray on this machine
    environment = {name: value for name, value in os.environ.items() if name not in RANKS}
    environment["PYTHONUNBUFFERED"] = "1"  # the last line of the output is then the last written
    if job.cpu:
        environment["ACCELERATE_USE_CPU"] = "true"
    if context.get_world_size() == 1:
        return environment
    group = ray.util.get_current_placement_group()
    machines = set(ray.util.placement_group_table(group)["bundles_to_node_id"].values())
    ranks = (
        context.get_world_rank(),
        context.get_world_size(),
        context.get_local_rank(),
        context.get_local_world_size(),
        context.get_node_rank(),
        len(machines),
        *address,
    )
    return environment | {name: str(value) for name, value in zip(RANKS, ranks, strict=True)}


def run_trainer(job: RayJob, environment: dict[str, str]) -> Event | None:
    """Run the trainer to its end. Returns None if all went well."""
    host = socket.gethostname()
    if missing := find_unshared(job):
        where = f"{missing} of {job.host} is missing on {host}"
        return Event("failed", f"{where}: it must be on a disk that all machines share")
    script = job.script
    if not os.path.exists(script):  # Ray has copied it to this machine
        spec = importlib.util.find_spec(Path(script).stem)
        script = str(spec and spec.origin)
    command = [sys.executable, script, *job.flags, *RESUME]
    rank = ray.train.get_context().get_world_rank()
    job.log(rank).touch()
    printed = ""
    with open(job.log(rank), newline="", errors="replace") as log:
        log.seek(0, os.SEEK_END)  # after the output of earlier trainers
        supervisor = start_trainer(
            command, environment, job.folder, job.lock, job.log(rank), job.save_seconds
        )
        threading.Thread(target=save_on_preemption, args=(supervisor,), daemon=True).start()
        status = None
        while status is None:
            status = supervisor.poll()
            new = log.read()  # after `poll`, so that nothing is missing at the end
            print(new, end="", flush=True)  # Ray's dashboard shows it
            printed = (printed + new)[-TAIL:]
            if job.over.exists():
                save_and_end(supervisor)
            time.sleep(0.5)
    return interpret_end(status, printed, f"{Path(job.script).name} of worker {rank} on {host}")


def find_unshared(job: RayJob) -> str | None:
    """Name a folder of the driver that this machine does not have; None if it has all."""
    if not (job.shared / job.token).exists():
        return f"--output_dir {job.output_dir}"
    return None if os.path.isdir(job.folder) else f"the folder {job.folder}"


def save_on_preemption(supervisor: subprocess.Popen[bytes]) -> None:
    """Let the trainer save and end when Ray announces that it will take the machine away."""
    if not hasattr(ray.train, "get_preemption_info"):  # an older Ray
        return
    with contextlib.suppress(Exception):  # the other workers have ended
        while ray.train.get_preemption_info() is None:
            time.sleep(5)
        save_and_end(supervisor)


def interpret_end(status: int, printed: str, what: str) -> Event | None:
    """Return the event that a trainer's end means for the job; None if all went well.

    An error of the trainer ends the job, because a restart would repeat it. After a signal, or the
    end of another rank, the workers start again.
    """
    if status == 0:
        return None
    number = -status if status < 0 else status - 128
    if number > 0:
        return Event("lost", f"{what} was ended by {signal.Signals(number).name}")
    if status == PEER_ENDED:
        return Event("lost", f"{what} ended because another worker ended")
    lines = [line for line in printed.replace("\r", "\n").split("\n") if line.strip()]
    sentences = list(filter(SENTENCE.match, lines))
    last = lines[-1] if lines else "it printed nothing"
    return Event("failed", (sentences or [f"{what} ended with status {status}: {last}"])[-1])


# -------------------------------------------------------------------------------------------------
# the driver


def make_shared(job: RayJob) -> BaseFileLock:
    """Make the folder that the workers share, and lock --output_dir against another driver."""
    job.shared.mkdir(parents=True, exist_ok=True)
    lock = FileLock(Path(job.output_dir, ".lock-ray"))
    try:
        lock.acquire(timeout=0)
    except Timeout:
        fail(job.busy)
    job.over.unlink(missing_ok=True)  # left by a driver that was killed
    (job.shared / job.token).touch()
    job.log(0).write_bytes(b"")
    return lock


def check_resources(args: argparse.Namespace) -> None:
    """If there are too few CPUs or GPUs, print that the job waits, or stop with an error."""
    nodes = [node["Resources"] for node in ray.nodes() if node["Alive"]]
    possible = 0
    for node in nodes:
        workers = int(node.get("CPU", 0) // args.cpus_per_worker)
        possible += workers if args.cpu else min(workers, int(node.get("GPU", 0)))
    if possible >= args.min_workers:
        return
    totals = [f"{sum(node.get(kind, 0) for node in nodes):g} {kind}s" for kind in ("CPU", "GPU")]
    each = f"{args.cpus_per_worker} CPU{' and a GPU' * (not args.cpu)}"
    sentence = (
        f"Ray has {' and '.join(totals)}, enough for {amount(possible, 'worker')} ({each} each), "
        f"but --min_workers is {args.min_workers}"
    )
    if not (args.address or os.environ.get("RAY_ADDRESS")):
        fail(f"{sentence}: lower it, or give the --address of a larger cluster")
    print(f"{sentence}: waiting for more machines", flush=True)


def watch(fitting: threading.Thread, job: RayJob, events: Queue, max_failures: int) -> None:
    """Print events and the trainer's output until `fitting` ends.

    Stops with an error if a trainer failed, or if workers start again and again without saving.
    """
    saved: set[Path] | None = None
    gauges = Gauges(
        "train_on_ray",
        workers="Workers that train",
        starts="How often the workers have started",
        step="Optimizer steps, as in the last record",
        loss="Mean loss of the last record",
        images_per_second="Images per second of the last record",
    )
    num_starts = 0  # all of them
    starts = 0  # without a new checkpoint
    reason = ""
    failures: list[str] = []
    printed = ""
    with open(job.log(0), newline="", errors="replace") as log:
        while True:
            event = next_event(events)
            new = log.read()
            print(new, end="", flush=True)
            printed = (printed + new)[-TAIL:]
            if event is None and failures:  # only one worker of a machine prints the sentence
                sentence = next(filter(SENTENCE.match, failures), failures[0])
                raise SystemExit(1) if sentence in printed else Refused(sentence)
            if event is None:
                record = read_last_record(Path(job.output_dir))
                gauges.set(**{name: record.get(name) for name in RECORDED})
                if fitting.is_alive():
                    continue
                return
            if event.kind == "failed":
                failures.append(event.text)
                continue
            print(f"Ray: {event.text}", flush=True)
            if event.kind == "lost":
                reason = f"; the last reason: {event.text}"
                continue
            num_starts += 1
            gauges.set(workers=event.workers, starts=num_starts)
            before = saved
            saved = set(Path(job.output_dir).glob("checkpoint-*/trainer_state.json"))
            starts = starts + 1 if saved == before else 0
            if starts > max_failures:
                fail(f"the workers started {starts + 1} times without a new checkpoint{reason}")


def read_last_record(output_dir: Path) -> dict[str, float]:
    """The last record with a loss in the last 64 KiB of metrics.jsonl; empty if there is none."""
    with contextlib.suppress(OSError), open(output_dir / "metrics.jsonl", "rb") as file:
        file.seek(-min(2**16, os.path.getsize(file.name)), os.SEEK_END)
        for line in reversed(file.read().splitlines()):
            with contextlib.suppress(ValueError):  # a line that is cut off
                if fits(record := parse_json(line), {"step": int, "loss": float}):
                    return record
    return {}


def next_event(events: Queue) -> Event | None:
    """The next event, or None if none comes within a second."""
    try:
        # `get` with a timeout leaves an error that Ray prints if a signal ends it
        if events.empty():
            time.sleep(1)
        return None if events.empty() else events.get()
    finally:
        end_if_stopped()  # Ray may have swallowed a signal's exception


def fit(args: argparse.Namespace, job: RayJob, events: Queue, errors: list[Exception]) -> None:
    """Run Ray Train to its end, and append its error, if any, to `errors`."""
    scaling = ray.train.ScalingConfig(
        num_workers=(args.min_workers, args.max_workers),
        use_gpu=not args.cpu,
        resources_per_worker={"CPU": args.cpus_per_worker},
        elastic_resize_monitor_interval_s=args.resize_seconds,
    )
    run = ray.train.RunConfig(
        name=f"run-{job.token}",
        storage_path=str(job.shared),
        failure_config=ray.train.FailureConfig(max_failures=-1),  # `watch` counts them
        # else Ray kills the supervisors, and the trainers can't save
        worker_runtime_env={"env_vars": {"RAY_kill_child_processes_on_worker_exit": "0"}},
    )
    try:
        TorchTrainer(
            run_worker,
            train_loop_config={"job": job, "events": events},
            torch_config=OnlyRanks(backend="gloo"),
            scaling_config=scaling,
            run_config=run,
        ).fit()
    except Exception as error:
        errors.append(error)


def end_trainers(job: RayJob, fitting: threading.Thread) -> None:
    """End the trainers, which save first, and then Ray Train.

    Workers that still start keep Ray Train busy.
    """
    job.over.touch()
    wait_until_free(job.lock, job.save_seconds + 10)
    fitting.join(15)


@in_one_sentence
def main(args: argparse.Namespace) -> None:
    """Train.

    Exit status: 130 after Ctrl-C, 143 after SIGTERM, 1 after an error, printed in one line.
    """
    check_output_dir(vars(args.trainer))

    # Make the folder that the workers share.
    job = RayJob(
        args.script,
        args.flags,
        os.getcwd(),
        args.output_dir,
        uuid.uuid4().hex,
        socket.gethostname(),
        args.cpu,
        args.save_seconds,
    )
    is_new = not os.path.exists(args.output_dir)
    with explained(f"--output_dir {args.output_dir} can't be written to"):
        lock = make_shared(job)

    # Start Ray or connect to it, and train. `fit` is in a thread, because Ray's handler of Ctrl-C
    # would not wait for the trainers.
    try:
        modules = list_own_modules(run_worker, start_trainer)
        disconnect = connect(args.address, [*modules, args.script])
        check_resources(args)
        here = ray.get_runtime_context().get_node_id()
        on_this_machine = NodeAffinitySchedulingStrategy(here, soft=False)
        events = Queue(actor_options={"num_cpus": 0, "scheduling_strategy": on_this_machine})
        errors: list[Exception] = []
        fitting = threading.Thread(
            target=fit, args=(args, job, events, errors), name="fit", daemon=True
        )
        try:
            fitting.start()
            watch(fitting, job, events, args.max_failures)
            if errors:
                reason = explain(errors[0])
                fail(f"Ray Train stopped ({reason}); the same command resumes the run")
        finally:
            end_trainers(job, fitting)
            if not fitting.is_alive():  # Ray kills this process if a thread still uses it then
                disconnect()
    finally:
        delete(job.shared)
        lock.release(force=True)
        if is_new:
            delete_if_empty(Path(args.output_dir))


if __name__ == "__main__":
    # Run the module under its own name, not as __main__, since workers import it by that name.
    this = importlib.import_module(Path(__file__).stem)
    try:
        this.main(args)
    except SystemExit as stop:
        # Python's own end would shut Ray down while `fit` uses it
        if "fit" in [thread.name for thread in threading.enumerate()]:
            os._exit(int(stop.code or 0))
        raise
