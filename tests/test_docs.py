"""The README and the pages of the site: their Python runs as printed, and their links resolve."""

import re
from pathlib import Path

import jax
import pytest

ROOT = Path(__file__).parent.parent
PAGES = sorted({*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md")})
PAGES_WITH_CODE = [path for path in PAGES if "```python\n" in path.read_text(encoding="utf-8")]


def page_name(path):
    return path.relative_to(ROOT).as_posix()


@pytest.mark.slow
@pytest.mark.parametrize("path", PAGES_WITH_CODE, ids=page_name)
def test_code_of_a_page_runs(path, capsys, tmp_path, monkeypatch, needs):
    monkeypatch.chdir(tmp_path)
    blocks = re.findall(r"```python\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    names: dict = {}
    for block in blocks:
        for package in ("flax", "optax"):
            if re.search(rf"^(?:from|import) {package}\b", block, flags=re.MULTILINE):
                needs(package)
        # Optimizers of others promote types.
        with jax.numpy_dtype_promotion("standard" if "import optax" in block else "strict"):
            exec(compile(block, page_name(path), "exec"), names)
    if "jspec.generate(" in "".join(blocks):
        assert names["out"].stats.accept_length >= 1


def test_pages_with_code_are_found():
    pages = {"README.md", "docs/extending.md", "docs/extending-models.md", "docs/bench.md", "docs/guide/generating.md"}
    assert pages <= set(map(page_name, PAGES_WITH_CODE))


def test_numbers_are_rendered_in_tables_only():
    assert [page_name(path) for path in PAGES if "<!-- n:" in path.read_text(encoding="utf-8")] == []


def anchors(path):
    """The anchors of a page's headings, as GitHub and the site make them."""
    headings = re.findall(r"^#+ (.*)$", path.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading).strip().lower().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=page_name)
def test_links_resolve(path):
    text = re.sub(r"```.*?```", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"https?:|mailto:", link):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file) if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@pytest.mark.parametrize("path", sorted(ROOT.glob("notebooks/*.ipynb")), ids=page_name)
def test_pages_that_a_notebook_names_exist(path):
    for page in re.findall(r"docs/[\w/.-]+\.md", path.read_text(encoding="utf-8")):
        assert (ROOT / page).exists(), page


def test_ci_finds_the_readmes_test_command():
    commands = re.findall(r"^pip install -e .*&& pytest$", (ROOT / "README.md").read_text(), flags=re.MULTILINE)
    assert commands == ['pip install -e ".[test]" && pytest']
    assert "README.md" in (ROOT / ".ci" / "run").read_text()


def test_every_public_name_is_on_the_api_page():
    import jspec

    page = (ROOT / "docs" / "api" / "jspec.md").read_text() + (ROOT / "docs" / "api" / "drafters.md").read_text()
    assert set(re.findall(r"^::: jspec\.(\w+)$", page, flags=re.MULTILINE)) == set(jspec.__all__)
