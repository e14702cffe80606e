"""Flags: @FILE reads what run.args wrote, numbers have bounds, flags override a demo's."""

import argparse
import copy
import gc
import os
import pickle
import shlex
from pathlib import Path

import pytest

import train_flow
import train_text_to_image
from diffusion_training.arguments import (
    PATH,
    SWITCH,
    Flags,
    format_args,
    make_parser,
    number,
    parse_demo,
)
from diffusion_training.errors.sentences import in_one_sentence


def test_garbage_is_not_collected_between_the_flags_of_a_script_and_its_main(parser, monkeypatch):
    found = []
    main = in_one_sentence(lambda args: found.append(gc.isenabled()))
    monkeypatch.setattr("sys.argv", ["paint.py", "--size=9"])
    try:
        parser.parse_args(["--size=8"])  # as tests and Ray's workers do
        assert gc.isenabled()
        args = parser.parse_args()
        assert not gc.isenabled() and args.size == 9
        main(args)
    finally:
        gc.enable()
        gc.unfreeze()
    assert found == [True]


@pytest.fixture
def parser():
    parser = make_parser("/somewhere/paint.py", "Paint.\n\nMore on it.")
    parser.add_argument("--out", type=PATH, default="out")
    parser.add_argument("--size", type=number(1, 64, int), default=8)
    parser.add_argument("--rate", type=number(0, 1), default=0.5)
    parser.add_argument("--batch", type=number(1, 9, int, "auto"), default=1)
    parser.add_argument("--prompts", nargs="+")
    parser.add_argument("--weights", nargs="+", type=number(0, 10))
    parser.add_argument("--name")
    parser.add_argument("--flip", **SWITCH)
    return parser


def test_path_flags_drop_extra_slashes_from_addresses():
    assert PATH("s3://bucket/cache/") == "s3://bucket/cache"
    assert PATH("s3://bucket//a///b//") == "s3://bucket/a/b" and PATH("s3://b/") == "s3://b"
    assert PATH("file:///a//b/") == "file:///a/b" and PATH("a//b/") == "a//b/"
    with pytest.raises(argparse.ArgumentTypeError, match="one slash after the colon"):
        PATH("s3:/bucket/a")


def test_run_args_files_are_parsed_back_to_the_same_flags(parser, tmp_path):
    for argv in (
        [],
        [
            '--name=it\'s a # "test"',
            "--rate=0.30000000000000004",
            "--flip",
            "--size=7",
            "--batch=auto",
        ],
        [
            "--prompts",
            'it\'s a "dog"',
            "# two",
            "",
            "--weights",
            "0.1",
            "1e-9",
            "--no-flip",
            "--out=a b/c",
        ],
    ):
        args = parser.parse_args(argv)
        (tmp_path / "run.args").write_text(format_args(vars(args), "python paint.py"))
        assert vars(parser.parse_args([f"@{tmp_path}/run.args"])) == vars(args)
        # later flags win
        assert parser.parse_args([f"@{tmp_path}/run.args", "--flip", "--size=3"]).flip
    written = (tmp_path / "run.args").read_text().splitlines()
    assert written[0] == "# python paint.py @run.args"
    assert "out" not in format_args(vars(args), "python paint.py", leave_out=["out"])


def test_flags_keep_the_given_values_and_are_read_only(parser):
    flags = Flags(**vars(parser.parse_args(["--size=7"])))
    assert flags.size == 7 and "size" in flags and flags.prompts is None
    with pytest.raises(AttributeError, match="args.size is read-only"):
        flags.size = 8
    with pytest.raises(AttributeError, match="args.found is read-only"):
        flags.found = 8
    assert vars(flags) == vars(parser.parse_args(["--size=7"]))


def test_flag_files_may_have_comments_and_several_flags_per_line(parser, tmp_path, capsys):
    (tmp_path / "own.args").write_text("# mine\n--size 32  # small\n\n--name 'a b' --flip\n")
    args = parser.parse_args([f"@{tmp_path}/own.args", "--no-flip"])
    assert (args.size, args.name, args.flip) == (32, "a b", False)
    for name in (f"@{tmp_path}/nowhere.args", "@"):
        with pytest.raises(SystemExit) as stop:
            parser.parse_args([name])
        assert stop.value.code == 2 and f"{name} can't be read" in capsys.readouterr().err


@pytest.mark.parametrize("end", ["\n", "\r\n"])
def test_a_flag_file_is_read_as_a_shell_reads_it(parser, tmp_path, end):
    lines = ["--out=photos#1 --name \"a 'b' # c\" \\", "  --flip # isn't", "# --size=3"]
    (tmp_path / "own.args").write_text(end.join(lines), newline="")
    args = parser.parse_args([f"@{tmp_path}/own.args"])
    assert (args.out, args.name, args.flip, args.size) == ("photos#1", "a 'b' # c", True, 8)


