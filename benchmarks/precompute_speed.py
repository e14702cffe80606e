"""How fast is image decoding, and how close is precompute_latents.py to its encoder's speed?

    python benchmarks/precompute_speed.py transform     # needs scikit-learn
    python benchmarks/precompute_speed.py script        # 2 cores: one decodes, one encodes
    python benchmarks/precompute_speed.py script --size sd2 --mixed_precision bf16 --rows 8192 \\
        --batch_size 64 --resolutions 512 --threads 16  # on a GPU
    python benchmarks/precompute_speed.py passes        # --resolutions 256 512: one pass or two

transform: crop the centre square of two photographs and resize it to --resolutions pixels, on one
core. In turns: ours, diffusers' transform, Pillow, OpenCV as img2dataset calls it (if
opencv-python-headless is installed), and torchcodec with torchvision. Prints images per second, and
the speed relative to diffusers' transform in the same turn (median, least and most). The speed of
our decoder alone is the limit for all code that decodes every pixel with libjpeg.

script: encode photographs and captions with models of random weights. In turns: `encode` over
batches in memory, and the whole script from `main(parse_args(...))` to the end. The script also
loads models and data, decodes images in --dataloader_num_workers processes, checks rows and writes
shards. "Running" leaves out everything before the first batch is encoded. The images per second
that one core decodes to batches show how many cores an encoder needs. By default the models are
small, but a caption's embedding has as many bytes as with Stable Diffusion 2.

passes: do several resolutions in one pass save time? Prints the CPU seconds of all processes for
all images, of stage 1 (decoding, cropping, resizing, tokens) and of the whole script, in turns for
each of --resolutions and for all in one pass.
"""

import contextlib
import functools
import io
import itertools
import resource
import tempfile
import time
from pathlib import Path

import bench  # first: it puts the package on sys.path
import numpy as np
import torch
import torchvision.transforms.v2 as v2
import transformers
from PIL import Image
from torchvision import transforms

try:
    import cv2
except ImportError:
    cv2 = None

from accelerate import Accelerator

import precompute_latents
from diffusion_training.data.encoders import load_encoders, place_encoders
from diffusion_training.data.images import decode_image, decode_jpeg
from diffusion_training.data.rows import load_rows
from diffusion_training.data.transform_settings import make_transform
from diffusion_training.data.transforms import transform_row
from diffusion_training.families.opening import open_base
from diffusion_training.families.recording import record_family
from diffusion_training.latents.plan import plan_caches
from diffusion_training.launch import accelerator_options, make_launch
from diffusion_training.loading import load_batches


