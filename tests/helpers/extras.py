"""Imported by tests that train: skips them where a package of the extra `train` is missing."""

import optional

optional.lazy("flax", "optax", "orbax.checkpoint")
