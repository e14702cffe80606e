"""Several captions per image: a cache holds all of them, and one is drawn each epoch.

A cache draws the same captions as the images.
"""

import collections
import dataclasses
import json

import datasets
import fsspec
import numpy as np
import pytest
import torch
from accelerate import Accelerator
from conftest import MODELS, Script, make_images, make_models, make_sdxl, metrics, replace, reset
from hypothesis import given, settings
from hypothesis import strategies as st

import train_flow
from diffusion_training.data.captions import tokenize
from diffusion_training.data.encoders import encode_prompts, load_encoders
from diffusion_training.data.texts import list_captions
from diffusion_training.data.transform_settings import make_transform
from diffusion_training.draws import draw_caption
from diffusion_training.families.opening import open_base
from diffusion_training.latents.source import open_data
from diffusion_training.launch import accelerator_options, make_launch
from diffusion_training.order import Order, step_batches
from diffusion_training.training.progress import Progress

precompute = Script("precompute_latents")
train = Script("train_text_to_image")
pytestmark = pytest.mark.usefixtures("without_figures")
SHORT = ["a digit zero", "one", None, "a digit three", "a digit four", "five", "a digit six"]
LONG = [
    "a handwritten digit zero",
    None,
    "a handwritten digit two",
    "",
    " ".join(["digit"] * 30),
    "the five",
    "the digit six",
]
COLUMNS = ["--caption_column", "short", "long", "--caption_weights", "0.3", "0.7"]
KEYS = [(epoch, row, 1.0) for epoch in (0, 1, 2, 3, 7, None) for row in range(7)]


def make_data(tmp_path, name="images", **columns):
    make_images(tmp_path / name, 7)
    columns = columns or {"short": SHORT, "long": LONG}
    rows = [
        dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)
    ]
    lines = [json.dumps({"file_name": f"{i}.png", **row}) for i, row in enumerate(rows)]
    (tmp_path / name / "metadata.jsonl").write_text("\n".join(lines))
    return tmp_path / name


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    return {"sd": make_models(folder / "sd"), "sdxl": make_sdxl(folder / "sdxl"), "prx": MODELS}


def make_cache(folder, *more):
    precompute(*precompute.flags(folder, "--rows_per_shard=4", "--batch_size=3", *more))


def list_train_flags(output_dir, *more):
    return train.flags(output_dir, "--train_batch_size=2", "--lr_warmup_steps=0", *more)


def read_prompts(family, *argv):
    """The trainer's inputs for the captions of KEYS, in order: {name: tensor}."""
    reset()
    script = train_flow if family == "prx" else train.module
    args = replace(train.module.parse_args([str(arg) for arg in argv]), model_family=family)
    launch = make_launch(Accelerator(**accelerator_options(args)), args)
    data = open_data(launch, open_base(args), None, {}, args)
    found = []
    for key in KEYS:
        batch = data.dataset[[key]]
        if "prompt_lengths" in batch:
            assert batch["prompt_lengths"] == batch["prompt_mask"].sum(dim=1).tolist()
        with torch.no_grad():
            found.append(script.prepare_batch(data, 0.0, batch).condition)
    # without SDXL's sizes: the crops of a cache are those of epoch 0
    names = found[0].keys() - {"time_ids"}
    return {name: torch.cat([prompts[name] for prompts in found]) for name in names}


