"""Mutants of the code on which losslessness depends, listed in `mutant_list.py`: each is one wrong expression, and a
test fails.

    python tests/mutants.py            # all of them: half an hour
    python tests/mutants.py -k accept  # those whose name or function contains this

A mutant names a function and an expression or a statement within it, which is found by its syntax tree: lines,
formatting and the rest of the file may change. Every mutant is applied in a copy of the tree, and its test runs there;
it is dead if the test fails. Before that, all of these tests must pass. `tests/test_mutants.py` checks that each is
found.
"""

import argparse
import ast
import contextlib
import dataclasses
import functools
import os
import shutil
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterable, Iterator
from pathlib import Path

from mutant_list import FIELDS

ROOT = Path(__file__).parent.parent
COPIED = ("jspec", "pallas_kernels", "tests", "pyproject.toml")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """`old`, an expression or a simple statement that occurs once in `function`, becomes `new`.

    function: "module:name" or "folder:name"; the name has those of the classes and functions around it.
    test: id of pytest, without "tests/".
    """

    name: str
    function: str
    old: str
    new: str
    test: str

    def apply(self, root: Path = ROOT) -> tuple[Path, str]:
        """The path of the file and its text with the mutant.

        Raises:
          LookupError: the expression is not in the function, or more than once.
        """
        where, _, name = self.function.partition(":")
        path = root / where.replace(".", "/")
        files = path.rglob("*.py") if path.is_dir() else [path.with_suffix(".py")]
        wanted = ast.parse(self.old).body[0]
        wanted = ast.dump(wanted.value if isinstance(wanted, ast.Expr) else wanted)
        places = [
            (file, node)
            for file in files
            for function in functions(file).get(name, [])
            for node in ast.walk(function)
            if ast.dump(node) == wanted
        ]
        if len(places) != 1:
            raise LookupError(f"{self.name}: {self.old} is {len(places)} times in {self.function}: must be there once")
        file, node = places[0]
        new = self.new if isinstance(node, ast.stmt) else f"({self.new})"
        return file, replaced(file.read_text(encoding="utf-8"), node, new)


def functions(file: Path) -> dict[str, list[ast.AST]]:
    """The functions of a file, by their names with those of the classes and functions around them."""
    return _functions(file.read_text(encoding="utf-8"))


@functools.cache
def _functions(text: str) -> dict[str, list[ast.AST]]:
    named: dict[str, list[ast.AST]] = {}

    def visit(node: ast.AST, around: str) -> None:
        for child in ast.iter_child_nodes(node):
            is_function = isinstance(child, ast.FunctionDef)
            name = f"{around}.{child.name}".lstrip(".") if is_function or isinstance(child, ast.ClassDef) else around
            if is_function:
                named.setdefault(name, []).append(child)
            visit(child, name)

    visit(ast.parse(text), "")
    return named


def replaced(text: str, node: ast.AST, new: str) -> str:
    """The text with `new` in place of a node of its syntax tree, whose columns count bytes."""
    lines = text.encode().splitlines(keepends=True)
    begin = sum(map(len, lines[: node.lineno - 1])) + node.col_offset
    end = sum(map(len, lines[: node.end_lineno - 1])) + node.end_col_offset
    return (text.encode()[:begin] + new.encode() + text.encode()[end:]).decode()


MUTANTS = tuple(Mutant(*fields) for fields in FIELDS)


@contextlib.contextmanager
def copied_tree() -> Iterator[Path]:
    """A copy of the code and the tests in a folder that is deleted afterwards."""
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "tree"
        root.mkdir()
        for name in COPIED:
            source = ROOT / name
            ignore = shutil.ignore_patterns("__pycache__")
            shutil.copytree(source, root / name, ignore=ignore) if source.is_dir() else shutil.copy(source, root / name)
        yield root


def run(root: Path, tests: Iterable[str]) -> tuple[int, str]:
    """The exit status of pytest in a copy of the tree, and the end of its output."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "--full", "-o", "addopts=", "-p", "no:cacheprovider"]
    environment = os.environ | {"PYTHONPATH": str(root)}
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
    paths = [f"tests/{test}" for test in tests]
    done = subprocess.run(
        [*command, *paths], cwd=root, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    return done.returncode, done.stdout[-3000:]


def main() -> int:
    """Runs the mutants; returns 1 if one survives."""
    parser = argparse.ArgumentParser(description="Applies mutants and runs the tests that kill them.")
    parser.add_argument("-k", default="", help="only mutants whose name or function contains this")
    options = parser.parse_args()
    selected = [mutant for mutant in MUTANTS if options.k in mutant.name or options.k in mutant.function]
    if not selected:
        parser.error(f"-k {options.k!r}: no mutant has this in its name or function")
    with copied_tree() as root:
        status, output = run(root, dict.fromkeys(mutant.test for mutant in selected))
        if status:
            print(output + "\nthese tests must pass before a mutant is applied")
            return 2
        alive = 0
        for mutant in selected:
            file, text = mutant.apply(root)
            original = file.read_text(encoding="utf-8")
            file.write_text(text, encoding="utf-8")
            status, output = run(root, [mutant.test])
            file.write_text(original, encoding="utf-8")
            # 1: tests failed. Anything else, such as an error of collection, proves nothing.
            verdict = {0: "SURVIVES", 1: "dead"}.get(status, "BROKEN")
            print(f"{verdict:8} {mutant.function}: {mutant.name}", flush=True)
            if status != 1:
                alive += 1
                print(textwrap.indent(output, "    "), flush=True)
    print(f"{len(selected) - alive} of {len(selected)} dead")
    return int(alive > 0)


if __name__ == "__main__":
    sys.exit(main())
