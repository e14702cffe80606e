"""minimal/precompute_latents.py writes the cache of the big script, and trainers open it."""

import json
import re
import shutil
import time

import datasets
import numpy as np
import pytest
from conftest import MODELS, Script, finish, kill, make_sdxl, read_files, start, wait_until
from diffusers import AutoencoderKL
from PIL import Image
from safetensors.torch import load_file, save_file
from test_minimal import (
    EXACT,
    PATHS,
    SHOWN,
    TEXT,
    assert_same_bits,
    make_pictures,
    make_unets,
    refused,
    run_big,
    run_twin,
    train,
)
from transformers import CLIPTextModel

from diffusion_training.latents import cache as cache_module
from diffusion_training.models import hash_weights

NAME = "precompute_latents"
BIG = Script(NAME)
PART = 2**12  # bytes of a part of a shard, in place of 2**26, so that shards have several
pytestmark = pytest.mark.usefixtures("without_figures")


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    """A folder of pictures of all kinds with captions, two of them unusable."""
    folder = tmp_path_factory.mktemp("inputs")
    with pytest.MonkeyPatch.context() as m:
        m.setattr(datasets.config, "HF_DATASETS_CACHE", str(folder / "datasets-cache"))
        make_pictures(folder / "images")
        images = folder / "images"
        Image.open(images / "03.png").convert("RGB").save(images / "03.png", exif=turned())
        clear = Image.open(images / "05.png").convert("RGBA")
        clear.putalpha(100)
        clear.save(images / "05.png")
        (images / "07.png").write_bytes((images / "07.png").read_bytes()[:100])
        table = (images / "metadata.csv").read_text().splitlines()
        table[10] = table[10].partition(",")[0] + ","  # without a caption
        table[12] += ", and more words than the text encoder takes" * 9
        table[12] = table[12].replace(",", ',"', 1) + '"'
        (images / "metadata.csv").write_text("\n".join(table))
        yield folder


def turned():
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def cache_flags(inputs, *more):
    flags = [f"--train_data_dir={inputs / 'images'}", f"--pretrained_model_name_or_path={MODELS}"]
    return [*flags, "--resolution=16", "--rows_per_shard=8", "--batch_size=3", "--random_flip",
            "--max_skipped=0.2", *more]  # fmt: skip


def write_by_big(inputs, folder, *more):
    def run():
        cache_module.BATCH_BYTES = PART
        BIG(*cache_flags(inputs, *more), "--dataloader_num_workers=0", f"--output_dir={folder}")

    assert finish(start(run, log=folder.with_suffix(".log"))) == [0]
    return folder


def start_twin(folder, flags, num_processes=1):
    right = "2**26"
    text = PATHS[NAME].read_text()
    assert text.count(right) == 1
    text = text.replace(right, str(PART))
    argv = [*flags, f"--output_dir={folder}"]
    log = folder.with_suffix(".log")
    return start(lambda: run_twin(NAME, *argv, text=text), num_processes, log)


def write_by_twin(folder, flags, num_processes=1):
    """Write a cache, or what is missing of it. Returns what was printed."""
    codes = finish(start_twin(folder, flags, num_processes))
    said = folder.with_suffix(".log").read_text()
    assert set(codes) == {0}, said
    return said


def assert_same_cache(big, twin, least=4):
    """Equal bytes of all that a trainer reads, and an equal description of it.

    least: shards and empty prompts that there must be.
    """
    one, other = read_files(big), read_files(twin)
    names = [name for name in one if name.endswith((".arrow", ".npy"))]
    assert len(names) >= least
    assert [name for name in names if one[name] != other[name]] == []
    assert not any(".tmp-" in name for name in other)
    one, other = (json.loads(files["cache.json"]) for files in (one, other))
    for name in ("made_with", "version", "tokenizer_rules"):
        one.pop(name)
        other.pop(name, None)
    for cache in (one, other):  # `datasets` names the files of a folder in two ways
        assert cache["source"].pop("fingerprint")
    assert one == other
    assert [(entry["row"], entry["key"]) for entry in read_skipped(big)] == [
        (entry["row"], entry["key"]) for entry in read_skipped(twin)
    ]


