"""Copy what a script shares with the others into them: python tests/copy_shared.py train_unconditional.py

Functions and classes of the same name are the same text in every script that has them, because no script imports
another (tests/test_shared_blocks.py holds them to it). Edit one copy, then run this. A function that only one script
has is not copied: taking it over is a decision.
"""

import ast
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
SCRIPTS = ("precompute_latents.py", "train_text_to_image.py", "train_unconditional.py")
# The same name for another thing: each script has its own, because it is what the script is about.
OWN = {"parse_args", "main", "make_unet", "prepare_batch", "log_validation", "describe_model"}


def shared_blocks(source):
    """{name: (first line, line after the last, text)} of a script's functions and classes, decorators included."""
    lines, found = source.splitlines(keepends=True), {}
    for node in ast.parse(source).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name not in OWN:
            first = min([node.lineno, *(decorator.lineno for decorator in node.decorator_list)]) - 1
            found[node.name] = (first, node.end_lineno, "".join(lines[first : node.end_lineno]))
    return found


def copy(name, root=ROOT):
    """Copy from script `name` into the others. Returns what was copied, as ["function -> script"]."""
    mine, copied = shared_blocks((root / name).read_text()), []
    for other in sorted(set(SCRIPTS) - {name}):
        lines = (root / other).read_text().splitlines(keepends=True)
        theirs = shared_blocks("".join(lines))
        for block in sorted(mine.keys() & theirs.keys(), key=lambda block: -theirs[block][0]):  # from the end upwards
            first, end, text = theirs[block]
            if text != mine[block][2]:
                lines[first:end] = [mine[block][2]]
                copied.append(f"{block} -> {other}")
        (root / other).write_text("".join(lines))
    return copied


if __name__ == "__main__":
    if len(sys.argv) != 2 or Path(sys.argv[1]).name not in SCRIPTS:
        sys.exit(f"usage: python tests/copy_shared.py SCRIPT, one of {', '.join(SCRIPTS)}")
    copied = copy(Path(sys.argv[1]).name)
    print("\n".join(copied) or "nothing differs")
    if copied:
        print("now: ruff check, which names imports that are missing or no longer used")
