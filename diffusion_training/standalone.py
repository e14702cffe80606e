"""Combine a script and the package code that it uses into one file, which runs alone.

python -m diffusion_training.standalone train_unconditional.py > mine.py
"""

import ast
import functools
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

Import = tuple[str | None, str, str | None]  # source, name there, alias


class Chunk:
    """A top-level statement of a file, with its comments.

    bound: the names that it defines. uses: all names in it. uses_at_once: the names that are needed
    when it is executed. For a function these are in its decorators, defaults and types.
    """

    def __init__(self, module: "Module", node: ast.stmt, text: str) -> None:
        self.module = module
        self.text = text
        self.uses = {part.id for part in ast.walk(node) if isinstance(part, ast.Name)}
        self.uses_at_once = {part.id for part in walk_outside(node) if isinstance(part, ast.Name)}
        self.is_main = isinstance(node, ast.If) and "__name__" in self.uses
        self.bound = set()
        if hasattr(node, "name"):
            self.bound.add(node.name)
            return
        for part in ast.walk(node):
            if isinstance(part, ast.Import | ast.ImportFrom):  # an import in a try block
                self.bound |= {alias.asname or alias.name for alias in part.names}
            elif isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store):
                self.bound.add(part.id)


def walk_outside(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of a statement that run when it is executed: no bodies of functions."""
    yield node
    parts = ast.iter_child_nodes(node)
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
        parts = iter([*node.decorator_list, node.args, *filter(None, [node.returns])])
    for part in parts:
        yield from walk_outside(part)


def imports_package(node: ast.stmt) -> bool:
    return isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == __package__


class Module:
    """A file: its chunks, the chunk that binds each name, and its imports.

    The imports are {name: {(source, its name there, alias)}}.
    """

    def __init__(self, path: Path) -> None:
        text, direct = name_directly(path.read_text(encoding="utf-8"), path)
        lines = text.splitlines()
        tree = ast.parse(text)
        self.path = path
        self.doc = ast.get_docstring(tree) or ""
        self.chunks = []
        self.imports: dict[str, set[Import]] = {}
        for name, source in direct.items():
            self.imports[name] = {(source, name, None)}
        end = 0
        for node in tree.body[1 if self.doc else 0 :]:
            decorators = getattr(node, "decorator_list", ())
            first = min(part.lineno for part in (node, *decorators)) - 1
            while first > end and lines[first - 1].startswith("#"):
                first -= 1
            end = node.end_lineno
            if isinstance(node, ast.Try) and imports_package(node.body[0]):
                node = node.body[0]  # one file needs no message about a missing package
            if not isinstance(node, ast.Import | ast.ImportFrom):
                self.chunks.append(Chunk(self, node, "\n".join(lines[first:end])))
                continue
            source = getattr(node, "module", None)
            for alias in node.names:
                name = alias.name if source else alias.name.split(".")[0]
                bindings = self.imports.setdefault(alias.asname or name, set())
                bindings.add((source, alias.name, alias.asname))
        self.home = {name: chunk for chunk in self.chunks for name in chunk.bound}


def name_directly(text: str, path: Path) -> tuple[str, dict[str, str]]:
    """Write `flags.add_x` of an imported module `flags` as `add_x`.

    Returns (the text, {name: the module to import it from}).
    """
    tree = ast.parse(text)
    modules = {}
    taken = set()  # names that the text defines
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            source = getattr(node, "module", None)
            for alias in node.names:
                name = f"{source}.{alias.name}" if source else alias.name
                if find_module(name, path.parent):
                    modules[alias.asname or alias.name] = name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            taken.add(node.id)
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            taken.add(node.name)
        elif isinstance(node, ast.arg):
            taken.add(node.arg)
    places = []
    direct: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            if source := modules.get(node.value.id):
                if node.attr in taken or direct.setdefault(node.attr, source) != source:
                    sys.exit(
                        f"{path} uses {node.attr} of {source}, and another {node.attr}: "
                        "rename one of them"
                    )
                places.append((node.lineno - 1, node.col_offset, node.value.end_col_offset))
    lines = text.splitlines()
    for number, start, end in sorted(places, reverse=True):
        line = lines[number].encode()  # offsets count bytes
        lines[number] = (line[:start] + line[line.index(b".", end) + 1 :]).decode()
    return "\n".join(lines), direct


def find_module(name: str | None, folder: Path) -> Path | None:
    """Return the file of a module in this package or beside the script; else None."""
    first, *rest = (name or "").split(".")
    path = Path(__file__).parent.joinpath(*rest) if first == __package__ else folder / first
    if rest and first != __package__:
        return None
    files = (Path(f"{path}.py"), path / "__init__.py")
    return next((file for file in files if file.is_file()), None)


@functools.cache
def open_module(name: str | None, folder: Path) -> Module | None:
    """Return the Module of a name in this package or beside the script; else None."""
    path = find_module(name, folder)
    return Module(path) if path else None


def look_up(chunk: Chunk, name: str, folder: Path) -> tuple[Chunk | None, Iterable[Import]]:
    """Resolve a name in a chunk: (the chunk that binds it, or None; its imports from libraries)."""
    if name in chunk.module.home:
        return chunk.module.home[name], ()
    imports = chunk.module.imports.get(name, ())
    for source, original, alias in imports:
        if module := open_module(source or original, folder):
            if alias or original not in module.home:
                sys.exit(
                    f"{chunk.module.path} imports {original} from {source or 'its folder'} "
                    "as a module or under another name: use `from MODULE import NAME`"
                )
            return module.home[original], ()
    return None, imports


def reach(chunks: Iterable[Chunk], folder: Path) -> tuple[set[Chunk], set[Import]]:
    """Return (the chunks and all chunks that they use, their imports from libraries)."""
    reached = set()
    libraries = set()
    meanings = {}
    waiting = list(chunks)
    while waiting:
        chunk = waiting.pop()
        if chunk in reached:
            continue
        reached.add(chunk)
        for name in chunk.uses:
            definition, imports = look_up(chunk, name, folder)
            if definition:
                waiting.append(definition)
                meaning = definition.module.path
            elif imports:
                libraries.update(imports)
                meaning = "a library"
            else:
                continue
            if meanings.setdefault(name, meaning) != meaning:
                sys.exit(
                    f"{name} has different meanings in {meaning} and {meanings[name]}: "
                    "rename one of them"
                )
    return reached, libraries


def sort_modules(module: Module, folder: Path, order: list[Module]) -> list[Module]:
    """Append a module to a list, after the modules that it imports."""
    sources = {source or "" for imports in module.imports.values() for source, _, _ in imports}
    for source in sorted(sources):
        imported = open_module(source, folder)
        if imported and imported not in order:
            sort_modules(imported, folder, order)
    order.append(module)
    return order


def write_imports(libraries: set[Import]) -> str:
    """Return the import statements, first those of the standard library."""
    lines = set()
    for source, name, alias in libraries:
        line = f"from {source} import {name}" if source else f"import {name}"
        lines.add(f"{line} as {alias}" if alias else line)
    standard = {line for line in lines if line.split()[1].split(".")[0] in sys.stdlib_module_names}
    return "\n".join([*sorted(standard), "", *sorted(lines - standard)])


def make_standalone(path: str | Path) -> str:
    """Return the script and all package code that it uses as the text of one file.

    The code that the script needs while it is loaded comes first, then the script, then all other
    code that it uses.
    """
    script = Module(Path(path))
    folder = script.path.parent
    modules = sort_modules(script, folder, [])
    chunks, _ = reach(script.chunks, folder)
    # If any part of a file is used, its statements that define no name are taken too: they may set
    # an environment variable, for example.
    files = {chunk.module for chunk in chunks}
    unnamed = [chunk for module in files for chunk in module.chunks if not chunk.bound]
    unnamed = [chunk for chunk in unnamed if not chunk.is_main]
    chunks, libraries = reach([*script.chunks, *unnamed], folder)
    loaded = [chunk for chunk in script.chunks if not chunk.is_main]
    needed = [look_up(chunk, name, folder)[0] for chunk in loaded for name in chunk.uses_at_once]
    early, _ = reach([*filter(None, needed), *unnamed], folder)
    parts = [f'"""{script.doc}\n"""', write_imports(libraries)]

    def choose_part(chunk: Chunk) -> int:
        """0: needed while the script is loaded, 1: the script, 2: the rest, 3: the call to main."""
        if chunk.is_main:
            return 3
        if chunk.module is script:
            return 1
        return 0 if chunk in early else 2

    for part in range(4):
        for module in modules:
            members = [chunk for chunk in module.chunks if chunk in chunks]
            texts = [chunk.text for chunk in members if choose_part(chunk) == part]
            if texts and module is not script:
                title = (module.doc or module.path.name).splitlines()[0]
                parts.append(f"# {'-' * 20} {title}")
            parts += texts
    return "\n\n\n".join(parts) + "\n"


if __name__ == "__main__":
    if len(sys.argv) != 2 or not Path(sys.argv[1]).is_file():
        sys.exit("usage: python -m diffusion_training.standalone SCRIPT > mine.py")
    sys.stdout.write(make_standalone(sys.argv[1]))
