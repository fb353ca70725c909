"""The names that libraries of JAX give weights: a table, and their translation to Hugging Face names.

Each library has a module of its own. A translation is part of the program that fuses weights, so that its transposed
and sliced arrays are never stored.
"""

from collections.abc import Mapping

from jaxtyping import Array

from jspec.checkpoints.files import CheckpointError
from jspec.checkpoints.names import gemma, maxtext, tunix
from jspec.checkpoints.names.leaves import Library, Named, read
from jspec.models.decoder import Decoder

TRANSFORMERS = "transformers"
"""The names of Hugging Face, which need no translation."""
LIBRARIES: dict[str, Library] = {"gemma": gemma.LIBRARY, "maxtext": maxtext.LIBRARY, "tunix": tunix.LIBRARY}
"""Name -> how it holds weights."""


def check_names(names: object, config: Decoder) -> None:
    """Raises ValueError for an unknown library, CheckpointError if it has no names for models of this family."""
    if names == TRANSFORMERS:
        return
    if not isinstance(names, str) or names not in LIBRARIES:
        raise ValueError(f"names={names!r}: must be one of {', '.join([TRANSFORMERS, *LIBRARIES])}")
    if type(config) not in LIBRARIES[names].layouts:
        known = ", ".join(kind.__name__ for kind in LIBRARIES[names].layouts)
        raise CheckpointError(
            f"names={names!r}: known for {known}, and this model is of type {type(config).__name__}; pass arrays under "
            "their Hugging Face names"
        )


def translate(names: str, config: Decoder, arrays: Mapping[str, Array]) -> Named:
    """Arrays under their Hugging Face names, from those by path."""
    library = LIBRARIES[names]
    leaves = library.leaves(arrays, config)
    named = read(leaves, library.layouts[type(config)](config))
    leaves.refuse_unused()
    return named
