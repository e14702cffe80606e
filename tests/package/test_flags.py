"""Flags that trainers share: bad values end with an error before anything is loaded."""

import argparse
import importlib
import importlib.util
import re

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS
from conftest import ROOT, find_parser, needs
from diffusers.optimization import SchedulerType

from diffusion_training.arguments import make_parser
from diffusion_training.training.flags import (
    SCHEDULES,
    TRACKERS,
    add_logging_flags,
    add_optimization_flags,
    add_saving_flags,
    check_training_args,
)


def parse(*argv):
    parser = make_parser("train.py", None)
    add_optimization_flags(parser, lr_scheduler="cosine", adam_beta1=0.9, adam_weight_decay=0.01)
    add_logging_flags(parser.add_argument, "train")
    add_saving_flags(parser.add_argument)
    args = parser.parse_args(argv)
    check_training_args(parser, args)
    return args


@pytest.mark.parametrize("argv, sentence", [
    (["--seed=-1"], "argument --seed: -1 is not between 0 and"),
    (["--lr_scheduler=piecewise_constant"], "needs --lr_step_rules"),
    (["--lr_scheduler=piecewise_constant", "--lr_step_rules=1:x,0.1"], "needs --lr_step_rules"),
    (["--lr_scheduler=piecewise_constant", "--lr_step_rules=nan:5,0.1"], "needs --lr_step_rules"),
    (["--lr_scheduler=piecewise_constant", "--lr_step_rules=1", "--lr_warmup_steps=5"],
     "piecewise_constant has no warm-up"),
    (["--learning_rate=nan"], "argument --learning_rate: nan is not between 0 and 100"),
    (["--optimizer=adam"], "--optimizer adam is none of adamw, adamw8bit, adafactor,"),
    (["--train_batch_size=0"], "argument --train_batch_size: 0 is not between 1 and"),
    (["--find_lr", "--find_lr_min=1", "--find_lr_max=0.1"],
     "--find_lr_min 1.0 is not below --find_lr_max 0.1"),
])  # fmt: skip
def test_bad_training_flags_end_with_one_line(argv, sentence, capsys):
    with pytest.raises(SystemExit) as stop:
        parse(*argv)
    assert stop.value.code == 2 and sentence in capsys.readouterr().err.strip().split("\n")[-1]


@needs("bitsandbytes")
def test_8_bit_adam_has_two_flags_and_needs_bitsandbytes(monkeypatch, capsys):
    assert parse().optimizer == "adamw" and parse("--optimizer=adafactor").optimizer == "adafactor"
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name: None if name == "bitsandbytes" else name
    )
    for argv in (["--use_8bit_adam"], ["--optimizer=adamw8bit"]):
        with pytest.raises(SystemExit):
            parse(*argv)
        assert "--optimizer adamw8bit needs bitsandbytes: `pip" in capsys.readouterr().err
    monkeypatch.undo()
    assert parse("--use_8bit_adam").optimizer == "adamw8bit"


def test_good_training_flags_are_accepted():
    assert parse(
        "--lr_scheduler=piecewise_constant", "--lr_step_rules=1:1000,0.1:2000,0.01"
    ).lr_step_rules
    assert parse("--train_batch_size=auto").train_batch_size == "auto"
    assert parse("--num_epochs=3").num_train_epochs == 3
    assert parse().scale_lr is parse("--scale_lr=sqrt", "--no-scale_lr").scale_lr is False
    assert parse("--scale_lr").scale_lr == "linear"
    assert parse("--push_to_hub").push_to_hub and not parse("--find_lr").push_to_hub


def test_choices_are_those_of_accelerate_and_diffusers():
    assert {*TRACKERS} == LOGGER_TYPE_TO_CLASS.keys()
    assert [*SCHEDULES] == [schedule.value for schedule in SchedulerType]


def test_report_to_accepts_every_tracker_and_names_a_missing_one(capsys, monkeypatch):
    for name in TRACKERS:
        monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
        with pytest.raises(SystemExit):
            parse(f"--report_to={name}")
        assert f"--report_to {name} needs {name}: `pip install {name}`" in capsys.readouterr().err
        monkeypatch.setattr(importlib.util, "find_spec", lambda module, name=name: module == name)
        assert parse(f"--logger={name}").report_to == name


def list_scripts():
    return sorted(path.stem for path in ROOT.glob("*.py"))


def choose_value(action, condition=""):
    """A value of a flag that differs from its default, or makes a condition true."""
    pattern = condition.partition(" ")[2].split("|")[0]
    if pattern:
        value = __file__ if pattern == "FILE" else pattern.replace("*", "a")
        return [value] if isinstance(action.nargs, str) and action.nargs in "+*" else value
    if isinstance(action.default, bool):
        return True if condition else not action.default
    return "another"


@pytest.mark.parametrize("script", list_scripts())
def test_each_flag_that_needs_another_says_so(script, capsys):
    """On the command line it is an error, from a file a line, and with what it needs neither."""
    parser = find_parser(importlib.import_module(script).parse_args)
    parser.typed = []
    actions = parser._option_string_actions
    defaults = {action.dest: action.default for action in parser._actions}

    def freeze(own, values):
        parser.own = own
        parser.freeze(argparse.Namespace(**defaults | values))
        return capsys.readouterr().out

    def satisfy(conditions):
        """Values that make conditions true, and what the flags in them need in turn."""
        values = {}
        for condition in conditions:
            known = [each for each in condition.split(" or ") if parser.knows(each)]
            if not known:  # a flag of another trainer, such as --output_kohya_format
                flags = (ROOT / "docs/flags.md").read_text()
                assert f"`{condition.split()[0]}`" in flags, condition
                continue
            action = actions[known[0].split(" ")[0]]
            values |= satisfy(action.needs) | {action.dest: choose_value(action, known[0])}
        return values

    def check_idle(action, values, word):
        flag = action.option_strings[0]
        if action.strict:
            with pytest.raises(SystemExit) as stop:
                freeze({action.dest: flag}, values)
            said = capsys.readouterr().err
            assert stop.value.code == 2 and f"{flag} does nothing {word} --" in said
        assert f" {flag.replace('--no-', '--')} " in freeze({}, values).replace("(", " ")

    for action in parser._actions:
        if not (action.needs or action.useless_with):
            continue
        flag = action.option_strings[0]
        value = {action.dest: choose_value(action)}
        needed = satisfy(action.needs)
        assert freeze({action.dest: flag}, {**value, **needed}) == ""
        for condition in filter(parser.knows, action.needs):
            without = {name: False for name in satisfy([condition])}
            check_idle(action, {**value, **needed, **without}, "without")
        for condition in filter(parser.knows, action.useless_with.split(" or ")):
            check_idle(action, {**value, **needed, **satisfy([condition])}, "with")


@pytest.mark.parametrize("script", list_scripts())
def test_a_flag_whose_help_names_what_it_needs_has_it_in_its_needs(script):
    parser = find_parser(importlib.import_module(script).parse_args)
    for action in parser._actions:
        named = re.match(r"with (--\w+)", action.help or "")
        if named and parser.knows(named[1]):
            conditions = " ".join(action.needs)
            assert named[1] in conditions, f"{action.option_strings} of {script}: {named[0]}"
