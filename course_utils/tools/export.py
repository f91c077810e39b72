"""``python -m course_utils export``: copy the cells tagged ``export`` into ``course_utils/chapters/``.

The notebook is where a technique is written; the module is a copy for later chapters and tests to import. So the
exporter is short and strict: it refuses whatever would make a module that means something else than the notebook, or
that cannot be imported alone.
"""

from __future__ import annotations

import argparse
import ast
import builtins
import difflib
import symtable
import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from course_utils.tools.notebooks import (
    ROOT,
    Chapter,
    CourseError,
    assigned_literals,
    course,
    find,
    is_code,
    pretty,
    read,
    tags,
    where,
    write_text,
)

TOP_LEVEL_PACKAGES = {"torch", "numpy"}
KERNEL_PACKAGES = {"numba", "triton"}
UPPER_ROOMS = {"tools", "__main__"}
MODULE_NAMES = {"__name__", "__file__", "__doc__", "__spec__"} | set(dir(builtins))
GENERATED = "Generated from the notebooks"


@dataclass(frozen=True)
class ExportCell:
    """One tagged cell: its source and where it stands, in words."""

    source: str
    place: str


@dataclass
class Module:
    """One module to be: the cells in order, the notebooks they come from, the notebook's own module or not."""

    name: str
    chapter: int
    title: str
    notebooks: list[str] = field(default_factory=list)
    cells: list[ExportCell] = field(default_factory=list)
    is_destination: bool = False  # named by a tag (export:NAME), not by the notebook's metadata

    def source(self) -> str:
        """The module's text."""
        body = "\n\n\n".join(cell.source.strip("\n").rstrip() for cell in self.cells)
        return f"{self.header()}\n\n{body}\n"

    def header(self) -> str:
        files = "\n".join(f"    {path}" for path in self.notebooks)
        return (
            f'"""Chapter {self.chapter}, {self.title}. {GENERATED}; never edit this file.\n\n'
            f'Edit the cells tagged ``export`` and run ``make export``:\n\n{files}\n"""'
        )


def main(argv: list[str], root: Path = ROOT) -> int:
    """Write the modules, or with ``--check`` compare them. Returns 0; 1 where ``--check`` finds a difference.

    Raises :class:`CourseError` that lists every refusal; no module is written then.
    """
    parser = argparse.ArgumentParser(
        "python -m course_utils export", description="Export cells -> chapters/*.py"
    )
    parser.add_argument(
        "--check", action="store_true", help="write nothing, fail where module and notebook differ"
    )
    options = parser.parse_args(argv)
    modules = collect(root)
    refused = [problem for module in modules for problem in problems(module, modules)]
    if refused:
        raise CourseError("nothing exported:\n  " + "\n  ".join(refused))
    if options.check:
        found = differences(root, modules)
        print("\n".join(found) if found else f"{len(modules)} modules equal their notebooks")
        return 1 if found else 0
    for module in modules:
        path = folder(root) / f"{module.name}.py"
        changed = not path.exists() or path.read_text(encoding="utf-8") != module.source()
        if changed:
            write_text(path, module.source())
        print(f"{pretty(path, root)}  {len(module.cells)} cells{'' if changed else ', unchanged'}")
    for orphan in orphans(root, modules):
        orphan.unlink()
        print(f"{pretty(orphan, root)}  removed: no notebook exports to it")
    if not modules:
        print("no cell is tagged export")
    return 0


def folder(root: Path) -> Path:
    """Where the modules live."""
    return Path(root) / "course_utils" / "chapters"


# --- collecting --------------------------------------------------------------------------------------------------


def collect(root: Path = ROOT, chapters: list[Chapter] | None = None) -> list[Module]:
    """The modules that the notebooks make, in the course's order: each main line first, then its deep dives."""
    modules: dict[str, Module] = {}
    for chapter in find(root) if chapters is None else chapters:
        nb = read(chapter.path)
        own = course(nb).get("module")
        for index, cell in enumerate(nb.cells):
            for tag in tags(cell) if is_code(cell) else ():
                if tag == "export" or tag.startswith("export:"):
                    name = tag.partition(":")[2] or own
                    _add(modules, name, nb, index, chapter, root)
                    modules[name].is_destination = name != own
    return list(modules.values())


