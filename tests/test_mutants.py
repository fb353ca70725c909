"""The list of mutants fits the code: lines, tests and the table in the documentation. `mutants.py` runs them."""

import ast
import re

import mutants
import pytest
import tiers
from mutants import MUTANTS, PAGE, ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_changes_one_line_that_exists(mutant):
    text = (ROOT / mutant.file).read_text(encoding="utf-8")
    assert text.count(mutant.old) == 1, "the line has changed: update the mutant"
    assert "\n" not in mutant.old.rstrip("\n") and mutant.new != mutant.old
    ast.parse(text.replace(mutant.old, mutant.new))
    for test in mutant.tests:
        path, _, function = test.partition("::")
        assert re.search(rf"^def {re.escape(function.partition('[')[0])}\b", (ROOT / path).read_text(), re.MULTILINE)


def test_every_test_that_kills_a_mutant_is_collected(request):
    """Checks the files of this run: a point may have been dropped or renamed."""
    collected = request.config.stash[tiers.COLLECTED]
    files = {test.partition("::")[0] for test in collected}
    names = collected | {test.partition("[")[0] for test in collected} | files
    killers = {test for mutant in MUTANTS for test in mutant.tests if test.partition("::")[0] in files}
    assert killers <= names, f"not collected: {sorted(killers - names)}"


def test_there_are_enough_of_them_and_no_two_are_alike():
    assert len(MUTANTS) >= 30
    assert len({(mutant.file, mutant.old, mutant.new) for mutant in MUTANTS}) == len(MUTANTS)


def test_the_table_in_the_documentation_is_up_to_date():
    text = PAGE.read_text(encoding="utf-8")
    assert mutants.page_with_table(text) == text, "run python tests/mutants.py --write"
