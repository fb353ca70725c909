"""Doors into other libraries, one module per library."""
