"""The cost of a large download and a large cache: bytes, shards, cores, GPUs, hours and dollars.

    python benchmarks/data_plan.py
    python benchmarks/data_plan.py --rows 2e9 --gpus 256 --peak_tflops 312 --gpu_price 2

For download_images.py and precompute_latents_ray.py with the VAE and the text encoder of Stable
Diffusion 2. Flags set prices, machines and the speed of the web. The speed of the scripts was
measured: `MEASURED` names the benchmark of each figure. Operations are counted, as in plan.py. The
used share of a GPU's peak is an assumption.

Prints the plan of each number of rows with its bottleneck, then the images per second at which each
part is saturated, then the plan and the guide that the scripts follow ("Processing 2 Billion
Images for Stable Diffusion Model Training").
"""

import argparse
import functools
from collections.abc import Callable
from typing import NamedTuple

import bench
import plan
import torch
from diffusers import AutoencoderKL
from transformers import CLIPTextConfig, CLIPTextModel

from diffusion_training.latents.cache_size import count_bytes


class Measured(NamedTuple):
    """A figure, and the table in docs/ that holds it."""

    value: float
    benchmark: str
    row: str  # beginning of its row in the table
    column: int


MEASURED = {
    "images decoded by a core, 640 px": Measured(
        269, "precompute_speed.py transform", "| `transform_row` (torchcodec) |", 1
    ),
    "CPU seconds of 8,000 downloads": Measured(159, "downloads.py", "| `--resize_to 512` |", 1),
    "driver's CPU, ms a shard, downloads": Measured(
        1.59, "driver.py", "| downloads | 100,000 |", 3
    ),
    "driver's CPU, ms a shard, cache": Measured(0.66, "driver.py", "| cache | 100,000 |", 3),
    "MiB of the driver, downloads": Measured(555, "driver.py", "| downloads | 100,000 |", 6),
    "MiB of the driver, cache": Measured(1321, "driver.py", "| cache | 100,000 |", 6),
    "images/s of a training step, H200, 512 px": Measured(
        101.9, "gpu.py", "| `train_text_to_image.py`, from a cache, with EMA |", 1
    ),
    "MiB at 3,000 shards, downloads": Measured(554, "driver.py", "| downloads | 3,000 |", 6),
    "MiB at 3,000 shards, cache": Measured(1023, "driver.py", "| cache | 3,000 |", 6),
}
# The guide: 120 million images in 10 hours on 10 machines of 32 cores, m5.8xlarge.
GUIDE_ROWS, GUIDE_HOURS, GUIDE_CORES = 120e6, 10, 320
# Its series: Stable Diffusion 2 pre-trained on 2e9 images, in GPU hours of an A100.
GUIDE_TRAINED, GUIDE_DOLLARS, GUIDE_GPU_HOURS = 2e9, 39.5e3, 13165


