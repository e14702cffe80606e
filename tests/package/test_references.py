"""Reference images: files and columns, gaps, sizes, crops and mirrors."""

import json

import datasets
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from conftest import MODELS, Script, make_klein, patch
from PIL import Image

import precompute_latents
from diffusion_training.data.captioned_images import CaptionedImages
from diffusion_training.data.encoders import load_text_encoders
from diffusion_training.data.folders import count_references, list_paths
from diffusion_training.data.references import (
    add_references,
    choose_result_size,
    list_reference_columns,
    read_reference,
    resize_reference,
)
from diffusion_training.data.rows import load_rows
from diffusion_training.data.texts import CaptionChoice
from diffusion_training.data.transform_settings import make_transform
from diffusion_training.data.transforms import transform_row
from diffusion_training.errors.sentences import Refused
from diffusion_training.families.opening import open_base
from diffusion_training.latents.reader import CachedLatents, load_cache


def draw(path, size=(8, 8), seed=0):
    path.parent.mkdir(exist_ok=True)
    pixels = np.random.default_rng(seed).integers(0, 255, (size[1], size[0], 3), np.uint8)
    Image.fromarray(pixels).save(path)
    return pixels


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in "abc":
        draw(tmp_path / "photos" / f"{name}.png", seed=ord(name))
        (tmp_path / "photos" / f"{name}.txt").write_text("make it blue")
    return tmp_path / "photos"


def open_rows(*flags):
    args = precompute_latents.parse_args([
        "--pretrained_model_name_or_path=base", "--train_data_dir=photos", *map(str, flags)
    ])  # fmt: skip
    images = load_rows(args, others=["text"], add_references=add_references)
    return count_references(args), images.rows, list_reference_columns(images.rows, args)


def name_references(rows, columns):
    return [
        [value and value["path"] and value["path"].rsplit("/", 1)[1] for value in rows[name]]
        for name in columns
    ]


def test_a_control_file_is_the_reference_of_its_image_and_never_a_row(folder, capsys):
    draw(folder / "a.control.png")
    draw(folder / "c.CONTROL.jpg")
    count, rows, columns = open_rows()
    assert count == 1 and columns == ["conditioning_image"]
    assert name_references(rows, columns) == [["a.control.png", "c.CONTROL.jpg"]]
    assert "1 image of 3 without a reference left out" in capsys.readouterr().out
    _, rows, columns = open_rows("--allow_missing_conditioning")
    assert name_references(rows, columns) == [["a.control.png", None, "c.CONTROL.jpg"]]
    before = rows._fingerprint
    draw(folder / "a.control.png", size=(9, 9))
    assert open_rows("--allow_missing_conditioning")[1]._fingerprint != before
    draw(folder / "a.control.jpg")
    with pytest.raises(Refused, match="are references of the same image: delete one"):
        open_rows()


def test_a_folder_is_listed_once_for_its_rows(folder, monkeypatch):
    """With masks, captions and references in files; once more to count the references."""
    draw(folder / "a.control.png")
    draw(folder / "a.mask.png")
    found = []
    patch(monkeypatch, "list_paths", lambda path: found.append(path) or list_paths(path))
    assert open_rows()[0] == 1
    assert found == [str(folder)] * 2


def test_folders_of_references_have_the_names_of_the_images(folder, tmp_path):
    for place, names in {"before": "abc", "masks": "ab"}.items():
        for name in names:
            draw(tmp_path / place / f"{name}.jpg")
    flags = ["--conditioning_data_dir", "before", "masks"]
    count, rows, columns = open_rows(*flags)
    assert count == 2 and len(rows) == 2
    assert columns == ["conditioning_image", "conditioning_image_2"]
    assert name_references(rows, columns) == [["a.jpg", "b.jpg"]] * 2
    draw(tmp_path / "other/x.png")
    with pytest.raises(Refused, match="no file in --conditioning_data_dir other has the name"):
        open_rows("--conditioning_data_dir", "other")
    draw(folder / "inside/a.png")
    with pytest.raises(Refused, match="photos/inside lies in"):
        open_rows("--conditioning_data_dir", "photos/inside")


def test_columns_of_references_may_be_several_and_have_gaps(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "photos").mkdir()
    draw(tmp_path / "x.png")
    image = {"bytes": (tmp_path / "x.png").read_bytes(), "path": None}
    columns = {"image": [image] * 3, "one": [image, None, image], "two": [image, image, None]}
    table = pa.table({**columns, "text": ["a", "b", "c"]})
    pq.write_table(table, tmp_path / "photos/train.parquet")
    flags = ["--conditioning_image_column", "one", "two"]
    count, rows, columns = open_rows(*flags)
    assert count == 2 and rows["text"][:] == ["a"]
    assert "2 images of 3 without a reference left out" in capsys.readouterr().out
    assert len(open_rows(*flags, "--allow_missing_conditioning")[1]) == 3
    with pytest.raises(Refused, match="no column 'three'.*--conditioning_image_column"):
        open_rows("--conditioning_image_column", "three")


