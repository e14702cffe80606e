"""Do two promises hold on this GPU: no step waits for it, and a resumed run has the same bits?

    python benchmarks/gpu_promises.py     # some minutes; needs requirements-dev.txt

Waits: the tiny runs of tests/scripts/test_waits.py, in which CI counts waits on an imitated GPU.
Here torch itself reports those of one steady step (torch.cuda.set_sync_debug_mode), with its lines.

Resume: short runs of tiny models, each twice whole and once ended after half its steps and resumed,
with and without --deterministic. Prints the largest difference of any weight in the last
checkpoint. The status is 1 if a step waits for something unknown, or if a run with --deterministic
differs.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from pathlib import Path

import bench

for folder in ("tests", "tests/scripts"):
    sys.path.insert(0, str(bench.ROOT / folder))

FLAGS = ["--mixed_precision=bf16", "--train_batch_size=4", "--checkpointing_steps=4"]
FLAGS += ["--report_to=none", "--dataloader_num_workers=0"]
TEXT = ["train_text_to_image.py", "--use_ema"]
RESUMED = {  # {what: (script, flags)}
    "unconditional": ["train_unconditional.py"],
    "text to image": TEXT,
    "8-bit AdamW": [*TEXT, "--optimizer=adamw8bit"],
    "fp16": [*TEXT, "--mixed_precision=fp16", "--rank=4"],
    "compiled": [*TEXT, "--compile"],
    "batch size auto": [*TEXT, "--train_batch_size=auto"],
    "LoRA of Z-Image": ["train_flow.py", "--rank=4"],
}


def count_waits(name):
    """Make the runs of a list of test_waits.py. Returns rows: run, waits found, waits known."""
    import test_waits
    import torch
    from torch.optim.optimizer import register_optimizer_step_post_hook

    lists = {name: getattr(test_waits, f"list_{name}", None)}
    lists |= {
        "z-image": test_waits.SLOWER["z-image"],
        "klein": test_waits.SLOWER["flux2-klein"],
        "qwen": test_waits.SLOWER["qwen-image"],
    }
    steps, found, rows = 0, Counter(), []

    def note(message, *where, **options):
        if "called a synchronizing CUDA operation" in str(message):
            lines = [frame for frame in traceback.extract_stack() if str(bench.ROOT) in frame[0]]
            found[f"{os.path.relpath(lines[-2].filename, bench.ROOT)}:{lines[-2].lineno}"] += 1

    def watch(*given):  # the third step
        nonlocal steps
        steps += 1
        torch.cuda.set_sync_debug_mode("warn" if steps == 2 else "default")

    warnings.showwarning = note
    register_optimizer_step_post_hook(watch)
    with tempfile.TemporaryDirectory() as folder:
        for what, run in lists[name](Path(folder)).items():
            steps = 0
            found.clear()
            warnings.simplefilter("always")
            if run.script in test_waits.SCRIPTS:
                script = test_waits.SCRIPTS[run.script]
                script(*script.flags(Path(folder) / what, *run.flags))
            else:
                test_waits.run_twin(run.script, *run.flags, f"--output_dir={folder}/{what}")
            if run.known is not None and run.script != test_waits.PRECOMPUTE:
                known = sum(wait.count for wait in run.known)
                rows.append([f"{name}, {what}", sum(found.values()), known, ", ".join(found)])
    return rows


def launch(folder, script, *flags):
    command = [sys.executable, "-m", "accelerate.commands.launch", "--quiet", script, *flags]
    done = subprocess.run(
        [*command, f"--output_dir={folder}"], cwd=bench.ROOT, capture_output=True, text=True
    )
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")


def compare(one, other):
    """The largest difference of a weight between two checkpoints."""
    from safetensors.torch import load_file

    differences = [0.0]
    for path in (one / "checkpoint-8").rglob("*.safetensors"):
        weights = load_file(path)
        others = load_file(other / "checkpoint-8" / path.relative_to(one / "checkpoint-8"))
        differences += [float((weights[name] - others[name]).abs().max()) for name in weights]
    return max(differences)


def resume(what, flags, folder):
    """Returns a row: the run, its difference when repeated, and when resumed."""
    from conftest import make_captioned, make_models, make_z_image

    script, *more = RESUMED[what]
    flags = [*FLAGS, *more, *flags]
    if script != "train_unconditional.py":  # which trains on the demo's digits
        make_captioned(folder / "data", 12)
        make = make_z_image if script == "train_flow.py" else make_models
        flags += [f"--pretrained_model_name_or_path={make(folder)}", "--resolution=16"]
        flags.append(f"--train_data_dir={folder / 'data'}")
    for name in ("whole", "again"):
        launch(folder / name, script, *flags, "--max_train_steps=8")
    launch(folder / "half", script, *flags, "--max_train_steps=4")
    resumed = [*flags, "--max_train_steps=8", "--resume_from_checkpoint=latest"]
    launch(folder / "half", script, *resumed)
    return [compare(folder / "whole", folder / name) for name in ("again", "half")]


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = ("unconditional", "stable_diffusion", "sdxl", "prx", "recorded", "twins")
    names += ("z-image", "klein", "qwen")
    parser.add_argument("--waits", nargs="*", choices=names, default=names)
    parser.add_argument("--resume", nargs="*", choices=RESUMED, default=[*RESUMED])
    parser.add_argument("--in_this_process", action="store_true", help=argparse.SUPPRESS)
    cli = parser.parse_args(argv)
    if cli.in_this_process:  # the runs of a list change the process
        for row in count_waits(*cli.waits):
            print(f"wait | {' | '.join(map(str, row))}", flush=True)
        return
    print(bench.machine(), flush=True)
    os.environ |= {"HF_HUB_OFFLINE": "1"}
    rows, wrong = [], []
    for name in cli.waits:
        command = [sys.executable, __file__, "--in_this_process", "--waits", name]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stderr[-3000:]}")
        for line in done.stdout.splitlines():
            if line.startswith("wait | "):
                rows.append(line.split(" | ")[1:])
                wrong += [rows[-1]] if rows[-1][1] != rows[-1][2] else []
    bench.show("Waits in a steady step", ["run", "found", "known", "lines"], rows)
    rows = []
    for what in cli.resume:
        for flags in ([], ["--deterministic"]):
            with tempfile.TemporaryDirectory() as folder:
                again, resumed = resume(what, flags, Path(folder))
            rows.append([what, " ".join(flags), f"{again:.2g}", f"{resumed:.2g}"])
            wrong += [rows[-1]] if flags and again + resumed else []
    columns = ["run", "", "repeated", "resumed"]
    bench.show("Largest difference of a weight", columns, rows)
    if wrong:
        sys.exit(f"Not as promised: {wrong}")


if __name__ == "__main__":
    main()
