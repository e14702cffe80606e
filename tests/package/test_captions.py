"""Rows with captions: how they are transformed, why some are skipped, and what is reported."""

import argparse
import io
import time

import datasets
import pytest
import torch
from conftest import MODELS, make_chat_tokenizer, make_images
from image_server import make_pixel_bomb
from PIL import Image
from transformers import CLIPTokenizer

import precompute_latents
from diffusion_training.data import captions as module
from diffusion_training.data import transforms
from diffusion_training.data.images import decode_image, shrink
from diffusion_training.data.texts import CaptionChoice, choose_caption
from diffusion_training.data.transform_settings import make_transform
from diffusion_training.draws import draw_choices
from diffusion_training.families.base import Tokenizers
from diffusion_training.families.known import load_family
from diffusion_training.latents import passes
from diffusion_training.latents.cache_size import measure_captions
from diffusion_training.latents.passes import decode_ahead

TOKENIZER = CLIPTokenizer.from_pretrained(MODELS, subfolder="tokenizer")
TOKENIZERS = Tokenizers([TOKENIZER], load_family("sd"))


@pytest.fixture
def row(tmp_path):
    """row(*flags, **changes) transforms image 3 of a folder, with `changes` to its fields."""
    folder = make_images(tmp_path / "images", 4)

    def transform(
        *flags, number=3, epoch=0, target=None, source="train_data_dir", ahead=False, **changes
    ):
        flags = [
            f"--{source}={folder}",
            "--pretrained_model_name_or_path=sd",
            "--resolution=16",
            *flags,
        ]
        item = {"image": {"bytes": None, "path": f"{folder}/3.png"}, "text": "a digit", **changes}
        args = precompute_latents.parse_args(flags)
        how = make_transform(
            args, "image", args.mask_column, args.caption_weights, 3, args.resolution
        )
        item = decode_ahead(item, how) if ahead else item
        return transforms.transform_row(number, epoch, item, how, target)

    transform.folder = folder
    return transform


def test_the_crop_of_a_row_follows_from_its_random_key(row, tmp_path):
    image = decode_image({"bytes": None, "path": f"{row.folder}/3.png"}, 3)
    for number, epoch, seed in ((3, 0, 0), (4, 0, 0), (3, 1, 0), (3, 0, 1)):
        y, x = draw_choices(seed, epoch, number)[:2]
        made = row(f"--seed={seed}", number=number, epoch=epoch)
        assert torch.equal(made["pixel_values"], shrink(image, 16, (y, x)))
        assert {name: made[name] for name in made if name != "pixel_values"} == {
            "row": number, "key": "3.png", "text": "a digit", "skipped": None,
            "original_size": (20, 24), "crop_top_left": (0, round(round(4 * x) * 16 / 20)),
        }  # fmt: skip
    assert torch.equal(
        row("--center_crop", "--seed=1")["pixel_values"], shrink(image, 16, (0.5, 0.5))
    )
    nearest = row("--center_crop", "--image_interpolation_mode=nearest-exact")["pixel_values"]
    assert torch.equal(nearest, shrink(image, 16, (0.5, 0.5), "nearest-exact"))


def test_image_and_mask_are_resized_to_the_target_size(row):
    """From 24 x 20 pixels, 10 x 20 are cropped."""
    image = decode_image({"bytes": None, "path": f"{row.folder}/3.png"}, 3)
    mask = Image.new("L", (24, 20))
    mask.paste(255, (0, 0, 12, 20))
    file = io.BytesIO()
    mask.save(file, "PNG")
    y, x = draw_choices(0, 0, 3)[:2]
    made = row(
        "--mask_column=where", target=(16, 8), where={"bytes": file.getvalue(), "path": None}
    )
    assert torch.equal(made["pixel_values"], shrink(image, (16, 8), (y, x)))
    assert made["crop_top_left"] == (0, round(round(14 * x) * 8 / 10))
    masks = decode_image({"bytes": file.getvalue(), "path": None}, 1)
    assert torch.equal(made["mask"], shrink(masks, (16, 8), (y, x), "bilinear"))
    made = row(target=(16, 40))  # a crop of 24 x 10
    assert made["crop_top_left"] == (round(round(10 * y) * 16 / 10), 0) and round(10 * y) % 5
    assert torch.equal(
        row("--center_crop", target=(16, 40))["pixel_values"], shrink(image, (16, 40), (0.5, 0.5))
    )
    for nothing in (None, {"bytes": None, "path": None}):  # the whole image counts
        mask = row("--mask_column=where", target=(16, 8), where=nothing)["mask"]
        assert mask.shape == (1, 16, 8) and (mask == 255).all()
    broken = row("--mask_column=where", target=(16, 8), text=None)
    assert broken["skipped"] and broken["mask"].shape == (1, 16, 8)


