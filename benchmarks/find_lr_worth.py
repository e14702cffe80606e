"""What is --find_lr worth? Trains a demo at the rate that it suggests, a third, 3 and 10 times it. A Markdown table.

    python benchmarks/find_lr_worth.py train_unconditional.py
    accelerate launch precompute_latents.py && python benchmarks/find_lr_worth.py train_text_to_image.py

The demo's own rate comes with them. All runs have the same seed, steps and held-out digits, so that their held-out
losses can be compared. Flags that follow a `--` go to all of them: `-- --train_data_dir photos ...` for your own data.
What a run leaves stays in --output_dir, and is not trained again.
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path

import torch

ROOT = Path(__file__).parent.parent


def run(script, folder, flags):
    """Run a trainer in `folder`; returns its last held-out record, None if it ended without one."""
    quiet = ["--report_to=none", "--resume_from_checkpoint=latest", f"--output_dir={folder}"]
    never = {
        "train_unconditional.py": "--save_images_epochs=1000000",
        "train_text_to_image.py": "--validation_epochs=1000000",
    }
    command = [sys.executable, str(ROOT / script), *flags, *quiet, never[script]]
    said = subprocess.run(command, capture_output=True, text=True)
    if said.returncode:
        print((said.stderr.strip().splitlines() or ["?"])[-1], file=sys.stderr)
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []
    return next((record for record in reversed(records) if "held_out_loss" in record), None)


def name_processor():
    """The processor and how many of its cores are used."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if os.path.exists("/proc/cpuinfo") else []
    names = [line.split(":")[1].strip() for line in lines if line.startswith("model name")]
    return f"{(names or ['unknown processor'])[0]}, {torch.get_num_threads()} threads"


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("script", choices=["train_unconditional.py", "train_text_to_image.py"])
    parser.add_argument("--steps", type=int, default=600, help="optimizer steps of each training")
    parser.add_argument("--factors", type=float, nargs="+", default=[1 / 3, 1, 3, 10], help="times the suggestion")
    parser.add_argument("--holdout", default="0.1", help="share or number of images for the held-out loss")
    parser.add_argument("--output_dir", type=Path, default=Path("find-lr-worth"))
    argv = sys.argv[1:] if argv is None else argv
    own, more = (argv[: argv.index("--")], argv[argv.index("--") + 1 :]) if "--" in argv else (argv, [])
    args = parser.parse_args(own)
    folder = args.output_dir / Path(args.script).stem
    flags = [*more, f"--holdout={args.holdout}", "--seed=0"]

    found = folder / "find-lr/find_lr.json"
    if not found.is_file():
        run(args.script, found.parent, [*flags, "--find_lr"])
    suggestion = json.loads(found.read_text())["suggestion"]
    rates = {f"{factor:.2g} x the suggestion": factor * suggestion for factor in args.factors}
    print(f"{args.script}, {args.steps} steps; --find_lr suggests {suggestion:.2g}; {name_processor()}\n")
    print("| learning rate | | held_out_loss_ema | held_out_loss |\n|---|---|---|---|", flush=True)
    for name, rate in [*rates.items(), ("without --learning_rate", None)]:
        out = folder / (f"lr-{rate:.3g}" if rate else "own")
        chosen = [f"--learning_rate={rate}"] if rate else []
        losses = run(args.script, out, [*flags, *chosen, f"--max_train_steps={args.steps}"]) or {}
        if not rate:
            rate = float((out / "run.args").read_text().split("--learning_rate=")[1].split()[0])
        ema, plain = (losses.get(key, float("nan")) for key in ("held_out_loss_ema", "held_out_loss"))
        print(f"| {rate:.2g} | {name} | {ema:.4f} | {plain:.4f} |", flush=True)


if __name__ == "__main__":
    main()
