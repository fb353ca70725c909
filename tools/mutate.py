"""Mutates the lines of the code that a change touched and lists the mutants that no test finds.

    python tools/mutate.py              # what has changed since the last commit
    python tools/mutate.py --base main  # since another commit

The operators are those of cosmic-ray; of those that apply to an expression, one is chosen. Each mutant runs the fast
tests of the folder that mirrors the file's, those of the file itself first, in a copy of the tree. A survivor is a test
to write, unless the mutant is equivalent.
"""

import argparse
import ast
import os
import random
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path

from cosmic_ray import plugins
from cosmic_ray.ast import ast_nodes, get_ast_from_path
from cosmic_ray.mutating import mutate_and_test
from cosmic_ray.work_item import MutationSpec, TestOutcome

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from mutants import copied_tree  # noqa: E402, after its folder is on the path


def changed_lines(base: str) -> dict[Path, set[int]]:
    """The lines of each file of the code that differ from those of `base`."""
    diff = ["git", "diff", "-U0", "--no-prefix", base, "--", "jspec/*.py", "pallas_kernels/*.py"]
    output = subprocess.run(diff, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    changed: dict[Path, set[int]] = {}
    for file in re.split(r"^\+\+\+ ", output, flags=re.MULTILINE)[1:]:
        path, _, hunks = file.partition("\n")
        for begin, count in re.findall(r"^@@ -\S+ \+(\d+)(?:,(\d+))? @@", hunks, flags=re.MULTILINE):
            changed.setdefault(Path(path), set()).update(range(int(begin), int(begin) + int(count or 1)))
    return {path: lines for path, lines in changed.items() if lines}


def mutations(path: Path, lines: set[int]) -> list[MutationSpec]:
    """One mutation of each expression in these lines, in their order; none of annotations, which never run."""
    tree = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
    inert = [part for node in tree for name in ("annotation", "returns") if (part := getattr(node, name, None))]
    spans = [((part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)) for part in inert]
    nodes = list(ast_nodes(get_ast_from_path(path)))
    specs: dict[tuple, list[MutationSpec]] = {}
    for name in plugins.operator_names():
        operator = plugins.get_operator(name)
        if operator.arguments():
            continue
        places = (place for node in nodes for place in operator().mutation_positions(node))
        for occurrence, (begin, end) in enumerate(places):
            if begin[0] in lines and not any(first <= begin and end <= last for first, last in spans):
                specs.setdefault((begin, end), []).append(MutationSpec(path, name, occurrence, begin, end))
    choice = random.Random(0)
    return [choice.choice(specs[place]) for place in sorted(specs)]


def commands(path: Path) -> list[str]:
    """The commands that run the tests of a file's name, if there are any, and those of the folder that mirrors its own.

    Each ends with the first failure.
    """
    room = "kernels" if path.parts[0] == "pallas_kernels" else path.parts[1].removesuffix(".py")
    folder = Path("tests", room)
    names = (f"test_{path.stem}.py", f"test_{path.parent.name}.py")
    tests = [[folder / name] for name in names if (folder / name).exists()]
    tests.append([folder] if folder.is_dir() else [*Path("tests").glob(f"test_{room}*.py")])
    pytest = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-p", "no:cacheprovider"]
    return [shlex.join([*pytest, *map(str, paths)]) for paths in tests]


def survives(spec: MutationSpec, tests: list[str], limit: float) -> bool:
    """Whether all tests pass with the mutant, which is printed then. limit: seconds until endless tests have failed."""
    diff = None
    for command in tests:
        result = mutate_and_test([spec], command, limit)
        if result.test_outcome == TestOutcome.INCOMPETENT:
            raise RuntimeError(result.output)
        if result.test_outcome == TestOutcome.KILLED:
            return False
        diff = result.diff
    print(diff, flush=True)
    return True


def main() -> int:
    """Runs the mutants; returns 1 if one survives."""
    parser = argparse.ArgumentParser(description="Lists mutants of changed lines that no test finds.")
    parser.add_argument("--base", default="HEAD", help="the commit before the change; default: HEAD")
    changed, outcomes = changed_lines(parser.parse_args().base), []
    with copied_tree() as root:
        os.chdir(root)
        os.environ["PYTHONPATH"] = str(root)
        os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(ROOT / ".jax_cache"))
        for path, lines in changed.items():
            specs, tests = mutations(path, lines), commands(path)
            print(f"{path}: {len(specs)} mutants", flush=True)
            began = time.monotonic()
            if specs and subprocess.run(shlex.split(tests[-1]), stdout=subprocess.DEVNULL).returncode:
                print(f"must pass before a mutant is applied: {tests[-1]}")
                return 2
            limit = 60 + 3 * (time.monotonic() - began)
            outcomes += [survives(spec, tests, limit) for spec in specs]
    print(f"{sum(outcomes)} of {len(outcomes)} mutants survive")
    return int(any(outcomes))


if __name__ == "__main__":
    sys.exit(main())
