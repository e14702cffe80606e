"""Rows that were chosen with `datasets` become a cache again, or an error explains why not.

The page on caches shows the same commands.
"""

import math
import shutil

import datasets
import pytest
import torch
from test_cache import make_cache

from diffusion_training.latents.filtered import main, parse_args
from diffusion_training.latents.reader import CachedLatents, load_cache


def read(folder):
    cache = CachedLatents({str(folder): load_cache(folder)}, 0, False)
    return cache[[(0, row, 1.0) for row in range(len(cache))]]


def filtered(tmp_path, name="new"):
    flags = [f"--like={tmp_path / 'cache'}", f"--output_dir={tmp_path / name}"]
    main(parse_args([str(tmp_path / "chosen"), *flags]))
    return tmp_path / name


@pytest.mark.parametrize("text_cache", ["embeddings", "ids"])
def test_rows_chosen_with_datasets_become_a_cache(tmp_path, text_cache):
    make_cache(tmp_path / "cache", f"--text_cache={text_cache}")
    rows = datasets.load_from_disk(str(tmp_path / "cache"))
    chosen = rows.filter(lambda row: row["key"] != rows["key"][1]).add_column("score", [1] * 5)
    chosen.save_to_disk(tmp_path / "chosen")
    before, after = read(tmp_path / "cache"), read(filtered(tmp_path))
    for name in ("latents", "prompt_embeds" if text_cache == "embeddings" else "input_ids"):
        assert torch.equal(after[name], before[name][[0, 2, 3, 4, 5]])
    opened = load_cache(tmp_path / "new")
    assert opened.settings["rows"] == 5 and set(opened.empty_prompt) == set(
        load_cache(tmp_path / "cache").empty_prompt
    )
    assert datasets.load_from_disk(str(tmp_path / "new"))["key"][:] == chosen["key"][:]


def test_a_filtered_cache_of_several_shards_refuses_the_same_rows(tmp_path, capfd):
    make_cache(tmp_path / "cache")
    make_cache(tmp_path / "other", seed=1)
    cache, other = (
        datasets.load_from_disk(str(tmp_path / name), keep_in_memory=True)
        for name in ("cache", "other")
    )
    twice = datasets.concatenate_datasets([cache, cache])
    twice.save_to_disk(tmp_path / "chosen")
    before, after = read(tmp_path / "cache"), read(filtered(tmp_path))
    assert len(load_cache(tmp_path / "new").settings["shards"]["name"]) == 4
    assert torch.equal(after["latents"], torch.cat([before["latents"]] * 2))
    shutil.rmtree(tmp_path / "chosen")
    mixed = datasets.concatenate_datasets([cache, other.select([2]), cache])
    mixed.save_to_disk(tmp_path / "chosen")
    with pytest.raises(SystemExit):
        filtered(tmp_path, "mixed")
    assert "row 6 is of another cache than" in capfd.readouterr().err


def test_rows_mapped_through_torch_become_a_cache(tmp_path):
    """These rows have another precision, and checksums that do not fit."""
    make_cache(tmp_path / "cache")
    rows = datasets.load_from_disk(str(tmp_path / "cache"))
    rows.with_format("torch").map(dict).save_to_disk(tmp_path / "chosen")
    before, after = read(tmp_path / "cache"), read(filtered(tmp_path))
    assert torch.equal(after["latents"], before["latents"])


def test_an_interrupted_filter_command_can_be_run_again(tmp_path, monkeypatch):
    make_cache(tmp_path / "cache")
    datasets.load_from_disk(str(tmp_path / "cache")).save_to_disk(tmp_path / "chosen")
    with monkeypatch.context() as m, pytest.raises(KeyboardInterrupt):
        m.setattr("diffusion_training.latents.filtered.finish_cache", interrupt)
        m.setattr("diffusion_training.latents.filtered.read_bytes", interrupt)
        filtered(tmp_path)
    assert len(read(filtered(tmp_path))["latents"]) == 6


def change(rows, name, function):
    """Rows in which the first one has another value in a column."""
    first = lambda row, number: {name: row[name] if number else function(row[name])}
    return rows.map(first, with_indices=True, features=rows.features)


def test_a_folder_of_rows_gets_the_command_that_makes_a_cache(tmp_path, monkeypatch):
    make_cache(tmp_path / "cache")
    monkeypatch.chdir(tmp_path)
    datasets.load_from_disk(str(tmp_path / "cache")).save_to_disk(tmp_path / "chosen")
    with pytest.raises(SystemExit) as stop:
        load_cache(tmp_path / "chosen")
    command = str(stop.value).partition("python -m diffusion_training.latents.filtered ")[2]
    main(parse_args(command.replace("CACHE", str(tmp_path / "cache")).split()))
    assert len(read("NEW")["latents"]) == 6


def interrupt(*args):
    raise KeyboardInterrupt


def test_filtered_rows_that_do_not_fit_the_cache_are_refused(tmp_path, capfd):
    make_cache(tmp_path / "cache")
    rows = datasets.load_from_disk(str(tmp_path / "cache"))
    other = str(tmp_path / "other")
    make_cache(tmp_path / "other", seed=1)
    for chosen, said in [
        (rows.remove_columns("latents"), "no column 'latents'"),
        (rows.select([]), "chosen is not a folder of save_to_disk (it holds no rows)"),
        (datasets.load_from_disk(other).remove_columns("checksum"), "no column 'checksum'"),
        (change(rows, "latents", lambda numbers: None), "'latents' has missing values: leave"),
        (change(rows, "latents", lambda numbers: [math.nan] * len(numbers)), "are not finite: le"),
        (datasets.load_from_disk(other), "row 0 is of another cache than"),
        (datasets.DatasetDict(train=rows), "several splits: train"),
    ]:
        chosen.save_to_disk(tmp_path / "chosen")
        with pytest.raises(SystemExit):
            filtered(tmp_path)
        assert said in capfd.readouterr().err
        shutil.rmtree(tmp_path / "chosen")
    rows.save_to_disk(tmp_path / "chosen")
    with pytest.raises(SystemExit):
        filtered(tmp_path, "cache")  # not into the cache itself
    assert "choose another folder" in capfd.readouterr().err
