"""The options that `load` and `from_named` share, checked together."""

import dataclasses
from collections.abc import Sequence

import jax
from jax.sharding import Mesh

from jspec.cache.narrow import check_kv
from jspec.core.checks import check_flag, check_int
from jspec.core.sharding import Placement, make_placement
from jspec.core.xla_options import prepare_collectives
from jspec.models.decoder import Decoder
from jspec.models.quantized import FORMATS, check_weights


@dataclasses.dataclass(frozen=True)
class LoadOptions:
    """How a model is held: its devices, its precision, and the format of its caches.

    placement: the devices over which it is split; None: it is on the default device.
    exact, weights, kv: as in `jspec.load`.
    """

    placement: Placement | None
    exact: bool
    weights: str | None
    kv: str | None

    @classmethod
    def checked(
        cls,
        tensor: object,
        data: object,
        mesh: Mesh | None,
        *,
        exact: object,
        weights: str | None,
        kv: str | None,
        formats: Sequence[str] = (),
    ) -> "LoadOptions":
        """The options that these arguments of `jspec.load` describe.

        formats: further values of `weights`.

        Raises:
          TypeError, ValueError: one of the wrong type or out of bounds, or two that do not go together.
        """
        tensor = None if tensor is None else check_int("tensor", tensor, least=1)
        data = None if data is None else check_int("data", data, least=1)
        exact = check_flag("exact", exact)
        check_weights(weights, *formats)
        check_kv(kv)
        placement = make_placement(tensor, mesh, jax.devices(), data)
        options = cls(placement, exact, weights, kv)
        if exact:
            options._check_exact()
        if placement is not None:
            prepare_collectives()
        return options

    @property
    def devices(self) -> int:
        """Devices that share the weights."""
        return 1 if self.placement is None else self.placement.size

    def applied(self, config: Decoder) -> Decoder:
        """The configuration of a target with the forward and the caches that are asked for.

        Raises:
          ValueError: it has none, or its exact forward does not go together with the other options.
        """
        if config.exact:
            self._check_exact()
        if self.exact:
            config = config.exactly()
        return config if self.kv is None else config.with_kv(self.kv)

    def _check_exact(self) -> None:
        """Raises ValueError if there is no exact forward with the other options."""
        if self.kv is not None:
            raise ValueError(f"exact=True: no exact forward with kv={self.kv!r} yet; omit one of them")
        if self.weights in FORMATS:
            raise ValueError(f"exact=True: no exact forward with weights={self.weights!r} yet; omit one of them")
        if self.placement is not None and self.placement.mesh.size > 1:
            raise ValueError(
                "exact=True: no exact forward of a model over several devices yet; omit tensor, data and mesh"
            )
