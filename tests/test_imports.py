"""Imports go one way: a module may use those above it in docs/structure.md, never those below."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LAYERS = [
    ["pallas_kernels"],
    ["jspec.struct"],
    ["jspec.stopping"],
    ["jspec.types"],
    ["jspec.tree"],
    ["jspec.sampling"],
    ["jspec.accept"],
    ["jspec.grow"],
    ["jspec.propose"],
    ["jspec.cache"],
    ["jspec.models"],
    ["jspec.drafters"],
    ["jspec.capture"],
    ["jspec.decode"],
    ["jspec.checkpoint_files"],
    ["jspec.config_json"],
    ["jspec.block_scaled"],
    ["jspec.experts_checkpoint"],
    ["jspec.deepseek_config"],
    ["jspec.deepseek_checkpoint"],
    ["jspec.gemma4_config"],
    ["jspec.gemma4_checkpoint"],
    ["jspec.qwen3_next_config"],
    ["jspec.qwen3_next_checkpoint"],
    ["jspec.checkpoint"],
    ["jspec.assistant_checkpoint"],
    ["jspec.torch_file"],
    ["jspec.eagle_config"],
    ["jspec.eagle_checkpoint"],
    ["jspec.text"],
    ["jspec.model"],
    ["jspec.show"],
    ["jspec.result"],
    ["jspec.memory"],
    ["jspec.generate"],
    ["jspec.look"],
    ["jspec.contract"],
    ["jspec.plots"],
    ["jspec.evaluate"],
    ["jspec.bench"],
    ["jspec.train"],
    ["jspec.startup"],
    ["jspec.cli"],
]
ONLY = {
    "jspec.decode": {"jspec.types", "jspec.tree", "jspec.sampling", "jspec.stopping", "jspec.capture"},
    "jspec.accept": {"jspec.types", "jspec.tree", "jspec.sampling"},
    "jspec.tree": {"jspec.types"},
    "jspec.sampling": {"jspec.struct", "jspec.types"},
    "jspec.stopping": {"jspec.struct"},
    "jspec.cache": {"jspec.struct", "jspec.cache", "pallas_kernels"},
    "pallas_kernels": {"pallas_kernels"},
}
STANDARD = {"collections", "dataclasses", "functools", "math"}
"""What the kernels take of the standard library."""
FILES = sorted([*ROOT.glob("jspec/**/*.py"), *ROOT.glob("pallas_kernels/**/*.py")])


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def layer_of(module: str) -> str | None:
    return next((name for layer in LAYERS for name in layer if module == name or module.startswith(name + ".")), None)


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
def test_imports_go_up(path):
    module = module_name(path)
    if module == "jspec":
        return
    order = [name for layer in LAYERS for name in layer]
    own = layer_of(module)
    assert own is not None, f"{module} is in no layer of this test"
    for imported in imports(path):
        used = layer_of(imported)
        assert used is not None, f"{module} imports {imported}, which is in no layer"
        assert order.index(used) <= order.index(own), f"{module} imports {imported}, which stands below it"
        assert own not in ONLY or used in ONLY[own], f"{module} imports {imported}: {own} may use {ONLY[own]} only"


@pytest.mark.parametrize("path", sorted(ROOT.glob("pallas_kernels/**/*.py")), ids=module_name)
def test_kernels_import_jax_only(path):
    for node in ast.walk(ast.parse(path.read_text())):
        names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
        names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
        assert {name.split(".")[0] for name in names} <= {*STANDARD, "jax", "jaxtyping", "pallas_kernels"}


def test_every_module_is_in_the_structure_page():
    page = (ROOT / "docs" / "structure.md").read_text()
    kernels = [
        f"pallas_kernels/{name}/"
        for name in (
            "delta_rule",
            "group_rows",
            "grouped_matmul",
            "kv_compact",
            "mla_attention",
            "paged_attention",
            "residual_norm",
            "split_heads",
            "topk",
        )
    ]
    folders = ("jspec/bench/", "jspec/train/", *kernels)
    for path in FILES:
        name = path.relative_to(ROOT).as_posix()
        if name.endswith("__init__.py") and name != "jspec/drafters/__init__.py":
            continue
        assert f"`{name}`" in page or any(name.startswith(f) and f"`{f}`" in page for f in folders), name
