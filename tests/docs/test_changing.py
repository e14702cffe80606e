"""docs/changing.md: a data set of one's own trains, and a run on it resumes to the same bits."""

import re
import textwrap

import pytest
import torch
from conftest import ROOT, Script, make_models, make_unet_config
from safetensors.torch import load_file

SECTION = (ROOT / "docs/changing.md").read_text().split("## A data set of your own")[1]
RINGS = """
class Rings(torch.utils.data.Dataset):
    def __len__(self):
        return 20

    def __getitem__(self, i):
        axis = torch.linspace(0, 20, 24)
        return ((axis[:, None] + axis + i).sin() * 127 + 128).byte().expand(3, -1, -1)


own = Rings()
"""


@pytest.mark.usefixtures("forked")
@pytest.mark.parametrize("name", ["train_unconditional", "train_text_to_image"])
def test_a_data_set_that_is_written_to_parquet_trains(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    exec(re.search("```python\n(.*?)```", SECTION, re.S)[1], {})
    flags = ["--train_data_dir=own", "--resolution=16", "--max_train_steps=1", "--report_to=none"]
    if name == "train_unconditional":
        flags += [f"--model_config_name_or_path={make_unet_config(tmp_path)}"]
        flags += ["--ddpm_num_inference_steps=1", "--eval_batch_size=1"]
    else:
        flags += [f"--pretrained_model_name_or_path={make_models(tmp_path)}"]
    Script(name)(*flags, "--output_dir=out", "--dataloader_num_workers=0")
    assert (tmp_path / "out/model_index.json").is_file()


@pytest.mark.ci
@pytest.mark.usefixtures("forked")
def test_computed_images_train_and_resume_to_the_same_bits(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    imports, lines = re.search("```\n(import datasets)\n\n(.*?)```", SECTION, re.S).groups()
    source = (ROOT / "train_unconditional.py").read_text()
    replaced = "    images = load_images(args, args.streaming, channels=channels)\n"
    assert source.count(replaced) == 1
    source = source.replace(replaced, textwrap.indent(lines, "    "))
    source = source.replace("class ImageDataset", f"{imports}\n{RINGS}\n\nclass ImageDataset")
    (tmp_path / "train_rings.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    train = Script("train_rings")
    (tmp_path / "empty").mkdir()
    flags = [
        "--train_data_dir=empty",
        "--resolution=16",
        "--report_to=none",
        "--train_batch_size=3",
    ]
    flags += [f"--model_config_name_or_path={make_unet_config(tmp_path)}", "--holdout=4"]
    flags += ["--ddpm_num_inference_steps=1", "--eval_batch_size=1", "--checkpointing_steps=4"]
    flags += ["--lr_scheduler=constant", "--dataloader_num_workers=1"]
    train(*flags, "--max_train_steps=8", "--output_dir=whole")
    train(*flags, "--max_train_steps=4", "--output_dir=parts")
    train(*flags, "--max_train_steps=8", "--output_dir=parts", "--resume_from_checkpoint=latest")
    file = "unet/diffusion_pytorch_model.safetensors"
    whole, parts = (load_file(tmp_path / folder / file) for folder in ("whole", "parts"))
    assert whole.keys() == parts.keys()
    assert all(torch.equal(whole[key], parts[key]) for key in whole)
