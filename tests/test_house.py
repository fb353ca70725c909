"""Limits of size, shape and wording. `house.json` lists what exceeds one, with its value, which may only fall.

python tests/test_house.py  # lists what exceeds a limit anew; run it after a value has fallen
"""

import ast
import functools
import json
import math
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
LISTED = ROOT / "tests" / "house.json"
CODE = ("jspec", "pallas_kernels", "benchmarks", "tools")
PARTICIPLES = {"own", "given", "found", "kept", "wanted", "each", "made", "chosen"}
"""Names that do not say what they hold."""
WEIGHTS = {
    *("qkv", "qkv_bias", "q_norm", "k_norm", "gate_up", "gate_up_bias", "down", "down_projection", "embed", "lm_head"),
    *("attention_norm", "mlp_norm", "router", "sinks", "indexer", "q_latent", "kv_latent", "clusters", "per_layer"),
    *("conv", "a_log", "dt_bias", "in_proj", "out_proj", "shared_gate", "markov"),
}
"""Fields of weights in the families of models."""


@functools.cache
def files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


@functools.cache
def text(path: Path) -> str:
    return path.read_text(encoding="utf-8")


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse(text(path))


@functools.cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree(path)))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def functions(*folders: str) -> Iterator[tuple[str, ast.FunctionDef]]:
    """The functions of all files with their names, such as "jspec/core/tree.py: paths"."""

    def visit(node: ast.AST, around: str) -> Iterator[tuple[str, ast.FunctionDef]]:
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.ClassDef):
                name = f"{around}.{child.name}".replace(": .", ": ")
                if isinstance(child, ast.FunctionDef):
                    yield name, child
                yield from visit(child, name)
            elif isinstance(child, ast.stmt):
                yield from visit(child, around)

    for path in files(*folders):
        yield from visit(tree(path), f"{name_of(path)}: ")


def lines_of(path: Path) -> int:
    return text(path).count("\n")


def lines_of_files() -> dict[str, int]:
    return {name_of(path): lines_of(path) for path in files(*CODE, "tests")}


def lines_of_functions(*folders: str) -> dict[str, int]:
    return {name: (node.end_lineno or 0) - node.lineno + 1 for name, node in functions(*folders)}


def arguments_of_functions(*folders: str) -> dict[str, int]:
    def count(node: ast.FunctionDef) -> int:
        names = [
            argument.arg for part in ("posonlyargs", "args", "kwonlyargs") for argument in getattr(node.args, part)
        ]
        return len([name for name in names if name not in ("self", "cls")])

    return {name: count(node) for name, node in functions(*folders)}


def checks_of_protocols() -> dict[str, int]:
    """How often a file asks whether a value has one of the protocols of the core."""
    classes = [node for node in nodes(ROOT / "jspec/core/types.py") if isinstance(node, ast.ClassDef)]
    protocols = {cls.name for cls in classes if "Protocol" in {ast.unparse(base) for base in cls.bases}}
    counts: Counter[str] = Counter()
    for path in files("jspec"):
        for node in nodes(path):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "isinstance":
                counts[name_of(path)] += bool(protocols & set(re.findall(r"\w+", ast.unparse(node.args[1]))))
    return dict(counts)


def weights_in_core() -> dict[str, int]:
    """How often a file of the core has the name of a weight, as an attribute or as a text."""

    def names(node: ast.AST) -> bool:
        return getattr(node, "attr", None) in WEIGHTS or (isinstance(node, ast.Constant) and node.value in WEIGHTS)

    return {name_of(path): sum(map(names, nodes(path))) for path in files("jspec/core")}


def participles() -> dict[str, int]:
    """How often a file gives such a name to a variable, parameter, attribute or function; the tests all together."""

    def bound(node: ast.AST) -> str | None:
        if isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
            return node.id if isinstance(node, ast.Name) else node.attr
        return node.arg if isinstance(node, ast.arg) else getattr(node, "name", None)

    counts: Counter[str] = Counter()
    for path in files(*CODE, "tests"):
        key = "tests" if path.is_relative_to(ROOT / "tests") else name_of(path)
        counts[key] += sum(bound(node) in PARTICIPLES for node in nodes(path))
    return dict(counts)


def comments(path: Path) -> list[str]:
    return re.findall(r"^(?:[^\"'#\n]|\"[^\"\n]*\"|'[^'\n]*')*# (.*)$", text(path), re.MULTILINE)


def prose(path: Path) -> str:
    """Docstrings and comments."""
    strings = [node.value for node in nodes(path) if isinstance(node, ast.Expr)]
    docs = [node.value for node in strings if isinstance(node, ast.Constant) and isinstance(node.value, str)]
    return "\n".join([*docs, *comments(path)])


