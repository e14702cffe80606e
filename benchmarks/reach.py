"""How much code does a reader of the simplest runs meet? Counts the lines that the demos run.

    python benchmarks/reach.py      # four steps of each demo; some minutes on 2 cores

Lines inside functions count, of the script and of the package, in all threads of the main process;
what only defines something does not. Each demo runs in a process of its own, without a tracker and
without processes that load data. The numbers depend a little on the version of Python.
"""

import collections
import importlib
import inspect
import json
import os
import platform
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
STEPS = ["--max_train_steps=4", "--report_to=none"]
UNCONDITIONAL = ["train_unconditional", *STEPS, "--dataloader_num_workers=0"]
# in an order in which each finds the cache that it reads
DEMOS = [
    UNCONDITIONAL,
    ["precompute_latents"],
    ["train_text_to_image", *STEPS],
    ["precompute_latents", "--model_family=prx"],
    ["train_flow", *STEPS],
]


def count_lines(run: Callable[[], object], root: Path = ROOT) -> dict[str, int]:
    """Run a function. Returns {file of a script or of the package: how many of its lines ran}."""
    scripts = (str(root / f"{name}.py") for name, *_ in DEMOS)
    places = (f"{root / 'diffusion_training'}{os.sep}", *scripts)
    lines = collections.defaultdict(set)

    def trace(frame, event, argument):
        code = frame.f_code
        # a body of a module or class is no function
        if not code.co_filename.startswith(places) or not code.co_flags & inspect.CO_OPTIMIZED:
            return None
        if event == "line":  # not the `def` itself
            lines[code.co_filename].add(frame.f_lineno)
        return trace

    before = sys.gettrace()
    threading.settrace(trace)
    sys.settrace(trace)
    try:
        run()
    finally:
        sys.settrace(before)
        threading.settrace(before)
    return {str(Path(name).relative_to(root)): len(each) for name, each in sorted(lines.items())}


def run_demo(name: str, *flags: str) -> dict[str, int]:
    sys.path.insert(0, str(ROOT))
    script = importlib.import_module(name)
    return count_lines(lambda: script.main(script.parse_args([*flags])))


def main() -> None:
    print(f"Python {platform.python_version()}")
    with tempfile.TemporaryDirectory() as folder:
        env = os.environ | {"HF_DATASETS_CACHE": f"{folder}/datasets", "HF_HUB_OFFLINE": "1"}
        for demo in DEMOS:
            command = [sys.executable, __file__, *demo]
            done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True)
            if done.returncode:
                sys.exit(f"{' '.join(demo)}\n{done.stdout}{done.stderr}")
            counts = json.loads(done.stdout.splitlines()[-1])
            own = counts.pop(f"{demo[0]}.py")
            total = sum(counts.values())
            print(
                f"{' '.join(demo)}: {own:,} lines of the script, {total:,} of the package in "
                f"{len(counts)} files"
            )
            for file, count in sorted(counts.items(), key=lambda pair: -pair[1]):
                print(f"{count:7,} {file}")


if __name__ == "__main__":
    if sys.argv[1:]:  # in the process of one demo
        print("\n" + json.dumps(run_demo(*sys.argv[1:])))
    else:
        main()
