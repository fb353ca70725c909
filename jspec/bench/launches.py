"""What the host starts to run rounds on a GPU: one CUDA graph with their loop in it, see `jspec.core.xla_options`."""

import pathlib
import re
import tempfile

from jax.stages import Compiled, Lowered

_DUMPED = "*.thunk_sequence_after_thunk_passes.txt"


def compiled(lowered: Lowered, platform: str) -> tuple[Compiled, str]:
    """Compile a program. Also returns what the host starts on a GPU, as XLA writes it; "" if that is not known.

    XLA writes nothing about a program from the compilation cache.
    """
    if platform != "gpu":
        return lowered.compile(), ""
    with tempfile.TemporaryDirectory() as folder:
        program = lowered.compile({"xla_dump_to": folder})
        return program, "\n".join(path.read_text() for path in sorted(pathlib.Path(folder).glob(_DUMPED)))


def problem(launches: str) -> str:
    """What the host starts itself, if that is not one CUDA graph with the loop in it."""
    kinds = re.findall(r"^( *)\d+: (\w+)", launches, re.MULTILINE)
    outer = [kind for indent, kind in kinds if not indent]
    inner = [kind for indent, kind in kinds if len(indent) == 4]
    one = outer == ["kCommandBuffer"] and inner.count("kWhile") == 1
    return "" if one else f"the host starts {outer}, and inside of these {inner}"