def transform(folder, *flags):
    """The first row of a folder: (its item, its stored image, its stored reference)."""
    args = precompute_latents.parse_args([
        "--pretrained_model_name_or_path=base", f"--train_data_dir={folder}", *map(str, flags)
    ])  # fmt: skip
    images = load_rows(args, others=["text"], add_references=add_references)
    made = make_transform(
        args, images.column, None, None, 3, 16, list_reference_columns(images.rows, args), 32, 4
    )  # fmt: skip
    return transform_row(0, 0, images.rows[0], made)


def test_a_reference_of_equal_size_gets_the_crop_of_its_image(tmp_path):
    pixels = draw(tmp_path / "photos/a.png", (48, 24))
    Image.fromarray(pixels).save(tmp_path / "photos/a.control.png")
    (tmp_path / "photos/a.txt").write_text("x")
    item = transform(tmp_path / "photos")
    (reference,) = item["references"]
    assert item["is_aligned"] and item["pixel_values"].shape == (3, 16, 16)
    assert reference.size == (32, 32)  # the side of references
    shrunk = np.asarray(reference.resize((16, 16), Image.BOX), float)
    image = item["pixel_values"].permute(1, 2, 0).numpy().astype(float)
    assert abs(shrunk - image).mean() < 15 < abs(shrunk[:, ::-1] - image).mean()


def test_a_reference_of_another_size_is_only_resized(tmp_path):
    draw(tmp_path / "photos/a.png", (48, 24))
    draw(tmp_path / "photos/a.control.png", (30, 60))
    (tmp_path / "photos/a.txt").write_text("x")
    item = transform(tmp_path / "photos")
    (reference,) = item["references"]
    assert not item["is_aligned"] and item["pixel_values"].shape == (3, 16, 16)
    assert reference.size == (23, 45)  # its own ratio, and about 32 x 32 pixels
    # a smaller one is not enlarged, unless it would be too small for FLUX.2
    for size, side, expected in (
        ((80, 100), 1024, (80, 100)),
        ((20, 40), 1024, (64, 128)),
        ((20, 40), 32, (23, 45)),
    ):
        found = resize_reference(torch.zeros(3, *size, dtype=torch.uint8), side, "bicubic")
        assert found.shape == (3, *expected)


def test_the_result_of_an_edit_has_the_nearest_ratio():
    assert choose_result_size(100, 100, 1024, 16) == [1024, 1024]
    assert choose_result_size(90, 160, 1024, 16) == [768, 1344]


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
def test_a_reference_of_a_sample_is_resized_as_in_training(tmp_path, mode):
    draw(tmp_path / "photos/a.png", (48, 24))
    draw(tmp_path / "photos/a.control.png", (300, 600))
    (tmp_path / "photos/a.txt").write_text("x")
    (trained,) = transform(tmp_path / "photos", f"--image_interpolation_mode={mode}")["references"]
    drawn = read_reference(str(tmp_path / "photos/a.control.png"), 32, mode)
    assert np.array_equal(drawn, trained)


def test_a_broken_reference_skips_its_row_with_the_reason(tmp_path):
    draw(tmp_path / "photos/a.png")
    (tmp_path / "photos/a.control.png").write_bytes(b"x" * 100)
    (tmp_path / "photos/a.txt").write_text("x")
    item = transform(tmp_path / "photos")
    assert "its reference can't be used" in item["skipped"]
    assert [image.size for image in item["references"]] == [(32, 32)]


def test_references_are_read_beside_images_cropped_and_mirrored_as_they_are(tmp_path):
    for name in "abc":
        pixels = draw(tmp_path / f"photos/{name}.png", (48, 24), seed=ord(name))
        (tmp_path / f"photos/{name}.txt").write_text("x")
        Image.fromarray(pixels).save(tmp_path / f"photos/{name}.control.png")
    draw(tmp_path / "photos/b.control.png", (24, 12))
    (tmp_path / "photos/c.control.png").write_bytes(b"x" * 100)
    args = precompute_latents.parse_args([
        f"--pretrained_model_name_or_path={MODELS}", f"--train_data_dir={tmp_path / 'photos'}",
        "--random_flip",
    ])  # fmt: skip
    images = load_rows(args, others=["text"], add_references=add_references)
    columns = list_reference_columns(images.rows, args)
    made = make_transform(args, images.column, None, None, 3, 16, columns, 16)
    _, tokenizers = load_text_encoders(open_base(args), torch.float32)
    data = CaptionedImages(images, made, tokenizers, CaptionChoice(0, None), None, 0)
    batch = data[[(epoch, 0, 1.0) for epoch in range(8)]]
    assert 0 < batch["flipped"].sum() < 8
    assert torch.equal(batch["conditioning_pixel_values"], batch["pixel_values"])
    batch = data[[(0, row, 1.0) for row in range(3)]]
    assert batch["weight"].tolist() == [1, 0, 0]
    reasons = [reason for _, reason in batch["skipped"]]
    assert reasons[0] == "it has no reference of its own size"
    assert "its reference can't be used" in reasons[1]
    assert batch["conditioning_pixel_values"].shape == (3, 3, 16, 16)


