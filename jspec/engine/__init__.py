"""Requests over slots: scheduling, prefix cache, the caller's handles; `Engine`, `generate` and `stream`."""