def _add(modules: dict[str, Module], name: str | None, nb, index: int, chapter: Chapter, root: Path) -> None:
    path = pretty(chapter.path, root)
    if not name or not name.isidentifier():
        raise CourseError(
            f"{path}, {where(nb, index)}: no module to export to ({name!r}); "
            'set "course": {"chapter", "kind", "module", "title"} in the notebook\'s metadata'
        )
    about = course(nb)
    module = modules.setdefault(name, Module(name, int(about.get("chapter", 0)), about.get("title") or name))
    if path not in module.notebooks:
        module.notebooks.append(path)
    module.cells.append(ExportCell(nb.cells[index].source, f"{path}, {where(nb, index)}"))


# --- refusing ----------------------------------------------------------------------------------------------------


def problems(module: Module, modules: list[Module]) -> Iterator[str]:
    """Every reason to refuse the module, each with its place and a way out."""
    trees: list[tuple[ExportCell, ast.Module]] = []
    for cell in module.cells:
        try:
            trees.append((cell, ast.parse(cell.source)))
        except SyntaxError as error:
            yield _syntax_problem(cell, error)
    if len(trees) < len(module.cells):
        return  # names of an unreadable cell would all count as missing
    earlier = {other.name for other in modules[: modules.index(module)]}
    for cell, tree in trees:
        for statement in tree.body:
            yield from _statement_problems(cell, statement, module, earlier)
    yield from _double_names(trees)
    yield from _missing_names(trees, module)


def _syntax_problem(cell: ExportCell, error: SyntaxError) -> str:
    lines = cell.source.splitlines()
    bad = [line.strip() for line in lines if line.lstrip().startswith(("%", "!", "?"))]
    if bad:
        return f"{cell.place}: magic `{bad[0]}` cannot be exported; move it to a cell without the tag"
    return f"{cell.place}: line {error.lineno} is not Python ({error.msg})"


def _statement_problems(
    cell: ExportCell, statement: ast.stmt, module: Module, earlier: set[str]
) -> Iterator[str]:
    at = f"{cell.place}: line {statement.lineno}"
    if isinstance(statement, ast.Import | ast.ImportFrom):
        yield from (f"{at} {problem}" for problem in _import_problems(statement, earlier))
    elif isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        kernel = KERNEL_PACKAGES & {name.partition(".")[0] for name in _imported_inside(statement)}
        if kernel and not module.is_destination:
            yield (
                f"{at} `{statement.name}` builds a kernel (imports {', '.join(sorted(kernel))}); kernels live in their "
                f"own module: tag the cell export:{module.name}_kernels"
            )
    else:
        try:
            assigned_literals(statement)
        except ValueError:
            code = ast.unparse(statement).splitlines()[0]
            yield (
                f"{at} `{code}` runs code; export cells hold imports, functions, classes and constants "
                "(names assigned to literals)"
            )


def _import_problems(statement: ast.Import | ast.ImportFrom, earlier: set[str]) -> Iterator[str]:
    if isinstance(statement, ast.ImportFrom):
        if statement.level:
            yield "is a relative import; write course_utils.… in full"
            return
        if any(alias.name == "*" for alias in statement.names):
            yield f"imports * from {statement.module}; name what is used"
            return
        inner = statement.module in ("course_utils", "course_utils.chapters")
        names = [f"{statement.module}.{a.name}" for a in statement.names] if inner else [statement.module]
    else:
        names = [alias.name for alias in statement.names]
    for name in names:
        reason = _refused_import(name, earlier)
        if reason:
            yield f"imports {name}: {reason}"


def _refused_import(name: str, earlier: set[str]) -> str | None:
    package, _, rest = name.partition(".")
    if package == "__future__":
        return "a __future__ import must come first in a file, and changes what the other cells mean; leave it out"
    if package != "course_utils":
        known = TOP_LEVEL_PACKAGES | sys.stdlib_module_names
        return (
            None
            if package in known
            else (
                "only torch, numpy, the standard library and course_utils at top level; import it inside the function"
            )
        )
    room, _, rest = rest.partition(".")
    if room in UPPER_ROOMS:
        return "the maintainers' commands are above the chapters"
    if room == "chapters" and rest.partition(".")[0] not in earlier:
        return "not an earlier chapter's module; import what comes before, or pass the object in"
    return None