def test_bad_masks_skip_the_row_but_memory_errors_are_raised(row, monkeypatch):
    file = io.BytesIO()
    Image.new("L", (7, 9)).save(file, "PNG")
    for data, said in (
        (file.getvalue(), "its mask has 7 x 9 pixels, the image 24 x 20"),
        (b"x", "its mask can't be used: cannot"),
    ):
        assert row("--mask_column=where", where={"bytes": data, "path": None})[
            "skipped"
        ].startswith(said)

    def fail(source, channels, **options):
        if channels == 1:
            raise MemoryError
        return decode_image(source, channels, **options)

    monkeypatch.setattr(transforms, "decode_image", fail)
    with pytest.raises(MemoryError):
        row("--mask_column=where", where={"bytes": file.getvalue(), "path": None})


def test_one_caption_of_a_list_is_drawn_by_key(row):
    several = [f"caption {k}" for k in range(5)]
    drawn = [
        [row(f"--seed={seed}", number=i, text=several)["text"] for i in range(20)]
        for seed in (0, 0, 1)
    ]
    assert drawn[0] == drawn[1] != drawn[2] and {*drawn[0]} == {*several}
    assert drawn[0] == [several[int(5 * draw_choices(0, 0, i)[3])] for i in range(20)]
    assert row(text=["only"])["text"] == "only"


@pytest.mark.parametrize("changes, flags, reason", [
    ({"text": None}, [], "it has no caption"),
    ({"text": []}, [], "it has no caption"),
    ({"text": 7}, [], "its caption is not text but 7"),
    ({"text": [None, None]}, [], "it has no caption"),
    ({"text": " \n"}, ["--skip_empty_captions"], "its caption is empty"),
    ({"text": ""}, [], None),
    ({"image": None}, [], "there is no image"),
    ({"image": {"bytes": None, "path": None}}, [], "there is no image"),
    ({"image": {"bytes": b"no image", "path": "a.png"}}, [], "cannot identify image file"),
    ({"image": {"bytes": make_pixel_bomb(), "path": "a.png"}}, [],
     "Image size (3600000000 pixels) exceeds limit"),
    ({}, ["--min_size=21"], "24 x 20 pixels: a side is below --min_size 21"),
    ({}, ["--min_size=20"], None),
])  # fmt: skip
def test_skipped_rows_have_a_reason_and_a_placeholder_image(row, changes, flags, reason):
    made = row(*flags, **changes)
    assert made["skipped"] == reason or made["skipped"].startswith(reason + " ")  # a limit
    assert row(*flags, ahead=True, **changes)["skipped"] == made["skipped"]
    assert made["pixel_values"].shape == (3, 16, 16) and made["pixel_values"].dtype == torch.uint8
    if reason:  # a placeholder keeps the batch in shape
        assert made["text"] == "" and not made["pixel_values"].any()


