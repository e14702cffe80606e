"""Setting up a run as Accelerate's launcher says, stopping it on signals, and ending it."""

import contextlib
import ctypes
import os
import re
import signal
import sys
import time
from argparse import Namespace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import NoReturn

import torch
from accelerate import Accelerator
from accelerate.utils import (
    DynamoBackend,
    InitProcessGroupKwargs,
    ProjectConfiguration,
    TorchDynamoPlugin,
)
from filelock import BaseFileLock
from huggingface_hub import upload_folder

from diffusion_training.errors import SIGNALS, explained, fail, handling
from diffusion_training.training.heartbeat import listen_to_machines


def make_accelerator(
    args: Namespace, timeout: timedelta = timedelta(hours=2)
) -> tuple[Accelerator, int]:
    """Make the Accelerator, with the settings of `accelerate config` and its launcher.

    The settings are put into `args`. Stops with an error if one is not supported. Returns
    (accelerator, number of CPU cores for each process of this machine).

    timeout: how long processes wait for each other, for example while the first one downloads or
    checks a model.
    """
    options = {}
    if "report_to" in args:  # only trainers have this flag
        torch.set_float32_matmul_precision("high" if args.allow_tf32 else "highest")
        options["log_with"] = None if args.report_to == "none" else args.report_to
        logs = str(Path(args.output_dir, args.logging_dir))
        options["project_config"] = ProjectConfiguration(args.output_dir, logging_dir=logs)
    # on a CPU, Accelerate would ignore these
    for engine in ("FSDP", "DEEPSPEED", "MEGATRON_LM", "PARALLELISM_CONFIG"):
        if os.environ.get(f"ACCELERATE_USE_{engine}", "false").lower() not in ("false", "0", "no"):
            fail(
                f"{engine} is not supported: launch on one device, or on several with DDP "
                "(--multi_gpu)"
            )
    args.mixed_precision = args.mixed_precision or os.environ.get(
        "ACCELERATE_MIXED_PRECISION", "no"
    )
    if args.mixed_precision not in ("no", "fp16", "bf16"):
        fail(f"mixed precision {args.mixed_precision} is not supported: choose no, fp16 or bf16")
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    with explained("the processes can't be set up as they were launched"):
        cores = max(1, cores // int(os.environ.get("LOCAL_WORLD_SIZE", 1)))
        num_launched = int(os.environ.get("WORLD_SIZE", 1))
        # the launcher's options; `compile_model` applies them, and keeps the names of weights
        dynamo = TorchDynamoPlugin()
        options["kwargs_handlers"] = [InitProcessGroupKwargs(timeout=timeout)]
        accelerator = Accelerator(
            mixed_precision=args.mixed_precision, dynamo_backend="no", **options
        )
        # fails if the device is busy, missing, or too old for this torch
        torch.ones(1, device=accelerator.device)
    device, num_processes = accelerator.device, accelerator.num_processes
    if num_processes == 1 and {"ACCELERATE_MIXED_PRECISION", "MASTER_ADDR"} <= os.environ.keys():
        # on CPUs the launcher starts one process instead of several, and sets an address
        num_launched = max(2, num_launched)
    if num_launched != num_processes:
        turn = (
            "on CPUs set ACCELERATE_USE_CPU=true and launch with --multi_gpu, on GPUs give "
            "each process its own"
        )
        fail(f"{num_launched} processes were launched but each sees {num_processes}: {turn}")
    # MULTI_...: DDP, on any kind of device
    if not accelerator.distributed_type.value.startswith(("NO", "MULTI_")):
        fail(
            f"{accelerator.distributed_type.value} is not supported: launch on one device, or "
            "on several with DDP"
        )
    if args.mixed_precision == "fp16" and device.type == "cpu":
        fail("fp16 does nothing on a CPU, or is very slow: use --mixed_precision bf16 or no")
    if args.compile is None and dynamo.backend != DynamoBackend.NO:
        args.compile = dynamo.backend.value.lower()
    # The trainers accumulate by themselves: otherwise Accelerate would divide the gradients again.
    steps, accelerator.gradient_accumulation_steps = accelerator.gradient_accumulation_steps, 1
    # the launcher does not pass this flag on, so it is read from the launcher's command line
    if said := re.search(rb"gradient_accumulation_steps[=\0](\d+)", read_launcher()[1]):
        steps = int(said[1])
    if steps < 1:
        fail(f"the launch says {steps} gradient accumulation steps: there must be one at least")
    if steps != 1 and "gradient_accumulation_steps" in args:
        if args.gradient_accumulation_steps not in (1, steps):
            fail(
                f"--gradient_accumulation_steps {args.gradient_accumulation_steps}, but the "
                f"launch says {steps}"
            )
        args.gradient_accumulation_steps = steps
    if device.type == "cpu":
        keep_memory()
        if threads_are_default():
            torch.set_num_threads(cores)
    listen_to_machines(timeout)
    threads = f", {torch.get_num_threads()} threads each" if device.type == "cpu" else ""
    accelerator.print(
        f"Processes: {num_processes} on {device.type}{threads}; mixed precision: "
        f"{args.mixed_precision}"
    )
    return accelerator, cores


def threads_are_default() -> bool:
    """Return whether one thread is the launcher's default and not the user's choice.

    A choice would be in the launcher's environment or command line.
    """
    if "ACCELERATE_MIXED_PRECISION" not in os.environ or os.environ.get("OMP_NUM_THREADS") != "1":
        return False
    environment, flags = read_launcher()
    return b"OMP_NUM_THREADS=" not in environment and b"num_cpu_threads" not in flags


def read_launcher() -> tuple[bytes, bytes]:
    """Return (environment, flags before the script's name) of the launcher; empty without one."""
    if "ACCELERATE_MIXED_PRECISION" not in os.environ:
        return b"", b""
    try:
        launcher = Path(f"/proc/{os.getppid()}")
        flags, _, _ = (
            (launcher / "cmdline").read_bytes().partition(b"\0" + os.fsencode(sys.argv[0]) + b"\0")
        )
        return (launcher / "environ").read_bytes(), flags.replace(b"-", b"_")
    except OSError:  # no Linux, or no right to look
        return b"", b""


def keep_memory() -> None:
    """Let glibc keep freed memory (mallopt(3)).

    Activations are allocated and freed in every step. Asking the system for new pages each time
    takes up to half of a step.
    """
    if sys.platform == "linux" and hasattr(libc := ctypes.CDLL(None), "mallopt"):
        for parameter in (-1, -3):  # M_TRIM_THRESHOLD and M_MMAP_THRESHOLD, in bytes
            libc.mallopt(parameter, 2**30)


class StopSignal:
    """Notes Ctrl-C and SIGTERM, which end the run on all processes after the current step."""

    def __init__(self, num_processes: int) -> None:
        self.handlers = contextlib.ExitStack()
        self.handlers.enter_context(handling(self.note))
        # The processes agree over gloo, so that no device has to wait.
        self.group = torch.distributed.new_group(backend="gloo") if num_processes > 1 else None

    @property
    def received(self) -> int:
        return SIGNALS[-1] if SIGNALS else 0  # also one that came earlier and was swallowed

    def note(self, number: int, frame: FrameType | None) -> None:
        SIGNALS.append(number)
        if len(SIGNALS) >= 3:  # torchrun sends each one twice; a third is meant to kill
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def agree(self) -> int:
        """Return the signal's number if any process has received one, else 0; once per step."""
        number = torch.tensor(self.received)
        if self.group is not None:
            torch.distributed.all_reduce(number, torch.distributed.ReduceOp.MAX, group=self.group)
        return int(number)

    def close(self) -> None:
        self.handlers.close()


def end_stopped(
    accelerator: Accelerator, stop: int, global_step: int, max_train_steps: int
) -> NoReturn:
    """End the program after a signal, with the exit status for that signal."""
    where = f"after step {global_step} of {max_train_steps}"
    turn = "the same command with --resume_from_checkpoint latest goes on from there"
    accelerator.print(f"Stopped by {signal.Signals(stop).name} {where}; {turn}")
    accelerator.end_training()
    SIGNALS.clear()  # it has been reported
    sys.exit(128 + stop)


def end_run(
    accelerator: Accelerator,
    lock: BaseFileLock | None,
    done: str,
    files: list[str],
    args: Namespace,
) -> None:
    """Upload if asked for, print `done`, and release everything."""
    accelerator.wait_for_everyone()
    # torch 2.11 can hang at exit if gloo's thread has not finished the last gather
    time.sleep(0.1)
    if accelerator.is_main_process and args.push_to_hub:
        files = ["model_index.json", "README.md", "loss.png", "samples/*", *files]
        with explained(
            f"the upload to {args.hub_model_id} failed; all is whole in {args.output_dir}"
        ):
            upload_folder(
                repo_id=args.hub_model_id, folder_path=args.output_dir, allow_patterns=files
            )
    accelerator.print(done)
    if lock is not None:
        lock.release(force=True)
    accelerator.end_training()
