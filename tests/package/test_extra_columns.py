"""An extra column of a cache: an entry in EXTRA_COLUMNS, and the line that computes it."""

import pyarrow as pa
import pytest
import torch
from conftest import Script, make_captioned, make_models, patch

from diffusion_training.latents.columns import Column
from diffusion_training.latents.reader import CachedLatents, load_cache

precompute = Script("precompute_latents")
COLUMN = Column("brightness", "float16", (2, 2), is_optional=True, is_map=True)


@pytest.fixture
def cached(tmp_path, monkeypatch):
    """A cache with an extra column: four means of each image."""
    make_captioned(tmp_path / "images", 6)
    models = make_models(tmp_path)
    patch(monkeypatch, "EXTRA_COLUMNS", (COLUMN,))
    encode = precompute.module.encode

    def encode_more(batch, *given):
        encoded = encode(batch, *given)
        pooled = [
            torch.nn.functional.adaptive_avg_pool2d(images.float(), 2).mean(dim=1)
            for images in batch["pixel_values"]
        ]
        encoded.columns["brightness"] = [values.half().flatten(1) for values in pooled]
        return encoded

    monkeypatch.setattr(precompute.module, "encode", encode_more)
    flags = [f"--train_data_dir={tmp_path / 'images'}", f"--pretrained_model_name_or_path={models}"]
    precompute(*precompute.flags(tmp_path / "cache", *flags, "--center_crop", "--random_flip"))
    return tmp_path / "cache"


def read(folder, optional=(), random_flip=False):
    caches = {str(folder): load_cache(folder)}
    dataset = CachedLatents(caches, 0, random_flip, optional_columns=optional)
    return dataset[[(0, row, 1.0) for row in range(len(dataset))]]


def test_extra_columns_are_read_only_on_request(cached):
    assert "brightness" not in read(cached)
    values = read(cached, ["brightness"])["brightness"]
    assert values.shape == (6, 4) and values.dtype == torch.float16
    assert values.mean(dim=1).diff().gt(5).all()  # image i has the grey level 20 * i
    mirrored = read(cached, ["brightness"], random_flip=True)
    assert 0 < mirrored["flipped"].sum() < 6
    for plain, found, flip in zip(values, mirrored["brightness"], mirrored["flipped"], strict=True):
        plain = plain.view(2, 2)
        assert torch.equal(found.view(2, 2), plain.flip(-1) if flip else plain)


def rewrite(folder, name, change):
    """Change a column of the cache's only shard."""
    (path,) = folder.glob("*.arrow")
    table = pa.ipc.open_stream(path.read_bytes()).read_all()
    column = change(table[name].combine_chunks())
    table = table.set_column(table.schema.get_field_index(name), name, column)
    sink = pa.BufferOutputStream()
    with pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table)
    path.unlink()  # the old file may be mapped
    path.write_bytes(sink.getvalue().to_pybytes())


def test_damage_of_an_extra_column_is_found_only_when_it_is_read(cached):
    def reverse(column):
        return pa.FixedSizeListArray.from_arrays(column.flatten()[::-1], 4)

    rewrite(cached, "brightness", reverse)
    assert len(read(cached)["latents"]) == 6
    with pytest.raises(OSError, match="is damaged"):
        read(cached, ["brightness"])


def test_a_cache_with_an_unknown_extra_column_is_refused(cached, monkeypatch, capsys):
    patch(monkeypatch, "EXTRA_COLUMNS", ())
    with pytest.raises(SystemExit, match="brightness.*which this version can't read"):
        load_cache(cached)
