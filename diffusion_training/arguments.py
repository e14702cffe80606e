"""Flags: a parser that reads @FILE, numbers with bounds, a demo's command line, run.args."""

import argparse
import contextlib
import difflib
import fnmatch
import functools
import gc
import importlib.util
import os
import re
import shlex
import signal
import sys
import textwrap
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn

from diffusion_training.errors.printing import PACKAGED, hide_secrets, note_secrets, shorten

# defines --flag, and --no-flag, which overrides a --flag in a @FILE
SWITCH: dict[str, Any] = {"action": argparse.BooleanOptionalAction, "default": False}
SWITCHED_ON = SWITCH | {"default": True}  # the same, for a flag that is on by default
# in a file of flags: a string or an escaped character, or what a shell leaves out
SKIPPED = re.compile(
    r"""(?P<kept>'[^']*'|"(?:\\.|[^"\\])*"|\\[^\r\n])|\\\r?\n|(?<!\S)\#[^\r\n]*""", re.DOTALL
)
# flags that people know from other programs, and what they are called here
OTHER_PROGRAMS = Path(__file__).with_name("other_programs.tsv")


def clean_path(text: str) -> str:
    """An argparse type: a path with ~ expanded, or an address without superfluous slashes.

    A shell does not expand the ~ in --output_dir=~/run. On a disk a//b/ is a/b; in a bucket it
    would be another name. s3:/bucket, which pathlib makes of s3://bucket, would be a local folder.
    """
    if re.match(r"[a-z0-9]{2,}:/[^/]", text):
        raise argparse.ArgumentTypeError("one slash after the colon: write two, as s3://bucket")
    if "://" not in text:
        return os.path.expanduser(text)
    return re.sub(r"(?<![:/])/+(?=/|$)", "", text)


PATH = clean_path


def local_path(text: str) -> str:
    """An argparse type: a path that must be on a disk."""
    if "://" in text:
        raise argparse.ArgumentTypeError(f"{text} is an address: give a local folder")
    return clean_path(text)


def is_address(path: str | Path) -> bool:
    """Whether a path is an fsspec address, such as s3://bucket/latents, and not on a disk."""
    return "://" in str(path)


def read_words(path: Path) -> list[str]:
    """The words of a file as a shell would read them. Raises ValueError if it is not text.

    `shlex` would end --output_dir=photos#1 at the #, which begins a comment only before a word, and
    would not join lines that end in a backslash.
    """
    content = path.read_bytes()
    with contextlib.suppress(UnicodeDecodeError):
        text = content.decode("utf-8-sig")
        if "\0" not in text:
            text = SKIPPED.sub(lambda match: match["kept"] or "", text)
            return shlex.split(text)
    raise ValueError("it is not a text file in UTF-8")


class Needs(argparse._ActionsContainer):
    """`add_argument` with two more parameters: what a flag needs, so that it does something.

    needs: conditions that must all be true, and useless_with: those that must be false. A condition
    is a flag, such as "--rank", or a flag with values, any of which will do: "--optimizer
    adamw|muon", "--train_data_dir *.npy". FILE stands for a path on this machine.
    "--a or --b" is true if one of them is. Flags that a script lacks are no conditions. A flag that
    does nothing is an error on the command line if it is strict, and else a line: settings of
    samples stay in a command without prompts.
    """

    def add_argument(
        self,
        *names: Any,
        needs: str | Sequence[str] = (),
        useless_with: str = "",
        strict: bool = True,
        **options: Any,
    ) -> argparse.Action:
        action = super().add_argument(*names, **options)
        vars(action)["needs"] = [needs] if isinstance(needs, str) else [*needs]
        vars(action)["useless_with"] = useless_with
        vars(action)["strict"] = strict
        return action


class Group(Needs, argparse._ArgumentGroup):
    """A group of flags in --help."""


