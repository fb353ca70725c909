"""How the next token is chosen from the target's logits."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Sampling:
    """Parameters of the choice of a token.

    temperature: 0 takes the highest logit (greedy). Other values are not available.
    """

    temperature: float = 0.0

    def __post_init__(self):
        if self.temperature != 0.0:
            raise ValueError(
                f"Sampling(temperature={self.temperature}): only greedy decoding, temperature=0.0, is available"
            )