@pytest.mark.parametrize(
    "content",
    [
        b"\x89PNG\r\n--size=3",  # no UTF-8
        b"GIF89a --name=\0",  # no command line has this character
        "--size=3".encode("utf-16"),  # what PowerShell's > writes
    ],
)
def test_an_argument_file_that_is_not_text_is_refused_in_a_sentence(
    parser, tmp_path, capsys, content
):
    (tmp_path / "own.args").write_bytes(content)
    with pytest.raises(SystemExit):
        parser.parse_args([f"@{tmp_path}/own.args"])
    assert capsys.readouterr().err.endswith(
        "own.args can't be read: it is not a text file in UTF-8\n"
    )


def test_an_argument_file_may_begin_with_a_byte_order_mark(parser, tmp_path):
    (tmp_path / "own.args").write_text("--size=3 --name='größer 猫'", encoding="utf-8-sig")
    args = parser.parse_args([f"@{tmp_path}/own.args"])
    assert (args.size, args.name) == (3, "größer 猫")


def test_numbers_out_of_bounds_are_refused(parser, capsys):
    assert (
        parser.parse_args(["--size=64"]).size == 64 and parser.parse_args(["--rate=0"]).rate == 0.0
    )
    for flag, sentence in {
        "--size=65": "argument --size: 65 is not between 1 and 64",
        "--size=0": "0 is not between 1 and 64",
        "--size=1.5": "argument --size: invalid int value: '1.5'",
        "--rate=nan": "nan is not between 0 and 1",
        "--rate=inf": "inf is not between 0 and 1",
        "--batch=Auto": "argument --batch: invalid int value: 'Auto'",
    }.items():
        with pytest.raises(SystemExit) as stop:
            parser.parse_args([flag])
        # the usage does not list all flags, which would hide the error
        usage, error = capsys.readouterr().err.splitlines()
        assert stop.value.code == 2 and sentence in error and "--help" in usage, flag
    assert number(1, 2, int).bounds == (1, 2, int)  # for tests of all flags
    with pytest.raises(argparse.ArgumentTypeError):
        number(-1, 1)("-inf")


def test_a_demo_prints_its_full_command_and_flags_override_it(parser, capsys, monkeypatch):
    demo = "--name 'the demo'\n  --size 4 --flip"
    args = parse_demo(parser, demo, ["--size=5", "--no-flip"])
    assert (args.name, args.size, args.flip) == ("the demo", 5, False)
    printed = capsys.readouterr().out.splitlines()[-1]
    assert shlex.split(printed)[0] == "python" and "/paint.py --name" in printed
    assert vars(parser.parse_args(shlex.split(printed)[2:])) == vars(args)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # as the launcher does
    parse_demo(parser, demo, [])
    assert capsys.readouterr().out.splitlines()[-1].startswith("accelerate launch ")
    # in an installed package, a script is named and not its path
    monkeypatch.setattr("diffusion_training.arguments.PACKAGED", parser.folder)
    monkeypatch.setattr(Path, "is_dir", lambda path: True)
    parse_demo(parser, demo, [])
    start = "accelerate launch -m diffusion_training paint --name "
    assert capsys.readouterr().out.splitlines()[-1].startswith(start)
    monkeypatch.setenv("RANK", "1")
    parse_demo(parser, demo, [])
    assert capsys.readouterr().out == ""


def test_tilde_is_expanded_and_a_parser_needs_no_docstring(parser):
    assert parser.parse_args(["--out=~/x"]).out == os.path.expanduser("~/x") != "~/x"
    assert parser.description == "Paint." and parser.prog == "paint.py"
    assert make_parser("paint.py", None).description == ""  # python -OO has none


def test_a_demo_reads_flags_from_the_command_line(parser, monkeypatch):
    monkeypatch.setattr("sys.argv", ["paint.py", "--size=5"])
    args = parse_demo(parser, "--name demo --size 4", None)
    assert (args.name, args.size) == ("demo", 5)


def test_help_shows_defaults_and_flag_files(parser):
    parser.add_argument("--tint", default=0, help="of grey")
    parser.add_argument("--tone", help="of the paper (default: white)")
    parser.add_argument("--wet", action=argparse.BooleanOptionalAction, default=True, help="soak")
    parser.add_argument("--inks", nargs="+", default=["red", "blue"], help="colours")
    printed = " ".join(parser.format_help().split())
    assert "@FILE reads flags from a file: @my-run/run.args" in printed
    said = ["of grey (default: 0)", "soak (default: on)", "colours (default: red blue)"]
    assert all(text in printed for text in [*said, "of the paper (default: white)"])
    assert "None" not in printed and "(default: white) (" not in printed and "False" not in printed