def test_a_cache_of_pairs_mirrors_aligned_pairs_and_groups_by_all_sizes(tmp_path):
    folder = tmp_path / "pairs"
    sizes = {"a": ((64, 64), (64, 64)), "b": ((64, 64), (64, 128)), "c": ((64, 64), (64, 64))}
    for name, (size, reference) in sizes.items():
        draw(folder / f"{name}.png", size, seed=ord(name))
        draw(folder / f"{name}.control.png", reference, seed=ord(name) + 9)
        (folder / f"{name}.txt").write_text("x")
    draw(folder / "d.png", (64, 64))
    (folder / "d.txt").write_text("x")
    base = f"--pretrained_model_name_or_path={make_klein(tmp_path / 'base')}"
    output = tmp_path / "cache"
    # klein's pipeline takes no reference with a side below 64 pixels
    flags = [base, f"--train_data_dir={folder}", "--resolution=128", "--random_flip"]
    flags += ["--dataloader_num_workers=0", f"--output_dir={output}", "--max_sequence_length=64"]
    Script("precompute_latents")(*flags, "--allow_missing_conditioning")
    settings = json.loads((output / "cache.json").read_text())
    assert "references" in settings["features"]
    rows = datasets.load_from_disk(output)
    found = {row["key"][0]: row for row in rows}
    for name, row in found.items():
        latents, mirrored = np.array(row["latents"]), np.array(row["latents_flipped"])
        assert np.array_equal(latents, mirrored) == (name == "b")
        if name != "d":
            pair = row["reference_0"], row["reference_0_flipped"]
            assert np.array_equal(*map(np.array, pair)) == (name == "b")
    assert found["d"]["reference_0"] == [] and found["d"]["reference_sizes"] == [0, 0, 0, 0]
    reader = CachedLatents({str(output): load_cache(output)}, 0, True)
    assert len(np.unique(reader.sizes, axis=0)) == 3  # a and c share a batch
    names = [*reader.names()]
    number = names.index("b.png")
    batch = reader[[(0, number, 1.0)]]
    height, width, *pixels = batch["reference_sizes"][0]
    assert batch["reference_0"].shape == (1, 4 * height * width) and pixels[0] > pixels[1]
    assert "reference_0" not in reader[[(0, names.index("d.png"), 1.0)]]
    # the row's checksum covers the references
    shard = next(output.glob("data-*.arrow"))
    content = bytearray(shard.read_bytes())
    needle = np.array(found["a"]["reference_0"], np.float16).tobytes()
    content[content.index(needle) + 5] ^= 1
    shard.write_bytes(content)
    with pytest.raises(OSError, match="is damaged"):
        damaged = CachedLatents({str(output): load_cache(output)}, 0, True)
        damaged[[(0, names.index("a.png"), 1.0)]]


def test_flags_of_references_that_do_not_fit_are_refused(tmp_path, capsys):
    flags = ["--pretrained_model_name_or_path=x", f"--train_data_dir={tmp_path}"]
    flags += ["--conditioning_image_column", "a"]
    for script, more, sentence in [
        ("precompute_latents", ["--conditioning_data_dir", "b"], "not both"),
        ("precompute_latents", ["--streaming"], "leave --streaming out"),
        ("train_flow", [], "is for making a cache: add --cache_latents"),
    ]:
        assert sentence in Script(script).refused(*flags, *more, status=2)


def test_a_reference_that_the_pipeline_can_not_take_is_named(tmp_path):
    folder = tmp_path / "pairs"
    for name, reference in {"a": (128, 128), "b": (2000, 200)}.items():
        draw(folder / f"{name}.png", (128, 128))
        draw(folder / f"{name}.control.png", reference)
        (folder / f"{name}.txt").write_text("x")
    flags = [f"--pretrained_model_name_or_path={make_klein(tmp_path / 'base')}"]
    flags += [f"--train_data_dir={folder}", "--resolution=128", "--dataloader_num_workers=0"]
    flags += [f"--output_dir={tmp_path / 'cache'}", "--max_sequence_length=64"]
    said = Script("precompute_latents").refused(*flags)
    assert "b.png: Flux2KleinPipeline can't take references of 405 x 40 pixels: Image too" in said
