"""Imported by tests that train: skips them where a package of the extra `train` is missing."""

import pytest

for _name in ("flax", "optax", "orbax.checkpoint"):
    pytest.importorskip(_name, reason=f'needs {_name}: pip install -e ".[train]"')