def test_missing_or_broken_images_are_skipped_machine_faults_are_raised(row, monkeypatch):
    for error, reason in (
        (
            FileNotFoundError(2, "No such file", "/gone/away/3.png"),
            "not read: [Errno 2] No such file",
        ),
        (PermissionError(13, "Permission denied", "x"), "not read: [Errno 13] Permission denied"),
        (
            OSError("image file is truncated (3 bytes not processed)"),
            "image file is truncated (3 bytes",
        ),
        (Image.DecompressionBombError("Image size exceeds limit"), "Image size exceeds limit"),
        (OSError(5, "Input/output error"), None),
        (MemoryError(), None),
    ):

        def fail(*args, error=error, **options):
            raise error

        monkeypatch.setattr(transforms, "decode_image", fail)
        if reason:
            assert row()["skipped"].startswith(reason)
        else:
            with pytest.raises(type(error)):
                row()


def test_keys_of_rows_do_not_depend_on_where_the_data_is(row, tmp_path):
    assert row()["key"] == row(source="dataset_name")["key"] == "3.png"
    assert row(image={"bytes": b"", "path": f"{row.folder}/sub/9.png"})["key"] == "sub/9.png"
    assert row(image={"bytes": b"", "path": "hf://of/a/hub.png"})["key"] == "hf://of/a/hub.png"
    assert row(image={"bytes": b"", "path": None})["key"] == "row 3"
    (tmp_path / "link").symlink_to(row.folder)  # `datasets` follows it
    assert row(f"--train_data_dir={tmp_path / 'link'}")["key"] == "3.png"
    assert row(image={"bytes": b"", "path": "a\x1b[2J.png"})["key"] == "a?[2J.png"


def test_captions_are_padded_or_cut_to_the_text_encoders_length():
    texts = ["", "a digit", "a " * 50]
    tokens = module.tokenize(TOKENIZERS, texts)["input_ids"]
    assert tokens.shape == (3, 8) and (tokens[:, 0] == TOKENIZER.bos_token_id).all()
    assert (tokens[0, 2:] == TOKENIZER.pad_token_id).all() and tokens[
        2, -1
    ] == TOKENIZER.eos_token_id
    assert module.are_cut(TOKENIZERS, texts) == [False, False, True]
    limit = "a " * 6  # a token each, and the start and end tokens
    assert module.are_cut(TOKENIZERS, [limit, limit + "a"]) == [False, True]


def test_padding_tokens_are_not_counted():
    tokenizers = Tokenizers([TOKENIZER], load_family("prx"))
    choice = CaptionChoice(seed=0, weights=None)
    texts = ["a", "a " * 50]  # with a start and an end token; the limit is 8
    tokens = module.tokenize_batch(tokenizers, choice, texts, [(0, 0), (0, 1)])
    assert tokens["prompt_lengths"] == [3, 8]
    assert measure_captions(tokenizers, texts) == {"ids": 5.5, "embeddings": 5.5}
    assert measure_captions(tokenizers, []) == {}
    assert measure_captions(TOKENIZERS, texts) == {}  # it keeps padding


def test_batches_are_padded_to_multiples_of_their_longest_caption(monkeypatch):
    """On either side, unless the model sees padding. A search for the batch size pads fully."""
    lengths = (0, 1, 31, 32, 33, 65, 255, 400)
    padded = [module.choose_length(length, 250) for length in lengths]
    assert padded == [32, 32, 32, 32, 64, 96, 250, 250]
    monkeypatch.setattr(module, "MULTIPLE", 2)
    tokenizer = CLIPTokenizer.from_pretrained(MODELS, subfolder="tokenizer")
    choice = CaptionChoice(seed=0, weights=None)
    texts = ["", "a", "a a a"]  # with a start and an end token; the limit is 8
    for side in ("right", "left"):
        tokenizer.padding_side = side
        prx = Tokenizers([tokenizer], load_family("prx"))
        whole = module.tokenize(prx, texts)
        tokens = module.tokenize_batch(prx, choice, texts, [(0, row) for row in range(3)])
        used = slice(-6, None) if side == "left" else slice(6)
        for name in ("input_ids", "prompt_mask"):
            assert torch.equal(tokens[name], whole[name][:, used])
        assert tokens["prompt_lengths"] == [2, 3, 5]
        assert tokens["prompt_mask"].sum() == whole["prompt_mask"].sum() == 10
        longest = module.tokenize_longest(prx, choice)
        assert longest["prompt_lengths"] == [8] and longest["prompt_mask"].all()
    tokenizers = Tokenizers([make_chat_tokenizer(8)], load_family("sd"))
    tokens = module.tokenize_batch(tokenizers, choice, texts, [(0, row) for row in range(3)])
    assert tokens["input_ids"].shape == (3, 8)


