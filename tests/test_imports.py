"""Imports go one way: a folder imports from the folders below it, and no module takes part in a cycle."""

import ast
import graphlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = [
    "pallas_kernels",
    "jspec.core",
    "jspec.cache",
    "jspec.models",
    "jspec.drafters",
    "jspec.checkpoints",
    "jspec.text",
    "jspec.loading",
    "jspec.generation",
    "jspec.runner",
    "jspec.engine",
    "jspec.interop",
    "jspec.serve",
    "jspec.analysis",
    "jspec.bench",
    "jspec.train",
    "jspec.cli",
]
"""Lowest first: code in a folder imports from its own folder and from those before it."""
STANDARD = {"collections", "dataclasses", "functools", "importlib", "math", "types", "typing", "warnings"}
"""What the kernels take of the standard library."""
FILES = sorted([*ROOT.glob("jspec/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")])


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str | None:
    return next((name for name in LAYERS if module == name or module.startswith(name + ".")), None)


def imports(path: Path) -> set[str]:
    """Modules of this repository that a file imports, wherever in the file."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports with the full name"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return {name for name in found if name.split(".")[0] in ("jspec", "pallas_kernels")}


@pytest.mark.parametrize("path", FILES, ids=module_name)
def test_imports_go_down(path):
    module = module_name(path)
    if module in ("jspec", "jspec.__main__"):
        return
    own = layer_of(module)
    assert own is not None, f"{module} is in no layer of this test"
    for imported in imports(path):
        used = layer_of(imported)
        assert used is not None, f"{module} imports {imported}, which is in no layer"
        assert LAYERS.index(used) <= LAYERS.index(own), f"{module} imports {imported}, from a higher layer"


def test_no_import_cycle():
    modules = {module_name(path): path for path in FILES}
    # `from package import name` depends on the module of that name where there is one, else on the package.
    graph = {
        module: {name if name in modules else name.rpartition(".")[0] for name in imports(path)} - {module}
        for module, path in modules.items()
    }
    list(graphlib.TopologicalSorter(graph).static_order())


@pytest.mark.parametrize("path", sorted(ROOT.glob("pallas_kernels/**/*.py")), ids=module_name)
def test_kernels_import_jax_only(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert {name.split(".")[0] for name in names} <= {*STANDARD, "jax", "jaxtyping", "pallas_kernels"}


def test_structure_page_names_every_folder():
    page = (ROOT / "docs" / "structure.md").read_text()
    folders = {path.parent.relative_to(ROOT).as_posix() for path in FILES} - {"jspec"}
    for folder in folders:
        name = folder.removeprefix("pallas_kernels/")
        assert f"| `{name}/` |" in page, folder
    for path in ROOT.glob("jspec/*.py"):
        assert path.name == "__init__.py" or f"| `jspec/{path.name}` |" in page, path


def test_structure_page_names_files_that_exist():
    page = (ROOT / "docs" / "structure.md").read_text()
    for row in re.findall(r"^\| `.*$", page, flags=re.MULTILINE):
        folder, *names = re.findall(r"`([\w/]+/|[\w/]+\.py)`", row)
        folder = ROOT / folder if (ROOT / folder).exists() else ROOT / "pallas_kernels" / folder
        assert folder.exists(), row
        for name in names:
            assert (folder / name).exists() or (ROOT / name).exists(), f"{name}: {row}"
