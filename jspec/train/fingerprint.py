"""Fingerprints of texts, by which a run that is resumed knows that they are those that it began with."""

from collections.abc import Iterable

from jspec.loading.fingerprint import of_array
from jspec.train.batches import Source


def of_texts(sources: Iterable[Source], heldout: Source | None) -> dict[str, object]:
    """What identifies the texts of a run: of each source its share, its shape and its fingerprint, by its name."""
    identity: dict[str, object] = {}
    if heldout is not None:
        identity["heldout"] = of_array(heldout.tokens)
        if heldout.mask is not None:
            identity["heldout_mask"] = of_array(heldout.mask)
    for index, source in enumerate(sources):
        name = source.name or f"sources[{index}]"
        identity |= {f"{name}: share": float(source.share), f"{name}: shape": list(source.tokens.shape)}
        identity[f"{name}: sha256"] = of_array(source.tokens)
        if source.mask is not None:
            identity[f"{name}: mask"] = of_array(source.mask)
    return identity
