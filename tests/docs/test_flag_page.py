"""docs/flags.md lists the flags of the scripts' parsers, docs/from-kohya.md those of others.

`python tests/docs/test_flag_page.py` updates it.
"""

import argparse
import importlib
import re
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/package")]

from test_package import find_parser  # noqa: E402

from diffusion_training.arguments import OTHER_PROGRAMS  # noqa: E402

PAGE = ROOT / "docs/flags.md"
KOHYA = ROOT / "docs/from-kohya.md"
FIGURE = re.compile(r"(?<=<!-- flags -->\n).*?(?=\n<!-- end -->)", re.S)
# Scripts with this flag share a section.
SECTIONS = {"The trainers": "--train_batch_size", "The caches": "--text_cache"}


@dataclass(frozen=True)
class Flag:
    """A flag as one script has it."""

    group: str
    names: str
    meaning: str
    default: str


def list_flags(script):
    """The flags of a script, in the order of its --help."""
    flags = []
    for action in find_parser(importlib.import_module(script).parse_args)._actions[
        1:
    ]:  # without --help
        names = action.option_strings or [action.metavar or action.dest]
        if isinstance(action, argparse.BooleanOptionalAction):
            names = [name for name in names if not name.startswith("--no-")]
        meaning, said = re.fullmatch(r"(.*?)(?: \(default: (.*)\))?", action.help).groups()
        if action.choices:
            meaning += ": " + ", ".join(f"`{choice}`" for choice in action.choices)
        default = said or describe_default(action)
        names = ", ".join(f"`{name}`" for name in names)
        flags.append(Flag(action.container.title, names, meaning, default))
    return flags


def describe_default(action):
    is_switch = isinstance(action, argparse.BooleanOptionalAction)
    if is_switch:
        return "on" if action.default else "off"
    if action.default is None or action.nargs == 0:
        return ""
    values = action.default if isinstance(action.default, list) else [action.default]
    return f"`{' '.join(map(str, values))}`" if values else ""


def draw_section(flags_of):
    """Tables of flags, one for each group. flags_of: {script: its flags}."""
    rows = {}  # {group: {(names, meaning): {script: default}}}
    groups = {}  # {(names, meaning): the first group with it}
    for script, flags in flags_of.items():
        for flag in flags:
            key = flag.names, flag.meaning
            group = groups.setdefault(key, flag.group)
            rows.setdefault(group, {}).setdefault(key, {})[script] = flag.default
    lines = []
    for group, keys in rows.items():
        several = len(flags_of) > 1
        lines += ["", f"### {group[0].upper()}{group[1:]}", ""]
        lines += ["| flag | meaning | default |" + " scripts |" * several]
        lines += ["|---|---|---|" + "---|" * several]
        for (names, meaning), defaults in keys.items():
            cells = [names, meaning.replace("|", "\\|"), join_defaults(defaults)]
            if several:
                cells.append("all" if len(defaults) == len(flags_of) else name_scripts(defaults))
            lines.append(f"| {' | '.join(cells)} |")
    return lines


def name_scripts(scripts):
    return ", ".join(f"`{script}`" for script in scripts)


def join_defaults(defaults):
    """One default, or the default of each script."""
    scripts_of = {}
    for script, default in defaults.items():
        scripts_of.setdefault(default, []).append(script)
    if len(scripts_of) == 1:
        return next(iter(scripts_of))
    return "; ".join(
        f"{default or 'none'} ({name_scripts(scripts)})" for default, scripts in scripts_of.items()
    )


def draw_flags():
    """The sections of the page."""
    scripts = sorted((path.stem for path in ROOT.glob("*.py")), reverse=True)  # trainers first
    flags_of = {script: list_flags(script) for script in scripts}
    sections = {}
    for script, flags in flags_of.items():
        names = " ".join(flag.names for flag in flags)
        shared = [title for title, name in SECTIONS.items() if f"`{name}`" in names]
        sections.setdefault(shared[0] if shared else f"{script}.py", {})[script] = flags
    lines = []
    for title, members in sections.items():
        lines += ["", f"## {title}"]
        if title in SECTIONS:
            lines += ["", ", ".join(f"`{script}.py`" for script in members)]
        lines += draw_section(members)
    return "\n".join(lines[1:])


def draw_other_programs():
    """The table of docs/from-kohya.md, from the file that wrong flags are looked up in.

    The flags are not in its first column, where the advice for wrong flags looks for others.
    """
    rows = [line.split("\t") for line in OTHER_PROGRAMS.read_text().splitlines()[1:]]
    lines = ["", "| of | flag | here |", "|---|---|---|"]
    cells = [(of, ", ".join(map(mark, flags.split())), mark(here)) for flags, of, here in rows]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in cells)])


def mark(text):
    return re.sub(r"(--[\w-]+)", r"`\1`", text)


def test_other_programs_are_on_their_page_and_named_flags_exist():
    (figure,) = FIGURE.findall(KOHYA.read_text())
    assert figure == draw_other_programs(), (
        "docs/from-kohya.md is out of date: python tests/docs/test_flag_page.py draws it anew"
    )
    parsers = [
        find_parser(importlib.import_module(path.stem).parse_args) for path in ROOT.glob("*.py")
    ]
    flags = {name for parser in parsers for name in parser._option_string_actions}
    for line in OTHER_PROGRAMS.read_text().splitlines()[1:]:
        theirs, _, here = line.split("\t")
        assert {*re.findall(r"--[a-z][a-z][\w-]*", here)} <= flags, line
        for flag in theirs.split():
            assert not all(flag in parser._option_string_actions for parser in parsers), line


def test_flags_page_matches_the_parsers():
    (figure,) = FIGURE.findall(PAGE.read_text())
    assert figure == draw_flags(), (
        "docs/flags.md is out of date: python tests/docs/test_flag_page.py draws it anew"
    )


if __name__ == "__main__":
    PAGE.write_text(FIGURE.sub(lambda _: draw_flags(), PAGE.read_text()))
    KOHYA.write_text(FIGURE.sub(lambda _: draw_other_programs(), KOHYA.read_text()))
