"""One file made of a script and the functions that it uses, which runs without this package.

python -m diffusion_training.standalone train_unconditional.py > mine.py
"""

import ast
import functools
import importlib.util
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

Import = tuple[str | None, str, str | None]  # source, name there, alias


class Chunk:
    """A top-level statement of a file, with its comments.

    bound: the names that it defines. uses: all names that it uses. uses_at_once: those that it uses
    when it is executed, which for a function are its decorators, defaults and types.
    """

    def __init__(self, module: "Module", node: ast.stmt, text: str) -> None:
        self.module, self.text = module, text
        self.uses = {x.id for x in ast.walk(node) if isinstance(x, ast.Name)}
        self.uses_at_once = {x.id for x in walk_outside(node) if isinstance(x, ast.Name)}
        self.is_main = isinstance(node, ast.If) and "__name__" in self.uses
        self.bound = {node.name} if hasattr(node, "name") else set()
        for x in () if self.bound else ast.walk(node):
            if isinstance(x, ast.Import | ast.ImportFrom):  # an import in a try block
                self.bound |= {alias.asname or alias.name for alias in x.names}
            elif isinstance(x, ast.Name) and isinstance(x.ctx, ast.Store):
                self.bound.add(x.id)


def walk_outside(node: ast.AST) -> Iterator[ast.AST]:
    """The parts of a statement that are executed with it, so not the body of a function."""
    yield node
    parts = ast.iter_child_nodes(node)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        parts = iter([*node.decorator_list, node.args, *filter(None, [node.returns])])
    for part in parts:
        yield from walk_outside(part)


class Module:
    """A file: its chunks, the chunk that binds each name, and its imports.

    The imports are {name: {(source, its name there, alias)}}.
    """

    def __init__(self, path: Path) -> None:
        source = path.read_text(encoding="utf-8")
        lines, tree, end = source.splitlines(), ast.parse(source), 0
        self.path, self.doc, self.chunks, self.imports = path, ast.get_docstring(tree) or "", [], {}
        for node in tree.body[1 if self.doc else 0 :]:
            first = (
                min(
                    [
                        node.lineno,
                        *(decorator.lineno for decorator in getattr(node, "decorator_list", ())),
                    ]
                )
                - 1
            )
            while first > end and lines[first - 1].startswith("#"):
                first -= 1
            text, end = "\n".join(lines[first : node.end_lineno]), node.end_lineno
            if not isinstance(node, ast.Import | ast.ImportFrom):
                self.chunks.append(Chunk(self, node, text))
                continue
            for alias in node.names:
                source = getattr(node, "module", None)
                bound = alias.asname or (alias.name if source else alias.name.split(".")[0])
                self.imports.setdefault(bound, set()).add((source, alias.name, alias.asname))
        self.home = {name: chunk for chunk in self.chunks for name in chunk.bound}


@functools.cache
def open_module(name: str | None, folder: Path) -> Module | None:
    """The Module of a name if it is in this package or beside the script; else None."""
    spec = importlib.util.find_spec(name) if name and name.split(".")[0] == __package__ else None
    path = Path(spec.origin) if spec and spec.origin else folder / f"{name}.py"
    return Module(path) if path.is_file() else None


def look_up(chunk: Chunk, name: str, folder: Path) -> tuple[Chunk | None, Iterable[Import]]:
    """Resolve a name in a chunk: (the chunk that binds it, or None; its imports from libraries)."""
    if name in chunk.module.home:
        return chunk.module.home[name], ()
    imports = chunk.module.imports.get(name, ())
    for source, original, alias in imports:
        if other := open_module(source or original, folder):
            if alias or original not in other.home:
                where = source or "its folder"
                sys.exit(
                    f"{chunk.module.path} imports {original} of {where} "
                    "as a module or under another name"
                )
            return other.home[original], ()
    return None, imports


def reach(chunks: Iterable[Chunk], folder: Path) -> tuple[set[Chunk], set[Import]]:
    """Everything that some chunks use: (all chunks, including these; imports of libraries)."""
    found, libraries, meanings, waiting = set(), set(), {}, list(chunks)
    while waiting:
        chunk = waiting.pop()
        if chunk in found:
            continue
        found.add(chunk)
        for name in chunk.uses:
            other, imports = look_up(chunk, name, folder)
            libraries.update(imports)
            waiting += [other] if other else []
            meaning = other.module.path if other else "a library" if imports else None
            if meaning and meanings.setdefault(name, meaning) != meaning:
                sys.exit(
                    f"{name} is one thing in {meaning} and another in {meanings[name]}: "
                    "rename one of them"
                )
    return found, libraries


def sort_modules(module: Module, folder: Path, order: list[Module]) -> list[Module]:
    """Append a module to a list, after the modules that it imports."""
    for source in sorted(
        {source or "" for imports in module.imports.values() for source, _, _ in imports}
    ):
        other = open_module(source, folder)
        if other and other not in order:
            sort_modules(other, folder, order)
    order.append(module)
    return order


def write_imports(libraries: set[Import]) -> str:
    """The import statements: first of the standard library, then of others."""
    lines = set()
    for source, name, alias in libraries:
        line = f"from {source} import {name}" if source else f"import {name}"
        lines.add(f"{line} as {alias}" if alias else line)
    own = {line for line in lines if line.split()[1].split(".")[0] in sys.stdlib_module_names}
    return "\n".join([*sorted(own), "", *sorted(lines - own)])


def make_standalone(path: str | Path) -> str:
    """The text of the one file.

    First comes what the script needs while it is loaded, then the script, then all else that it
    uses.
    """
    script, folder = Module(Path(path)), Path(path).parent
    order, (chunks, _) = sort_modules(script, folder, []), reach(script.chunks, folder)
    # If anything of a file is used, its statements without a name are taken too, since they may set
    # a variable, for example.
    files = {chunk.module for chunk in chunks}
    deeds = [
        chunk
        for module in files
        for chunk in module.chunks
        if not chunk.bound and not chunk.is_main
    ]
    chunks, libraries = reach([*script.chunks, *deeds], folder)
    at_once = [
        (chunk, name) for chunk in script.chunks if not chunk.is_main for name in chunk.uses_at_once
    ]
    at_once = [look_up(chunk, name, folder)[0] for chunk, name in at_once]
    early = reach([*filter(None, at_once), *deeds], folder)[0]
    parts = [f'"""{script.doc}\n"""', write_imports(libraries)]

    def place(chunk: Chunk) -> int:
        """0: needed while the script is loaded, 1: the script, 2: the rest, 3: the call of main."""
        return 3 if chunk.is_main else 1 if chunk.module is script else 0 if chunk in early else 2

    for part in range(4):
        for module in order:
            texts = [
                chunk.text for chunk in module.chunks if chunk in chunks and place(chunk) == part
            ]
            said = (module.doc or module.path.name).splitlines()[0]
            title = [f"# {'-' * 20} {said}"] if texts and module is not script else []
            parts += title + texts
    return "\n\n\n".join(parts) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit("usage: python -m diffusion_training.standalone SCRIPT > mine.py")
    sys.stdout.write(make_standalone(sys.argv[1]))
