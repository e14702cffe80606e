"""Ends the job when a machine falls silent: torch would wait for it for hours."""

import atexit
import contextlib
import os
import socket
import sys
import threading
from datetime import timedelta
from pathlib import Path

import torch

from diffusion_training.errors import speaks

BEAT = 2.0  # seconds
# beats; the launcher then ends its other processes, and the job is over within a minute
MOST_SILENT = 17
LEFT = b"left"


def listen_to_machines(timeout: timedelta) -> None:
    """Send heartbeats of this machine and listen to the others of the job, in threads.

    The threads also run while a machine computes. If a machine is silent for `MOST_SILENT` beats of
    this one, the process prints an error and ends with status 1. Silence is counted in beats and
    not in seconds, so that a job that is stopped and continued (SIGSTOP, a suspended cluster) hears
    all machines again. A single machine starts no threads.

    timeout: how long the others may take to get here.
    """
    rank, num_local = int(os.environ.get("RANK", "0")), int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_machines, mine = int(os.environ.get("WORLD_SIZE", "1")) // num_local, rank // num_local
    if num_machines < 2:
        return
    # A connection of its own: requests that block on torch's connection must not delay heartbeats.
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore(
        *address, is_master=False, wait_for_workers=False, timeout=timeout
    )
    # the store also holds the beats of earlier attempts
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    names = [f"heartbeat/{attempt}/{machine}" for machine in range(num_machines)]
    heard, ended = [], threading.Event()

    def beat() -> None:
        number = 0
        with contextlib.suppress(RuntimeError):  # the store has gone: nothing is heard any more
            while not ended.wait(BEAT):
                if speaks():
                    number += 1
                    store.set(names[mine], f"{number} {socket.gethostname()}")
                # never returns if the machine that runs the store is silent
                heard[:] = store.multi_get(names)
            if speaks():
                store.set(names[mine], LEFT)

    def listen() -> None:
        before, silent = [], [0] * num_machines
        while not ended.wait(BEAT):
            if now := list(heard):
                said = zip(silent, now, before or now, strict=True)
                silent = [count + 1 if this == last != LEFT else 0 for count, this, last in said]
                before = now
            if max(silent) >= MOST_SILENT:
                first = silent.index(max(silent))
                host = before[first].decode().partition(" ")[2]
                if speaks():
                    what = (
                        f"machine {first} ({host}) has been silent for "
                        f"{MOST_SILENT * BEAT:.0f} seconds"
                    )
                    turn = "what is saved is whole, and the same command goes on from there"
                    print(
                        f"\n{Path(sys.argv[0]).name}: {what}; {turn}", file=sys.stderr, flush=True
                    )
                os._exit(1)  # whatever the main thread waits for

    beating, listening = (threading.Thread(target=work, daemon=True) for work in (beat, listen))

    def leave() -> None:
        ended.set()
        beating.join(2 * BEAT)

    beating.start()
    listening.start()
    atexit.register(leave)