def parse_args(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    add = functools.partial(parser.add_argument, type=float)
    add("--rows", nargs="+", default=[1e6, 120e6, 2e9], help="numbers of images")
    add(
        "--resolution", type=int, default=256, help="side of the square images of the cache, pixels"
    )
    add("--text_cache", type=str, choices=["embeddings", "ids"], default="embeddings")
    add("--rows_per_shard", type=int, default=10_000, help="of the download; a cache has 2,048")
    add("--web_bytes", default=200e3, help="bytes of an image on the web")
    add("--stored_bytes", default=60e3, help="bytes of an image after --resize_to 512")
    web_speed = GUIDE_ROWS / GUIDE_HOURS / 3600 / GUIDE_CORES
    add("--web_speed", default=web_speed, help="images/s from the web per core (the guide's)")
    add("--cores", type=int, default=GUIDE_CORES, help="cores that download")
    add("--gpus", type=int, default=64, help="GPUs that encode, with the cores that they need")
    add("--peak_tflops", default=989, help="peak of a GPU (989: H100, dense bf16)")
    add("--mfu", default=0.4, help="used share of the peak (an assumption)")
    add("--cores_per_machine", type=int, default=32, help="cores per machine and network interface")
    add("--gpus_per_machine", type=int, default=8, help="GPUs per machine with GPUs")
    add("--machine_gbps", default=10, help="network of a machine, Gbit/s")
    add("--store_gbps", default=400, help="reads and writes of the object storage, Gbit/s")
    add("--store_requests", default=3500, help="objects per second that the storage accepts")
    add("--core_price", default=0.048, help="dollars per hour of a core")
    add("--gpu_price", default=3.0, help="dollars per hour of a GPU")
    add("--tb_price", default=23.0, help="dollars per month of a terabyte in the storage")
    return parser.parse_args(argv)


def count_encoding(resolution, text_cache):
    """Count the operations, in 1e12, of Stable Diffusion 2 to encode an image and its caption."""
    with torch.device("meta"):
        vae = AutoencoderKL(**{**plan.KL, "latent_channels": 4})
        text = CLIPTextModel(
            CLIPTextConfig(
                hidden_size=1024,
                intermediate_size=4096,
                num_attention_heads=16,
                num_hidden_layers=23,
            )
        )
    tflop = plan.count(lambda: vae.encode(torch.zeros(1, 3, resolution, resolution)))
    if text_cache == "embeddings":
        tflop += plan.count(lambda: text(torch.ones(1, 77, dtype=torch.long)))
    return tflop


class Stage(NamedTuple):
    """A download or a cache, for any number of rows."""

    row_bytes: float
    rows_per_shard: int
    cores: float
    gpus: int
    price: float  # dollars an hour
    limits: dict[str, float]  # {part: images per second at which it is saturated}
    reads: float  # bytes per second that all machines read
    count_mib: Callable[[float], float]  # number of shards -> memory of the driver

    @property
    def bottleneck(self):
        return min(self.limits, key=self.limits.get)

    @property
    def speed(self):
        return self.limits[self.bottleneck]


def plan_stages(args):
    """Plan both stages: {"download": Stage, "cache": Stage}."""
    measured = {name: figure.value for name, figure in MEASURED.items()}
    side = args.resolution // 8
    row_bytes, _ = count_bytes(
        {
            "text_cache": args.text_cache,
            "features": [],
            "prompt_embeds_shape": [77, 1024],
            "tokenizer": {"model_max_length": 77},
            "latents_shape": [8, side, side],
            "transform": {"random_flip": False},
        }
    )
    encoder = args.peak_tflops * args.mfu / count_encoding(args.resolution, args.text_cache)
    decode = measured["images decoded by a core, 640 px"]
    cores = args.gpus * encoder / decode

    store = args.store_gbps * 1e9 / 8

    def plan_stage(kind, row_bytes, rows_per_shard, cores, gpus, read, moved, limits):
        """read: bytes read per image. moved: bytes per image that the storage reads or writes."""
        machines = max(1, cores / args.cores_per_machine + gpus / args.gpus_per_machine)
        network = machines * args.machine_gbps * 1e9 / 8
        driver = 1000 / measured[f"driver's CPU, ms a shard, {kind}"]
        few, many = measured[f"MiB at 3,000 shards, {kind}"], measured[f"MiB of the driver, {kind}"]
        return Stage(
            row_bytes,
            rows_per_shard,
            cores,
            gpus,
            cores * args.core_price + gpus * args.gpu_price,
            {
                **limits,
                "network of the machines": network / (read + row_bytes),
                "bytes of the storage": store / moved,
                "requests of the storage": args.store_requests * rows_per_shard / 2,  # and a record
                "driver": driver * rows_per_shard,
            },
            min(network, store),
            lambda shards: few + (many - few) * max(0, shards - 3000) / 97_000,
        )

    per_core = 8000 / measured["CPU seconds of 8,000 downloads"]
    return {
        "download": plan_stage(
            "downloads",
            args.stored_bytes,
            args.rows_per_shard,
            args.cores,
            gpus=0,
            read=args.web_bytes,
            moved=args.stored_bytes,
            limits={"web": args.cores * args.web_speed, "cores": args.cores * per_core},
        ),
        "cache": plan_stage(
            "cache",
            row_bytes,
            2048,
            cores,
            args.gpus,
            read=args.stored_bytes,
            moved=args.stored_bytes + row_bytes,
            limits={"GPUs": args.gpus * encoder, "cores": cores * decode},
        ),
    }


def show_number(number):
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def describe(name, stage, rows, args):
    """Return the figures of a stage for a number of rows, in the order of the table."""
    terabytes, hours = rows * stage.row_bytes / 1e12, rows / stage.speed / 3600
    shards = -(-rows // stage.rows_per_shard)
    figures = {"TB": terabytes, "dollars a month to keep it": terabytes * args.tb_price}
    figures |= {"shards": shards, "GiB of the driver": stage.count_mib(shards) / 1024}
    figures |= {"cores": stage.cores} | ({"GPUs": stage.gpus} if stage.gpus else {})
    figures |= {"hours": hours, "dollars": hours * stage.price}
    if name == "cache":
        figures["hours of a restart, which reads all shards"] = (
            rows * stage.row_bytes / stage.reads / 3600
        )
    texts = {key: show_number(number) for key, number in figures.items()}
    return texts | {"bottleneck": stage.bottleneck}


def main(argv=None):
    args = parse_args(argv)
    stages = plan_stages(args)
    rows = []
    for name, stage in stages.items():
        columns = [describe(name, stage, count, args) for count in args.rows]
        rows += [[f"{name}: {key}", *(each[key] for each in columns)] for key in columns[0]]
    bench.show("The plan", ["images", *(f"{count:,.0f}" for count in args.rows)], rows)

    parts = dict.fromkeys(part for stage in stages.values() for part in stage.limits)
    rows = [
        [part, *(f"{s.limits[part]:,.0f}" if part in s.limits else "" for s in stages.values())]
        for part in parts
    ]
    bench.show("Images/s at which each part is saturated", ["part", *stages], rows)

    download, cache = stages.values()
    guide = f"{GUIDE_ROWS / 1e6:g} million images on {GUIDE_CORES} cores"
    by_cores = GUIDE_ROWS / (download.limits["cores"] / args.cores * GUIDE_CORES) / 3600
    rows = [[f"download of {guide}, hours", GUIDE_HOURS, f"{by_cores:.1f} if the web is no limit"]]
    hours = GUIDE_TRAINED / cache.speed / 3600
    rows.append(
        [
            f"{GUIDE_TRAINED:.0e} images, dollars",
            f"{GUIDE_DOLLARS:,.0f}: pre-training, {GUIDE_GPU_HOURS:,} hours of an A100",
            f"{hours * cache.price:,.0f}: the cache, {hours * cache.gpus:,.0f} hours of a GPU",
        ]
    )
    speed = MEASURED["images/s of a training step, H200, 512 px"].value
    rows.append(
        [
            f"{GUIDE_TRAINED:.0e} images, once, hours",
            f"{GUIDE_GPU_HOURS:,} of an A100, with all phases",
            f"{GUIDE_TRAINED / speed / 3600:,.0f} of an H200 at 512 px, at {speed} images/s",
        ]
    )
    bench.show("Beside the guide", ["", "the guide", "this plan"], rows)


if __name__ == "__main__":
    main()
