"""Damaged values in the config.json of every family and kind of draft: an error that names the file, or a model that
has these values.

The slow tier tries all of them, the fast tier a sample.
"""

import ast
import json
import random
import signal
from contextlib import contextmanager
from pathlib import Path

import hostile
import pytest

import jspec
from jspec.checkpoints.files import CheckpointError


@contextmanager
def no_hang(seconds: int = 30):
    """Ends a test that hangs; a load here takes milliseconds."""

    def stop(signum, frame):
        raise AssertionError("hangs")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    return hostile.bases(tmp_path_factory.mktemp("bases"))


def outcome(base, raw) -> str:
    """What went wrong: "" if a changed config.json ends in an error or a warning of our own, or in its values."""
    (base.directory / "config.json").write_text(json.dumps(raw))
    try:
        with no_hang():
            loaded = base.load(base.directory)
    except (CheckpointError, UserWarning) as error:
        return "" if str(base.directory) in str(error) else f"does not name the file: {error}"
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "; ".join(hostile.contradictions(base.describe(loaded), raw))


def failures(cases) -> list[str]:
    problems = []
    for base, path, value in cases:
        problem = outcome(base, hostile.changed(base.raw, path, value))
        if problem:
            shown = "absent" if value is hostile.ABSENT else repr(value)
            problems.append(f"{base.name}: {'.'.join(map(str, path))}={shown}: {problem}")
    return problems


def every_case(bases):
    return [(base, path, value) for base in bases for path, value in hostile.mutations(base.raw)]


def test_intact_configurations_load(bases):
    for base in bases:
        assert outcome(base, base.raw) == ""
        base.load(base.directory)


def test_some_damaged_values(bases):
    cases = every_case(bases)
    assert not failures(random.Random(0).sample(cases, 400))


@pytest.mark.slow
def test_damaged_values_of_every_key(bases):
    cases = every_case(bases)
    assert len(cases) > 20_000
    # Not a multiple of the number of values that a key gets, so the values take turns.
    assert not failures(cases[::3])


@pytest.mark.slow
def test_two_damaged_values(bases):
    generator, cases = random.Random(1), []
    for base in bases:
        singles = list(hostile.mutations(base.raw))
        for _ in range(100):
            (path, value), (other, second) = generator.sample(singles, 2)
            try:
                cases.append((base, hostile.changed(hostile.changed(base.raw, path, value), other, second)))
            except (KeyError, IndexError, TypeError):
                continue  # the first removed what the second changes
    assert len(cases) > 2000
    problems = [f"{base.name}: {problem}" for base, raw in cases if (problem := outcome(base, raw))]
    assert not problems


def test_parsers_read_no_value_without_type_and_bounds():
    """A parser gets a `Fields`; only that file looks into the JSON object itself."""
    for path in sorted((Path(jspec.__file__).parent / "checkpoints").glob("*.py")):
        tree = ast.parse(path.read_text())
        named = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
        imported = {alias.name for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names}
        assert "_raw" not in named or path.name == "fields.py", path
        assert not imported & {"read_json", "Json"} or path.name == "fields.py", path
