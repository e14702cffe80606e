"""Our trainers, from a latent cache and from images, against diffusers' example scripts.

    python benchmarks/peers.py                                  # ours alone; minutes on 2 cores
    python benchmarks/peers.py --diffusers path/to/diffusers    # a checkout of the repository
    python benchmarks/peers.py --diffusers path/to/diffusers --size sd2 --mixed_precision bf16 \\
        --batch_size 32 --resolution 512 --steps 40             # on a GPU

Prints the speed and the processor time of the start, with and without imports. All train the same
model from the same random weights, with the same images, batch size and precision, and with EMA.
The LoRA for SDXL trains without EMA, because diffusers' script has none. The scripts run as `python
script flags`, in turns.

"By operations alone" is the relative speed of text to image if a step cost no more than its
operations, which are counted first. It shows how much work the cache saves.
"""

import functools
import itertools
import tempfile
from pathlib import Path

import bench

# Trainer: (folder of diffusers' script, its name).
TRAINERS = {
    "train_text_to_image": ("text_to_image", "train_text_to_image.py"),
    "train_unconditional": ("unconditional_image_generation", "train_unconditional.py"),
    "sdxl_lora": ("text_to_image", "train_text_to_image_lora_sdxl.py"),
    "z_image_lora": ("dreambooth", "train_dreambooth_lora_z_image.py"),
    "qwen_image_lora": ("dreambooth", "train_dreambooth_lora_qwen_image.py"),
}
NAMES = {
    "sdxl_lora": "a LoRA for SDXL",
    "z_image_lora": "a LoRA for Z-Image",
    "qwen_image_lora": "a LoRA for Qwen-Image",
}
# the numbers of layers of the published models; all else is tiny
LAYERS = {
    "z_image_lora": {"n_layers": 30, "n_refiner_layers": 2},
    "qwen_image_lora": {"num_layers": 60},
}


def count_flops(models, resolution):
    """Count the operations of (a training step, the VAE, the text encoder) for one image."""
    import torch
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import CLIPTextConfig, CLIPTextModel

    def count(function):
        with FlopCounterMode(display=False) as counter:
            function()
        return counter.get_total_flops()

    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(
            UNet2DConditionModel.load_config(models, subfolder="unet")
        )
        vae = AutoencoderKL.from_config(AutoencoderKL.load_config(models, subfolder="vae"))
        text_encoder = CLIPTextModel(
            CLIPTextConfig.from_pretrained(models, subfolder="text_encoder")
        )
        side = resolution // 8
        latents, prompt = (
            torch.randn(1, 4, side, side),
            torch.randn(1, 77, unet.config.cross_attention_dim),
        )
        image, ids, timestep = (
            torch.randn(1, 3, resolution, resolution),
            torch.ones(1, 77).long(),
            torch.zeros(1),
        )
        return (
            count(lambda: unet(latents, timestep, prompt).sample.sum().backward()),
            count(lambda: vae.encode(image)),
            count(lambda: text_encoder(ids)),
        )


