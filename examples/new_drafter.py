"""A drafter made of two others: their chains become two branches of one tree.

A small model writes well, n-grams copy long. The target verifies both in one forward and accepts the longer one.

python examples/new_drafter.py --check
"""

import argparse
import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np

import jspec
from jspec.analysis.evaluate import heldout_prompts
from jspec.core.types import DraftTree


@dataclasses.dataclass(frozen=True)
class Both:
    """Proposes the chains of two drafters; its state is the pair of theirs."""

    first: Any = jspec.Standalone(depth=4)
    second: Any = jspec.Ngram(n=8, depth=6)
    capture_layers = ()

    @property
    def depth(self):
        """Tokens of the longest chain."""
        return max(self.first.depth, self.second.depth)

    def bind(self, target, draft):
        """Binds the parts; a frozen dataclass is replaced, not changed."""
        return Both(self.first.bind(target, draft), self.second.bind(target, draft))

    def init(self, params, batch, capacity, page_size):
        """The states of both."""
        return tuple(part.init(params, batch, capacity, page_size) for part in (self.first, self.second))

    def draft(self, params, s):
        """A tree of two branches. Where they begin with the same token, the first one counts."""
        chain, first = self.first.draft(params, dataclasses.replace(s, draft=s.draft[0]))
        copy, second = self.second.draft(params, dataclasses.replace(s, draft=s.draft[1]))
        tokens = jnp.concatenate([chain.tokens, copy.tokens[:, 1:]], axis=1)  # one root for both
        parents = [0, *range(self.first.depth), 0, *range(self.first.depth + 1, self.first.depth + self.second.depth)]
        parents = np.broadcast_to(np.array(parents, np.int32), tokens.shape)
        return DraftTree(tokens, jnp.asarray(parents)), (first, second)

    def extend(self, params, s, committed):
        """Both absorb the committed tokens."""
        first, second = (dataclasses.replace(s, draft=state) for state in s.draft)
        return self.first.extend(params, first, committed), self.second.extend(params, second, committed)


def main() -> None:
    """Compares the drafter with its parts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="bundled:python-small")
    parser.add_argument("--draft", default="bundled:python-tiny")
    parser.add_argument("--check", action="store_true", help="also check the contract of drafters; takes a minute")
    options = parser.parse_args()

    model = jspec.load(options.model, draft=options.draft)
    if options.check:
        print(jspec.check_drafter(Both(), model))
    prompts = heldout_prompts()[:16]
    plain = jspec.generate(model, prompts, drafter=None, max_new_tokens=64)
    for drafter in (Both.first, Both.second, Both()):
        out = jspec.generate(model, prompts, drafter=drafter, max_new_tokens=64)
        assert out.tokens == plain.tokens  # a drafter changes the speed, never the output
        print(f"{type(drafter).__name__}: accept length {out.stats.accept_length:.2f}")


if __name__ == "__main__":
    main()
