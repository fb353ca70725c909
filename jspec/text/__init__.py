"""Tokenizers, chat templates, streamed text, stop strings and highlighted tokens."""