@pytest.mark.parametrize(
    "family, text_cache, more",
    [
        ("sd", "embeddings", ["--random_flip", "--bucket_step=4"]),
        ("sd", "ids", []),
        pytest.param("sdxl", "embeddings", [], marks=pytest.mark.long),
        ("sdxl", "ids", []),
        pytest.param("prx", "embeddings", [], marks=pytest.mark.long),
        ("prx", "ids", []),
    ],
)
def test_a_cache_draws_the_same_captions_as_the_images(tmp_path, models, family, text_cache, more):
    data, pipeline = make_data(tmp_path), f"--pretrained_model_name_or_path={models[family]}"
    flow = ["--model_family=prx"] * (family == "prx")
    flags = [f"--train_data_dir={data}", pipeline, *COLUMNS, *more]
    make_cache(tmp_path / "cache", *flags, *flow, f"--text_cache={text_cache}")
    images = read_prompts(
        family, *flags, "--resolution=16", "--dataloader_num_workers=0", "--seed=3"
    )
    cache = read_prompts(
        family, pipeline, f"--latents_dir={tmp_path / 'cache'}", "--seed=3", *more[:1]
    )
    assert images.keys() == cache.keys()
    for name, numbers in images.items():
        torch.testing.assert_close(cache[name].to(numbers.dtype), numbers, rtol=2e-3, atol=2e-4)

    # the cache at an address
    fsspec.filesystem("memory").put(f"{tmp_path / 'cache'}/", f"/{tmp_path.name}/", recursive=True)
    stored = [f"--latents_dir=memory://{tmp_path.name}", f"--shards_dir={tmp_path / 'shards'}"]
    if not more:
        stored = read_prompts(family, pipeline, *stored, "--seed=3")
        assert all(torch.equal(stored[name], numbers) for name, numbers in cache.items())

    # the captions that must be drawn
    args = precompute.module.parse_args([*flags, *flow])
    encoders = load_encoders(open_base(args), torch.float32)
    there = [[text is not None for text in pair] for pair in zip(SHORT, LONG, strict=True)]
    drawn = [draw_caption(3, epoch, row, [0.3, 0.7], there[row]) for epoch, row, _ in KEYS]
    texts = [(SHORT, LONG)[which][row] for which, (_, row, _) in zip(drawn, KEYS, strict=True)]
    assert {*drawn} == {0, 1} and texts[-7:] == [*SHORT[:2], LONG[2], *SHORT[3:]]
    tokens = tokenize(encoders.tokenizers, texts)
    with torch.no_grad():
        torch.testing.assert_close(
            images["prompt_embeds"], encode_prompts(encoders, tokens)["prompt_embeds"]
        )

    rows = datasets.load_from_disk(str(tmp_path / "cache"))
    assert rows["text"][:] == [[*pair] for pair in zip(SHORT, LONG, strict=True)]
    described = json.loads((tmp_path / "cache/cache.json").read_text())
    assert "captions" in described["features"]
    assert described["captions_cut"] == 1
    lengths = np.array(rows["prompt_lengths"][:])
    assert ((lengths == -1) == ~np.array(there)).all()
    if more:  # a trainer's own weights override the cache's
        other = ["--caption_weights", "5", "1e-6"]
        images, cache = (
            read_prompts(family, pipeline, *source, "--seed=3", *more[:1], *other)
            for source in (
                [*flags, "--resolution=16", "--dataloader_num_workers=0"],
                [f"--latents_dir={tmp_path / 'cache'}"],
            )
        )
        torch.testing.assert_close(
            cache["prompt_embeds"], images["prompt_embeds"], rtol=2e-3, atol=2e-4
        )
        texts = [LONG[2] if text is None else text for text in SHORT]
        shorts = tokenize(encoders.tokenizers, texts)
        with torch.no_grad():
            shorts = encode_prompts(encoders, shorts)["prompt_embeds"].repeat(len(KEYS) // 7, 1, 1)
        torch.testing.assert_close(images["prompt_embeds"], shorts)


@settings(max_examples=40, derandomize=True, database=None, deadline=None)
@given(
    st.lists(st.floats(1e-6, 1e6), min_size=1, max_size=5), st.integers(0, 2**63 - 1), st.data(),
    st.tuples(st.integers(1, 5), st.integers(1, 3), st.integers(1, 3)), st.integers(1, 12),
)  # fmt: skip
def test_resumed_runs_draw_each_images_caption_by_its_epoch(weights, seed, data, launch, steps):
    count = 6
    there = st.lists(st.booleans(), min_size=len(weights), max_size=len(weights)).filter(any)
    there = [data.draw(there) for _ in range(count)]

    def run(state, launch, most):
        batch_size, accumulation, num_processes = launch
        order, seen = Order(np.arange(count), seed), []
        progress = Progress(state, count, batch_size * num_processes, accumulation, order)
        ranks = [
            step_batches(order, progress, rank, num_processes) for rank in range(num_processes)
        ]
        while progress.images_seen < 5 * count and most:
            most -= 1
            for _ in range(progress.next_step().micro_batches):
                for keys in map(next, ranks):
                    seen += [
                        (epoch, row, draw_caption(seed, epoch, row, weights, there[row]))
                        for epoch, row, weight in keys
                        if weight
                    ]
            progress.advance(progress.next_step().images, stepped=True)
        return seen, progress.state()

    begin = {"global_step": 0, "data_step": 0, "images_seen": 0}
    whole, _ = run(begin, (1, 1, 1), -1)
    first, state = run(begin, launch, steps)
    rest, _ = run(json.loads(json.dumps(state)), (2, 1, 1), -1)
    assert sorted({*first, *rest}) == sorted(whole) and len(whole) == 5 * count
    assert all(there[row][which] for _, row, which in whole)
    assert all(
        draw_caption(seed, None, row, weights, there[row]) == there[row].index(True)
        for row in range(count)
    )


def test_draw_caption_follows_the_caption_weights():
    def share(weights, there):
        found = collections.Counter(
            draw_caption(5, epoch, 2, weights, there) for epoch in range(4000)
        )
        return [found[i] / 4000 for i in range(len(weights))]

    assert share([0.3, 0.7], [True, True]) == pytest.approx([0.3, 0.7], abs=0.03)
    assert share([6, 2, 2], [True, True, True]) == pytest.approx([0.6, 0.2, 0.2], abs=0.03)
    # The weight of a missing caption goes to the others
    assert share([6, 2, 2], [False, True, True]) == pytest.approx([0, 0.5, 0.5], abs=0.03)
    assert share([6, 2, 2], [True, True, False]) == pytest.approx([0.75, 0.25, 0], abs=0.03)


def test_several_captions_train_the_same_from_a_cache_and_resume_exactly(tmp_path, models):
    data, pipeline = make_data(tmp_path), f"--pretrained_model_name_or_path={models['sd']}"
    make_cache(tmp_path / "cache", f"--train_data_dir={data}", pipeline, *COLUMNS, "--center_crop")
    images = [
        f"--train_data_dir={data}",
        "--resolution=16",
        "--center_crop",
        "--dataloader_num_workers=0",
        *COLUMNS,
    ]
    cached = [f"--latents_dir={tmp_path / 'cache'}"]
    runs = {
        "images": images,
        "cache": cached,
        "again": [*cached, f"--resume_from_checkpoint={tmp_path / 'cache-run/checkpoint-4'}"],
    }
    losses = {}
    for name, argv in runs.items():
        out = tmp_path / f"{name}-run"
        more = [
            "--holdout=2",
            "--max_train_steps=8",
            "--checkpointing_steps=4",
            "--caption_dropout=0.2",
        ]
        train(*list_train_flags(out, pipeline, *argv, *more))
        losses[name] = [record.get("loss", record.get("held_out_loss")) for record in metrics(out)]
    assert losses["cache"] == pytest.approx(losses["images"], rel=2e-4) and len(losses["cache"]) > 8
    assert losses["again"] == losses["cache"][-len(losses["again"]) :] and len(losses["again"]) >= 4
    whole, again = (
        tmp_path / f"{name}-run/unet/diffusion_pytorch_model.safetensors"
        for name in ("cache", "again")
    )
    assert whole.read_bytes() == again.read_bytes()


def test_caption_weights_apply_to_a_list_in_one_column(tmp_path):
    pairs = [["a", "b"], ["a"], [None, "b"], "a", [], None, ["a", "b", "c"], ["a", 7], ["", "b"]]
    flags = [
        "--train_data_dir=.",
        "--pretrained_model_name_or_path=sd",
        "--caption_weights",
        "1",
        "2",
    ]
    args, found = precompute.module.parse_args(flags), []
    transform = make_transform(args, "image", None, args.caption_weights, 3, 16)
    for text in pairs:
        try:
            found.append(list_captions({"text": text}, transform))
        except ValueError as error:
            found.append(str(error))
    assert found == [
        ["a", "b"],
        ["a", None],
        [None, "b"],
        "it has 1 captions for 2 --caption_weights",
        "it has no caption",
        "it has 1 captions for 2 --caption_weights",
        "it has 3 captions for 2 --caption_weights",
        "its caption is not text but 7",
        ["", "b"],
    ]
    transform = dataclasses.replace(transform, skip_empty_captions=True)
    assert list_captions({"text": ["", "b"]}, transform) == [None, "b"]
    with pytest.raises(ValueError, match="no caption"):
        list_captions({"text": ["", " \n"]}, transform)


def test_mismatched_caption_columns_and_weights_are_refused(tmp_path, models):
    data, pipeline = make_data(tmp_path), f"--pretrained_model_name_or_path={models['sd']}"
    flags = [f"--train_data_dir={data}", pipeline]
    for script in (precompute, train):
        both = [*flags, "--caption_column", "short", "long"]
        said = "--caption_weights has 3 values for 2 columns of --caption_column"
        assert said in script.refused(*both, "--caption_weights", "1", "2", "3", status=2)
        twice = [*flags, "--caption_column", "short", "short"]
        assert "short short gives a value twice" in script.refused(*twice, status=2)
        error = script.refused(*both, "--caption_weights", "1", "0", status=2)
        assert "0 is not between" in error
        error = script.refused(*both, "--instance_prompt=x", status=2)
        assert "fills gaps in a single column: give only one" in error
        wide = [*flags, "--caption_column", "short", "wide", "--resolution=16"]
        error = script.refused(*wide, f"--output_dir={tmp_path / script.file_name}")
        assert "has no column 'wide', only" in error
    make_cache(tmp_path / "cache", *flags, *COLUMNS)
    make_cache(tmp_path / "plain", *flags, "--caption_column=short", "--max_skipped=1")
    again = precompute.flags(tmp_path / "cache", "--rows_per_shard=4", *flags, *COLUMNS[:3])
    assert "transform.caption_weights [0.3, 0.7] -> [1.0, 1.0]" in precompute.refused(*again)
    out = f"--output_dir={tmp_path / 'out'}"
    for folder, weights, said in (
        ("cache", ["1", "2", "3"], "--caption_weights has 3 values, but {} was made with 2"),
        ("plain", ["1", "2"], "--caption_weights has 2 values, but {} was made with 0"),
    ):
        argv = [pipeline, f"--latents_dir={tmp_path / folder}", out, "--caption_weights", *weights]
        assert said.format(tmp_path / folder) in train.refused(*argv)
    both = [pipeline, "--latents_dir", tmp_path / "cache", tmp_path / "plain", out]
    assert "features [] -> " in train.refused(*both)


def test_streaming_caches_the_same_captions(tmp_path, models):
    data, pipeline = make_data(tmp_path), f"--pretrained_model_name_or_path={models['sd']}"
    flags = [pipeline, f"--train_data_dir={data}", "--resolution=16", *COLUMNS]
    stream = ["--streaming", "--shuffle_caption", "--max_train_steps=2"]
    train(*list_train_flags(tmp_path / "out", *flags, *stream))
    assert len(metrics(tmp_path / "out")) >= 2
    make_cache(tmp_path / "one", *flags)
    make_cache(tmp_path / "other", *flags, "--streaming")
    one, other = (
        datasets.load_from_disk(str(tmp_path / name)).to_dict() for name in ("one", "other")
    )
    assert one.keys() == other.keys() and all(
        one[name] == other[name] for name in one if name != "key"
    )
