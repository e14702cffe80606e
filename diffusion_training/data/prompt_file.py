"""Prompts in a file, each with values of its own, as kohya's scripts and musubi-tuner have them."""

import argparse
import json
import re
from pathlib import Path
from typing import Any

from diffusion_training.arguments import COUNT, number

SIDE = number(8, 16384, int)
# {switch in a line: (its name in a JSON list, type)}
SWITCHES: dict[str, tuple[str, Any]] = {
    "w": ("width", SIDE),
    "h": ("height", SIDE),
    "d": ("seed", number(0, 2**62, int)),
    "s": ("sample_steps", COUNT),
    "l": ("scale", number(1, 1000)),
    "n": ("negative_prompt", str),
}


def split_prompt(line: str) -> tuple[str, dict[str, Any]]:
    """Split "a red bicycle --w 512": the prompt, and {name in `SWITCHES`: value}.

    Raises ValueError for switches that are unknown or have another value.
    """
    text, *parts = re.split(r"(?:^|\s)--(?=\S)", line)
    values = {}
    for part in parts:
        switch, _, value = part.partition(" ")
        if switch not in SWITCHES:
            raise ValueError(f"there is no switch --{switch}: --{' --'.join(SWITCHES)} are known")
        name, kind = SWITCHES[switch]
        try:
            values[name] = kind(value.strip())
        except (argparse.ArgumentTypeError, ValueError) as error:
            raise ValueError(f"--{switch} has a wrong value ({error})") from None
    return text.strip(), values


def join_prompt(values: dict[str, Any]) -> str:
    """Write an entry of a JSON list as a line. Raises ValueError if that is impossible.

    A value that is null counts as left out.
    """
    values = {name: value for name, value in values.items() if value is not None}
    switches = {name: f"--{switch}" for switch, (name, _) in SWITCHES.items()}
    if unknown := values.keys() - switches.keys() - {"prompt"}:
        raise ValueError(f"there is no key {min(unknown)}: {', '.join(switches)} are known")
    if nested := [name for name, value in values.items() if isinstance(value, dict | list)]:
        raise ValueError(f"{nested[0]} is no text or number")
    if split := [name for name, value in values.items() if re.search(r"(^|\s)--\S", str(value))]:
        raise ValueError(f"{split[0]} has a word that begins with --, as switches do")
    words = [str(values.get("prompt", ""))]
    words += [f"{switch} {values[name]}" for name, switch in switches.items() if name in values]
    return " ".join(words)


def read_prompt_file(parser: Any, args: argparse.Namespace) -> None:
    """Put the lines of --validation_prompts_file in place of --validation_prompts.

    Stops with an error if a line can't be read. run.args has both flags: the file wins, unless the
    prompts alone are on the command line.
    """
    path = args.validation_prompts_file
    if path is None:
        return
    if args.validation_prompts and "validation_prompts" in parser.own:
        if "validation_prompts_file" in parser.own:
            parser.error(
                "--validation_prompts can't be combined with --validation_prompts_file: leave one "
                "of them out"
            )
        args.validation_prompts_file = None
        return
    where = ""
    try:
        text = Path(path).read_text(encoding="utf-8-sig")
        if path.endswith(".json"):
            entries = json.loads(text)
        else:
            stripped = map(str.strip, text.splitlines())
            entries = [line for line in stripped if line and not line.startswith("#")]
        if not entries or not isinstance(entries, list):
            raise ValueError("it has no list of prompts")
        lines = []
        for entry in entries:
            where = f" in {str(entry)!r}"
            if not isinstance(entry, dict | str):
                raise ValueError("it is no text and no object with a prompt")
            lines.append(join_prompt(entry) if isinstance(entry, dict) else entry)
            split_prompt(lines[-1])
    except (OSError, ValueError, RecursionError) as error:
        parser.error(f"--validation_prompts_file {path}{where}: {error}")
    args.validation_prompts = lines
