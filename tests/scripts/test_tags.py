"""--shuffle_caption and --keep_tokens: a new order of tags each epoch.

Tested with images and with a cache of tokens.
"""

import collections

import pytest
import torch
from conftest import MODELS, Script, make_captioned, read_losses, replace
from datasets import load_from_disk
from test_several_captions import (
    KEYS,
    list_train_flags,
    make_cache,
    make_data,
    models,  # noqa: F401
    precompute,
    read_prompts,
    train,
)

from diffusion_training.data.captioned_flags import weigh_captions
from diffusion_training.data.captions import tokenize
from diffusion_training.data.encoders import encode_prompts, load_encoders
from diffusion_training.data.texts import choose_caption, choose_captions, draw_text, list_captions
from diffusion_training.data.transform_settings import make_transform
from diffusion_training.families.opening import open_base
from diffusion_training.families.recording import record_family
from diffusion_training.latents.reader import CachedLatents, load_cache

train_flow = Script("train_flow")
pytestmark = pytest.mark.usefixtures("without_figures")
TAGS = [
    "one, two, three",
    "a digit,zero",
    "six",
    "two,one , three ",
    "seven, eight, nine, zero",
    "",
    "four, five",
]
LONG = [", ".join(reversed(text.split(", "))) or None for text in TAGS]
SHUFFLE = ["--shuffle_caption", "--keep_tokens=1"]


def make_args(*argv):
    return train.module.parse_args(
        ["--train_data_dir=.", f"--pretrained_model_name_or_path={MODELS}", *argv]
    )


def make_choice(args):
    """Choose captions as the flags say."""
    return choose_captions(args, weigh_captions(args), [args.caption_prefix])


def test_shuffle_caption_draws_all_orders_behind_keep_tokens_equally():
    args = make_args("--shuffle_caption", "--keep_tokens=2", "--seed=4")
    choice = make_choice(args)
    found = collections.Counter(
        choose_caption(" a ,b,c, d,  e", epoch, 7, choice) for epoch in range(3000)
    )
    assert len(found) == 6 and all(text.startswith("a, b, ") for text in found)
    assert {*found.values()} <= {*range(420, 580)}
    assert choose_caption("a,b", 0, 7, choice) == "a, b"
    assert choose_caption("a", 0, 7, choice) == "a"
    assert (
        choose_caption(" a ,b,c", None, 7, choice) == " a ,b,c"
    )  # held-out captions are not shuffled
    orders = [
        [choose_caption("a,b,c,d,e,f,g", epoch, row, choice) for epoch in range(9)]
        for row in (1, 1, 2)
    ]
    assert orders[0] == orders[1] != orders[2]
    choice = make_choice(replace(args, shuffle_caption=False))
    assert choose_caption(" a ,b,c", 0, 7, choice) == " a ,b,c"


@pytest.mark.parametrize(
    "family, several", [("sd", False), ("sd", True), ("sdxl", False), ("prx", True)]
)
def test_a_cache_of_ids_shuffles_tags_like_the_images(tmp_path, models, family, several):  # noqa: F811
    columns = {"text": TAGS, "long": LONG} if several else {"text": TAGS}
    flags = [
        f"--train_data_dir={make_data(tmp_path, **columns)}",
        f"--pretrained_model_name_or_path={models[family]}",
    ]
    weights = ["--caption_column", "text", "long"] * several
    flow = ["--model_family=prx"] * (family == "prx")
    make_cache(tmp_path / "cache", *flags, *flow, *weights, "--text_cache=ids")
    cached = [flags[1], f"--latents_dir={tmp_path / 'cache'}"]
    images = read_prompts(
        family, *flags, *weights, "--resolution=16", "--dataloader_num_workers=0", *SHUFFLE
    )
    cache, plain = read_prompts(family, *cached, *SHUFFLE), read_prompts(family, *cached)
    assert images.keys() == cache.keys() and all(
        torch.equal(cache[name], images[name]) for name in images
    )
    assert not torch.equal(cache["prompt_embeds"], plain["prompt_embeds"])
    # The held-out rows are not shuffled
    assert torch.allclose(cache["prompt_embeds"][-7:], plain["prompt_embeds"][-7:], atol=1e-5)
    args = make_args(*weights, *SHUFFLE)
    base = open_base(
        replace(args, model_family=family, pretrained_model_name_or_path=str(models[family])),
        record=record_family,
    )
    encoders, choice = load_encoders(base, torch.float32), make_choice(args)
    rows = [[*pair] for pair in zip(TAGS, LONG, strict=True)] if several else TAGS
    texts = [choose_caption(rows[row], epoch, row, choice) for epoch, row, _ in KEYS]
    with torch.no_grad():
        tokens = tokenize(encoders.tokenizers, texts)
        expected = encode_prompts(encoders, tokens)["prompt_embeds"]
    torch.testing.assert_close(images["prompt_embeds"], expected)


