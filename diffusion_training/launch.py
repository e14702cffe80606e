"""Set up a run with the launcher's settings."""

import contextlib
import ctypes
import os
import socket
import sys
import time
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, PartialState
from accelerate.commands.config.config_args import load_config_from_file
from accelerate.utils import (
    AutocastKwargs,
    DynamoBackend,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from huggingface_hub.constants import HF_HOME

from diffusion_training.errors.faults import explain
from diffusion_training.errors.printing import amount
from diffusion_training.errors.sentences import CHANGED, explained, fail
from diffusion_training.heartbeat import listen_to_machines
from diffusion_training.memory import is_gpu
from diffusion_training.models import DTYPES

# of processes that wait for each other, for example while the first one checks a model
TIMEOUT = timedelta(hours=2)
CONNECTING = 600.0  # seconds that a process waits for the first machine to answer


@dataclass(frozen=True)
class Launch:
    """The settings of a launch: devices, processes and precision."""

    accelerator: Accelerator
    cores: int  # CPU cores for each process of this machine
    mixed_precision: str
    compile: str | None  # a backend of torch.compile
    gradient_accumulation_steps: int
    shard: bool = False  # whether each process holds a part of the models; False for one process

    @property
    def device(self) -> torch.device:
        return self.accelerator.device

    @property
    def rank(self) -> int:
        return self.accelerator.process_index

    @property
    def num_processes(self) -> int:
        return self.accelerator.num_processes

    @property
    def is_main(self) -> bool:
        return self.accelerator.is_main_process

    @property
    def has_weights(self) -> bool:
        """Whether this process loads weights. With --shard, the others get them from the first."""
        return self.is_main or not self.shard

    @property
    def dtype(self) -> torch.dtype:
        """The precision of frozen models."""
        return getattr(torch, DTYPES[self.mixed_precision])

    def describe(self) -> str:
        """Describe devices and precision, for the terminal and the report."""
        where = self.device.type
        if is_gpu(self.device):
            where += f" ({torch.get_device_module(self.device).get_device_name(self.device)})"
        elif where == "cpu":
            where += f", {amount(torch.get_num_threads(), 'thread')} each"
        return f"{self.num_processes} on {where}; mixed precision: {self.mixed_precision}"

    def share(self, count: int) -> range:
        """Return the numbers below `count` that this process takes.

        With --shard all processes take equally many, because none can call a model alone. Numbers
        from `count` on are placeholders.
        """
        end = count + -count % self.num_processes if self.shard else count
        return range(self.rank, end, self.num_processes)

    def choose_workers(self, wanted: int | None) -> int:
        """Return the number of loader processes: `wanted`, or all cores less one, at most 8."""
        return min(8, self.cores - 1) if wanted is None else wanted

    def settings(self) -> dict[str, Any]:
        """Return the settings to record, under the names of their flags."""
        names = ("mixed_precision", "compile", "gradient_accumulation_steps")
        return {name: getattr(self, name) for name in names}


def accelerator_options(args: Namespace) -> dict[str, Any]:
    """Return the arguments of `Accelerator`: precision, trackers, time-outs.

    It also sets torch's precision and determinism, which has to be done before CUDA starts. Stops
    with an error if `accelerate config` or its launcher asks for something that is not supported,
    or if the first machine does not answer.
    """
    # on a CPU, Accelerate would ignore these
    for engine in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        if os.environ.get(f"ACCELERATE_USE_{engine}", "false").lower() not in ("false", "0", "no"):
            advice = "launch on one device, or on several with DDP (--multi_gpu)"
            if engine == "FSDP" and "shard" in args:
                advice = "use --shard, and launch with DDP (--multi_gpu)"
            fail(f"{engine} is not supported: {advice}")
    precision = args.mixed_precision or os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    if os.environ.get("ACCELERATE_FP8_BACKEND", "NO").upper() != "NO":  # whatever the precision
        precision = "fp8"
    if precision not in DTYPES:
        fail(f"mixed precision {precision} is not supported: choose no, fp16 or bf16")
    wait_for_first_machine()
    # autocast would cache its copies of all weights, too many for one process
    autocast = AutocastKwargs(cache_enabled=not vars(args).get("shard"))
    options = {
        "mixed_precision": precision,
        # `compile_model` compiles instead, and keeps the names of weights
        "dynamo_backend": "no",
        "kwargs_handlers": [InitProcessGroupKwargs(timeout=TIMEOUT), autocast],
    }
    if "report_to" in args:  # only trainers have this flag
        logs = str(Path(args.output_dir, args.logging_dir))
        torch.set_float32_matmul_precision("high" if args.allow_tf32 else "highest")
        if args.deterministic:
            CHANGED.enter_context(only_deterministic())
        options["log_with"] = None if args.report_to == "none" else args.report_to
        options["project_config"] = ProjectConfiguration(args.output_dir, logging_dir=logs)
    return options


def wait_for_first_machine() -> None:
    """Wait until the first process can be reached. A signal ends this, but not torch's own wait."""
    if os.environ.get("RANK", "0") == "0":
        return
    host, port = os.environ.get("MASTER_ADDR", ""), int(os.environ.get("MASTER_PORT", "0"))
    deadline = time.monotonic() + CONNECTING
    while host and port:
        try:
            socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            if time.monotonic() > deadline:
                fail(
                    f"the first machine, {host}:{port}, has not answered for {CONNECTING:.0f} "
                    f"seconds ({explain(error)}): is it running, and can it be reached from here?"
                )
        time.sleep(0.5)


def make_group(timeout: timedelta) -> torch.distributed.ProcessGroup:
    """Make a group of all processes over gloo, so that no device has to wait.

    timeout: how long one process waits for another.
    """
    # fails if a process has ended, for which a new group would wait all this time
    PartialState().wait_for_everyone()
    return torch.distributed.new_group(backend="gloo", timeout=timeout)


def make_launch(accelerator: Accelerator, args: Namespace) -> Launch:
    """Check the device and the processes of an Accelerator, and the launcher's other settings.

    Stops with an error if the processes do not work together, or a setting is not supported.
    """
    flags = vars(args)  # some scripts lack some of them
    shard = flags.get("shard", False)
    with explained("the launched processes can't be set up"):
        # fails if the device is busy, missing, too old for this torch, or holds no numbers (meta)
        torch.ones(1, device=accelerator.device).item()
        check_processes(accelerator)
        handler = accelerator.init_handler  # None for an Accelerator of the user's own
        listen_to_machines(handler.timeout if handler else TIMEOUT)
        dynamo = TorchDynamoPlugin()  # the launcher's options, which `compile_model` applies
        cores = count_cores()
    device = accelerator.device
    precision = accelerator.mixed_precision
    if precision == "fp16" and device.type == "cpu":
        fail("fp16 does nothing on a CPU, or is very slow: use --mixed_precision bf16 or no")
    backend = flags.get("compile")
    if backend is None and dynamo.backend != DynamoBackend.NO:
        backend = dynamo.backend.value.lower()
    if backend:
        keep_compiled(flags.get("cache_dir"))
    if shard and (backend or precision == "fp16"):
        what, flag = ("fp16", "mixed_precision bf16")
        if backend:
            what, flag = ("torch.compile", "no-compile")
        fail(f"accelerate launch turns on {what}, which --shard does not support: add --{flag}")
    if flags.get("base_precision"):
        check_quantization(args.base_precision, precision, backend)
    if flags.get("blocks_to_swap") and backend:  # of the launch
        fail("--blocks_to_swap can't be compiled: add --no-compile")
    accumulation_steps = choose_accumulation(accelerator, args)
    if flags.get("full_bf16"):
        if precision != "bf16":
            fail("--full_bf16 needs --mixed_precision bf16: add it")
        if backend or accumulation_steps > 1:  # of the launch
            what, flag = "accumulates gradients", "`accelerate config` without it"
            if backend:
                what, flag = "turns on torch.compile", "--no-compile"
            fail(f"accelerate launch {what}, which --full_bf16 does not support: use {flag}")
        if accelerator.num_processes > 1:
            fail(
                "--full_bf16 trains on one device: several would exchange their gradients only "
                "after the weights were updated; launch one process, or use --shard"
            )
    if device.type == "cpu":
        keep_memory()
        if threads_are_default():
            torch.set_num_threads(cores)
    shard = shard and accelerator.num_processes > 1
    launch = Launch(accelerator, cores, precision, backend, accumulation_steps, shard)
    loaders = ""
    if "dataloader_num_workers" in args:
        count = launch.choose_workers(args.dataloader_num_workers)
        loaders = f"; loader processes for each: {count}"
    accelerator.print(f"Processes: {launch.describe()}{loaders}")
    for sentence in (advise_launcher(precision), advise_precision(device, precision, args)):
        if sentence:
            accelerator.print(sentence)
    return launch


def advise_precision(device: torch.device, precision: str, args: Namespace) -> str | None:
    """Return advice for a GPU that computes in float32 by default; None if there is none."""
    chosen = args.mixed_precision or vars(args).get("allow_tf32")
    if precision != "no" or chosen or not is_gpu(device):
        return None
    if not torch.get_device_module(device).is_bf16_supported(including_emulation=False):
        return None
    flags = "--mixed_precision bf16" + " or --allow_tf32" * ("allow_tf32" in args)
    return (
        f"Float32 leaves the tensor cores of this GPU unused: {flags} is faster "
        "(--mixed_precision no keeps float32 and hides this line)"
    )


def advise_launcher(mixed_precision: str) -> str | None:
    """Return what a start by `python` leaves unused, in a sentence; None if that is nothing."""
    if is_launched() or "RANK" in os.environ:  # torchrun and Ray set the latter
        return None
    num_devices = torch.accelerator.device_count()
    if num_devices > 1:
        return f"One of {num_devices} devices is used: `accelerate launch` starts on all of them"
    used = {"num_processes": 1, "mixed_precision": mixed_precision}
    with contextlib.suppress(Exception):  # no file, or one that only `accelerate launch` explains
        config = vars(load_config_from_file(None))
        unused = [f"{name}: {config[name]}" for name in used if config[name] != used[name]]
        if unused:
            return (
                f"`python` does not read the settings of `accelerate config` ({', '.join(unused)})"
                ": start with `accelerate launch` to use them"
            )
    return None


def keep_compiled(cache_dir: str | None) -> None:
    """Let inductor keep its code for later runs, in the folder of downloads.

    Otherwise it would be in the machine's folder for temporary files, and a resumed run might have
    to compile again. The variable TORCHINDUCTOR_CACHE_DIR names another folder.
    """
    name = "TORCHINDUCTOR_CACHE_DIR"
    if name not in os.environ:
        os.environ[name] = str(Path(cache_dir or HF_HOME, "diffusion_training", "inductor"))
        CHANGED.callback(os.environ.pop, name, None)


@contextlib.contextmanager
def only_deterministic() -> Iterator[None]:
    """Let torch use only deterministic kernels in the block, for --deterministic.

    Enter it before CUDA starts. An operation without such a kernel raises an error. With
    warn_only=True, torch would keep the usual backward pass of attention, which is not
    deterministic.
    """
    cudnn = torch.backends.cudnn
    flags = cudnn.benchmark, cudnn.deterministic
    mode = torch.are_deterministic_algorithms_enabled()
    warn_only = torch.is_deterministic_algorithms_warn_only_enabled()
    # cuBLAS reads this when it starts; see "Results reproducibility" in its documentation
    workspace = os.environ.get("CUBLAS_WORKSPACE_CONFIG")
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = workspace or ":4096:8"
    cudnn.benchmark = False  # it would choose kernels by speed, different ones each time
    cudnn.deterministic = True
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode, warn_only=warn_only)
        cudnn.benchmark, cudnn.deterministic = flags
        if workspace is None:
            del os.environ["CUBLAS_WORKSPACE_CONFIG"]


