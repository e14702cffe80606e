"""What does a latent cache save? Training from it over encoding in each step, and over diffusers' script.

    python benchmarks/cached_vs_online.py                                          # some minutes on 2 cores
    python benchmarks/cached_vs_online.py --diffusers path/to/diffusers            # a checkout of the repository
    python benchmarks/cached_vs_online.py --size sd2 --mixed_precision bf16 --batch_size 32 --steps 40   # on a GPU

Images, models, batch, precision and averaged weights are the same; runs take turns. Models have random weights, by
default with a tenth of Stable Diffusion 2's channels. The table says how much the cache would save if a step cost no
more than its operations.
"""

import itertools
import statistics
import tempfile
from pathlib import Path

import bench


def count_flops(models, resolution):
    """(operations of a training step, of encoding the image, of encoding the caption), each for one image."""
    import torch
    from diffusers import AutoencoderKL, UNet2DConditionModel
    from torch.utils.flop_counter import FlopCounterMode
    from transformers import CLIPTextConfig, CLIPTextModel

    def count(function):
        with FlopCounterMode(display=False) as counter:
            function()
        return counter.get_total_flops()

    with torch.device("meta"):
        unet = UNet2DConditionModel.from_config(UNet2DConditionModel.load_config(models, subfolder="unet"))
        vae = AutoencoderKL.from_config(AutoencoderKL.load_config(models, subfolder="vae"))
        text_encoder = CLIPTextModel(CLIPTextConfig.from_pretrained(models, subfolder="text_encoder"))
        side = resolution // 8
        latents, prompt = torch.randn(1, 4, side, side), torch.randn(1, 77, unet.config.cross_attention_dim)
        image, ids, timestep = torch.randn(1, 3, resolution, resolution), torch.ones(1, 77).long(), torch.zeros(1)
        return (
            count(lambda: unet(latents, timestep, prompt).sample.sum().backward()),
            count(lambda: vae.encode(image)),
            count(lambda: text_encoder(ids)),
        )


def main(argv=None):
    parser = bench.make_parser(__doc__, batch_size=2, steps=10)
    parser.add_argument("--resolution", type=int, default=512)
    parser.add_argument("--diffusers", help="a checkout of diffusers, whose example script is timed as well")
    cli = parser.parse_args(argv)
    print(bench.machine())
    with tempfile.TemporaryDirectory() as folder:
        folder, count = Path(folder), cli.batch_size * cli.steps
        models = bench.make_models(folder / "sd", cli.size)
        images = bench.make_images(folder / "images", count, cli.resolution)
        precision = f"--mixed_precision={cli.mixed_precision}"
        common = [f"--pretrained_model_name_or_path={models}", precision, f"--train_batch_size={cli.batch_size}"]
        common += [f"--max_train_steps={cli.steps}", "--use_ema", "--checkpointing_steps=1000000"]
        data = [f"--train_data_dir={images}", f"--resolution={cli.resolution}", f"--cache_dir={folder / 'data'}"]
        data += ["--center_crop", "--dataloader_num_workers=1"]
        ids = bench.make_cache(folder / "ids", models, count, cli.resolution, "ids")
        cache = bench.make_cache(folder / "cache", models, count, cli.resolution)
        ours, number = bench.ROOT / "train_text_to_image.py", itertools.count()

        def time_it(script, *flags):
            return bench.run(script, [*common, *flags, f"--output_dir={folder}/out-{next(number)}"], cli.steps)["step"]

        runs = {
            "from a cache": lambda: time_it(ours, f"--latents_dir={cache}", "--report_to=none"),
            "from a cache of ids": lambda: time_it(ours, f"--latents_dir={ids}", "--report_to=none"),
            "encoding in the step": lambda: time_it(ours, *data, "--report_to=none"),
        }
        if cli.diffusers:
            theirs = Path(cli.diffusers, "examples/text_to_image/train_text_to_image.py")
            runs["diffusers' script"] = lambda: time_it(theirs, *data)
        steps = bench.interleaved(runs, cli.rounds)
        train, vae, text = count_flops(models, cli.resolution)
        ideal = [1, (train + text) / train, *[(train + vae + text) / train] * 2]
        first = statistics.median(steps["from a cache"])
        rows = [
            [name, bench.spread([cli.batch_size / step for step in times], "{:.2f}"),
             f"{first / statistics.median(times):.2f}", f"{1 / cost:.2f}"]
            for (name, times), cost in zip(steps.items(), ideal, strict=False)
        ]  # fmt: skip
        title = f"{cli.size}, {cli.resolution} px, batch {cli.batch_size}, {cli.mixed_precision}, with EMA"
        bench.show(title, ["", "images/s", "of the cache's speed", "by operations alone"], rows)
        gigaflops = [f"{flops / 1e9:.4g}" for flops in (train, vae, text)]
        print("\nGFLOP an image: a step {}, the VAE {}, the text encoder {}".format(*gigaflops))


if __name__ == "__main__":
    main()