def make_flags(folder, cli):
    """Return {trainer: {way: (script, its flags)}}, without --output_dir."""
    models, side = bench.make_models(folder / "sd", cli.size), cli.resolution // 4
    images = bench.make_images(
        folder / "images", 8 * cli.batch_size * cli.steps, bench.make_pictures(cli.resolution)
    )
    photos = folder / "photos"
    photos.mkdir()
    for path in images.glob("*.jpg"):
        (photos / path.name).symlink_to(path)
    widths = {"tenth": [32, 64, 128], "sd2": [128, 128, 256, 256, 512, 512]}.get(cli.size, [8, 16])
    unet = bench.make_unet_config(folder / "unet.json", widths, side, 2 if cli.size == "sd2" else 1)
    common = [f"--mixed_precision={cli.mixed_precision}", "--checkpointing_steps=1000000"]
    data = [
        f"--train_data_dir={images}",
        f"--cache_dir={folder / 'data'}",
        "--dataloader_num_workers=1",
    ]
    # 8 times the batch size, for one epoch; at the end one image is sampled in one step.
    small = [
        *common,
        *data,
        f"--model_config_name_or_path={unet}",
        f"--resolution={side}",
        "--num_epochs=1",
    ]
    small += [
        f"--train_batch_size={8 * cli.batch_size}",
        "--save_images_epochs=2",
        "--eval_batch_size=1",
    ]
    small += ["--ddpm_num_inference_steps=1", "--use_ema"]
    found = {}
    for name in cli.trainers:
        # own: flags that diffusers' script lacks
        ours, ways, own = bench.ROOT / "train_text_to_image.py", {}, []
        theirs = []
        if name in LAYERS:
            ours = bench.ROOT / "train_flow.py"
            made = bench.make_transformer_pipeline(
                folder / name, name.removesuffix("_lora"), **LAYERS[name]
            )
            pixels = [
                *common,
                f"--pretrained_model_name_or_path={made}",
                f"--train_batch_size={cli.batch_size}",
                f"--max_train_steps={cli.steps}",
                f"--resolution={cli.resolution}",
                "--rank=4",
            ]
            # as in diffusers' scripts, which read each file of a folder as an image
            own = [*data, "--no-use_ema", "--lora_layers=to_k,to_q,to_v,to_out.0"]
            theirs = [f"--instance_data_dir={photos}", "--instance_prompt=a digit"]
        elif name == "train_unconditional":
            ours, pixels = bench.ROOT / "train_unconditional.py", small
        else:
            made = models
            text = [
                *common,
                f"--train_batch_size={cli.batch_size}",
                f"--max_train_steps={cli.steps}",
                "--use_ema",
            ]
            if name == "sdxl_lora":
                made, text[-1] = bench.make_sdxl(folder / "sdxl", cli.size), "--rank=4"
                own = ["--no-use_ema", "--lora_layers=attention"]  # as in diffusers' script
            text += [f"--pretrained_model_name_or_path={made}"]
            for way, kind in {"from a cache": "embeddings", "from a cache of ids": "ids"}.items():
                rows = cli.batch_size * cli.steps
                cache = bench.make_cache(
                    folder / f"{name}-{kind}", made, rows, cli.resolution, kind
                )
                ways[way] = [*text, f"--latents_dir={cache}"]
            pixels = [*text, *data, f"--resolution={cli.resolution}"]
        ways["from images"] = pixels
        found[name] = {
            way: (ours, [*flags, *own, "--report_to=none"]) for way, flags in ways.items()
        }
        if cli.diffusers:
            found[name]["diffusers"] = (
                Path(cli.diffusers, "examples", *TRAINERS[name]),
                pixels + theirs,
            )
    return found


def main(argv=None):
    parser = bench.make_parser(__doc__, batch_size=2)
    parser.add_argument(
        "--resolution",
        type=int,
        default=256,
        help="pixels of text to image; unconditional uses a quarter",
    )
    three = [name for name in TRAINERS if name not in LAYERS]
    parser.add_argument("--trainers", nargs="+", choices=TRAINERS, default=three)
    parser.add_argument("--ways", nargs="+", help="such as diffusers; default: all")
    parser.add_argument("--diffusers", help="checkout of diffusers, to compare with its scripts")
    cli = parser.parse_args(argv)
    print(bench.machine())
    with tempfile.TemporaryDirectory() as folder:
        folder, number = Path(folder), itertools.count()
        flags = make_flags(folder, cli)
        train, vae, text = count_flops(folder / "sd", cli.resolution)
        print(
            "GFLOP per image: a step {:.4g}, the VAE {:.4g}, the text encoder {:.4g}".format(
                *(flops / 1e9 for flops in (train, vae, text))
            )
        )

        def time_it(script, argv):
            return bench.run(
                script, [*argv, f"--output_dir={folder}/out-{next(number)}"], cli.steps
            )

        def compare():
            for name, ways in flags.items():
                runs = {
                    way: functools.partial(time_it, *how)
                    for way, how in ways.items()
                    if not cli.ways or way in cli.ways
                }
                results = bench.interleaved(runs, cli.rounds)
                first, size = (
                    next(iter(results.values())),
                    cli.batch_size * (8 if name == "train_unconditional" else 1),
                )
                costs = {"from a cache": train, "from a cache of ids": train + text}
                for way, found in results.items():
                    ideal = (
                        f"{train / costs.get(way, train + vae + text):.2f}"
                        if name == "train_text_to_image"
                        else ""
                    )
                    turns = zip(first, found, strict=True)
                    yield [
                        NAMES.get(name, f"`{name}.py`"),
                        way,
                        bench.spread([size / one["step"] for one in found]),
                        bench.spread([one["step"] / other["step"] for one, other in turns]),
                        ideal,
                        bench.spread([one["first_cpu"] for one in found], "{:.1f}"),
                        bench.spread([one["forward_cpu"] for one in found]),
                        bench.spread([one["start_cpu"] for one in found]),
                    ]

        title = (
            f"{cli.size}, {cli.resolution} px, batch {cli.batch_size} "
            f"(unconditional: {cli.resolution // 4} px, 8 x"
        )
        header = [
            "",
            "",
            "images/s",
            "relative to the first, in the same turn",
            "by operations alone",
            "s of processor time to the end of step 1",
            "from the end of the imports to the first call of the model",
            "and to the end of step 1",
        ]
        bench.show(
            f"{title} as many), {cli.mixed_precision}, with EMA except for the LoRA",
            header,
            compare(),
        )


if __name__ == "__main__":
    main()