def relative_clauses() -> dict[str, int]:
    """ "that" and "which" in 1,000 words of docstrings and comments, rounded up, of files with at least 200 words."""
    rates = {}
    for path in files(*CODE):
        words = re.findall(r"[a-z']+", prose(path).lower())
        if len(words) >= 200:
            rates[name_of(path)] = math.ceil(1000 * sum(word in ("that", "which") for word in words) / len(words))
    return rates


def lines_per_comment() -> dict[str, int]:
    return {"jspec": sum(map(lines_of, files("jspec"))) // sum(len(comments(path)) for path in files("jspec"))}


def words(path: Path) -> int:
    return len(re.sub(r"<!--.*?-->", "", path.read_text(encoding="utf-8"), flags=re.DOTALL).split())


def words_of_pages() -> dict[str, int]:
    """Those that people write: a certificate is the output of `jspec verify`."""
    pages = set((ROOT / "docs").rglob("*.md")) - {ROOT / "docs" / "certificate.md"}
    return {name_of(path): words(path) for path in pages}


def lines_of_folders() -> dict[str, int]:
    """The lines of a folder beyond its budget in the table of docs/structure.md."""
    rows = re.findall(r"^\| `([\w/.]+)` \| (\d+) \|", (ROOT / "docs/structure.md").read_text(), re.MULTILINE)
    assert len(rows) > 15, "the table of folders is gone"
    beyond = {}
    for name, budget in rows:
        paths = files(name.rstrip("/")) if (ROOT / name).is_dir() else [ROOT / name]
        beyond[name] = sum(map(lines_of, paths)) - int(budget)
    return beyond


LIMITS: dict[str, tuple[int, Callable[[], dict[str, int]]]] = {
    "lines of a file": (450, lines_of_files),
    "lines of a function": (60, lambda: lines_of_functions("jspec", "benchmarks", "tools", "tests")),
    "lines of a kernel": (60, lambda: lines_of_functions("pallas_kernels")),
    "arguments of a function": (8, lambda: arguments_of_functions("jspec", "benchmarks", "tools", "tests")),
    "arguments of a kernel": (8, lambda: arguments_of_functions("pallas_kernels")),
    "lines of a folder beyond its budget in docs/structure.md": (0, lines_of_folders),
    "checks of a protocol by isinstance": (0, checks_of_protocols),
    "names of weights in the core": (0, weights_in_core),
    "names that are participles": (0, participles),
    "that and which in 1,000 words": (13, relative_clauses),
    "lines of code per comment": (40, lines_per_comment),
    "words of a page": (1500, words_of_pages),
    "words of the site": (22_000, lambda: {"docs": sum(words_of_pages().values())}),
    "words of the readme": (550, lambda: {"README.md": words(ROOT / "README.md")}),
}
"""What is limited -> the largest value that needs no entry in the list, and the values."""


@pytest.fixture(scope="module", autouse=True)
def forget_files():
    """Gives back the memory of all syntax trees."""
    yield
    for cached in (files, text, tree, nodes):
        cached.cache_clear()


def exceeding(what: str) -> dict[str, int]:
    limit, measure = LIMITS[what]
    return {name: value for name, value in sorted(measure().items()) if value > limit}


@pytest.mark.parametrize("what", LIMITS)
def test_nothing_exceeds_its_limit_by_more_than_is_listed(what):
    listed, values = json.loads(LISTED.read_text())[what], exceeding(what)
    larger = {name: value for name, value in values.items() if value > listed.get(name, 0)}
    assert not larger, f"{what}: above {LIMITS[what][0]} and above house.json"
    smaller = {name: value for name, value in listed.items() if value > values.get(name, 0)}
    assert not smaller, f"{what}: house.json lists more than there is: run python tests/test_house.py"


def test_modules_of_tests_have_different_names():
    """pytest collects no two modules of one name."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert not {name for name in names if names.count(name) > 1}


def test_a_round_and_its_five_verbs_fit_on_one_screen():
    """Within 60 lines, which come first in their file."""
    functions = [node for node in tree(ROOT / "jspec/core/round.py").body if isinstance(node, ast.FunctionDef)]
    names = [function.name for function in functions[:6]]
    assert names == ["step", "draft", "verify", "accept_drafts", "commit_round", "extend"]
    assert functions[5].end_lineno - functions[0].lineno < 60


def main() -> int:
    """Writes the list; returns 1 if a value has risen, which a reviewer must have agreed to."""
    before = json.loads(LISTED.read_text()) if LISTED.exists() else {}
    after = {what: exceeding(what) for what in LIMITS}
    LISTED.write_text(json.dumps(after, indent=1) + "\n")
    rises = [
        f"{what}: {name} {before.get(what, {}).get(name, 'is new')} -> {value}"
        for what, values in after.items()
        for name, value in values.items()
        if value > before.get(what, {}).get(name, 0)
    ]
    print("\n".join(rises))
    return int(bool(rises))


if __name__ == "__main__":
    sys.exit(main())
