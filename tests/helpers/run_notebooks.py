"""Runs the notebooks. `python tests/helpers/run_notebooks.py` runs all of them and stores their outputs."""

import os
import sys
from pathlib import Path
from typing import Any

NOTEBOOKS = sorted((Path(__file__).parents[2] / "notebooks").glob("*.ipynb"))
"""In reading order."""


def execute(path: Path) -> Any:
    """Runs a notebook from top to bottom and returns it with its new outputs."""
    os.environ.setdefault("JUPYTER_PLATFORM_DIRS", "1")  # otherwise Jupyter warns about the paths of its settings
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(notebook, timeout=600, kernel_name="python3")
    # Figures become outputs of their cells, whatever backend the tests use.
    client.execute(env=os.environ | {"MPLBACKEND": "module://matplotlib_inline.backend_inline"})
    return notebook


def output_kinds(cell: Any) -> set[str]:
    """What a cell shows: "text", "image", "html" or "error". Empty for a cell that shows nothing.

    An output counts as its richest form: a figure also has a text form, which no reader sees. Warnings do not count.
    """
    kinds = set()
    for output in cell.get("outputs", []):
        data = output.get("data", {})
        if output["output_type"] == "error":
            kinds.add("error")
        elif "image/png" in data:
            kinds.add("image")
        elif "text/html" in data:
            kinds.add("html")
        elif output.get("name") != "stderr":
            kinds.add("text")
    return kinds


def strip_volatile(notebook: Any) -> None:
    """Removes in place what depends on the machine: metadata and warnings. Merges the pieces of printed text."""
    notebook.metadata = {
        "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
        "language_info": {"name": "python"},
    }
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type != "code":
            continue
        printed, others = [], []
        for output in cell.outputs:
            if output.output_type == "stream":
                printed += [output] if output.name == "stdout" else []
            else:
                others.append(output)
                output.metadata = {}
        if printed:
            printed[0].text = "".join(output.text for output in printed)
        cell.outputs = printed[:1] + others


def main(paths: list[Path]) -> None:
    """Runs notebooks and writes them back with their outputs."""
    import nbformat

    for path in paths:
        notebook = execute(path)
        strip_volatile(notebook)
        nbformat.write(notebook, path)
        print(path.name, path.stat().st_size, "bytes", flush=True)


if __name__ == "__main__":
    main([Path(name) for name in sys.argv[1:]] or NOTEBOOKS)
