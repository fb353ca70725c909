"""Training of drafts: data, drafts distilled from a target, and the target's own text.

Needs the extra `train` (flax, optax, orbax-checkpoint), except for the data.

Bad input raises before any work that it would end: `TypeError` for a value of another type, `ValueError` for one out of
bounds, for text unlike the model, and for a damaged file, with its line; `OSError` for a file that is missing or cannot
be written. Docstrings list other errors.
"""