def read_skipped(folder):
    return [json.loads(line) for line in (folder / "skipped.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def big(inputs):
    return write_by_big(inputs, inputs / "big")


def test_minimal_cache_has_the_bytes_of_the_big_script_also_after_a_kill(tmp_path, inputs, big):
    """A shard that was complete is kept, and one that was damaged since is made again."""
    flags = cache_flags(inputs)
    twin = tmp_path / "twin"
    pids = start_twin(twin, flags)
    wait_until(lambda: len(list(twin.glob("records/*.json"))) == 2)
    kill(pids)
    assert not (twin / "state.json").exists()
    kept, damaged, *_ = sorted(twin.glob("*.arrow"))
    before = kept.stat().st_ino
    with damaged.open("ab") as file:
        file.write(b"x")
    (twin / ".tmp-1-data.arrow").touch()  # as a kill leaves it
    said = write_by_twin(twin, flags)
    assert kept.stat().st_ino == before and said.count("rows 8 to 15 of 21") == 2
    assert_same_cache(big, twin)
    assert [entry["reason"] for entry in read_skipped(twin)][1] == "ValueError: it has no caption"
    opened = datasets.load_from_disk(str(twin))
    assert len(opened) == 19 and opened["text"][0].startswith("a")


@pytest.mark.parametrize(
    "num_processes, more",
    [
        pytest.param(2, [], marks=pytest.mark.ci),
        pytest.param(3, ["--center_crop", "--batch_size=8"], marks=pytest.mark.long),
        pytest.param(1, ["--seed=3"], marks=pytest.mark.long),
    ],
)
def test_minimal_cache_has_the_bytes_of_the_big_script(tmp_path, inputs, num_processes, more):
    big = write_by_big(inputs, tmp_path / "big", *more)
    write_by_twin(tmp_path / "twin", cache_flags(inputs, *more), num_processes)
    assert_same_cache(big, tmp_path / "twin")


@pytest.mark.ci
@pytest.mark.parametrize("precision", ["no", "bf16"])
def test_minimal_cache_of_models_saved_in_float16_has_the_bytes_of_the_big_script(
    tmp_path, inputs, precision
):
    """They are described in float32, and computed in the precision of the run.

    The trainer's twin draws samples with them.
    """
    shutil.copytree(MODELS, tmp_path / "half")
    for path in (tmp_path / "half").rglob("*.safetensors"):
        weights = {name: weight.half() for name, weight in load_file(path).items()}
        save_file(weights, path, metadata={"format": "pt"})
    config = tmp_path / "half/text_encoder/config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"dtype": "float16"}))
    more = [f"--pretrained_model_name_or_path={tmp_path / 'half'}"]
    more.append(f"--mixed_precision={precision}")
    write_by_twin(tmp_path / "twin", cache_flags(inputs, *more))
    assert_same_cache(write_by_big(inputs, tmp_path / "big", *more), tmp_path / "twin")
    if precision == "no":
        make_unets(tmp_path)
        flags = [f"--latents_dir={tmp_path / 'twin'}", more[0], *EXACT, *SHOWN[TEXT]]
        flags.append(f"--unet_config_name_or_path={tmp_path / 'unet'}")
        train(run_twin, TEXT, tmp_path / "model", flags)
        assert len(list((tmp_path / "model/samples").iterdir())) == 4  # one before step 1


def test_minimal_cache_knows_its_models_by_their_hashes(tmp_path, inputs):
    """They are those of the big script. Other models are refused."""
    flags = cache_flags(inputs)
    twin = tmp_path / "twin"
    write_by_twin(twin, flags)
    cache = json.loads((twin / "cache.json").read_text())
    for name, kind in {"vae": AutoencoderKL, "text_encoder": CLIPTextModel}.items():
        assert cache[name]["sha256"] == hash_weights(kind.from_pretrained(MODELS, subfolder=name))
    shutil.copytree(MODELS, tmp_path / "other")
    AutoencoderKL.from_pretrained(MODELS, subfolder="vae").half().save_pretrained(
        tmp_path / "other/vae"
    )
    other = f"--pretrained_model_name_or_path={tmp_path / 'other'}"
    assert f"{twin} holds another cache (vae): choose" in fail_twin(twin, *flags, other)


@pytest.mark.long
def test_minimal_cache_of_a_parquet_file_with_lists_of_captions(tmp_path, inputs):
    """Of each list one caption is drawn, and images without a path are named by their rows."""
    pictures = [Image.open(path).copy() for path in sorted((inputs / "images").glob("0[0-2].*"))]
    texts = [["a digit", "a zero"], ["a digit", "a one", "one"], ["two"]]
    rows = datasets.Dataset.from_dict({"image": pictures * 3, "caption": texts * 3})
    (tmp_path / "data").mkdir()
    rows.to_parquet(tmp_path / "data/train.parquet")
    models = f"--pretrained_model_name_or_path={MODELS}"
    flags = [f"--dataset_name={tmp_path / 'data'}", models, "--resolution=16"]
    flags += ["--caption_column=caption", "--rows_per_shard=4"]
    write_by_twin(tmp_path / "twin", flags)
    BIG(*flags, "--dataloader_num_workers=0", f"--output_dir={tmp_path / 'big'}")
    assert_same_cache(tmp_path / "big", tmp_path / "twin", least=3)
    opened = datasets.load_from_disk(str(tmp_path / "twin"))
    assert opened["key"][:2] == ["row 0", "row 1"] and len({*opened["text"]}) > 3


def test_minimal_cache_killed_before_its_first_shard_is_made_by_the_same_command(
    tmp_path, inputs, big
):
    """Killed while it writes cache.json, which makes the folder a cache, and right after that."""
    flags = cache_flags(inputs)
    twin = tmp_path / "twin"
    argv = [*flags, f"--output_dir={twin}"]
    text = PATHS[NAME].read_text()
    for right in ("    unfinished.replace(path)\n", "    records_dir.mkdir(exist_ok=True)"):
        assert text.count(right) == 1
        killed = text.replace(right, "    os.kill(os.getpid(), 9)\n#")
        pids = start(lambda killed=killed: run_twin(NAME, *argv, text=killed))
        assert finish(pids) == [-9]
        assert any(twin.iterdir()) and not (twin / "records").exists()
    write_by_twin(twin, flags)
    assert_same_cache(big, twin)


def test_minimal_cache_reads_captions_beside_images_and_has_equal_reasons(tmp_path, inputs):
    """photo.txt beside photo.png. Two runs skip the same rows, for reasons of the same text."""
    images = tmp_path / "images"
    shutil.copytree(inputs / "images", images, ignore=shutil.ignore_patterns("*.csv"))
    for number, path in enumerate(sorted(images.iterdir())):
        if number != 4:
            path.with_suffix(".txt").write_text(f"\ufeffa digit, {number}\n")
    (images / "09.png").write_bytes(b"no image" * 100)
    flags = cache_flags(inputs, f"--train_data_dir={images}")
    write_by_twin(tmp_path / "twin", flags)
    assert_same_cache(
        write_by_big(inputs, tmp_path / "big", flags[0], flags[-1]), tmp_path / "twin"
    )
    opened = datasets.load_from_disk(str(tmp_path / "twin"))
    assert opened["text"][:2] == ["a digit, 0", "a digit, 1"]
    write_by_twin(tmp_path / "again", flags)
    first, second = ((tmp_path / name / "skipped.jsonl").read_text() for name in ("twin", "again"))
    assert first == second and "cannot identify image file <_io.BytesIO object>" in first
    assert [entry["key"] for entry in read_skipped(tmp_path / "twin")] == [
        "04.jpg", "07.png", "09.png"
    ]  # fmt: skip


@pytest.mark.long
@pytest.mark.parametrize("num_processes", [1, 2])
def test_minimal_cache_survives_many_kills(tmp_path, inputs, num_processes):
    flags = cache_flags(inputs, "--rows_per_shard=1", "--batch_size=1")
    moments = np.random.default_rng().uniform(0, 0.1, 20)
    twin = tmp_path / "twin"
    for moment in moments:
        before = len(list(twin.glob("records/*.json")))
        pids = start_twin(twin, flags, num_processes)
        wait_until(
            lambda before=before: (
                (twin / "state.json").exists() or len(list(twin.glob("records/*"))) > before
            )
        )
        time.sleep(moment)
        kill(pids)
    write_by_twin(twin, flags, num_processes)
    big = write_by_big(inputs, tmp_path / "big", "--rows_per_shard=1", "--batch_size=1")
    assert_same_cache(big, twin)


@pytest.mark.ci
def test_trainer_and_its_twin_train_on_a_minimal_cache(tmp_path, inputs):
    """The trainer compares models and checksums with what the cache says."""
    write_by_twin(tmp_path / "cache", cache_flags(inputs))
    make_unets(tmp_path)
    flags = [f"--latents_dir={tmp_path / 'cache'}", "--random_flip", *EXACT]
    flags += [f"--pretrained_model_name_or_path={tmp_path / 'sd'}", "--train_batch_size=10"]
    train(run_big, TEXT, tmp_path / "big", flags)
    train(run_twin, TEXT, tmp_path / "twin", flags)
    assert_same_bits(tmp_path / "big", tmp_path / "twin", 5)


def test_minimal_demo_is_that_of_the_big_script():
    demo = BIG.module.parse_args([])
    text = PATHS[NAME].read_text()
    for name in ("resolution", "batch_size", "output_dir"):
        value = getattr(demo, name)
        quoted = f'"{value}"' if isinstance(value, str) else str(value)
        assert re.findall(rf" {name}=([^,)]+),\n", text) == [quoted]


def fail_twin(folder, *flags):
    """What a twin prints that ends with status 1."""
    log = folder.with_suffix(".log")
    argv = [*flags, f"--output_dir={folder}"]
    assert finish(start(lambda: run_twin(NAME, *argv), log=log)) == [1], log.read_text()
    said = log.read_text()
    assert "Traceback" not in said
    return said


@pytest.mark.ci
def test_minimal_cache_is_refused_with_other_settings_or_too_many_bad_rows(tmp_path, inputs, big):
    twin = tmp_path / "twin"
    shutil.copytree(big, twin)
    said = fail_twin(twin, *cache_flags(inputs, "--seed=1"))
    assert f"{twin} holds another cache (transform" in said
    assert "choose another --output_dir" in said
    assert read_files(twin).keys() - {"records"} == read_files(big).keys()
    said = fail_twin(tmp_path / "strict", *cache_flags(inputs, "--max_skipped=0"))
    assert "1 of 21 rows can't be used, such as 07.png (" in said
    assert not (tmp_path / "strict/state.json").exists()


@pytest.mark.long
def test_minimal_cache_needs_stable_diffusion_and_a_column_of_captions(tmp_path, inputs):
    sdxl = f"--pretrained_model_name_or_path={make_sdxl(tmp_path)}"
    said = fail_twin(tmp_path / "a", *cache_flags(inputs, sdxl))
    assert "is no StableDiffusionPipeline with an AutoencoderKL: use the big script" in said
    said = fail_twin(tmp_path / "b", *cache_flags(inputs, "--caption_column=caption"))
    assert "has no column 'caption', only image, text" in said
    said = fail_twin(tmp_path / "c", *cache_flags(inputs, "--resolution=17"))
    assert "--resolution 17 must be a multiple of 2 for this VAE" in said


def test_minimal_precompute_mistakes_end_in_a_sentence_before_importing_torch(tmp_path):
    models = ["--pretrained_model_name_or_path", MODELS]
    said = refused(NAME, "--train_data_dir", tmp_path / "no", *models)
    assert said.endswith(f"--train_data_dir {tmp_path / 'no'} is not a folder")
    said = refused(NAME, "--train_data_dir", tmp_path)
    assert said.endswith("--pretrained_model_name_or_path is needed")
    data = ["--train_data_dir", tmp_path, *models]
    said = refused(NAME, *data, "--dataset_name", "photos")
    assert said.endswith("give --train_data_dir or --dataset_name, not both")
    for flag in ("rows_per_shard 0", "batch_size -1", "max_skipped nan"):
        assert refused(NAME, *data, *f"--{flag}".split()).endswith(f"--{flag} is out of range")
    (tmp_path / "photo.jpg").touch()
    said = refused(NAME, *data, "--output_dir", tmp_path)
    assert said.endswith(f"{tmp_path} holds something else: choose another folder")