def test_shuffled_tags_train_the_same_from_a_cache_and_resume_exactly(
    tmp_path,
    models,  # noqa: F811
):
    flags = [
        f"--train_data_dir={make_data(tmp_path, text=TAGS)}",
        f"--pretrained_model_name_or_path={models['sd']}",
    ]
    make_cache(tmp_path / "cache", *flags, "--text_cache=ids", "--center_crop")
    cached = [flags[1], f"--latents_dir={tmp_path / 'cache'}", *SHUFFLE]
    runs = {
        "images": [
            *flags,
            "--resolution=16",
            "--center_crop",
            "--dataloader_num_workers=1",
            *SHUFFLE,
        ],
        "cache": cached,
        "again": [*cached, f"--resume_from_checkpoint={tmp_path / 'cache-run/checkpoint-4'}"],
    }
    losses = {}
    for name, argv in runs.items():
        steps = ["--max_train_steps=8", "--checkpointing_steps=4"]
        train(*list_train_flags(tmp_path / f"{name}-run", *argv, *steps))
        losses[name] = read_losses(tmp_path / f"{name}-run")
    assert losses["cache"] == pytest.approx(losses["images"], rel=2e-4)
    assert losses["again"] == losses["cache"] and len(losses["cache"]) == 8
    whole, again = (
        tmp_path / f"{name}-run/unet/diffusion_pytorch_model.safetensors"
        for name in ("cache", "again")
    )
    assert whole.read_bytes() == again.read_bytes()


def test_a_prefix_is_in_every_caption_once_and_stays_in_front_of_the_tags():
    weighed = ["--caption_column", "text", "long", "--caption_weights", "1", "2"]
    args = make_args("--caption_prefix=sks dog, ", *weighed)
    transform = make_transform(args, "image", None, args.caption_weights, 3, 16)
    rows = [{"text": "red", "long": None}, {"text": "sks dog, red", "long": ""}]
    listed = [list_captions(row, transform) for row in rows]
    assert listed == [["sks dog, red", None], ["sks dog, red", "sks dog,"]]
    skips = replace(
        transform, caption_column="text", caption_weights=None, skip_empty_captions=True
    )
    assert draw_text({"text": "\ufeff red "}, 0.0, skips) == "sks dog, red"
    with pytest.raises(ValueError, match="its caption is empty"):
        draw_text({"text": ""}, 0.0, skips)
    choice = choose_captions(
        replace(args, shuffle_caption=True, keep_tokens=1), None, ["a", "a cat"]
    )
    found = {choose_caption("a cat, x, y,z", epoch, 7, choice) for epoch in range(40)}
    assert found == {"a cat, x, y, z", "a cat, x, z, y"}
    assert choose_caption("a cat, x, y,z", None, 7, choice) == "a cat, x, y,z"