def test_equal_captions_and_cut_captions_are_reported(capsys):
    def look(captions, prompt=None, repeats=False):
        args = argparse.Namespace(instance_prompt=prompt, folder_repeats=repeats)
        module.report_equal(
            module.sample_captions(datasets.Dataset.from_dict({"c": captions}), "c"), args
        )
        return capsys.readouterr().out

    assert "are 'x?[2J': is --caption_column right?" in look(["x\x1b[2J"] * 3)
    assert look(["dog"] * 3, repeats=True) == ""
    assert (
        look(["x"] * 3, prompt="x")
        == look(["x"])
        == look(["x", "y"])
        == look([None, "x"])
        == look([])
        == ""
    )
    assert "are 'x'" in look([["x", "y"], ["x", "z"], []])  # the first caption of each row
    assert f"are '{'x' * 60}'" in look(["x" * 99] * 2)
    rows = datasets.Dataset.from_dict({"c": [str(i) for i in range(25_000)]})
    assert module.sample_captions(rows, "c") == [str(i) for i in range(0, 25_000, 2)]
    module.report_cut(0, 10, 8, "tokens")
    module.report_cut(3, 1200, 8, "bytes", "there: ")
    said = "there: 3 of 1,200 captions have more than 8 bytes, and the rest is cut off\n"
    assert capsys.readouterr().out == said


def test_huge_captions_are_cut_before_they_are_tokenized():
    tokenizer = CLIPTokenizer.from_pretrained(MODELS / "tokenizer")
    tokenizers = Tokenizers([tokenizer], load_family("sd"))
    texts = ["a digit " * 10**6, "a digit " * 9, "a digit"]
    begin = time.process_time()
    tokens = module.tokenize(tokenizers, texts)["input_ids"]
    assert (
        module.are_cut(tokenizers, texts)[::2] == [True, False] and time.process_time() - begin < 2
    )
    assert torch.equal(tokens[0], module.tokenize(tokenizers, ["a digit " * 100])["input_ids"][0])


def test_image_and_mask_are_decoded_ahead(row, monkeypatch):
    file = io.BytesIO()
    Image.new("L", (24, 20)).save(file, "PNG")
    calls = []

    def decode(source, channels, **options):
        calls.append((channels, "pixels" in source))
        return decode_image(source, channels, **options)

    for where in (passes, transforms):
        monkeypatch.setattr(where, "decode_image", decode)
    mask = {"bytes": file.getvalue(), "path": None}
    row("--mask_column=where", ahead=True, where=mask)
    assert calls == [(3, False), (1, False), (3, True), (1, True)]
    calls.clear()
    row(ahead=True)
    assert calls == [(3, False), (3, True)]


def test_an_image_is_resized_once_unless_there_are_masks(row, monkeypatch):
    sizes = []
    monkeypatch.setattr(
        transforms, "shrink", lambda image, *how: sizes.append(len(image)) or shrink(image, *how)
    )
    assert "mask" not in row() and sizes == [3]
    assert row("--mask_column=where", where=None)["mask"].unique().tolist() == [255] and sizes == [
        3,
        3,
        1,
    ]


def test_shuffled_tag_order_stays_the_same_in_every_version():
    """A run that resumes with another version must draw the same captions."""
    choice = CaptionChoice(seed=4, weights=None, shuffle=True, num_kept=1)
    found = [choose_caption("a,b,c,d,e,f,g", epoch, 7, choice) for epoch in (0, 1)]
    assert found == ["a, g, b, c, f, d, e", "a, e, c, g, b, f, d"]