def count_cores() -> int:
    """Return the number of cores of this machine for each of its processes."""
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    return max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))


def check_processes(accelerator: Accelerator) -> None:
    """Stop with an error if the launched processes do not work together."""
    num_launched = int(os.environ.get("WORLD_SIZE", 1))
    num_processes = accelerator.num_processes
    if num_processes == 1 and {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys():
        # on CPUs the launcher starts one process instead of several, and sets an address
        num_launched = max(2, num_launched)
    if num_launched != num_processes:
        advice = (
            "on CPUs set ACCELERATE_USE_CPU=true and launch with --multi_gpu; on GPUs give "
            "each process its own GPU"
        )
        fail(
            f"{num_launched} processes were launched, but they do not work together (each sees "
            f"{num_processes}): {advice}"
        )
    # MULTI_...: DDP, on any kind of device
    if not accelerator.distributed_type.value.startswith(("NO", "MULTI_")):
        fail(
            f"{accelerator.distributed_type.value} is not supported: launch on one device, or "
            "on several with DDP"
        )


def choose_accumulation(accelerator: Accelerator, args: Namespace) -> int:
    """Return the micro-batches per step, from --gradient_accumulation_steps or the launch.

    The trainers accumulate gradients themselves, so the Accelerator keeps 1. Otherwise it would
    divide the gradients again.
    """
    steps = accelerator.gradient_accumulation_steps
    accelerator.gradient_accumulation_steps = 1
    if steps < 1:
        fail(f"accelerate launch sets {steps} gradient accumulation steps: set 1 or more")
    wanted = vars(args).get("gradient_accumulation_steps", 1)
    if steps == 1:
        return wanted
    if wanted not in (1, steps):
        fail(
            f"--gradient_accumulation_steps is {wanted}, but accelerate launch sets {steps}: "
            "give it in one place only"
        )
    return steps


def is_launched() -> bool:
    """Whether `accelerate launch` started this process: it sets this variable."""
    return "ACCELERATE_MIXED_PRECISION" in os.environ


def threads_are_default() -> bool:
    """Return whether one thread is the launcher's default and not the user's choice.

    A choice is in the launcher's environment or among its flags, before the script's name.
    """
    if not is_launched() or os.environ.get("OMP_NUM_THREADS") != "1":
        return False
    launcher = Path(f"/proc/{os.getppid()}")
    try:
        environment = (launcher / "environ").read_bytes()
        command = (launcher / "cmdline").read_bytes()
    except OSError:  # not Linux, or no permission
        return True
    flags, _, _ = command.partition(b"\0" + os.fsencode(sys.argv[0]) + b"\0")
    is_chosen = b"num_cpu_threads" in flags.replace(b"-", b"_")
    return not is_chosen and b"OMP_NUM_THREADS=" not in environment


def keep_memory() -> None:
    """Let glibc keep freed memory (mallopt(3)).

    Activations are allocated and freed in every step. Asking the system for new pages each time
    takes up to half of a step's time.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, in bytes
            libc.mallopt(parameter, 2**30)


def check_quantization(
    base_precision: str, mixed_precision: str, compile_backend: str | None
) -> None:
    """Stop with an error if the quantized base does not support the precision or the compiler."""
    if mixed_precision == "fp16":
        fail(
            f"--base_precision {base_precision} computes in bfloat16 or float32: use "
            "--mixed_precision bf16"
        )
    if compile_backend and base_precision == "nf4":
        fail("--base_precision nf4 can't be compiled: leave --compile out, or use --no-compile")
