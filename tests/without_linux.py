"""Run a script as on a system without what only Linux and macOS have.

`python tests/without_linux.py train_flow.py FLAGS`. The modules and functions that Windows lacks
are gone before the script begins, also in the processes that it starts, which are spawned.
"""

import importlib
import multiprocessing
import os
import pathlib
import runpy
import signal
import sys

ROOT = pathlib.Path(__file__).resolve().parents[1]
MODULES = ("fcntl", "grp", "pwd", "resource", "syslog", "termios")
FUNCTIONS = ("fork", "getuid", "getpgid", "killpg", "mkfifo", "sched_getaffinity", "setsid")
SIGNALS = ("SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2")

sys.path.insert(0, str(ROOT))


def take_away():
    for name in MODULES:
        sys.modules[name] = None  # so that importing it fails
    for name in FUNCTIONS:
        delattr(os, name)
    for name in SIGNALS:
        delattr(signal, name)
    opened = pathlib.Path.open

    def open_elsewhere(self, *args, **options):
        if self.is_relative_to("/proc") or self.is_relative_to("/sys"):
            raise FileNotFoundError(self)
        return opened(self, *args, **options)

    pathlib.Path.open = open_elsewhere


importlib.import_module("train_flow")  # with its libraries, which look at `sys.platform`
take_away()
if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    script = ROOT / sys.argv[1]
    sys.argv = sys.argv[1:]
    runpy.run_path(str(script), run_name="__main__")
