"""How much time does --follow save? A trainer beside the script that makes its cache, or after it.

    python benchmarks/follow.py                                   # some ten minutes
    python benchmarks/follow.py --encode_wait 0 --step_wait 0     # both compute on the same cores

precompute_latents.py and train_text_to_image.py, with the demo's digits and models. Each batch that
is encoded and each step also waits, as a CPU does for a GPU: by default as long in each script, so
that the two could overlap well if each had a GPU of its own. Without these waits they share the
cores of one machine. Prints the seconds of one after the other and of both together, and the share
of the trainer's time that it waited for data. Ends with an error if the weights differ.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import bench

# Runs a script in which each call of a function waits for some seconds before it begins
WAITING = """
import importlib, sys, time

name, function, seconds = sys.argv[1:4]
script = importlib.import_module(name)
call = getattr(script, function)

def wait_and_call(*args, **options):
    time.sleep(float(seconds))
    return call(*args, **options)

setattr(script, function, wait_and_call)
script.main(script.parse_args(sys.argv[4:]))
"""


def start(script, function, seconds, flags, log):
    """Start a script of which a function waits. Returns the process."""
    command = [sys.executable, "-c", WAITING, script, function, str(seconds), *map(str, flags)]
    environment = {"HF_HUB_OFFLINE": "1", "ACCELERATE_USE_CPU": "true", **os.environ}
    environment["PYTHONPATH"] = str(bench.ROOT)
    with open(log, "w") as file:
        return subprocess.Popen(command, stdout=file, stderr=file, env=environment)


def finish(process, log):
    if process.wait():
        sys.exit(Path(log).read_text()[-3000:])


def run(folder, cli, together):
    """Encode and train. Returns (seconds, share of the steps' time that waited, weights)."""
    cache, out = folder / "cache", folder / "out"
    models = f"--pretrained_model_name_or_path={bench.ROOT}/demo/models"
    encode = [models, f"--train_data_dir={bench.ROOT}/demo/digits", f"--output_dir={cache}"]
    encode += ["--resolution=8", f"--batch_size={cli.batch_size}", "--dataloader_num_workers=0"]
    encode += [f"--rows_per_shard={4 * cli.batch_size}"]
    encode += [f"--max_train_samples={cli.steps * cli.batch_size}"]
    train = [models, f"--latents_dir={cache}", f"--output_dir={out}", "--follow", "--use_ema"]
    train += [f"--unet_config_name_or_path={bench.ROOT}/demo/digits_text_to_image_unet.json"]
    train += [f"--train_batch_size={cli.batch_size}", f"--num_train_epochs={cli.epochs}"]
    train += ["--report_to=none", "--logging_steps=1", "--num_inference_steps=2"]
    logs = folder / "encode.log", folder / "train.log"
    begin = time.perf_counter()
    encoder = start("precompute_latents", "encode", cli.encode_wait, encode, logs[0])
    if not together:
        finish(encoder, logs[0])
    trainer = start("train_text_to_image", "train_step", cli.step_wait, train, logs[1])
    finish(trainer, logs[1])
    seconds = time.perf_counter() - begin
    finish(encoder, logs[0])
    records = map(json.loads, (out / "metrics.jsonl").read_text().splitlines())
    steps = [
        (record["data_wait"], 1 / record["images_per_second"])
        for record in records
        if "loss" in record
    ]
    waited = sum(share * time for share, time in steps) / sum(time for _, time in steps)
    return seconds, waited, (out / "unet/diffusion_pytorch_model.safetensors").read_bytes()


def measure(cli):
    """Yield a row of the table for each round."""
    for number in range(cli.rounds):
        found = []
        for together in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                found.append(run(Path(folder), cli, together))
        (later, wait_later, weights), (beside, wait_beside, other) = found
        if weights != other:
            sys.exit("the weights differ")
        yield [
            number + 1,
            f"{later:.0f}",
            f"{beside:.0f}",
            f"{beside / later:.2f}",
            f"{wait_later:.0%}",
            f"{wait_beside:.0%}",
        ]


def main(argv=None):
    parser = bench.make_parser(
        __doc__, size=None, mixed_precision=None, batch_size=16, steps=60, rounds=2
    )
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--encode_wait", type=float, default=0.5, help="seconds for each batch")
    parser.add_argument("--step_wait", type=float, default=0.5, help="seconds for each step")
    cli = parser.parse_args(argv)
    title = f"{bench.machine()}; {cli.steps} steps an epoch, {cli.epochs} epochs; waits of "
    title += f"{cli.encode_wait:g} s for a batch, {cli.step_wait:g} s for a step"
    header = ["round", "one after the other, s", "together, s", "ratio"]
    header += ["waited for data, later", "together"]
    bench.show(title, header, measure(cli))


if __name__ == "__main__":
    main()
