"""Scripts import nothing from each other; what they share is text, and this keeps it the same."""

import argparse
import ast
import difflib
import itertools

import pytest
from conftest import ROOT

SCRIPTS = ("train_unconditional.py", "precompute_latents.py", "train_text_to_image.py")
# What must be shared, so that a renamed function can't leave the comparison empty.
IMAGES = {"fail", "load_rows", "decode_image", "crop_square", "resize", "name_image", "ignore_signals", "Prefetcher",
          "step_seed", "draw_choices", "check_processes", "count_cores"}  # fmt: skip
MODELS = {"select_captioned", "transform", "tokenize", "keep", "locate_model", "vae_scale_factor",
          "load_models", "encode_images", "encode_prompts", "hash_weights", "describe_models",
          "find_differences"}  # fmt: skip
TRAINING = {"step_batches", "compute_loss", "update_ema", "remove", "replace", "saving", "find_checkpoints",
            "find_checkpoint", "save_checkpoint", "load_checkpoint", "read_metrics", "plot_loss", "save_pipeline",
            "check_launch", "use_cores", "open_output_dir", "start_records"}  # fmt: skip
SHARED = {
    ("precompute_latents.py", "train_unconditional.py"): IMAGES,
    ("precompute_latents.py", "train_text_to_image.py"): IMAGES | MODELS,
    ("train_text_to_image.py", "train_unconditional.py"): IMAGES | TRAINING,
}
# The same name for another thing: each script has its own, because it is what the script is about.
OWN = {"parse_args", "main", "collate", "make_unet", "make_pipeline", "log_validation", "save_model_card"}


def blocks(name):
    source = (ROOT / name).read_text()
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef | ast.ClassDef)]
    return {node.name: ast.get_source_segment(source, node) for node in nodes if node.name not in OWN}


def flags(name):
    """{flag: (type, choices, help, ...)} of a script, read from its parser."""
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
    return {
        option: (type(action).__name__, action.type, action.nargs, tuple(action.choices or ()), action.help)
        for action in parser._actions
        for option in action.option_strings
    }


@pytest.mark.parametrize("one, other", itertools.combinations(sorted(SCRIPTS), 2))
def test_functions_of_the_same_name_are_the_same(one, other):
    mine, theirs = blocks(one), blocks(other)
    common = mine.keys() & theirs.keys()
    assert common >= SHARED[one, other], SHARED[one, other] - common
    for name in sorted(common):
        diff = difflib.unified_diff(mine[name].splitlines(), theirs[name].splitlines(), one, other, lineterm="")
        assert mine[name] == theirs[name], "\n".join(diff)


@pytest.mark.parametrize("one, other", itertools.combinations(sorted(SCRIPTS), 2))
def test_flags_of_the_same_name_mean_the_same(one, other):
    mine, theirs = flags(one), flags(other)
    common = mine.keys() & theirs.keys()
    assert len(common) > 15
    assert {name: mine[name] for name in common} == {name: theirs[name] for name in common}
