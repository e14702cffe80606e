"""End the job when a machine falls silent, because torch would wait for it for hours."""

import atexit
import contextlib
import os
import socket
import sys
import threading
import uuid
from datetime import timedelta
from pathlib import Path

import torch

from diffusion_training.errors.sentences import PEER_ENDED, is_local_main, name_command

BEAT = 2.0  # seconds
# beats until a machine counts as lost; then the job ends within a minute
MAX_SILENT = 17
LEFT = b"left"


def listen_to_machines(timeout: timedelta) -> None:
    """Send heartbeats of this machine and listen to the other machines of the job, in threads.

    The threads also run while a machine computes. If a machine is silent for `MAX_SILENT` beats of
    this one, the process prints an error and ends with status 75. Silence is counted in beats, not
    in seconds, so a job that is paused and continued (SIGSTOP, a suspended cluster) is not ended. A
    single machine starts no threads.

    timeout: how long the other machines may take to connect.
    """
    rank = int(os.environ.get("RANK", "0"))
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    num_machines = int(os.environ.get("WORLD_SIZE", "1")) // num_local
    # Ray may put different numbers of processes on the machines, and sets these two
    num_machines = int(os.environ.get("GROUP_WORLD_SIZE", num_machines))
    own_machine = int(os.environ.get("GROUP_RANK", rank // num_local))
    if num_machines < 2:
        return
    # A separate connection: requests that block on torch's own must not delay heartbeats.
    address = os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    store = torch.distributed.TCPStore(
        *address, is_master=False, wait_for_workers=False, timeout=timeout
    )
    # The store may also hold the beats of earlier attempts. TORCHELASTIC_RESTART_COUNT does not
    # tell them apart: a machine that joined later counts fewer.
    attempt = [uuid.uuid4().hex]
    torch.distributed.broadcast_object_list(attempt)
    keys = [f"heartbeat/{attempt[0]}/{machine}" for machine in range(num_machines)]
    own_key = keys[own_machine]
    heard = []
    ended = threading.Event()

    def beat() -> None:
        number = 0
        with contextlib.suppress(RuntimeError):  # the store has ended
            while not ended.wait(BEAT):
                if is_local_main():
                    number += 1
                    store.set(own_key, f"{number} {socket.gethostname()}")
                # never returns if the machine that runs the store is silent
                heard[:] = store.multi_get(keys)
            if is_local_main():
                store.set(own_key, LEFT)

    def listen() -> None:
        previous = []
        silent = [0] * num_machines
        while not ended.wait(BEAT):
            if beats := list(heard):
                previous = previous or beats
                for machine in range(num_machines):
                    is_silent = beats[machine] == previous[machine] != LEFT
                    silent[machine] = silent[machine] + 1 if is_silent else 0
                previous = beats
            if max(silent) >= MAX_SILENT:
                if is_local_main():
                    machine = silent.index(max(silent))
                    host = previous[machine].decode().partition(" ")[2]
                    print(
                        f"\n{Path(sys.argv[0]).name}: machine {machine} ({host}) has been silent "
                        f"for {MAX_SILENT * BEAT:.0f} seconds; saved files are complete, "
                        f"and {name_command()} continues from there",
                        file=sys.stderr,
                        flush=True,
                    )
                os._exit(PEER_ENDED)  # not sys.exit: the main thread may be waiting in torch

    beating = threading.Thread(target=beat, daemon=True)
    listening = threading.Thread(target=listen, daemon=True)

    def leave() -> None:
        ended.set()
        beating.join(2 * BEAT)

    beating.start()
    listening.start()
    atexit.register(leave)
