"""Training of the bundled models: data, language models from scratch, drafts distilled from a target.

Needs the extra `train` (flax, optax, orbax-checkpoint), except for the data.
"""
