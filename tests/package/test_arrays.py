"""Arrays of images: memory-mapped, of any layout and value range; unusable ones are refused."""

import os
import pickle
import resource

import numpy as np
import pytest
import torch
from conftest import Script
from diffusers import DiffusionPipeline, UNet2DModel

from diffusion_training.data.arrays import load_images

train = Script("train_unconditional")
VALUES = np.random.default_rng(0).integers(0, 256, (6, 2, 16, 12), np.uint8)


@pytest.fixture
def save(tmp_path):
    """`save(array, *more)` saves an array and returns the flags of a run on it."""

    def save(array, *more):
        np.save(tmp_path / "images.npy", array)
        return [f"--train_data_dir={tmp_path / 'images.npy'}", "--resolution=16", *more]

    return save


def read(flags, channels=2):
    images = load_images(train.module.parse_args(flags), channels=channels)
    rows = images.rows[[*range(len(images.rows))]][images.column]
    return torch.stack([row["pixels"] for row in rows])


@pytest.mark.parametrize("keep", ["--preserve_input_precision", "--no-preserve_input_precision"])
def test_array_layouts_and_ranges_give_the_same_images(save, keep):
    wanted = torch.from_numpy(VALUES)
    wanted = wanted / 255 if keep.startswith("--pre") else wanted
    shares = VALUES.astype(np.float64) / 255
    for array, flags in (
        (VALUES, []),
        (VALUES.transpose(0, 2, 3, 1), []),
        (np.asfortranarray(VALUES), ["--array_layout=nchw"]),
        (shares, ["--array_range", "0", "1"]),
        ((2 * shares - 1).astype(np.float32), ["--array_range", "-1", "1"]),
    ):
        assert torch.allclose(read(save(array, keep, *flags)), wanted, atol=1e-6)
    one = read(save(VALUES[:, 0], keep), 1)
    assert torch.equal(one, wanted[:, :1])
    few = read(save(VALUES, keep, "--max_train_samples=2"))
    assert len(few) == 2 and all((row == wanted).flatten(1).all(1).any() for row in few)


def test_arrays_of_wrong_shape_type_or_range_are_refused(save):
    square = np.zeros((3, 2, 2, 2), np.uint8)
    assert read(save(square, "--array_layout=nhwc")).shape == (3, 2, 2, 2)
    for array, flags, sentence in (
        (square, [], "choose the axis of the channels with --array_layout nchw or nhwc"),
        (VALUES[:, :1], [], "has the shape [6, 1, 16, 12], but the model takes 2 channels"),
        (VALUES, ["--array_layout=nhwc"], "with --array_layout nhwc, but the model takes 2"),
        (VALUES[0, 0], [], "but images need [N, C, H, W]"),
        (VALUES / 255, [], "holds float64: give its values of black and white with --array_range"),
        (VALUES, ["--array_range", "0", "1"], "holds uint8: leave --array_range out"),
        (VALUES / 255, ["--array_range", "0", "0.5"], "--array_range must be 0 1 or -1 1"),
        (VALUES.astype(np.int16), [], "holds int16: convert it to uint8, or to floats"),
        (VALUES / 1.0, ["--array_range", "-1", "1"],
         "image 0 has values from 0 to 255, outside --array_range -1 1"),
        (np.full((2, 2, 3, 3), np.nan), ["--array_range", "0", "1"], "values from nan to nan"),
        (np.array([{}]), [], "can't be read as an array (Array can't be memory-mapped"),
    ):  # fmt: skip
        with pytest.raises(SystemExit) as stop:
            read(save(array, *flags))
        assert sentence in str(stop.value), sentence


def test_an_array_that_is_cut_short_while_it_is_read_ends_in_a_sentence(save, tmp_path):
    """Reading memory beyond the end of the file would kill the process."""
    flags = save(np.zeros((50, 2, 64, 64), np.uint8))
    rows = load_images(train.module.parse_args(flags), channels=2).rows
    assert rows[49]["image"]["pixels"].shape == (2, 64, 64)
    path = tmp_path / "images.npy"
    size = path.stat().st_size
    os.truncate(path, 5000)
    with pytest.raises(
        SystemExit, match=f"npy has 5000 bytes, and had {size} when the run began"
    ) as stop:
        rows[49]
    assert stop.value.alone  # only this process may know
    with path.open("ab") as file:
        file.truncate(size)
    assert rows[49]


def test_files_that_are_not_npy_arrays_are_refused(tmp_path):
    path = tmp_path / "IMAGES.NPY"  # the suffix in any case
    np.savez(tmp_path / "archive.npz", VALUES)
    for content in (b"no array", (tmp_path / "archive.npz").read_bytes()):
        path.write_bytes(content)
        with pytest.raises(SystemExit, match="can't be read as an array .the magic string is not"):
            load_images(train.module.parse_args([f"--train_data_dir={path}"]), channels=2)


def test_bad_array_flags_end_with_one_line(tmp_path, save):
    for flags, sentence in (
        (["--cache_images"], "leave --cache_images and --streaming out: an array"),
        (
            [f"--train_data_dir={tmp_path}", "--array_layout=nchw"],
            "need an array: --train_data_dir",
        ),
        ([f"--train_data_dir={tmp_path}/no.npy"], "is not a folder, nor an .npy file"),
    ):
        assert sentence in train.refused(*save(VALUES, *flags), status=2)


def test_an_array_is_never_copied_into_memory(tmp_path):
    """One row of a file of 256 MB is read, also by a reader that was pickled."""
    array = np.lib.format.open_memmap(tmp_path / "large.npy", "w+", np.uint8, (2**16, 1, 64, 64))
    array[-1] = 7
    args = train.module.parse_args([f"--train_data_dir={tmp_path}/large.npy"])
    del array
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    rows = load_images(args, channels=1).rows
    sent = pickle.dumps(rows)
    assert (pickle.loads(sent)[2**16 - 1]["image"]["pixels"] == 7).all()
    assert len(sent) < 2**21  # the numbers of the rows
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 * 1024  # KiB


@pytest.mark.usefixtures("without_figures")
def test_a_two_channel_model_trains_holds_out_images_and_samples(
    tmp_path, save, unet_config, capfd
):
    """A value out of range ends the run with a sentence, also in a loader process."""
    config = UNet2DModel.load_config(unet_config) | {"in_channels": 2, "out_channels": 2}
    UNet2DModel.from_config(config).save_config(tmp_path / "two")
    more = f"""--array_range 0 1 --model_config_name_or_path {tmp_path}/two --holdout 2
        --train_batch_size 2 --max_train_steps 2 --lr_warmup_steps 0""".split()
    train(*train.flags(tmp_path / "out", *save(VALUES / 255, *more)))
    pipeline = DiffusionPipeline.from_pretrained(tmp_path / "out")
    assert pipeline(num_inference_steps=1, output_type="np").images.shape == (1, 16, 16, 2)
    assert 'output_type="np"' in (tmp_path / "out/README.md").read_text()
    assert len(list((tmp_path / "out/samples").iterdir())) == 1
    flags = train.flags(tmp_path / "b", *save(VALUES / 200, *more), "--dataloader_num_workers=1")
    assert "outside --array_range 0 1" in train.refused(*flags)
    assert "Traceback" not in capfd.readouterr().err
