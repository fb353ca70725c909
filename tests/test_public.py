"""The public names of the package."""

import dataclasses
import importlib
import inspect
import itertools
import re
import subprocess
import sys
import tomllib
import types
import typing
from pathlib import Path

import pytest

import jspec
from jspec.core import package
from jspec.generation.options import GenerateKeywords, GenerateOptions

ROOT = Path(__file__).parent.parent
API_PAGES = "\n".join(page.read_text() for page in sorted(ROOT.glob("docs/api/*.md")))


@pytest.mark.parametrize("name", jspec.__all__)
def test_a_public_name_is_documented(name):
    value = getattr(jspec, name)
    documentation = inspect.cleandoc(value.__doc__ or "")
    assert documentation, f"jspec.{name} has no docstring"
    assert not documentation.startswith(f"{name}("), f"jspec.{name} has only the docstring that dataclasses generate"
    assert f"::: jspec.{name}\n" in API_PAGES, f"jspec.{name} is on no API page"


def test_the_module_and_the_function_generate_are_both_reachable():
    module = importlib.import_module("jspec.engine.generate")
    assert isinstance(jspec.engine.generate, types.ModuleType) and jspec.engine.generate is module
    assert jspec.generate is module.generate and inspect.isfunction(jspec.generate)


def test_modules_are_reachable_after_import_jspec():
    """In a process of its own, since other tests have imported them."""
    modules = (
        "jspec.analysis.plots, jspec.analysis.evaluate, jspec.analysis.verify_endpoint, "
        "jspec.plots, jspec.bench, jspec.cli, jspec.engine.generate"
    )
    code = f"import sys, jspec; print('scipy' in sys.modules, *(type(module).__name__ for module in ({modules})))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", *["module"] * 7], "scipy, which takes a third of the time, is not needed"
    assert importlib.import_module("jspec.analysis.plots") is jspec.plots
    for module, name in ((jspec, "contract"), (jspec.analysis, "nothing")):
        with pytest.raises(AttributeError, match=f"module '{module.__name__}' has no attribute '{name}'"):
            getattr(module, name)


def test_the_name_and_the_version_are_those_of_the_distribution():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert jspec.__version__ == package.VERSION == project["version"]
    assert package.NAME == project["name"]
    extras = project["optional-dependencies"]
    own = [re.fullmatch(rf"{package.NAME}\[(.*)\]", each) for each in itertools.chain(*extras.values())]
    assert {name for match in own if match for name in match[1].split(",")} <= extras.keys() and any(own)


def test_nothing_advises_to_install_another_project():
    """`jspec` is another project on the package index."""
    patterns = "*.md", "*.toml", ".ci/run", ".github/**/*.yml", "docs/**/*.*", "notebooks/*.ipynb", "jspec/**/*.py"
    wrong = re.compile(r"""(?<![\w-])jspec\[[a-z]|pip install [^\n`&]*(?<![\w./-])jspec(?![\w-])""")
    for path in {path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()}:
        assert not wrong.search(path.read_text(encoding="utf-8")), path
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    advised = {
        name for path in ROOT.glob("jspec/**/*.py") for name in re.findall(r"install\(.(\w+).\)", path.read_text())
    }
    assert advised and advised <= extras.keys()


def test_generate_and_stream_have_the_keywords_of_the_options():
    fields = {field.name: field.default for field in dataclasses.fields(GenerateOptions)}
    assert typing.get_type_hints(GenerateOptions) == typing.get_type_hints(GenerateKeywords)
    for function, others in ((jspec.generate, {"progress", "n"}), (jspec.stream, {"rounds"})):
        keywords = {
            name: parameter.default
            for name, parameter in inspect.signature(function).parameters.items()
            if parameter.kind is parameter.KEYWORD_ONLY and name not in others
        }
        assert keywords == fields, function.__name__
