"""CONTRIBUTING.md: the table of layers matches the imports.

`python tests/docs/test_layers.py` updates it.
"""

import collections
import functools
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests/package")]

from test_package import MODULES, find_imports  # noqa: E402

PAGE = ROOT / "CONTRIBUTING.md"
FIGURE = re.compile(r"(?<=<!-- layers -->\n).*?(?=\n<!-- end -->)", re.S)


def draw_layers():
    """Draw the table: a module's layer is one above the highest layer that it imports."""

    @functools.cache
    def height(name):
        return 1 + max((height(other) for other in find_imports(MODULES[name])), default=-1)

    cells = collections.defaultdict(list)
    for name in sorted(MODULES):
        room, _, module = name.rpartition(".")
        cells[height(name), room].append(module)
    rooms = sorted({room for _, room in cells})
    lines = [
        "| layer | " + " | ".join(f"`{room}/`" if room else "for all" for room in rooms) + " |"
    ]
    lines.append("|---" * (1 + len(rooms)) + "|")
    for level in sorted({level for level, _ in cells}, reverse=True):
        lines.append(
            f"| {level} | " + " | ".join(", ".join(cells[level, room]) for room in rooms) + " |"
        )
    return "\n".join(lines)


def test_layers_table_matches_the_imports():
    (figure,) = FIGURE.findall(PAGE.read_text())
    assert figure == draw_layers(), (
        "CONTRIBUTING.md has old layers: python tests/docs/test_layers.py draws them anew"
    )


if __name__ == "__main__":
    PAGE.write_text(FIGURE.sub(lambda _: draw_layers(), PAGE.read_text()))