def _imported_inside(node: ast.AST) -> Iterator[str]:
    for inner in ast.walk(node):
        if isinstance(inner, ast.Import):
            yield from (alias.name for alias in inner.names)
        elif isinstance(inner, ast.ImportFrom) and inner.module:
            yield inner.module


def _bound(statement: ast.stmt) -> Iterator[tuple[str, str]]:
    """(name, what it is bound to) for each name that a top-level statement binds; the same import is the same thing."""
    if isinstance(statement, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield statement.name, f"definition at {id(statement)}"
    elif isinstance(statement, ast.Import):
        for alias in statement.names:
            yield alias.asname or alias.name.partition(".")[0], f"import {alias.name if alias.asname else ''}"
    elif isinstance(statement, ast.ImportFrom):
        for alias in statement.names:
            yield alias.asname or alias.name, f"from {statement.module} import {alias.name}"
    elif isinstance(statement, ast.Assign | ast.AnnAssign):
        targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
        yield from ((t.id, f"definition at {id(statement)}") for t in targets if isinstance(t, ast.Name))


def _double_names(trees) -> Iterator[str]:
    seen: dict[str, tuple[str, str]] = {}
    for cell, tree in trees:
        for name, what in (pair for statement in tree.body for pair in _bound(statement)):
            if name in seen and seen[name][0] != what:
                yield f"{cell.place}: `{name}` is defined a second time (first in {seen[name][1]}); rename one"
            seen.setdefault(name, (what, cell.place))


def _missing_names(trees, module: Module) -> Iterator[str]:
    source = "\n".join(cell.source for cell, _ in trees)
    defined = {name for _, tree in trees for statement in tree.body for name, _ in _bound(statement)}
    missing = _globals_used(symtable.symtable(source, module.name, "exec")) - defined - MODULE_NAMES
    for name in sorted(missing):
        place = next((cell.place for cell, tree in trees if _uses(tree, name)), module.name)
        yield f"{place}: `{name}` is used but no export cell defines it; tag the cell that does (or imports it)"


def _globals_used(scope: symtable.SymbolTable) -> set[str]:
    """Every name that this scope or one inside it looks up among the module's globals."""
    top = scope.get_type() == "module"
    found = {s.get_name() for s in scope.get_symbols() if s.is_referenced() and (top or s.is_global())}
    return found.union(*(_globals_used(child) for child in scope.get_children()))


def _uses(tree: ast.Module, name: str) -> bool:
    return any(isinstance(node, ast.Name) and node.id == name for node in ast.walk(tree))


# --- comparing ---------------------------------------------------------------------------------------------------


def differences(root: Path = ROOT, modules: list[Module] | None = None, lines: int = 12) -> list[str]:
    """One short diff for every module that differs from its notebook or has none; empty when all are equal."""
    modules = collect(root) if modules is None else modules
    found = []
    for module in modules:
        path = folder(root) / f"{module.name}.py"
        old = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        diff = list(
            difflib.unified_diff(
                old, module.source().splitlines(), pretty(path, root), "notebook", lineterm="", n=1
            )
        )
        if diff:
            rest = [f"… {len(diff) - lines} more lines"] if len(diff) > lines else []
            found.append(
                "\n".join(
                    [
                        f"{pretty(path, root)} differs from its notebook; run `make export`",
                        *diff[:lines],
                        *rest,
                    ]
                )
            )
    return found + [
        f"{pretty(path, root)}: no notebook exports to it; run `make export`"
        for path in orphans(root, modules)
    ]


def orphans(root: Path, modules: list[Module]) -> list[Path]:
    """Modules that were generated once and that no notebook exports to any more."""
    kept = {module.name for module in modules}
    files = sorted(folder(root).glob("*.py")) if folder(root).is_dir() else []
    return [
        path
        for path in files
        if path.stem not in kept and GENERATED in path.read_text(encoding="utf-8")[:400]
    ]
