"""The additional stage of docs/cluster.md: its changes are applied to the scripts and run."""

import importlib
import io
import json
import shutil
import sys

import datasets
import pytest
import test_precompute_latents_ray as on_ray  # skips these tests if there is no Ray
import torch
import transformers
from conftest import MODELS, ROOT, make_captioned
from image_server import FLAGS, ImageServer, make_image
from PIL import Image
from test_changes import apply, change_text, run
from test_download_images import make_table, read_failures, read_rows, run_items_without_ray
from test_precompute_latents_ray import without_ray  # noqa: F401

ray = pytest.importorskip("ray")

CHANGES = {
    "download_images": (ROOT / "patches/stage_download.diff").read_text(),
    "precompute_latents": (ROOT / "patches/stage_cache.diff").read_text(),
    "precompute_latents_ray": (ROOT / "patches/stage_ray.diff").read_text(),
}


@pytest.fixture
def stage(tmp_path, monkeypatch):
    """examples/stage.py, with its filter in a folder."""
    shutil.copy(ROOT / "examples/stage.py", tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("stage")
    module.FILTER = str(tmp_path / "filter")
    yield module
    del sys.modules["stage"]


def make_filter(folder, images):
    """A filter with random weights that passes half of the images."""
    names = ["normal", "nsfw"]
    config = transformers.ViTConfig(
        hidden_size=16,
        intermediate_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        image_size=16,
        id2label=dict(enumerate(names)),
        label2id={name: i for i, name in enumerate(names)},
    )
    transformers.set_seed(0)
    model = transformers.ViTForImageClassification(config).eval()
    processor = transformers.ViTImageProcessor(size={"height": 16, "width": 16})
    with torch.inference_mode():
        logits = model(**processor(images, return_tensors="pt")).logits
        model.classifier.bias[1] -= (logits[:, 1] - logits[:, 0]).median()
    for part in (model, processor):
        part.save_pretrained(folder)


def test_patches_for_a_stage_have_fewer_than_ten_lines(tmp_path, stage):
    for name, change in CHANGES.items():
        _, lines = change_text(change, f"{name}.py")
        assert len(lines) < 10 and max(map(len, lines)) <= 101


def test_a_stage_filters_downloaded_images(tmp_path, stage, monkeypatch):
    script = apply(CHANGES["download_images"], "download_images.py", tmp_path)
    monkeypatch.setattr(
        script, "run_items", lambda *args: run_items_without_ray(*args, script=script)
    )
    server = ImageServer()
    table = make_table(tmp_path / "urls.parquet", [f"{server.url}/image/{i}" for i in range(9)])
    flags = [f"--input={table}", f"--output_dir={tmp_path / 'out'}", "--keep_columns", "id", *FLAGS]
    images = [Image.open(io.BytesIO(make_image(i))).convert("RGB") for i in range(9)]
    make_filter(tmp_path / "filter", images)
    faults = [stage.find_fault(make_image(i)) for i in range(9)]
    assert 0 < faults.count("unsafe") < 9
    run(script, *flags)
    server.close()
    assert [row["id"] for row in read_rows(tmp_path / "out")] == [
        i for i, fault in enumerate(faults) if not fault
    ]
    failures = read_failures(tmp_path / "out")
    assert {failure["reason"] for failure in failures} == {"unsafe"}
    stage.NAME = "another"
    with pytest.raises(SystemExit):
        run(script, *flags)


def test_a_stage_filters_a_cache_and_rewrites_its_captions(
    tmp_path, stage, monkeypatch, request, capsys
):
    """Without Ray's processes: the cache equals the other script's except for the captions."""
    make_captioned(tmp_path / "images", 12)
    images = [Image.open(path).convert("RGB") for path in (tmp_path / "images").glob("*.png")]
    make_filter(tmp_path / "filter", images)
    flags = [f"--train_data_dir={tmp_path / 'images'}", f"--pretrained_model_name_or_path={MODELS}"]
    flags += ["--resolution=16", "--batch_size=4", "--max_skipped=0.9", "--rows_per_shard=8"]
    flags += ["--center_crop", "--dataloader_num_workers=0"]
    script = apply(CHANGES["precompute_latents"], "precompute_latents.py", tmp_path)
    run(script, *flags, f"--output_dir={tmp_path / 'out'}")
    skipped = [
        json.loads(line) for line in (tmp_path / "out/skipped.jsonl").read_text().splitlines()
    ]
    assert 0 < len(skipped) < 12 and {row["reason"] for row in skipped} == {"unsafe"}
    assert json.loads((tmp_path / "out/cache.json").read_text())["stage"] == stage.NAME
    capsys.readouterr()
    name, stage.NAME = stage.NAME, "another"
    with pytest.raises(SystemExit):
        run(script, *flags, f"--output_dir={tmp_path / 'out'}")
    assert "stage" in capsys.readouterr().err
    stage.NAME = name

    class Rewriter(stage.Rewriter):
        def __init__(self):
            self.model = lambda texts, return_full_text: [
                [{"generated_text": text.upper()}] for text in texts
            ]

    monkeypatch.setattr(stage, "Rewriter", Rewriter)
    for name in ("precompute_latents", script.__name__):
        monkeypatch.setitem(sys.modules, name, script)
    changed = apply(CHANGES["precompute_latents_ray"], "precompute_latents_ray.py", tmp_path)
    monkeypatch.setitem(sys.modules, changed.__name__, changed)
    monkeypatch.setattr(on_ray, "script", changed)
    run_on_ray = request.getfixturevalue("without_ray")
    actors = {}

    class Named:
        """An actor with a name, as `ray.remote` makes it."""

        def __init__(self, actor):
            self.actor = actor

        def options(self, name):
            actors[name] = on_ray.argparse.Namespace(rewrite=on_ray.Remote(self.actor().rewrite))
            return self

        def remote(self):
            return None

    remote = changed.ray.remote
    changed.ray.remote = lambda **options: (
        Named if "num_gpus" in options and len(options) == 1 else remote(**options)
    )
    for name, value in {
        "is_initialized": lambda: True,
        "get_actor": actors.__getitem__,
        "get": changed.ray.get,
    }.items():
        monkeypatch.setattr(ray, name, value)
    code, said = run_on_ray(*flags, f"--output_dir={tmp_path / 'ray'}")
    assert code == 0, said
    one, other = (datasets.load_from_disk(str(tmp_path / name)) for name in ("out", "ray"))
    assert other["key"][:] == one["key"][:] and other["latents"][:] == one["latents"][:]
    assert other["text"][:] == [text.upper() for text in one["text"][:]]
