"""Checkpoint files to configurations and weights, and back: one table of families, one of kinds of drafts.

Files are hostile. Whatever reads one raises `CheckpointError` if it is missing, damaged or not supported, with the
file, the key or tensor, its value, and what would be valid. Docstrings list other errors.
"""
