"""Training on pairs of images: references in a cache, edits of several pipelines."""

import json

import numpy as np
import pytest
from conftest import Script, make_klein
from PIL import Image

precompute, train = Script("precompute_latents"), Script("train_flow")
SIDE = 64  # pixels; FLUX.2 klein takes no smaller references


def make_pairs(folder, count=4, size=(SIDE, SIDE), reference=(SIDE, SIDE)):
    """Random colours, and beside each image its inverse as a reference. Sizes: (width, height)."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for i in range(count):
        pixels = rng.integers(0, 255, (8, 8, 3), np.uint8)
        Image.fromarray(pixels).resize(size, Image.NEAREST).save(folder / f"{i}.png")
        inverse = Image.fromarray(255 - pixels).resize(reference, Image.NEAREST)
        inverse.save(folder / f"{i}.control.png")
        (folder / f"{i}.txt").write_text("one" if i % 2 else "a digit two")
    return folder


@pytest.fixture(scope="module")
def klein(tmp_path_factory):
    return make_klein(tmp_path_factory.mktemp("klein") / "base")


def test_klein_trains_edits_from_a_cache_of_pairs(tmp_path, klein):
    pairs = make_pairs(tmp_path / "pairs")
    base = [f"--pretrained_model_name_or_path={klein}"]
    data = [f"--train_data_dir={pairs}", f"--resolution={SIDE}", "--dataloader_num_workers=0"]
    precompute(*base, *data, f"--output_dir={tmp_path / 'cache'}")
    settings = json.loads((tmp_path / "cache/cache.json").read_text())
    assert settings["references"] == {"count": 1, "side": SIDE, "shape": [16, 16, 16]}
    train(
        *base,
        f"--latents_dir={tmp_path / 'cache'}",
        "--rank=2",
        "--train_batch_size=2",
        "--max_train_steps=2",
        "--holdout=1",
        "--num_inference_steps=2",
        "--report_to=none",
        "--num_validation_images=2",
        "--validation_prompts",
        "one",
        "--validation_images",
        str(pairs / "0.control.png"),
        f"--output_dir={tmp_path / 'out'}",
    )
