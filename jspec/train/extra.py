"""The packages of the extra `train`, imported in one place, with advice where one is missing."""

from jspec.core import package

try:
    import optax as optax
    import orbax.checkpoint as ocp
    from flax.training.train_state import TrainState as TrainState
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        f"training needs {error.name}, which the extra `train` installs: {package.install('train')}", name=error.name
    ) from None

__all__ = ["TrainState", "ocp", "optax"]