def test_help_ends_with_the_docstrings_commands_and_a_docs_page():
    doc = "Paint.\n\n    paint.py --size 4 \\\\\n        --flip\n\nMore."
    printed = make_parser("paint.py", doc, "docs/paint.md").format_help()
    assert "examples:\n\n    paint.py --size 4 \\\\\n        --flip\n\n@FILE" in printed
    assert printed.strip().endswith("Documentation: docs/paint.md") and "More." not in printed


@pytest.mark.parametrize(
    "typed, words",
    [
        ("--enable_bucket=16", ["docs/from-kohya.md says: --bucket_step 64"]),
        ("--optimizer_type=AdamW8bit", ["sd-scripts", "--optimizer, in small letters"]),
        ("--timestep_sampling=sigmoid", ["none for a U-Net"]),
        ("--trigger_word=sks", ["ai-toolkit", '--caption_prefix "sks dog,"']),
        ("--timesteps=9", ["the pretrained pipeline's scheduler"]),
        ("--batch_size=9", ["here: --train_batch_size"]),
        ("--train_text_encoder", ["none: text encoders are not trained"]),
        ("--class_data_dir=x", ["says", "--preserve_prior"]),
        ("--hub_token=x", ["docs/from-diffusers.md says", "hf auth login"]),
        ("--model_family=prx", ["it is one of train_flow.py"]),
        ("--text_cache=ids", ["it is one of precompute_latents_ray.py, precompute_latents.py"]),
        ("--ddpm_num_steps=9", ["it is one of train_unconditional.py"]),
        ("--retry_failed", ["it is one of download_images.py"]),
    ],
)
def test_flags_of_other_scripts_and_programs_are_recognized_by_the_pages(typed, words, capsys):
    with pytest.raises(SystemExit) as stop:
        train_text_to_image.parse_args([typed])
    (line,) = capsys.readouterr().err.splitlines()[1:]
    assert stop.value.code == 2 and f"there is no flag {typed}: " in line
    assert all(word in line for word in words) and "`" not in line and len(line) < 330


def test_a_flag_with_another_meaning_elsewhere_is_not_taken_in_silence(tmp_path, capsys):
    needed = [f"--latents_dir={tmp_path}", "--pretrained_model_name_or_path=x"]
    said = "for training FLUX.1-dev, is --embedded_guidance_scale here"
    for scale, is_told in ((1.0, True), (4, False)):
        train_flow.parse_args([*needed, "--validation_prompts=a", f"--guidance_scale={scale}"])
        assert (said in capsys.readouterr().out) == is_told
    with pytest.raises(SystemExit):
        train_flow.parse_args([*needed, "--timestep_sampling=sigmoid"])
    assert "here: --weighting_scheme sigmoid" in capsys.readouterr().err


def test_a_single_value_that_begins_with_a_dash_is_read_back(parser, tmp_path):
    args = parser.parse_args(["--prompts=-rf"])
    (tmp_path / "run.args").write_text(format_args(vars(args), "python paint.py"))
    assert parser.parse_args([f"@{tmp_path}/run.args"]).prompts == ["-rf"]


def test_a_misspelled_file_of_flags_gets_a_suggestion(parser, tmp_path, capsys):
    (tmp_path / "small.args").write_text("--size 4")
    with pytest.raises(SystemExit):
        parser.parse_args([f"@{tmp_path / 'small.arg'}"])
    assert f"did you mean @{tmp_path / 'small.args'}?" in capsys.readouterr().err


def test_mistyped_flags_get_a_suggestion(parser, capsys):
    for argv, sentence in {
        ("--sise=4", "1"): "there is no flag --sise=4: did you mean --size?",
        ("--colour", "red"): "there is no flag --colour (--help lists the flags)",
        ("red",): "red belongs to no flag: put several words in quotes",
    }.items():
        with pytest.raises(SystemExit) as stop:
            parser.parse_args(argv)
        assert stop.value.code == 2 and sentence in capsys.readouterr().err.splitlines()[-1]


def test_given_flags_are_listed_also_in_copies_and_pickles(parser):
    flags = parser.freeze(parser.parse_args(["--size=7", "--rate=0.5", "--flip"]))
    for each in (flags, pickle.loads(pickle.dumps(flags)), copy.deepcopy(flags)):
        assert each.given == ("size", "flip") and vars(each) == vars(flags) and each.size == 7
        with pytest.raises(AttributeError, match="read-only"):
            each.given = ()