def make_photos(width):
    """Yield the photographs of scikit-learn (640 x 427) as JPEG files `width` pixels wide."""
    from sklearn.datasets import load_sample_images

    for pixels in load_sample_images().images:
        buffer = io.BytesIO()
        Image.fromarray(pixels).resize((width, width * 427 // 640), Image.LANCZOS).save(
            buffer, "JPEG", quality=90
        )
        yield buffer.getvalue()


# ------------------------------------------------------------------- transform


def use_diffusers(resolution):
    steps = [transforms.Resize(resolution, interpolation=transforms.InterpolationMode.LANCZOS)]
    steps += [
        transforms.CenterCrop(resolution),
        transforms.ToTensor(),
        transforms.Normalize([0.5], [0.5]),
    ]
    whole = transforms.Compose(steps)
    return lambda photo: whole(Image.open(io.BytesIO(photo)).convert("RGB")) * 127.5 + 127.5


def use_pillow(resolution, draft=False):
    def make(photo):
        image = Image.open(io.BytesIO(photo))
        if draft:
            image.draft("RGB", (resolution, resolution))
        side, (width, height) = min(image.size), image.size
        left, top = (width - side) // 2, (height - side) // 2
        box = left, top, left + side, top + side
        return np.asarray(
            image.convert("RGB").resize((resolution, resolution), Image.BICUBIC, box)
        ).transpose(2, 0, 1)

    return make


def use_opencv(resolution):
    cv2.setNumThreads(1)

    def make(photo):  # decoded and resized as BGR, as img2dataset does
        image = cv2.imdecode(np.frombuffer(photo, np.uint8), cv2.IMREAD_UNCHANGED)
        scale = resolution / min(image.shape[:2])
        size = [round(side * scale) for side in image.shape[1::-1]]
        image = cv2.resize(image, size, interpolation=cv2.INTER_AREA)
        left, top = (size[0] - resolution) // 2, (size[1] - resolution) // 2
        return image[top : top + resolution, left : left + resolution].transpose(2, 0, 1)[::-1]

    return make


def use_torchcodec(resolution):
    whole = v2.Compose([v2.Resize(resolution), v2.CenterCrop(resolution)])
    return lambda photo: whole(decode_jpeg(photo))


def use_ours(resolution):
    flags = [
        "--train_data_dir=.",
        "--pretrained_model_name_or_path=.",
        f"--resolution={resolution}",
        "--center_crop",
    ]
    args = precompute_latents.parse_args(flags)
    transform = make_transform(args, "image", None, None, 3, resolution)

    def make(photo):
        row = {"image": {"bytes": photo, "path": None}, "text": "a photo"}
        item = transform_row(0, 0, row, transform)
        assert item["skipped"] is None
        return item["pixel_values"]

    return make


WAYS = {
    "diffusers": use_diffusers,
    "Pillow, crop and resize in one": use_pillow,
    "the same, decoded smaller (`draft`), other pixels": functools.partial(use_pillow, draft=True),
    "OpenCV, as img2dataset": use_opencv,
    "torchcodec, torchvision, bilinear": use_torchcodec,
    "`transform_row`, ours": use_ours,
    "(its decoder alone)": lambda resolution: (
        lambda photo: decode_image({"bytes": photo, "path": None}, 3)
    ),
}
MISSING = {use_opencv: cv2 is None, use_torchcodec: decode_jpeg is None}


def time_way(use, photos, resolution, seconds):
    """Return the images per second of one way."""
    make, start, count = use(resolution), time.perf_counter(), 0
    while (taken := time.perf_counter() - start) < seconds or count < 2:
        make(photos[count % len(photos)])
        count += 1
    return count / taken


def compare_transforms(args):
    (resolution,), found = args.resolutions or [256], []
    for width in args.widths:
        photos = list(make_photos(width))
        ways = {name: use for name, use in WAYS.items() if not MISSING.get(use)}
        runs = {
            name: functools.partial(time_way, use, photos, resolution, args.seconds)
            for name, use in ways.items()
        }
        found.append(bench.interleaved(runs, args.rounds))
    rows = []
    for name in found[0]:
        shares = [np.divide(speeds[name], speeds["diffusers"]) for speeds in found]
        pairs = zip(found, shares, strict=True)
        rows.append(
            [
                name,
                *(
                    f"{np.median(speeds[name]):.0f}, {bench.spread(share)} x"
                    for speeds, share in pairs
                ),
            ]
        )
    title = f"{bench.machine()}; to {resolution} px"
    title += "".join(
        f"; {name.split(',')[0]} is not installed" for name in WAYS if MISSING.get(WAYS[name])
    )
    bench.show(title, ["images/s", *(f"{width} px wide" for width in args.widths)], rows)


# ------------------------------------------------------------------- script


def run(flags, output_dir):
    """Run the script from its flags to the end.

    Returns (seconds, seconds since the first batch was encoded).
    """
    begun, encode = [], precompute_latents.encode

    def watched(*args):
        begun.append(time.perf_counter())
        return encode(*args)

    precompute_latents.encode, start = watched, time.perf_counter()
    try:
        precompute_latents.main(
            precompute_latents.parse_args([*flags, f"--output_dir={output_dir}"])
        )
    finally:
        precompute_latents.encode = encode
    return (end := time.perf_counter()) - start, end - begun[0]


def list_keys(rows, args, caches=(0,)):
    """Return the keys with which `TransformedRows` makes all rows, one per batch."""
    starts = range(0, rows, args.batch_size)
    return [
        (caches, [(0, row) for row in range(i, min(rows, i + args.batch_size))]) for i in starts
    ]


def plan(args, mixed_precision):
    """Open the models and the data, as the script does.

    Returns (base, encoders in float32, the data set of stage 1, the planned caches).
    """
    base = open_base(args, record=record_family)
    exact = load_encoders(base, torch.float32)
    _, described = precompute_latents.describe_encoders(base, exact, args, mixed_precision)
    images = load_rows(args, others=[args.caption_column])
    caches = plan_caches(args, images, exact, described, {})
    dataset = precompute_latents.TransformedRows(images.rows, exact.tokenizers, caches)
    return base, exact, dataset, caches


def measure(folder, rows, rounds, flags):
    """Measure images per second; returns a list over the turns for each of four kinds.

    The kinds are "decode" (one core), "encode", "whole" and "running".
    """
    args = precompute_latents.parse_args(flags)
    launch = make_launch(Accelerator(**accelerator_options(args)), args)
    base, exact, dataset, (cache,) = plan(args, launch.mixed_precision)
    encoders = exact if launch.dtype == torch.float32 else load_encoders(base, launch.dtype)
    place_encoders(encoders, launch.device, launch.compile)
    keys = list_keys(rows, args)
    few, speeds = (
        keys[: max(1, len(keys) // 4)],
        {name: [] for name in ("decode", "encode", "whole", "running")},
    )
    batches = list(load_batches(dataset, keys, 0, launch.device))
    for turn in range(rounds):
        start = time.perf_counter()
        for key in few:
            dataset[key]
        speeds["decode"].append(sum(len(key) for _, key in few) / (time.perf_counter() - start))
        start = time.perf_counter()
        for made in batches:
            _, event = precompute_latents.encode(made["batches"][0], encoders, cache)
        if event is not None:
            event.synchronize()
        speeds["encode"].append(rows / (time.perf_counter() - start))
        for name, seconds in zip(
            ("whole", "running"), run(flags, folder / f"cache-{turn}"), strict=True
        ):
            speeds[name].append(rows / seconds)
    return speeds


def make_flags(folder, args):
    """Make models and images in a folder; returns the script's flags without --resolution."""
    models = bench.make_models(folder / "models", args.size)
    images = bench.make_images(folder / "images", args.rows, make_photos(args.widths[0]))
    flags = [f"--{name}={getattr(args, name)}" for name in ("batch_size", "mixed_precision")]
    flags += [
        f"--train_data_dir={images}",
        f"--pretrained_model_name_or_path={models}",
        "--center_crop",
    ]
    flags += [f"--cache_dir={folder / 'datasets'}"]
    if args.dataloader_num_workers is not None:
        flags += [f"--dataloader_num_workers={args.dataloader_num_workers}"]
    return flags


def time_script(args):
    def rows():
        for resolution in args.resolutions or [64, 128]:
            with tempfile.TemporaryDirectory() as folder:
                folder = Path(folder)
                flags = [*make_flags(folder, args), f"--resolution={resolution}"]
                with (
                    contextlib.redirect_stdout(io.StringIO()),
                    contextlib.redirect_stderr(io.StringIO()),
                ):
                    speeds = measure(folder, args.rows, args.rounds, flags)
            cells = [bench.spread(found, "{:.0f}") for found in speeds.values()]
            cells += [bench.spread(np.divide(speeds["running"], speeds["encode"]))]
            yield [
                resolution,
                *cells,
                f"{np.median(np.divide(speeds['encode'], speeds['decode'])):.1f}",
            ]

    title = (
        f"{args.rows} photographs of {args.widths[0]} px, threads of the encoder: {args.threads}"
    )
    header = [
        "to px",
        "decoding, one core",
        "encoder alone",
        "whole script",
        "running",
        "running / encoder",
    ]
    bench.show(f"{bench.machine()}; {title}", [*header, "cores needed to decode"], rows())


# ------------------------------------------------------------------- passes


def count_cpu():
    """Seconds of CPU of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(each.ru_utime + each.ru_stime for each in used)


def time_passes(args):
    sides = list(map(str, args.resolutions or [256, 512]))
    sets = {" and ".join(each): each for each in [*([side] for side in sides), sides]}

    def count(function):
        before = count_cpu()
        function()
        return count_cpu() - before

    with tempfile.TemporaryDirectory() as folder:
        flags, runs, number = make_flags(Path(folder), args), {}, itertools.count()
        for name, chosen in sets.items():
            argv = [*flags, "--resolution", *chosen]
            given = precompute_latents.parse_args([*argv, f"--output_dir={folder}/none"])
            _, _, dataset, caches = plan(given, args.mixed_precision)
            keys = list_keys(args.rows, given, range(len(caches)))
            runs["stage 1", name] = functools.partial(
                count, lambda d=dataset, k=keys: [d[key] and None for key in k]
            )
            again = lambda argv=argv: run(argv, Path(folder, str(next(number))))  # noqa: E731
            runs["whole", name] = functools.partial(count, again)
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            found = bench.interleaved(runs, args.rounds)
    rows = []
    for what in ("stage 1", "whole"):
        cells = [bench.spread(found[what, name], "{:.1f}") for name in sets]
        *alone, together = [np.array(found[what, name]) for name in sets]
        rows.append([what, *cells, bench.spread(together / sum(alone))])
    title = f"{bench.machine()}; {args.rows} photographs of {args.widths[0]} px; seconds of CPU"
    bench.show(title, ["", *sets, "one pass / a pass each"], rows)


def main(argv=None):
    parser = bench.make_parser(__doc__, size="small", batch_size=16, steps=None, rounds=5)
    add = parser.add_argument
    add("what", choices=["transform", "script", "passes"])
    add(
        "--widths",
        type=int,
        nargs="+",
        default=[640, 1024, 2048],
        help="widths of the photographs in pixels (script and passes: the first)",
    )
    add(
        "--resolutions",
        type=int,
        nargs="+",
        help="pixels (None: 256 in transform, 64 128 in script, 256 512 in passes)",
    )
    add("--seconds", type=float, default=0.5, help="seconds per turn of transform")
    add("--rows", type=int, default=256, help="images in script and passes")
    add("--dataloader_num_workers", type=int, help="loader processes (None: the script chooses)")
    add("--threads", type=int, default=1, help="threads of the encoder on a CPU")
    args = parser.parse_args(argv)
    torch.set_num_threads(args.threads)
    transformers.utils.logging.disable_progress_bar()
    {"transform": compare_transforms, "script": time_script, "passes": time_passes}[args.what](args)


if __name__ == "__main__":
    main()
