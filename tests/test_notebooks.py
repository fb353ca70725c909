"""The notebooks run from top to bottom and show the kinds of outputs that are stored in them."""

import json

import pytest
from run_notebooks import NOTEBOOKS, execute, output_kinds

STORED_BYTES = 250_000
"""Limit for a notebook with its outputs."""


EXECUTED = [path for path in NOTEBOOKS if path.stem[:2] not in ("02", "04")]
"""The other two take minutes; `python tests/helpers/run_notebooks.py` runs all."""


def code_cells(notebook):
    return [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]


@pytest.mark.slow
@pytest.mark.parametrize("path", EXECUTED, ids=lambda path: path.stem)
def test_notebook_shows_what_is_stored(path, needs):
    for package in ("nbclient", "ipykernel", "matplotlib", *(["optax"] if "import optax" in path.read_text() else [])):
        needs(package)
    stored = json.loads(path.read_text())
    for new, old in zip(code_cells(execute(path)), code_cells(stored), strict=True):
        assert output_kinds(new) == output_kinds(old), "".join(old["source"])


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_stored_with_outputs(path):
    cells = code_cells(json.loads(path.read_text()))
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    kinds = set().union(*(output_kinds(cell) for cell in cells))
    assert "image" in kinds and "error" not in kinds
    assert path.read_text().count("<pre style=") == path.read_text().count('<pre style=\\"font-family:monospace;')
    assert path.stat().st_size < STORED_BYTES


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_holds_nothing_of_the_machine_it_ran_on(path):
    notebook = json.loads(path.read_text())
    assert notebook["metadata"]["language_info"] == {"name": "python"}
    for cell in notebook["cells"]:
        assert cell["metadata"] == {}
        assert all(output.get("name") != "stderr" for output in cell.get("outputs", []))
    assert "/home/" not in path.read_text() and "site-packages" not in path.read_text()


@pytest.mark.parametrize(
    "outputs, kinds",
    [
        ([], set()),
        ([{"output_type": "stream", "name": "stdout", "text": "a"}], {"text"}),
        ([{"output_type": "display_data", "data": {"image/png": "", "text/plain": "<Figure>"}}], {"image"}),
        ([{"output_type": "execute_result", "data": {"text/html": "", "text/plain": "a"}}], {"html"}),
        ([{"output_type": "execute_result", "data": {"text/plain": "a"}}], {"text"}),
        ([{"output_type": "error", "ename": "ValueError"}], {"error"}),
        ([{"output_type": "stream", "name": "stderr", "text": "a"}], set()),
    ],
)
def test_outputs_of_cells_have_their_kinds(outputs, kinds):
    assert output_kinds({"outputs": outputs}) == kinds
