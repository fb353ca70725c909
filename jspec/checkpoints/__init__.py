"""Checkpoint files to configurations and weights, and back: one table of families, one of kinds of drafts."""
