"""Scripts import nothing from each other; what they share is text, and this keeps it the same."""

import argparse
import difflib
import importlib
import io
import itertools
import math
import os
import re
import shutil
import sys

import pytest
from conftest import ROOT
from copy_shared import SCRIPTS, copy, shared_blocks

# What must be shared, so that a renamed function can't leave the comparison empty.
IMAGES = {"number", "parse_demo", "format_args", "fail", "explain", "explained", "load_rows", "read_items",
          "decode_image", "shrink", "name_image", "step_seed", "draw_choices", "ignore_signals", "end_workers",
          "load_batches", "mark_time", "seconds_between", "make_accelerator", "threads_are_default", "put_on_device",
          "compile_model", "has_caption_files", "add_captions"}  # fmt: skip
MODELS = {"transform", "tokenize", "locate_model", "vae_scale_factor", "load_models", "encode_images",
          "encode_prompts", "try_models", "hash_weights", "describe_models", "find_differences",
          "say_equal"}  # fmt: skip
TRAINING = {"compute_loss", "train_step", "update_ema", "check_training_args", "step_batches", "objective_flags",
            "check_objective", "is_due", "check_overflows", "StopSignal", "Records", "clean", "saving",
            "find_checkpoints", "find_checkpoint", "save_checkpoint", "load_checkpoint", "open_output_dir", "hold_out",
            "name_rows", "log_held_out_loss", "to_epsilon", "samples_path", "save_samples", "read_metrics",
            "plot_loss", "save_pipeline", "save_model_card", "save_report", "list_settings",
            "draw_curves", "end_run", "find_signs", "measure_images", "scale_learning_rate",
            "find_learning_rate", "choose_batch_size", "largest_batch"}  # fmt: skip
SHARED = {
    ("precompute_latents.py", "train_unconditional.py"): IMAGES,
    ("precompute_latents.py", "train_text_to_image.py"): IMAGES | MODELS,
    ("train_text_to_image.py", "train_unconditional.py"): IMAGES | TRAINING,
}
# Flags whose defaults differ, because those of diffusers' two scripts do, or because a script has its own data.
DEFAULTS = {"--resolution", "--output_dir", "--lr_scheduler", "--adam_beta1", "--adam_weight_decay",
            "--tracker_project_name"}  # fmt: skip


def blocks(name):
    return {block: text for block, (_, _, text) in shared_blocks((ROOT / name).read_text()).items()}


def parser_of(name):
    """The parser that a script's parse_args builds."""
    parser, parse = None, argparse.ArgumentParser.parse_args

    def catch(self, *args):
        nonlocal parser
        parser = self
        raise InterruptedError

    argparse.ArgumentParser.parse_args = catch
    try:
        __import__(name.removesuffix(".py")).parse_args([])
    except InterruptedError:
        pass
    finally:
        argparse.ArgumentParser.parse_args = parse
    return parser


def flags(name):
    """{flag: what it takes and says, its default if that is shared}."""
    return {
        option: (
            type(action).__name__, getattr(action.type, "bounds", action.type), action.nargs,
            tuple(action.choices or ()), action.help, None if option in DEFAULTS else action.default,
        )
        for action in parser_of(name)._actions
        for option in action.option_strings
    }  # fmt: skip


@pytest.mark.parametrize("one, other", list(itertools.combinations(SCRIPTS, 2)))
def test_functions_of_the_same_name_are_the_same(one, other):
    mine, theirs = blocks(one), blocks(other)
    common = mine.keys() & theirs.keys()
    assert common >= SHARED[one, other], SHARED[one, other] - common
    for name in sorted(common):
        diff = difflib.unified_diff(mine[name].splitlines(), theirs[name].splitlines(), one, other, lineterm="")
        assert mine[name] == theirs[name], "\n".join(
            [*diff, "run: python tests/copy_shared.py <the script that you edited>"]
        )


def test_what_the_download_has_of_the_others_is_the_same():
    mine, theirs = blocks("download_images.py"), blocks("precompute_latents.py")
    common = (mine.keys() & theirs.keys()) - {"stop"}  # it ends a download, which goes on by itself
    assert common == {"fail", "find_differences", "number"}
    assert all(mine[name] == theirs[name] for name in common)


@pytest.mark.parametrize("one, other", list(itertools.combinations(SCRIPTS, 2)))
def test_flags_of_the_same_name_mean_the_same(one, other):
    mine, theirs = flags(one), flags(other)
    common = mine.keys() & theirs.keys()
    assert len(common) > 15
    assert {name: mine[name] for name in common} == {name: theirs[name] for name in common}


def test_defaults_that_are_listed_as_different_do_differ():
    found = {name: {f: parser_of(name).get_default(f.strip("-")) for f in flags(name)} for name in SCRIPTS}
    for flag in DEFAULTS:
        assert len({defaults[flag] for defaults in found.values() if flag in defaults}) > 1, flag


@pytest.mark.parametrize("name", SCRIPTS)
def test_every_number_has_bounds_and_every_flag_a_chapter(name):
    parser = parser_of(name)
    chapters = [group.title for group in parser._action_groups[2:]]
    assert len(chapters) >= 3
    for action in parser._actions[1:]:
        assert action.container.title in chapters, action.option_strings
        assert action.type not in (int, float), f"{action.option_strings}: say its bounds with number()"
        if path := re.search("_dir$|_path$|^dataset_name$|^resume_from", action.dest) and action.dest != "logging_dir":
            assert action.type("~/x") == os.path.expanduser("~/x") != "~/x", action.option_strings
        if action.type is None or path:
            continue
        low, high, kind = action.type.bounds
        assert math.isfinite(low) and math.isfinite(high) and low < high
        for value in ("nan", "inf", "-inf", "x", "", str(low - 1), str(high * 10 + 1)):
            with pytest.raises((argparse.ArgumentTypeError, ValueError)):
                action.type(value)
        assert action.type(str(low)) == low and type(action.type(str(low))) is kind
        assert action.default is None or low <= action.default <= high


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_terminal_that_knows_ascii_only_ends_no_run(name, monkeypatch):
    shown = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", shown)
    importlib.import_module(name.removesuffix(".py")).in_one_sentence(lambda args: print("Müll.png", flush=True))(None)
    assert shown.buffer.getvalue() == b"M\\xfcll.png\n"


@pytest.mark.parametrize("change", ["body", "decorator", "class"])
def test_copying_makes_scripts_the_same_again(tmp_path, change):
    (tmp_path / "tests").mkdir()
    for name in SCRIPTS:
        shutil.copy(ROOT / name, tmp_path)
    edited = tmp_path / "train_unconditional.py"
    source = edited.read_text()
    old, new, block = {
        "body": (
            "    choices = np.random.default_rng([seed, epoch or 0, row]).random(4)",
            "    choices = [seed] * 4",
            "draw_choices",
        ),
        "decorator": ("@contextlib.contextmanager\ndef explained(", "def explained(", "explained"),
        "class": ("    def agree(self):", "    def agree_on(self):", "StopSignal"),
    }[change]
    assert source.count(old) == 1
    edited.write_text(source.replace(old, new))
    copied = copy("train_unconditional.py", tmp_path)
    sharing = [name for name in SCRIPTS[:2] if block in blocks(name)]
    assert sorted(copied) == sorted(f"{block} -> {name}" for name in sharing) and copied
    for name in sharing:
        assert (tmp_path / name).read_text() == (ROOT / name).read_text().replace(old, new)
    assert copy("train_unconditional.py", tmp_path) == []
