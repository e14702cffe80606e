"""Make the model of drawings in demo/: a VAE and a U-Net learn 32 things in 8 colors on 5 grounds.

    python benchmarks/drawings.py

The drawings are Debian's openclipart-png (public domain, 131 MB), which is fetched and checked by
its SHA-256. The VAE learns from 2,033 of them, and its error is measured on 226 others. The U-Net
learns 1,160 pictures with captions such as "a red apple on blue", of which none names one of 24
pairs of a color and a thing. About an hour on one core. A second start continues with the step that
was not finished.

Writes demo/drawings, the pipeline in 16 bits, and demo/animals and demo/ducks, the pictures of the
second and the third demo, which it then runs. Samples of all are in drawings.png in --output_dir.
It prints how like the pictures the samples are.
"""

import argparse
import contextlib
import json
import shutil
import sys
from collections.abc import Callable
from pathlib import Path

import bench
import datasets
import numpy as np
import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, StableDiffusionPipeline
from PIL import Image, ImageDraw, ImageFont
from transformers import AddedToken

sys.path.extend(str(bench.ROOT / name) for name in ("demo", "tests", "tests/scripts"))
import make_models
from packages import open_package
from test_real_data import trace_lite0, write_folder

from diffusion_training.training.scores.distances import cosines
from diffusion_training.training.scores.networks import load_network

THINGS = {  # name: its file
    "cup": "food/beverages/zielony_kubek_herbaty_-_01",
    "cake": "food/desserts/birthday_cake",
    "candy": "food/desserts/candy_20",
    "ice cream": "food/desserts/cone2_ganson",
    "fries": "food/french_fries_juliane_kr_r",
    "apple": "food/fruit/applf",
    "banana": "food/fruit/banana",
    "cherries": "food/fruit/cherries",
    "grapes": "food/fruit/grapes_simple",
    "pear": "food/fruit/green_pear_01",
    "lemon": "food/fruit/lemon_simple",
    "strawberry": "food/fruit/strawberry",
    "melon": "food/fruit/watermelon_simple",
    "burger": "food/meats_and_eggs/burger_http_www.treebui_r",
    "bird": "animals/birds/bird_of_peace_mauro_oliv_01",
    "ladybug": "animals/bugs/c_rollandin_francesco_ar_01",
    "fish": "animals/fish/pescetto_arancione_archi_01",
    "monkey": "animals/mammals/happy_monkey_benji_park_01",
    "bear": "animals/mammals/bears/bear_peterm_01",
    "flower": "plants/flowers/flower_01",
    "mushroom": "plants/mushroom",
    "tree": "plants/trees/evergreen/tree",
    "castle": "buildings/homes/pinkhome3",
    "book": "education/books/book_01",
    "gift": "recreation/holiday/gift01",
    "heart": "recreation/holiday/valentines/heart-arrow_benji_park_01",
    "balloon": "recreation/party/balloon-blue-aj",
    "ball": "recreation/toys/ball",
    "train": "recreation/toys/kiddy_train_orlando_kara_",
    "teddy": "recreation/toys/simple_teddy_bear_gerald_01",
    "airship": "transportation/pallone_aerestatico_arch_01",
    "car": "transportation/vehicles/car",
}
# pairs that no caption names
HELD_OUT = [
    ("airship", "blue"),
    ("apple", "purple"),
    ("ball", "pink"),
    ("balloon", "green"),
    ("banana", "yellow"),
    ("bear", "orange"),
    ("bird", "orange"),
    ("burger", "green"),
    ("car", "pink"),
    ("cherries", "red"),
    ("cup", "pink"),
    ("flower", "yellow"),
    ("fries", "purple"),
    ("gift", "yellow"),
    ("grapes", "blue"),
    ("heart", "blue"),
    ("ice cream", "purple"),
    ("ladybug", "green"),
    ("lemon", "red"),
    ("monkey", "red"),
    ("mushroom", "yellow"),
    ("teddy", "pink"),
    ("train", "red"),
    ("tree", "purple"),
]
DUCK = "recreation/toys/rubber_duck1_ganson"
# what the demo's fine-tuning learns: the file, and two colors that no caption names
ANIMALS = {
    "caterpillar": ("animals/bugs/caterpillar_david_wislon_01", "pink", "orange"),
    "dog": ("animals/mammals/dog_01_drawn_with_strai_01", "blue", "purple"),
    "dolphin": ("animals/fish/dolphin_enrique_meza_c_01", "purple", "red"),
    "goat": ("animals/mammals/goat_nicu_buculei_01", "red", "green"),
    "pig": ("animals/mammals/pig_marcelo_caiafa1", "green", "yellow"),
    "rooster": ("animals/birds/gallo_di_profilo_archite_01", "blue", "pink"),
    "tiger": ("animals/mammals/big_cats/color_tiger_susan_park_01", "yellow", "blue"),
    "turtle": ("animals/turtle_jurgen_gaeremyn_01", "orange", "green"),
}
# what the demos draw for the page: the LoRA has not seen a purple or a green duck, and the
# fine-tuned model no animal in its color
ANIMALS_DRAWN = [
    ("caterpillar", "pink", "green"), ("dog", "blue", "pink"), ("dolphin", "purple", "yellow"),
    ("goat", "red", "blue"), ("pig", "green", "white"), ("rooster", "blue", "white"),
    ("tiger", "yellow", "pink"), ("turtle", "orange", "blue"),
]  # fmt: skip
DUCKS = [
    ("yellow", "blue"), ("red", "white"), ("purple", "pink"), ("green", "yellow"),
    ("blue", "green"), ("purple", "white"), ("orange", "blue"), ("green", "white"),
]  # fmt: skip
GUIDANCE = 1.5
# degrees of the color wheel
HUES = {
    "red": 0, "orange": 28, "yellow": 52, "green": 120, "blue": 212, "purple": 275, "pink": 325
}  # fmt: skip
COLORS: list[str | None] = [None, *HUES]  # None: the drawing's own
GROUNDS = {
    "white": (255, 255, 255), "pink": (255, 210, 220), "yellow": (255, 241, 180),
    "green": (206, 240, 200), "blue": (200, 226, 255),
}  # fmt: skip
MASSES = {"cherries", "fries", "grapes"}  # some cherries, not a cherries
# not among the drawings that a VAE of things needs
NOT_DRAWN = ("buttons", "computer", "geography", "logos", "shapes", "signs_and_symbols")
UNET = {
    "_class_name": "UNet2DConditionModel",
    "sample_size": 16,
    "in_channels": 8,
    "out_channels": 8,
    "layers_per_block": 1,
    "block_out_channels": [64, 128],
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "mid_block_type": "UNetMidBlock2DCrossAttn",
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "attention_head_dim": 4,
    "cross_attention_dim": 64,
    "norm_num_groups": 16,
}


