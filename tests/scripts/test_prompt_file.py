"""--validation_prompts_file: prompts with values of their own, as kohya's scripts read them."""

import json
import re

import numpy as np
import pytest
import torch
from conftest import Script, list_sd_flags, open_pipeline
from PIL import Image

from diffusion_training.data.prompt_file import join_prompt, split_prompt

pytestmark = pytest.mark.usefixtures("without_figures")
train = Script("train_text_to_image")
LINES = """\ufeff# a comment, and an empty line

a digit zero --w 32 --h 16 --d 7 --s 3 --l 2.5 --n a digit one
a digit two -- not a switch
"""


def test_a_line_is_split_into_the_prompt_and_its_values():
    values = {"width": 32, "seed": 7, "sample_steps": 3, "scale": 2.5, "negative_prompt": "x, y"}
    line = "a high-res dog --w 32 --d 7 --s 3 --l 2.5 --n x, y"
    assert split_prompt(line) == ("a high-res dog", values)
    assert join_prompt({"prompt": "a high-res dog", **values}) == line
    assert split_prompt("a -- b--c") == ("a -- b--c", {})
    assert join_prompt({"prompt": "a -- b", "negative_prompt": None}) == "a -- b"


@pytest.fixture
def flags(tmp_path, sd_inputs):
    inputs = sd_inputs(7, "--random_flip")
    more = ["--max_train_steps=2", "--num_validation_images=2", "--guidance_scale=3"]
    more += ["--num_inference_steps=2", "--no-validate_first"]
    return list_sd_flags(inputs, tmp_path / "out", *more)


@pytest.mark.parametrize("line, said", [
    ("a dog --w 32 --ar 16:9", "there is no switch --ar: --w --h --d --s --l --n are known"),
    ("a dog --w wide", "--w has a wrong value"),
    ("a dog --l 0.5", "0.5 is not between 1 and 1000"),
    ('[{"prompt": "a dog", "steps": 3}]', "there is no key steps: width, height, seed, sample"),
    ('["a dog", null]', "it is no text and no object with a prompt"),
    ('[{"prompt": ["a dog"]}]', "prompt is no text or number"),
    ('[{"negative_prompt": "x --w 512"}]', "has a word that begins with --, as switches do"),
    ("{", "Expecting property name"),
    ("[]", "it has no list of prompts"),
    ("[" * 10**5, "recursion depth exceeded"),
    ("# nothing", "it has no list of prompts"),
])  # fmt: skip
def test_wrong_lines_end_in_one_sentence_before_anything_is_loaded(tmp_path, flags, line, said):
    path = tmp_path / f"prompts.{'json' if line[0] in '[{' else 'txt'}"
    path.write_text(line)
    given = f"--validation_prompts_file={path}"
    error = train.refused(*flags, given, status=2).splitlines()[-1]
    assert f"--validation_prompts_file {path}" in error and said in error
    assert not (tmp_path / "out").exists()


def test_a_file_and_prompts_exclude_each_other_but_for_run_args(tmp_path, flags):
    path = tmp_path / "prompts.txt"
    path.write_text("a dog --d 1")
    file, prompts = f"--validation_prompts_file={path}", "--validation_prompts=a cat"
    assert "leave one of them out" in train.refused(*flags, file, prompts, status=2)
    (tmp_path / "run.args").write_text(f"{file} --validation_prompts='an old line'")
    both = [*flags, f"@{tmp_path / 'run.args'}"]
    parse = train.module.parse_args
    assert parse(both).validation_prompts == ["a dog --d 1"]
    args = parse([*both, prompts])
    assert (args.validation_prompts, args.validation_prompts_file) == (["a cat"], None)
    assert "No such file" in train.refused(*flags, f"{file}x", status=2)


def test_pictures_are_drawn_with_the_values_of_their_line(tmp_path, flags):
    path = tmp_path / "prompts.txt"
    path.write_text(LINES)
    train(*flags, f"--validation_prompts_file={path}")
    grid = np.array(Image.open(tmp_path / "out/samples/step-0000002.png").convert("RGB"))
    pipeline = open_pipeline(tmp_path / "out")
    for number in range(2):
        # the seed of the second picture is the next one
        generator = torch.Generator().manual_seed(7 + number)
        (image,) = pipeline(
            "a digit zero", negative_prompt="a digit one", guidance_scale=2.5, height=16, width=32,
            num_inference_steps=3, generator=generator,
        ).images  # fmt: skip
        square = Image.new("RGB", (32, 32), "white")
        square.paste(image)
        expected = np.array(square.resize((64, 64), Image.NEAREST)).astype(int)
        start = grid.shape[1] - 68 * (2 - number)
        assert np.abs(grid[:64, start : start + 64] - expected).max() <= 1
    # the second line has the size of the run, and white around it
    assert (grid[68 + 32 : 132, -68:-4] == 255).all() and (grid[68:100, -68:-36] < 255).any()
    page = (tmp_path / "out/report.html").read_text()
    assert "a digit zero --w 32 --h 16 --d 7 --s 3 --l 2.5 --n a digit one" in page
    card = (tmp_path / "out/README.md").read_text()
    code = re.search(r"```python\n(.*?)```", card, re.S)[1]
    assert "a digit zero" in code and "--w" not in code


def test_a_size_that_the_model_cannot_draw_ends_before_step_1(tmp_path, flags):
    path = tmp_path / "prompts.json"
    path.write_text(json.dumps(["a digit zero", {"prompt": "a digit one", "width": 31}]))
    error = train.refused(*flags, f"--validation_prompts_file={path}")
    assert "'a digit one --w 31' has a width that is not a multiple of" in error
