"""Flags: a parser that reads @FILE, numbers with bounds, a demo's command line, run.args."""

import argparse
import os
import re
import shlex
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

PATH = os.path.expanduser  # an argparse type: a shell does not expand the ~ in --output_dir=~/run
# defines --flag, and --no-flag, which overrides a --flag in a @FILE
SWITCH: dict[str, Any] = {"action": argparse.BooleanOptionalAction, "default": False}


class Parser(argparse.ArgumentParser):
    """A parser that reads the flags in @FILE as a shell would.

    argparse itself takes each line as one argument, but a value may span several lines.
    """

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        words = []
        for word in sys.argv[1:] if args is None else args:
            try:
                if word.startswith("@"):
                    text = os.fsdecode(Path(word[1:]).read_bytes())
                    words += shlex.split(text, comments=True)
                else:
                    words.append(word)
            except (OSError, ValueError) as error:
                self.error(f"{word} can't be read: {error}")
        return super().parse_known_args(words, namespace)


class OneOrMore(argparse.Action):
    """Action for a flag with nargs="+": stores one value as it is, and several as a list.

    A value that is given twice is an error.
    """

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if len({*values}) < len(values):
            parser.error(f"{option_string} {' '.join(map(str, values))} names one twice")
        setattr(namespace, self.dest, values if len(values) > 1 else values[0])


class Flags(argparse.Namespace):
    """What the user said, read-only: what a run finds out is a value of its own."""

    def __init__(self, **values: Any) -> None:
        vars(self).update(values)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"args.{name} is read-only: pass what was found out as a value")


def list_values(value: Any) -> list:
    """Return the values of a flag with `OneOrMore`, always as a list."""
    return value if isinstance(value, list) else [value]


def make_parser(script: str, doc: str | None) -> Parser:
    """Make the parser of a script from its file name and docstring. It reads @FILE too."""
    return Parser(
        prog=Path(script).name,
        description=(doc or "").split("\n")[0],  # None under `python -OO`
        usage="%(prog)s [flags]  (--help lists them)",  # the full list would hide an error
        epilog="@FILE stands for the flags in a file, such as a run's run.args",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )


def number(low: float, high: float, kind: Callable = float, *words: str) -> Callable[[str], Any]:
    """Make an argparse type: a number from `low` to `high`, or one of `words`.

    `kind` converts the text. The bounds also exclude nan and inf.
    """

    def parse(text: str) -> Any:
        if text in words:
            return text
        if not low <= (value := kind(text)) <= high:
            raise argparse.ArgumentTypeError(f"{text} is not between {low:g} and {high:g}")
        return value

    parse.__name__ = kind.__name__
    parse.__dict__["bounds"] = low, high, kind
    return parse


def size(low: int, high: int) -> Callable[[str], int]:
    """Make an argparse type: a number of bytes, with or without a unit such as GB."""

    def parse(text: str) -> int:
        match = re.fullmatch(r"(\d+\.?\d*) ?([kKMGTP]?)B?", text)
        count = -1
        if match:
            digits, unit = match.groups()
            # an empty unit has index 0
            count = round(float(digits) * 1000 ** " KMGTP".index(unit.upper()))
        if not low <= count <= high:
            raise argparse.ArgumentTypeError(f"{text} is no number of bytes, such as 100GB")
        return count

    parse.__dict__["bounds"] = low, high, int
    return parse


COUNT = number(1, 10**9, int)  # an argparse type


def steps_or_share(text: str) -> int | float:
    """An argparse type: a number of steps, or below 1 a share of the run; 1 and 1.0 are a step."""
    value = number(0, 10**9)(text)
    if 0 < value < 1:
        return value
    if not value.is_integer():
        raise argparse.ArgumentTypeError(f"{text} is neither whole steps nor a share below 1")
    return int(value)


steps_or_share.__dict__["bounds"] = 0, 10**9, int


def check_source(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Stop with an error if the data folder does not exist, or if two sources are given.

    One of two sources would be ignored.
    """
    if args.dataset_name and args.train_data_dir:
        parser.error("--dataset_name and --train_data_dir exclude each other")
    path = Path(args.train_data_dir or ".")
    takes_array = "array_range" in args
    if not path.is_dir() and not (takes_array and path.suffix == ".npy" and path.is_file()):
        more = ", nor an .npy file" if takes_array else ""
        parser.error(f"--train_data_dir {path} is not a folder{more}")


def parse_demo(
    parser: Parser, demo: str, argv: list[str] | None, launcher: str = "accelerate launch"
) -> argparse.Namespace:
    """Parse the demo's command line, with the flags in `argv` overriding its own.

    Prints the full command.
    """
    command = shlex.split(demo) + (sys.argv[1:] if argv is None else argv)
    if os.environ.get("RANK", "0") == "0":
        full = f"{launcher} {parser.prog} {shlex.join(command)}"
        print(f"No data given: this is the demo, short for\n{full}")
    return parser.parse_args(command)


def format_args(flags: dict[str, Any], script: str, leave_out: Sequence[str] = ()) -> str:
    """Format {name: value} as the text of a file that @FILE reads, one flag per line."""
    lines = [f"# accelerate launch {script} @run.args"]
    for name, value in flags.items():
        if name in leave_out or value is None:
            continue
        if isinstance(value, bool):
            lines.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list):
            lines.append(f"--{name} {shlex.join(map(str, value))}")
        else:
            lines.append(f"--{name}={shlex.quote(str(value))}")
    return "\n".join(lines) + "\n"
