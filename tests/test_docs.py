"""The Python in the README and in the pages runs as printed."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


@pytest.mark.parametrize(
    "page", ["README.md", "docs/adding-a-cache.md", "docs/adding-a-drafter.md", "docs/profiling.md"]
)
def test_code_runs(page, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), flags=re.DOTALL)
    assert blocks
    names: dict = {}
    for block in blocks:
        exec(compile(block, page, "exec"), names)
    if "jspec.generate(" in "".join(blocks):
        assert names["out"].stats.accept_length >= 1


def test_ci_finds_the_readmes_test_command():
    commands = re.findall(r"^pip install -e .*&& pytest$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert commands == ['pip install -e ".[test]" && pytest']
    assert "README.md" in (ROOT / ".ci" / "run").read_text()
