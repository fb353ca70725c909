"""Ways to damage a file, each a function of its path and of random numbers."""

import os


def flip(path, rng):
    """One bit of a byte near the beginning."""
    content = bytearray(path.read_bytes())
    if not content:
        return path.write_bytes(b"x")
    content[rng.randrange(min(len(content), 400))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut(path, rng):
    """A part of its end is missing."""
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(max(1, len(content)))])


def noise(path, rng):
    """Random bytes."""
    path.write_bytes(rng.randbytes(rng.randrange(1, 3000)))


def make_directory(path, rng):
    """A directory of this name."""
    path.unlink()
    path.mkdir()


def make_pipe(path, rng):
    """A pipe of this name."""
    path.unlink()
    os.mkfifo(path)


def unlink(path, rng):
    """No file."""
    path.unlink()


def text_of(text):
    """Another text."""
    return lambda path, rng: path.write_text(text)


ANY = [cut, noise, flip, make_directory, make_pipe, text_of(""), text_of("\0"), unlink]
DOCUMENTS = [text_of(text) for text in ("[]", "{}", "null", "3", '"x"', "[" * 500, '{"a": 1}', "[1, 2]", "NaN")]
"""JSON of another kind."""
