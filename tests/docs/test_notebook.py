"""examples/sdxl_lora.ipynb: it runs from top to bottom, and its commands fit the scripts."""

import importlib
import re
import shlex
import sys
from pathlib import Path

import nbformat
import pytest
import torch
from conftest import ROOT, make_images, make_sdxl
from diffusers import AutoencoderKL, UNet2DConditionModel
from IPython.core.inputtransformer2 import TransformerManager
from nbclient import NotebookClient
from test_docs import find_script
from transformers import CLIPTextModel, CLIPTextModelWithProjection

sys.path.insert(0, str(ROOT / "benchmarks"))
import memory

PATH = ROOT / "examples/sdxl_lora.ipynb"
PARTS = {
    "vae": AutoencoderKL,
    "unet": UNet2DConditionModel,
    "text_encoder": CLIPTextModel,
    "text_encoder_2": CLIPTextModelWithProjection,
}


def read_notebook():
    """The notebook, without the cells that need a network."""
    notebook = nbformat.read(PATH, as_version=4)
    nbformat.validate(notebook)
    cells = notebook.cells
    tags = {tag for cell in cells for tag in cell.metadata.get("tags", [])}
    assert tags == {"network", "parameters"}
    notebook.cells = [
        cell
        for cell in cells
        if cell.cell_type == "code" and "network" not in cell.metadata.get("tags", [])
    ]
    return notebook


def find_parameters(notebook):
    (cell,) = (cell for cell in notebook.cells if "parameters" in cell.metadata.get("tags", []))
    return cell


def test_notebook_cells_compile_and_use_existing_flags(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("photographs").mkdir()
    notebook = read_notebook()
    values = {}
    exec(find_parameters(notebook).source, values)
    values["prompts"] = "a b"
    scripts = []
    for cell in nbformat.read(PATH, as_version=4).cells:
        if cell.cell_type == "code":
            compile(TransformerManager().transform_cell(cell.source), PATH.name, "exec")
    for cell in notebook.cells:
        for command in re.findall(r"^!(.*?[^\\])$", cell.source, re.M | re.S):
            words = shlex.split(command.replace("\\\n", " ").format(**values))
            script, flags = find_script(words)
            args = importlib.import_module(script.removesuffix(".py")).parse_args(flags)
            assert args.variant == "fp16"
            scripts.append(script)
    assert scripts == ["precompute_latents.py", "train_text_to_image.py"]


def test_notebook_fits_into_the_hosts_memory():
    """GB of the encoders at the start, then of the base in 16 bits; for samples, all in 16 bits."""
    ((_, encoders, base),) = memory.list_host(["SDXL"])
    with torch.device("meta"):
        parts = [memory.make_vae(memory.MODELS["SDXL"])]
        parts += memory.make_encoders(memory.MODELS["SDXL"])
    drawing = float(base) + 2 * sum(map(memory.count_numbers, parts)) / 1e9
    text = " ".join(nbformat.read(PATH, as_version=4).cells[0].source.split())
    assert f"at most {drawing:.1f} GB of the host's memory" in text
    room = 12 - 3  # Python, PyTorch and CUDA
    assert max(drawing, float(encoders), float(base)) < room


@pytest.mark.long
def test_notebook_runs_from_top_to_bottom(tmp_path):
    base = make_sdxl(tmp_path)
    for name, kind in PARTS.items():
        part = kind.from_pretrained(base / name)
        (base / name / "model.safetensors").unlink(missing_ok=True)
        (base / name / "diffusion_pytorch_model.safetensors").unlink(missing_ok=True)
        part.save_pretrained(base / name, variant="fp16")
    make_images(tmp_path / "photographs", 3)
    for path in ROOT.iterdir():
        if path.suffix == ".py" or path.name == "diffusion_training":
            (tmp_path / path.name).symlink_to(path)
    notebook = read_notebook()
    values = {"BASE": str(base), "PRECISION": "no", "RESOLUTION": 16, "BUCKET_STEP": 4, "RANK": 4}
    values |= {"STEPS": 1, "DRAWING_STEPS": 1}
    lines = [f"{name} = {value!r}" for name, value in values.items()]
    find_parameters(notebook).source += "\n" + "\n".join(lines)
    NotebookClient(notebook, resources={"metadata": {"path": str(tmp_path)}}).execute()
    assert (tmp_path / "lora-dog/pytorch_lora_weights_kohya.safetensors").is_file()
    assert (tmp_path / "drawn.png").is_file()
    samples = {path.name for path in (tmp_path / "lora-dog/samples").iterdir()}
    assert samples == {"step-0000000.png", "step-0000001.png"}