class Parser(Needs, argparse.ArgumentParser):
    """A parser that reads the flags in @FILE as a shell would, and suggests a flag after a typo.

    argparse itself takes each line as one argument, but a value may span several lines.
    """

    folder = Path()  # of the script: it has recipes/, and docs/ knows the flags of other programs

    def add_argument_group(self, *args: Any, **kwargs: Any) -> Group:
        group = Group(self, *args, **kwargs)
        self._action_groups.append(group)
        return group

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        words = []
        self.typed = sys.argv[1:] if args is None else args
        self.own = self.name_flags(self.typed)
        if args is None:  # this process runs a script, whose slow imports come next
            # They leave hardly any garbage, and to look for it takes a sixth of the processor time
            # of a start. `in_one_sentence` turns that on again.
            gc.disable()
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
                # Ctrl-C ends the imports without a traceback; later `main` handles it
                signal.signal(signal.SIGINT, signal.SIG_DFL)
        for word in self.typed:
            if not word.startswith("@"):
                words.append(word)
                continue
            path = Path(word[1:])
            beside = self.folder / path  # @recipes/NAME of a script in another folder
            if beside.parent.is_dir() and not path.parent.is_dir():
                path = beside
            try:
                words += read_words(path)
            except (OSError, ValueError) as error:
                names = [other.name for other in path.parent.glob("*") if not path.exists()]
                near = difflib.get_close_matches(path.name, names, 1)
                hint = f"did you mean @{path.with_name(near[0])}?" if near else str(error)
                renamed = path.parent / "renamed.tsv"  # recipes of before, for one GPU each
                for line in renamed.read_text().splitlines() if renamed.is_file() else ():
                    old, _, new = line.partition("\t")
                    if old == path.name:
                        hint = f"its flags are now @{path.with_name(new)}"
                self.error(f"{word} can't be read: {hint}")
        note_secrets(words)
        parsed, unknown = super().parse_known_args(words, namespace)
        if unknown:
            typo = next((word for word in unknown if word.startswith("-")), None)
            if typo is None:
                self.error(f"{unknown[0]} belongs to no flag: put several words in quotes")
            name = typo.split("=")[0]
            near = difflib.get_close_matches(name, self._option_string_actions, 1, 0.7)
            advice = f": did you mean {near[0]}?" if near else " (--help lists the flags)"
            if found := self.advise(name):
                advice = f": {found}"
            self.error(f"there is no flag {typo}{advice}")
        for name, value in vars(parsed).items():
            for each in list_values(value):
                if isinstance(each, str) and re.search(r"://\S*(\?\*{3}|\*{3}@)", each):
                    self.error(f"--{name} {each} lacks its password or query: give it in full")
        return parsed, unknown

    def advise(self, flag: str) -> str | None:
        """What OTHER_PROGRAMS or the pages say of a flag that this script does not have.

        It may be one of another script here, of kohya's or of diffusers'. None if nothing has it. A
        line of OTHER_PROGRAMS that leads to a flag of another script is left out.
        """
        if flag in self._option_string_actions:
            return f"give {flag}"
        for line in OTHER_PROGRAMS.read_text().splitlines()[1:]:
            flags, program, here = line.split("\t")
            first = re.match(r"--\w+", here)
            if flag in flags.split() and (first is None or first[0] in self._option_string_actions):
                return f"it is one of {program}; here: {here}"
        section = ""  # the scripts that the next table of flags.md is about
        for page in ("flags.md", "from-kohya.md", "from-diffusers.md"):
            path = self.folder / "docs" / page
            text = path.read_text() if path.is_file() else ""
            for line in text.splitlines():
                section = line if line.startswith(("`", "## ")) else section
                cells = [cell.strip() for cell in line.strip("|").split(" | ")]
                if len(cells) < 2 or not re.search(rf"`{re.escape(flag)}[ `]", cells[0]):
                    continue
                if page == "flags.md":
                    scripts = cells[-1] if len(cells) == 4 and cells[-1] != "all" else section
                    names = re.findall(r"(?<![.\w])\w+(?=`|\.py)", scripts)
                    return f"it is one of {', '.join(f'{name}.py' for name in names)}"
                plain = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", cells[1]).replace("`", "")
                return f"docs/{page} says: {textwrap.shorten(plain, 200, placeholder=' ...')}"
        return None

    def error(self, message: str) -> NoReturn:
        """End the program with status 2 and one line, without passwords in addresses."""
        super().error(shorten(hide_secrets(message, printed=True)))

    def freeze(self, args: argparse.Namespace, **defaults: Any) -> "Flags":
        """The parsed flags, read-only. defaults: values that depend on other flags."""
        self.check_needs(args)
        given = [name for name, value in vars(args).items() if value != self.get_default(name)]
        return Flags(given, self.typed, **vars(args) | defaults)

    def name_flags(self, words: Sequence[str]) -> dict[str, str]:
        """The flags among some words, as {name in `args`: as it is written}."""
        names = [word.split("=")[0] for word in words]
        actions = self._option_string_actions
        return {actions[name].dest: name for name in names if name in actions}

    def check_needs(self, args: argparse.Namespace) -> None:
        """Stop with an error if a flag of the command line does nothing, by its `Needs`.

        Recipes, run.args and the demo have flags for many runs: for theirs, a line is printed.
        """
        flags_of: dict[str, list[str]] = {}
        for action, why in self.find_idle(args).items():
            flag = self.own.get(action.dest)
            if flag and vars(action)["strict"]:
                todo = "leave it out" if why.startswith("with ") else "give both, or leave it out"
                self.error(f"{flag} does nothing {why}: {todo}")
            flags_of.setdefault(why, []).append(f"--{action.dest}")
        if flags_of and os.environ.get("RANK", "0") == "0":
            print(
                "Flags that do nothing in this run:",
                "; ".join(f"{' '.join(flags)} ({why})" for why, flags in flags_of.items()),
            )

    def find_idle(self, args: argparse.Namespace) -> dict[argparse.Action, str]:
        """The flags that do nothing beside the others, as {flag: why}."""
        return {
            action: why
            for action in self._actions
            if vars(args).get(action.dest, action.default) != action.default
            and (why := self.find_idle_reason(action, args))
        }

    def find_idle_reason(self, action: argparse.Action, args: argparse.Namespace) -> str | None:
        """Why a flag does nothing beside the others, such as "without --rank"; None if it does."""
        for condition in vars(action)["needs"]:
            choices = [each for each in condition.split(" or ") if self.knows(each)]
            if choices and not any(self.is_true(each, args) for each in choices):
                return (
                    f"without {' or '.join(filter(None, [', '.join(choices[:-1]), choices[-1]]))}"
                )
        for condition in filter(self.knows, vars(action)["useless_with"].split(" or ")):
            if self.is_true(condition, args):
                flag, _, patterns = condition.partition(" ")
                values = list_values(vars(args)[self._option_string_actions[flag].dest])
                return " ".join(["with", flag, *map(str, values)] if patterns else ["with", flag])
        return None

    def knows(self, condition: str) -> bool:
        """Whether this script has the flag of a condition."""
        return condition.split(" ")[0] in self._option_string_actions

    def is_true(self, condition: str, args: argparse.Namespace) -> bool:
        """Whether a condition of `Needs` is true."""
        flag, _, patterns = condition.partition(" ")
        value = vars(args).get(self._option_string_actions[flag].dest)
        if patterns == "FILE":
            return value is not None and os.path.exists(value)
        if not patterns:
            return bool(value)
        choices = patterns.split("|")
        return any(fnmatch.fnmatch(str(v), each) for v in list_values(value) for each in choices)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter):
    """Shows a default once, if there is one, and keeps the line breaks of commands."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        if action.default is None or "(default:" in (action.help or ""):
            return action.help
        if action.nargs == 0:  # a switch
            return f"{action.help} (default: on)" if action.default is True else action.help
        if isinstance(action.default, list):
            return f"{action.help} (default: {' '.join(action.default) or 'none'})"
        return super()._get_help_string(action)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        paragraphs = text.split("\n\n")
        return "\n\n".join(
            part if part.startswith(" ") else super(HelpFormatter, self)._fill_text(part, width, "")
            for part in paragraphs
        )


class OneOrMore(argparse.Action):
    """Action for a flag with nargs="+": stores one value as it is, and several as a list.

    A value that is given twice is an error.
    """

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        if len({*values}) < len(values):
            parser.error(
                f"{option_string} {' '.join(map(str, values))} gives a value twice: leave one out"
            )
        setattr(namespace, self.dest, values if len(values) > 1 else values[0])


class OrNo(argparse.Action):
    """Action for a flag whose value "no" takes back the value in a @FILE: it stores None."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: Any = None) -> None:
        setattr(namespace, self.dest, None if values == "no" else values)


class Flags(argparse.Namespace):
    """The user's flags, read-only. `complete_args` makes a copy with what a run has found out.

    given: names of the flags that differ from their defaults. typed: the words of the command
    line. They are slots, so that `vars` holds only flags.
    """

    __slots__ = ("given", "typed")

    def __init__(
        self, given: Collection[str] = (), typed: Sequence[str] = (), **values: Any
    ) -> None:
        object.__setattr__(self, "given", tuple(given))
        object.__setattr__(self, "typed", tuple(typed))
        vars(self).update(values)

    def __reduce__(self) -> tuple:
        return functools.partial(Flags, **vars(self)), (self.given, self.typed)

    def __setattr__(self, name: str, value: Any) -> None:
        raise AttributeError(f"args.{name} is read-only: return the new value instead")


def list_values(value: Any) -> list:
    """Return the values of a flag with `OneOrMore`, always as a list."""
    return value if isinstance(value, list) else [value]


def make_parser(script: str, doc: str | None, page: str | None = None) -> Parser:
    """Make the parser of a script from its file name and docstring. It reads @FILE too.

    page: its documentation, such as "docs/training.md". --help ends with the docstring's commands
    and this page.
    """
    lines = (doc or "").split("\n")  # None under `python -OO`
    indented = [i for i, line in enumerate(lines) if i > 1 and not line.startswith("    ")]
    commands = "\n".join(lines[2 : indented[0]]) if indented else ""
    parts = [
        f"examples:\n\n{commands}" if commands else "",
        "@FILE reads flags from a file: @my-run/run.args has those of a run in my-run/.",
        f"Documentation: {os.path.relpath(Path(script).parent / page)}" if page else "",
    ]
    parser = Parser(
        prog=Path(script).name,
        description=lines[0],
        usage="%(prog)s [flags]  (--help lists them)",  # the full list would hide an error
        epilog="\n\n".join(filter(None, parts)),
        formatter_class=HelpFormatter,
        allow_abbrev=False,  # --learning_rat is a typo, not --learning_rate
    )
    parser.folder = Path(script).parent
    return parser


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
            raise argparse.ArgumentTypeError(f"{text} is not a number of bytes such as 100GB")
        return count

    parse.__dict__["bounds"] = low, high, int
    return parse


COUNT = number(1, 10**9, int)  # an argparse type


def steps_or_share(text: str) -> int | float:
    """An argparse type: a number of steps, or a share of the run below 1. 1.0 is one step."""
    value = number(0, 10**9)(text)
    if 0 < value < 1:
        return value
    if not value.is_integer():
        raise argparse.ArgumentTypeError(f"{text} is neither a whole number nor a share below 1")
    return int(value)


steps_or_share.__dict__["bounds"] = 0, 10**9, int


def name_start(script: str | Path) -> str:
    """Return how a command that starts a script begins: as this run was started, or by `python`.

    script: its path, or the name of another script. Those of an installed package have no path that
    one would type.
    """
    # `accelerate launch` sets this variable
    launcher = "accelerate launch" if "ACCELERATE_MIXED_PRECISION" in os.environ else "python"
    path = Path(script)
    if PACKAGED.is_dir() and (path.resolve().parent == PACKAGED or not path.is_file()):
        return f"{launcher} -m diffusion_training {path.stem}"
    return f"{launcher} {shlex.quote(os.path.relpath(path))}"


def parse_demo(parser: Parser, demo: str, argv: list[str] | None) -> argparse.Namespace:
    """Parse the demo's command line, overridden by the flags in `argv`, and print it in full."""
    command = shlex.split(demo) + (sys.argv[1:] if argv is None else argv)
    if os.environ.get("RANK", "0") == "0":
        note_secrets(command)
        full = f"{name_start(parser.folder / parser.prog)} {shlex.join(command)}"
        print(f"No data given, so this is the demo. The full command:\n{hide_secrets(full)}")
    args = parser.parse_args(command)
    parser.own = parser.name_flags(sys.argv[1:] if argv is None else argv)
    return args


def format_args(flags: dict[str, Any], start: str, leave_out: Sequence[str] = ()) -> str:
    """Format {name: value} as the text of a file that @FILE reads, one flag per line.

    start: the beginning of the command that reads the file, such as "python train_flow.py".
    """
    lines = [f"# {start} @run.args"]
    for name, value in flags.items():
        if name in leave_out or value is None:
            continue
        if isinstance(value, bool):
            lines.append(f"--{name}" if value else f"--no-{name}")
        elif isinstance(value, list) and len(value) > 1:
            lines.append(f"--{name} {shlex.join(map(str, value))}")
        elif isinstance(value, list):  # with =, it may begin with a dash
            lines += [f"--{name}={shlex.quote(str(only))}" for only in value]
        else:
            lines.append(f"--{name}={shlex.quote(str(value))}")
    return "\n".join(lines) + "\n"


Add = Callable[..., argparse.Action]  # add_argument of a parser or of a group


def check_package(parser: argparse.ArgumentParser, flag: str, package: str, advice: str) -> None:
    """Stop with an error if a package that a flag needs is not installed."""
    if importlib.util.find_spec(package) is None:
        parser.error(f"{flag} needs {package}: `pip install {package}`, or {advice}")
