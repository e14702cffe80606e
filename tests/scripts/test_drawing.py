"""Samples use prompts that were encoded once: sampling loads no text encoder."""

import pytest
from conftest import Script, make_captioned, make_models, make_prx, patch

from diffusion_training.data import encoders

pytestmark = pytest.mark.usefixtures("without_figures")
precompute = Script("precompute_latents")
train_text_to_image = Script("train_text_to_image")
train_flow = Script("train_flow")


@pytest.fixture
def loads(monkeypatch):
    """The models whose text encoders were loaded."""
    loaded = []

    def load(base, dtype, load_text_encoders=encoders.load_text_encoders):
        loaded.append(base.source)
        return load_text_encoders(base, dtype)

    patch(monkeypatch, "load_text_encoders", load)
    return loaded


@pytest.mark.parametrize(
    "kind, cached",
    [
        ("unet", False),
        ("lora", True),
        ("transformer", True),
        pytest.param("unet", True, marks=pytest.mark.long),
        pytest.param("lora", False, marks=pytest.mark.long),
        pytest.param("transformer", False, marks=pytest.mark.long),
    ],
)
def test_sampling_loads_no_text_encoder(tmp_path, loads, kind, cached):
    """It is loaded once for the data and once for a saved pipeline, for any number of samples."""
    make_captioned(tmp_path / "images", 6)
    models = f"--pretrained_model_name_or_path={make_models(tmp_path)}"
    images = [f"--train_data_dir={tmp_path / 'images'}", "--resolution=16", "--center_crop"]
    more, train = [], train_text_to_image
    if kind == "lora":
        more = ["--rank=2"]
    if kind == "transformer":
        config = make_prx(tmp_path / "prx")
        more, train = [f"--transformer_config_name_or_path={config}"], train_flow
    if cached:
        family = ["--model_family=prx"] if kind == "transformer" else []
        precompute(*images, models, *family, f"--output_dir={tmp_path / 'cache'}")
        images = [f"--latents_dir={tmp_path / 'cache'}"]
    else:
        images.append("--dataloader_num_workers=0")
    loads.clear()
    samples = ["--validation_prompts=a digit one", "--num_validation_images=1"]
    steps = ["--max_train_steps=4", "--train_batch_size=2", "--validation_steps=1"]
    train(*train.flags(tmp_path / "out", models, *images, *more, *samples, *steps))
    steps = 4 if kind == "transformer" else 5  # a pretrained model also draws before step 1
    assert len(list((tmp_path / "out/samples").iterdir())) == steps
    assert len(loads) == (1 if kind == "lora" else 2)