def test_a_cache_with_a_prefix_trains_like_the_images_and_is_never_taken_for_another(
    tmp_path,
    models,  # noqa: F811
    capsys,
):
    flags = [
        f"--train_data_dir={make_data(tmp_path, text=TAGS)}",
        f"--pretrained_model_name_or_path={models['sd']}",
    ]
    making = [tmp_path / "cache", *flags, "--text_cache=ids"]
    make_cache(*making, "--caption_prefix=four")
    texts = load_from_disk(tmp_path / "cache")["text"]
    assert texts[0] == "four one, two, three" and texts[5] == "four" and texts[6] == TAGS[6]
    for more, said in (
        ([], "transform.caption_prefix four -> None"),
        (["--caption_prefix=five"], "transform.caption_prefix four -> five"),
    ):
        with pytest.raises(SystemExit):
            make_cache(*making, *more)
        assert said in capsys.readouterr().err
    cached = [flags[1], f"--latents_dir={tmp_path / 'cache'}", *SHUFFLE]
    images = [*flags, "--resolution=16", "--dataloader_num_workers=0", *SHUFFLE]
    cache = read_prompts("sd", *cached)
    with_prefix = read_prompts("sd", *images, "--caption_prefix=four")
    assert all(torch.equal(cache[name], with_prefix[name]) for name in cache)
    without = read_prompts("sd", *images)["prompt_embeds"]
    assert not torch.equal(cache["prompt_embeds"], without)
    said = "--caption_prefix does nothing with --latents_dir"
    assert said in train.refused(*cached, "--caption_prefix=four", status=2)


@pytest.mark.parametrize("several", [False, True])
def test_changed_captions_in_a_cache_are_reported_as_damage(tmp_path, models, several):  # noqa: F811
    columns = {"text": TAGS, "long": LONG} if several else {"text": TAGS}
    flags = [
        f"--train_data_dir={make_data(tmp_path, **columns)}",
        f"--pretrained_model_name_or_path={models['sd']}",
    ]
    flags += ["--caption_column", "text", "long"] * several
    make_cache(tmp_path / "cache", *flags, "--text_cache=ids")
    path = tmp_path / "cache/data-00001-of-00002.arrow"
    path.write_bytes(path.read_bytes().replace(b"seven, eight", b"eight, seven"))
    args = make_args(*SHUFFLE, "--resolution=16", *flags[2:])
    choice = make_choice(args)
    assert choice.weights == ([1.0, 1.0] if several else None)
    reads = load_encoders(open_base(args, record=record_family), torch.float32).tokenizers, choice
    cache = load_cache(tmp_path / "cache")
    dataset = CachedLatents({tmp_path / "cache": cache}, 0, False, choice.weights, reads)
    for row in (0, 5, 6):
        dataset[[(0, row, 1.0)]]
    with pytest.raises(OSError, match="data-00001-of-00002.arrow is damaged: to repair it, run"):
        dataset[[(0, 4, 1.0)]]


def test_shuffle_caption_is_refused_where_it_has_no_effect(tmp_path, models):  # noqa: F811
    make_captioned(tmp_path / "images", 4)
    flags = [
        f"--train_data_dir={tmp_path / 'images'}",
        f"--pretrained_model_name_or_path={models['sd']}",
    ]
    make_cache(tmp_path / "cache", *flags)
    cached = [flags[1], f"--latents_dir={tmp_path / 'cache'}", f"--output_dir={tmp_path / 'out'}"]
    said = (
        f"--shuffle_caption needs captions, but {tmp_path / 'cache'} holds embeddings: "
        "make it with --text_cache"
    )
    assert said in train.refused(*cached, "--shuffle_caption")
    said = "--keep_tokens does nothing without --shuffle_caption"
    for script in (train, train_flow):
        assert said in script.refused(*flags, "--keep_tokens=1", status=2)
    said = "there is no flag --shuffle_caption"
    assert said in precompute.refused(*flags, "--shuffle_caption", status=2)
