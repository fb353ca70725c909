"""How `jspec train text` made the texts of a token file: a file of JSON beside it, which model cards quote."""

import dataclasses
import json
from pathlib import Path

from jspec.checkpoints import atomic
from jspec.core.checks import check_int, check_number


@dataclasses.dataclass(frozen=True)
class Made:
    """How a target wrote texts.

    sampled_share: the fraction of the texts that were sampled at temperature 1; the others are greedy.
    seed: of the choice, and of the sampling.

    Raises:
      TypeError, ValueError: a value of another type, or out of bounds.
    """

    sampled_share: float
    seed: int

    def __post_init__(self):
        check_number("sampled_share", self.sampled_share, least=0, most=1)
        check_int("seed", self.seed, least=0, most=2**32 - 1)

    def write(self, tokens: Path) -> None:
        """Writes it beside the token file `tokens`."""
        atomic.write_text(_path(tokens), json.dumps(dataclasses.asdict(self)) + "\n")


def read(tokens: Path) -> Made | None:
    """What is written beside the token file `tokens`; None: there is nothing.

    Raises:
      ValueError: it is damaged.
    """
    path = _path(tokens)
    if not path.exists():
        return None
    try:
        return Made(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError) as error:
        raise ValueError(f"{path}: not what `jspec train text` writes beside its texts ({error})") from None


def _path(tokens: Path) -> Path:
    return tokens.with_suffix(".json")
