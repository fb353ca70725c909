"""Pre-training of the bundled models: data from installed packages, tokenizers, and language models from scratch.

Needs the extra `train`. `python -m tools.pretrain --help` lists the commands.
"""
