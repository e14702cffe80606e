"""How near does precompute_latents.py come to the speed of its encoder alone, and how many cores does that take?

    python benchmarks/precompute_speed.py                                   # 2 cores: one decodes, one encodes
    python benchmarks/precompute_speed.py --vae 128 256 512 512 --text 1024 23 --tokens 77 --mixed_precision bf16 \\
        --rows 8192 --batch_size 64 --resolutions 512 --threads 16          # on a GPU: shapes of Stable Diffusion 2

Makes photographs (pip install scikit-learn), captions, and models with random weights. Then, in turns: `encode` over
batches that lie in memory, and the whole script from `main(parse_args(...))` to the end, with models and data to load,
images to decode in --dataloader_num_workers processes, rows to check and shards to write. "Running" leaves out what
comes before the first batch is encoded. Images that one core decodes to batches in a second say how many cores an
encoder needs. Prints medians, least and most. By default the models are small, but a caption's embedding has the bytes
of Stable Diffusion 2's.
"""

import argparse
import contextlib
import io
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
import transformers
from bench import machine, spread  # before the scripts, which it finds
from diffusers import AutoencoderKL
from transform_speed import make_photos
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

import precompute_latents as script

MODELS = Path(__file__).parent.parent / "demo/models"


def make_models(folder, vae, text, tokens):
    """VAE and text encoder with random weights, and the demo's tokenizer with room for so many tokens."""
    count, groups = len(vae), min(32, *vae)
    kinds = {"down_block_types": ("DownEncoderBlock2D",) * count, "up_block_types": ("UpDecoderBlock2D",) * count}
    model = AutoencoderKL(
        block_out_channels=vae, norm_num_groups=groups, layers_per_block=2, latent_channels=4, **kinds
    )
    model.save_pretrained(folder / "vae")
    tokenizer = CLIPTokenizer.from_pretrained(MODELS / "tokenizer", model_max_length=tokens)
    tokenizer.save_pretrained(folder / "tokenizer")
    config = CLIPTextConfig(
        vocab_size=len(tokenizer), hidden_size=text[0], intermediate_size=4 * text[0], num_hidden_layers=text[1],
        num_attention_heads=max(1, text[0] // 64), max_position_embeddings=tokens, pad_token_id=tokenizer.pad_token_id,
        bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id,
    )  # fmt: skip
    CLIPTextModel(config).save_pretrained(folder / "text_encoder")


def make_images(folder, rows, width):
    folder.mkdir()
    photos = make_photos(width)
    for row in range(rows):
        (folder / f"{row:06d}.jpg").write_bytes(photos[row % len(photos)])
    lines = [json.dumps({"file_name": f"{row:06d}.jpg", "text": f"digit {row}"}) for row in range(rows)]
    (folder / "metadata.jsonl").write_text("\n".join(lines))


def run(flags, output_dir):
    """The script, from its flags to the end. Returns (seconds, seconds from the first batch that is encoded)."""
    begun, encode = [], script.encode

    def watched(*args):
        begun.append(time.perf_counter())
        return encode(*args)

    script.encode, start = watched, time.perf_counter()
    try:
        script.main(script.parse_args([*flags, f"--output_dir={output_dir}"]))
    finally:
        script.encode = encode
    end = time.perf_counter()
    return end - start, end - begun[0]


def measure(folder, rows, rounds, flags):
    """Images per second as {"decode": one core's, "encode": , "whole": , "running": }, each a list over the turns."""
    args = script.parse_args(flags)
    accelerator, _ = script.make_accelerator(args)
    *exact_models, tokenizer = script.load_models(args, torch.float32)
    script.describe_encoders(*exact_models, tokenizer, args)
    models = script.place_encoders(exact_models, accelerator.device, args)
    images, column = script.load_rows(args, others=[args.caption_column])
    dataset = script.TransformedRows(images, tokenizer, column, 3, args)
    keys = [[(0, row) for row in range(i, min(rows, i + args.batch_size))] for i in range(0, rows, args.batch_size)]
    speeds = {name: [] for name in ("decode", "encode", "whole", "running")}
    few = keys[: max(1, len(keys) // 4)]
    batches = list(script.load_batches(dataset, keys, 0, accelerator.device))
    for turn in range(rounds):
        start = time.perf_counter()
        for key in few:
            dataset[key]
        speeds["decode"].append(sum(map(len, few)) / (time.perf_counter() - start))
        start = time.perf_counter()
        for batch in batches:
            _, event = script.encode(batch, *models, args)
        if event is not None:
            event.synchronize()
        speeds["encode"].append(rows / (time.perf_counter() - start))
        for name, seconds in zip(("whole", "running"), run(flags, folder / f"cache-{turn}"), strict=True):
            speeds[name].append(rows / seconds)
    return speeds


def main(argv=None):
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = parser.add_argument
    add("--rows", type=int, default=256)
    add("--width", type=int, default=640, help="of the photographs, pixels")
    add("--resolutions", type=int, nargs="+", default=[64, 128])
    add("--vae", type=int, nargs="+", default=[8, 16, 16, 16], help="channels of its blocks")
    add("--text", type=int, nargs=2, default=[1024, 0], help="text encoder: hidden size and layers")
    add("--tokens", type=int, default=77, help="of a caption")
    add("--batch_size", type=int, default=16)
    add("--mixed_precision", default="no", choices=["no", "fp16", "bf16"])
    add("--dataloader_num_workers", type=int, help="(None: as the script chooses)")
    add("--threads", type=int, default=1, help="of the encoder on a CPU")
    add("--rounds", type=int, default=3)
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    print(f"{machine()}; {args.rows} photographs of {args.width} px, threads of the encoder: {args.threads}\n")
    print(
        "| to px | decoded by a core | encoder alone | whole script | running | share of the encoder | cores needed |"
    )
    print("|---|---|---|---|---|---|---|")
    for resolution in args.resolutions:
        with tempfile.TemporaryDirectory() as folder:
            folder = Path(folder)
            make_models(folder / "models", args.vae, args.text, args.tokens)
            make_images(folder / "images", args.rows, args.width)
            flags = [f"--{name}={getattr(args, name)}" for name in ("batch_size", "mixed_precision")]
            flags += [f"--train_data_dir={folder / 'images'}", f"--pretrained_model_name_or_path={folder / 'models'}"]
            flags += [f"--resolution={resolution}", "--center_crop", f"--cache_dir={folder / 'datasets'}"]
            if args.dataloader_num_workers is not None:
                flags += [f"--dataloader_num_workers={args.dataloader_num_workers}"]
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                speeds = measure(folder, args.rows, args.rounds, flags)
        share = np.divide(speeds["running"], speeds["encode"])
        cells = [spread(found, "{:.0f}") for found in speeds.values()]
        cells += [spread(share)]
        cells += [f"{np.median(np.divide(speeds['encode'], speeds['decode'])):.1f}"]
        print(f"| {resolution} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
