"""Samples use prompts that were encoded once: sampling loads no text encoder."""

import pytest
from conftest import make_captioned, make_models, make_prx, patch, reset

import precompute_latents
import train_flow
import train_text_to_image
from diffusion_training.latents import encoders

pytestmark = pytest.mark.usefixtures("without_figures")


@pytest.fixture
def loads(monkeypatch):
    """The models whose text encoders were loaded."""
    loaded = []

    def load(base, dtype, load_text_encoders=encoders.load_text_encoders):
        loaded.append(base.source)
        return load_text_encoders(base, dtype)

    patch(monkeypatch, "load_text_encoders", load)
    return loaded


def make_flags(tmp_path, models, *more):
    return [
        f"--pretrained_model_name_or_path={models}",
        f"--output_dir={tmp_path / 'out'}",
        "--train_batch_size=2",
        "--max_train_steps=4",
        "--validation_steps=1",
        "--validation_prompts=a digit one",
        "--num_validation_images=1",
        "--num_inference_steps=2",
        "--lr_warmup_steps=0",
        "--report_to=none",
        *map(str, more),
    ]


def train(script, flags):
    reset()
    script.main(script.parse_args(flags))


@pytest.mark.parametrize("cached", [True, False])
@pytest.mark.parametrize("kind", ["unet", "lora", "transformer"])
def test_sampling_loads_no_text_encoder(tmp_path, loads, kind, cached):
    """It is loaded once for the data and once for a saved pipeline, for any number of samples."""
    make_captioned(tmp_path / "images", 6)
    models = make_models(tmp_path)
    images = [f"--train_data_dir={tmp_path / 'images'}", "--resolution=16", "--center_crop"]
    flags, script = [], train_text_to_image
    if kind == "lora":
        flags = ["--rank=2"]
    if kind == "transformer":
        config = make_prx(tmp_path / "prx")
        flags, script = [f"--transformer_config_name_or_path={config}"], train_flow
    if cached:
        family = ["--model_family=prx"] if kind == "transformer" else []
        models_flag = f"--pretrained_model_name_or_path={models}"
        argv = [*images, models_flag, *family, f"--output_dir={tmp_path / 'cache'}"]
        train(precompute_latents, argv)
        images = [f"--latents_dir={tmp_path / 'cache'}"]
    else:
        images.append("--dataloader_num_workers=0")
    loads.clear()
    train(script, make_flags(tmp_path, models, *images, *flags))
    steps = 4 if kind == "transformer" else 5  # a pretrained model also draws before step 1
    assert len(list((tmp_path / "out/samples").iterdir())) == steps
    assert len(loads) == (1 if kind == "lora" else 2)
