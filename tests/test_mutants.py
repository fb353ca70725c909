"""The list of mutants fits the code and the tests. `mutants.py` runs them."""

import ast

import pytest
import tiers
from mutants import MUTANTS, ROOT, Mutant, functions


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_found_and_changes_the_code(mutant):
    file, text = mutant.apply()
    assert ast.dump(ast.parse(text)) != ast.dump(ast.parse(file.read_text(encoding="utf-8")))
    path, _, test = mutant.test.partition("::")
    assert test.partition("[")[0] in {"", *functions(ROOT / "tests" / path)}, "the test that kills it is not there"


def test_every_test_that_kills_a_mutant_is_collected(request):
    """Checks the files of this run: a point may have been dropped or renamed."""
    collected = request.config.stash[tiers.COLLECTED]
    files = {test.partition("::")[0] for test in collected}
    names = collected | {test.partition("[")[0] for test in collected} | files
    killers = {f"tests/{mutant.test}" for mutant in MUTANTS}
    killers = {test for test in killers if test.partition("::")[0] in files}
    assert killers <= names, f"not collected: {sorted(killers - names)}"


@pytest.mark.parametrize(
    ("function", "old", "message"),
    [
        ("jspec.core:nowhere", "s.done", "s.done is 0 times in"),
        ("jspec.core:truncate_at_stop", "s.nothing", "s.nothing is 0 times in"),
        ("jspec.core:truncate_at_stop", "s.length", "s.length is 2 times in"),
    ],
)
def test_a_mutant_without_one_place_is_refused(function, old, message):
    with pytest.raises(LookupError, match=message):
        Mutant("name", function, old, "0", "test").apply()


def test_a_mutant_survives_other_lines_and_other_formatting(tmp_path):
    text = 'class A:\n    def f(self):\n        return "é", (1 +\n            self . x)\n'
    (tmp_path / "code.py").write_text(text, encoding="utf-8")
    _, changed = Mutant("name", "code:A.f", "1 + self.x", "2", "test").apply(tmp_path)
    assert changed == 'class A:\n    def f(self):\n        return "é", ((2))\n'