def locate(name: str) -> Path:
    return open_package("openclipart-png") / f"usr/share/openclipart/png/{name}.png"


def open_square(path: Path, side: int, margin: float = 1.0) -> Image.Image:
    """A drawing, RGBA, in the middle of a square: as large as this permits, with a margin."""
    image = Image.open(path).convert("RGBA")
    image = image.crop(image.getchannel("A").getbbox())
    image = image.reduce(max(1, max(image.size) // 256))  # quickly; the rest below
    width = round(max(image.size) * margin)
    page = Image.new("RGBA", (width, width))
    page.paste(image, ((width - image.width) // 2, (width - image.height) // 2))
    return page.resize((side, side), Image.Resampling.LANCZOS)


def recolor(image: Image.Image, color: str | None) -> Image.Image:
    """Give another color to what has the drawing's main color, so a leaf stays green.

    What is dull gets brighter. Without a color the drawing is returned as it is.
    """
    if color is None:
        return image
    pixels = np.array(image)
    hsv = np.array(image.convert("RGB").convert("HSV")).astype(float)
    hue, saturation, value = hsv.transpose(2, 0, 1)
    weights = saturation * value * pixels[..., 3]
    counts = np.bincount(hue.astype(int).ravel(), weights.ravel(), minlength=256)
    smooth = np.convolve(np.tile(counts, 3), np.hanning(33), "same")[256:512]
    offset = (hue - smooth.argmax() + 128) % 256 - 128
    own = (np.abs(offset) < 34) & (pixels[..., 3] > 128)
    hsv[..., 0] = np.where(own, (HUES[color] / 360 * 256 + 0.4 * offset) % 256, hue)
    if color == "pink":
        hsv[..., 1] = np.where(own, 0.62 * saturation, saturation)
        hsv[..., 2] = np.where(own, 255 - 0.7 * (255 - value), value)
    for channel, goal in ((1, 150 if color == "pink" else 225), (2, 235)):
        levels = hsv[..., channel]
        top = np.percentile(levels[own], 80)
        if top < goal:
            gamma = np.log(goal / 255) / np.log(max(top, 60) / 255)
            hsv[..., channel] = np.where(own, 255 * (levels / 255) ** gamma, levels)
    pixels[..., :3] = Image.fromarray(hsv.round().clip(0, 255).astype(np.uint8), "HSV").convert(
        "RGB"
    )
    return Image.fromarray(pixels)


def caption(thing: str, color: str | None, ground: str) -> str:
    words = f"{color} {thing}" if color else thing
    article = "some" if thing in MASSES else "an" if words[0] in "aeiou" else "a"
    return f"{article} {words}" + ("" if ground == "white" else f" on {ground}")


def write_images(folder: Path, files: dict[str, str], colors: Callable[[str], list]) -> None:
    """A folder with the things in these colors, on each ground, with captions."""
    rows = []
    pictures = folder.with_name(f"{folder.name}-pictures")
    pictures.mkdir(parents=True, exist_ok=True)
    for thing, file in files.items():
        square = open_square(locate(file), 64, 1.1)
        for color in colors(thing):
            for ground, rgb in GROUNDS.items():
                page = Image.new("RGBA", square.size, (*rgb, 255))
                page.alpha_composite(recolor(square, color))
                name = f"{len(rows):04}.png"
                page.convert("RGB").save(pictures / name)
                rows.append((pictures / name, name, {"text": caption(thing, color, ground)}))
    write_folder(folder, rows)


def read_rows(folder: Path) -> list[dict[str, str]]:
    return [json.loads(line) for line in (folder / "metadata.jsonl").read_text().splitlines()]


def load_drawings() -> torch.Tensor:
    """The drawings of the package that show something, uint8 [N, 4, 64, 64]."""
    drawings, folder = [], locate("").parent
    for path in sorted(folder.rglob("*.png")):
        name = str(path.relative_to(folder))
        if path.is_symlink() or name.startswith(NOT_DRAWN) or "_bw" in name:
            continue
        if path.stat().st_size > 300_000:  # slow to read
            continue
        with Image.open(path) as image:
            if image.width * image.height > 2_500_000:
                continue
            box = image.convert("RGBA").getchannel("A").getbbox()
        if box and min(box[2] - box[0], box[3] - box[1]) >= 40:
            drawings.append(np.array(open_square(path, 64)))
    return torch.from_numpy(np.stack(drawings)).permute(0, 3, 1, 2)


def put_on(rgba: torch.Tensor, ground: torch.Tensor) -> torch.Tensor:
    """Drawings uint8 [N, 4, H, W] on a ground in [0, 1] -> images in [-1, 1]."""
    colors, alpha = rgba[:, :3] / 255, rgba[:, 3:] / 255
    return (colors * alpha + ground * (1 - alpha)) * 2 - 1


def pick(drawings: torch.Tensor, count: int) -> torch.Tensor:
    return drawings[torch.randint(len(drawings), (count,))]


def draw_any(drawings: torch.Tensor, count: int, size: int) -> torch.Tensor:
    """Parts of `size` pixels of some drawings, on white or a random color, perhaps mirrored."""
    chosen = pick(drawings, count)
    corners = torch.randint(65 - size, (count, 2)).tolist()
    parts = [x[:, i : i + size, j : j + size] for x, (i, j) in zip(chosen, corners, strict=True)]
    white = torch.rand(count, 1, 1, 1) < 0.35
    ground = torch.where(white, 1.0, torch.rand(count, 3, 1, 1).sqrt())
    images = put_on(torch.stack(parts), ground)
    return images.flip(-1) if torch.rand(()) < 0.5 else images


def train_vae(
    vae: AutoencoderKL, draw: Callable[[int], torch.Tensor], steps: int, learning_rate: float
) -> None:
    """Train what has gradients. `draw` makes the images of a step."""
    weights = [weight for weight in vae.parameters() if weight.requires_grad]
    average = [weight.detach().clone() for weight in weights]
    optimizer = torch.optim.AdamW(weights, lr=learning_rate, betas=(0.9, 0.99), weight_decay=1e-3)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, learning_rate, total_steps=steps, pct_start=0.05
    )
    for step in range(steps):
        images = draw(step)
        posterior = vae.encode(images).latent_dist
        restored = vae.decode(posterior.sample()).sample
        loss = F.mse_loss(restored, images) + 0.03 * F.l1_loss(restored, images)
        loss = loss + 2e-5 * posterior.kl().mean() / posterior.mean[0].numel()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(weights, 1)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for mean, weight in zip(average, weights, strict=True):
                mean.lerp_(weight, 1 - min(0.99, (1 + step) / (10 + step)))
    with torch.no_grad():
        for mean, weight in zip(average, weights, strict=True):
            weight.copy_(mean)


@torch.no_grad()
def normalize_latents(vae: AutoencoderKL, images: torch.Tensor) -> None:
    """Give the latents of these images zero mean and unit variance in each channel."""
    latents = torch.cat([vae.encode(part).latent_dist.sample() for part in images.split(32)])
    mean, std = latents.mean(dim=(0, 2, 3)), latents.std(dim=(0, 2, 3))
    before, after, count = vae.quant_conv, vae.post_quant_conv, len(mean)
    after.bias += after.weight[:, :, 0, 0] @ mean
    after.weight *= std[None, :, None, None]
    before.weight[:count] /= std[:, None, None, None]
    before.bias[:count] = (before.bias[:count] - mean) / std
    before.bias[count:] -= 2 * std.log()  # the logarithm of the variance
    vae.register_to_config(scaling_factor=1.0)


@torch.no_grad()
def measure_psnr(vae: AutoencoderKL, images: torch.Tensor) -> float:
    """In dB, of the mean error of all images, in [-1, 1]."""
    errors = []
    for part in images.split(32):
        restored = vae.decode(vae.encode(part).latent_dist.sample()).sample.clamp(-1, 1)
        errors.append((restored - part).square().mean(dim=(1, 2, 3)) / 4)
    return -10 * torch.cat(errors).mean().log10().item()


def make_vae(cli: argparse.Namespace, things: torch.Tensor, folder: Path) -> None:
    """Write vae/, whose encoder is done. things: uint8 [N, 4, 64, 64], those of the U-Net."""
    drawings = load_drawings()
    unseen = put_on(drawings[::10], torch.ones(1))
    seen = drawings[torch.arange(len(drawings)) % 10 > 0]
    grounds = torch.tensor([*GROUNDS.values()])[:, :, None, None] / 255

    def draw_mixed(step: int) -> torch.Tensor:
        own = put_on(pick(things, 5), pick(grounds, 5))
        return torch.cat([draw_any(seen, 3, 64), own])

    path = folder / "vae"
    if not path.exists():
        vae = AutoencoderKL(
            block_out_channels=(16, 32, 64),
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            latent_channels=8,
            norm_num_groups=8,
            mid_block_add_attention=False,
            sample_size=64,
        )
        steps, few = cli.vae_steps, cli.vae_steps // 4
        train_vae(vae, lambda step: draw_any(seen, 16, 32), steps - few, 3e-3)
        train_vae(vae, draw_mixed, few, 1e-3)
        normalize_latents(vae, put_on(things, grounds[torch.arange(len(things)) % len(grounds)]))
        vae.save_pretrained(path)
    path = folder / "vae-final"
    if not path.exists():  # the latents stay as they are, so this may be done at any time
        vae = AutoencoderKL.from_pretrained(folder / "vae")
        vae.encoder.requires_grad_(False)
        vae.quant_conv.requires_grad_(False)
        train_vae(vae, draw_mixed, cli.decoder_steps, 1e-3)
        vae.eval().save_pretrained(path)
        others, own = measure_psnr(vae, unseen), measure_psnr(vae, put_on(things, grounds[:1]))
        print(
            f"VAE: {others:.1f} dB PSNR on {len(unseen)} unseen drawings, {own:.1f} on the demo's"
        )


def make_others(texts: list[str], folder: Path) -> None:
    """Write models/: a tokenizer that knows the words, a random text encoder, VAE and sampler."""
    words = dict.fromkeys(word for text in texts for word in text.split())
    tokenizer = make_models.make_tokenizer(list(words), length=8)
    torch.manual_seed(0)
    text_encoder = make_models.make_text_encoder(tokenizer, hidden_size=64)
    # words that the U-Net does not learn come last: no other weight depends on them
    tokenizer.add_tokens([AddedToken(animal, single_word=True) for animal in ANIMALS])
    text_encoder.resize_token_embeddings(len(tokenizer), mean_resizing=False)
    # CLIP's own start is so small that two layers of random weights hide which word it was
    for name, weight in text_encoder.named_parameters():
        if "embedding" in name:  # of tokens and positions
            weight.data *= 50
    tokenizer.save_pretrained(folder / "models/tokenizer")
    text_encoder.save_pretrained(folder / "models/text_encoder")
    digits = bench.ROOT / "demo/models"
    shutil.copytree(digits / "scheduler", folder / "models/scheduler", dirs_exist_ok=True)
    shutil.copy(digits / "model_index.json", folder / "models")
    shutil.copytree(folder / "vae", folder / "models/vae", dirs_exist_ok=True)


def write_demo(folder: Path, demo: Path) -> None:
    """Write drawings/, the pipeline in 16 bits, and animals/ and ducks/, the data of the demos."""
    pipeline = StableDiffusionPipeline.from_pretrained(folder / "base")
    pipeline.vae = AutoencoderKL.from_pretrained(folder / "vae-final").half()
    pipeline.unet.half()  # the text encoder is small, and transformers opens it as it is stored
    pipeline.save_pretrained(demo / "drawings")
    for path in (demo / "drawings").rglob("*.json"):  # without the folder of this run
        content = json.loads(path.read_text())
        if content.pop("_name_or_path", None):
            path.write_text(json.dumps(content, indent=2) + "\n")
    features = datasets.Features({"image": datasets.Image(), "text": datasets.Value("string")})
    for name in ("animals", "ducks"):
        rows = read_rows(folder / name)
        columns = {
            "image": [
                Image.open(folder / name / row["file_name"]).convert("RGB")  # not only its path
                for row in rows
            ],
            "text": [row["text"] for row in rows],
        }
        (demo / name).mkdir(exist_ok=True)
        table = datasets.Dataset.from_dict(columns, features=features)
        table.to_parquet(demo / name / "train.parquet")


def draw(pipeline: StableDiffusionPipeline, prompts: list[str]) -> list[Image.Image]:
    """One sample for each prompt, the first that is drawn."""
    pipeline.set_progress_bar_config(disable=True)
    return [
        pipeline(
            prompt, num_inference_steps=50, guidance_scale=GUIDANCE, height=64, width=64,
            generator=torch.Generator().manual_seed(0),
        ).images[0]
        for prompt in prompts
    ]  # fmt: skip


def stack(images: list[Image.Image]) -> torch.Tensor:
    """Images of one size -> uint8 [N, 3, H, W]."""
    return torch.from_numpy(np.stack([np.array(image) for image in images])).permute(0, 3, 1, 2)


def make_page(cells: list[tuple[str, Image.Image]], columns: int = 8) -> Image.Image:
    """Samples, enlarged, with their prompts below."""
    side, margin, line = 112, 10, 32
    height = side + margin + line
    page = Image.new(
        "RGB", (columns * (side + margin) + margin, -(-len(cells) // columns) * height), "white"
    )
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(size=11)
    for number, (prompt, image) in enumerate(cells):
        left, top = margin + number % columns * (side + margin), number // columns * height
        page.paste(image.resize((side, side), Image.Resampling.LANCZOS), (left, top + margin))
        place = (left + side / 2, top + margin + side + 3)
        lines = prompt.replace(" on ", "\non ")
        pen.text(place, lines, "black", font, anchor="ma", align="center")
    return page


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, default=Path("drawings-out"))
    parser.add_argument("--vae_steps", type=int, default=3400, help="of 8 to 16 drawings")
    parser.add_argument("--decoder_steps", type=int, default=900, help="of 8, with fixed latents")
    parser.add_argument("--train_steps", type=int, default=2800, help="of 16 pictures")
    parser.add_argument("--demo_steps", type=int, help="fewer than the demos have, for a test")
    parser.add_argument("--demo_dir", type=Path, default=bench.ROOT / "demo")
    cli = parser.parse_args(argv)
    folder, demo = cli.output_dir.absolute(), cli.demo_dir.absolute()
    print(bench.machine())
    torch.manual_seed(0)
    animals = {animal: file for animal, (file, *_) in ANIMALS.items()}
    if not (folder / "ducks").exists():
        write_images(
            folder / "images",
            THINGS,
            lambda thing: [color for color in COLORS if (thing, color) not in HELD_OUT],
        )
        write_images(
            folder / "animals",
            animals,
            lambda animal: [color for color in COLORS if color not in ANIMALS[animal]],
        )
        without = [color for color in COLORS if color not in ("purple", "green")]
        write_images(folder / "ducks", {"duck": DUCK}, lambda thing: without)
    files = [*THINGS.values(), *animals.values(), DUCK]
    squares = [open_square(locate(file), 64, 1.1) for file in files]
    colored = [np.array(recolor(square, color)) for square in squares for color in COLORS]
    make_vae(cli, torch.from_numpy(np.stack(colored)).permute(0, 3, 1, 2), folder)
    rows = [row for name in ("images", "ducks") for row in read_rows(folder / name)]
    make_others([row["text"] for row in rows], folder)
    (folder / "unet.json").write_text(json.dumps(UNET))
    models = {"pretrained_model_name_or_path": folder / "models"}
    bench.launch(
        "precompute_latents", **models, train_data_dir=folder / "images", resolution=64,
        batch_size=32, output_dir=folder / "latents",
    )  # fmt: skip
    grounds = [ground for ground in GROUNDS for _ in range(5)]
    prompts = [caption(*pair, ground) for pair, ground in zip(HELD_OUT, grounds, strict=False)]
    bench.launch(
        "train_text_to_image", **models, latents_dir=folder / "latents",
        unet_config_name_or_path=folder / "unet.json", train_batch_size=16,
        max_train_steps=cli.train_steps, learning_rate=1.4e-3, lr_scheduler="cosine",
        lr_warmup_steps=0.04, snr_gamma=5, ema_max_decay=0.995, validation_prompts=prompts[::4],
        validation_steps=300, num_inference_steps=20, guidance_scale=GUIDANCE,
        num_validation_images=2, checkpointing_steps=300, resume_from_checkpoint="latest",
        report_to="none", output_dir=folder / "base",
    )  # fmt: skip
    write_demo(folder, demo)
    base = {"pretrained_model_name_or_path": demo / "drawings"}
    options = base | {"report_to": "none"}
    if cli.demo_steps:
        options["max_train_steps"] = cli.demo_steps
    with contextlib.chdir(folder):  # the second and the third demo
        bench.launch("precompute_latents", **base)
        bench.launch("train_text_to_image", **options)
        bench.launch("train_text_to_image", rank=16, **options)
    pipeline = StableDiffusionPipeline.from_pretrained(demo / "drawings")
    drawn = draw(pipeline, prompts)
    trace_lite0(folder / "lite0.pt")
    embed = load_network(str(folder / "lite0.pt")).embed_images
    images = stack([Image.open(path) for path in sorted((folder / "images").glob("*.png"))])
    known = torch.cat([embed(part) for part in images.split(64)])
    nearest = cosines(embed(stack(drawn)), known).amax(dim=1).mean()
    apart = cosines(known, known).fill_diagonal_(-1).amax(dim=1).mean()
    print(f"Cosine with the nearest picture: {nearest:.2f}; of pictures with theirs: {apart:.2f}")
    of_animals = [caption(*each) for each in ANIMALS_DRAWN]
    drawn += draw(StableDiffusionPipeline.from_pretrained(folder / "sd-animals"), of_animals)
    of_ducks = [caption("duck", color, ground) for color, ground in DUCKS]
    pipeline.load_lora_weights(folder / "lora-duck")
    drawn += draw(pipeline, of_ducks)
    cells = [*zip([*prompts, *of_animals, *of_ducks], drawn, strict=True)]
    make_page(cells).save(folder / "drawings.png")
    print(f"Look at {folder / 'drawings.png'}")


if __name__ == "__main__":
    main()
