"""Parsing of the text of a compiled program."""

import re

import jax


def computations(text):
    """Instructions of each computation of a program, by name; the main one is ENTRY."""
    found, name = {}, None
    for line in text.splitlines():
        header = re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", line)
        if header:
            name = "ENTRY" if header[1] else header[2]
            found[name] = []
        elif name:
            found[name].append(line)
    return found


def opcode(line):
    found = re.search(r" = .*?[\]})] ([a-z][a-z0-9-]*)\(", line)
    return found[1] if found else None


def loop_body(text):
    """The instructions of the loop body and of everything that it calls."""
    parts = computations(text)
    queue, reached = re.findall(r" while\(.*body=%?([\w.-]+)", text), {}
    for name in queue:
        reached[name] = parts[name]
        for line in parts[name]:
            queue += [part for part in re.findall(r"[\w.-]+", line) if part in parts and part not in queue]
    return [line for lines in reached.values() for line in lines]


def made(lines, shape):
    """The opcodes of the instructions with a result of this type."""
    return [opcode(line) for line in lines if re.search(rf" = {re.escape(shape)}\S* ", line)]


def pool_writes(lines, shape):
    """In-place writes of arrays of this type. On a GPU a kernel writes them, through another view of the array."""
    if jax.default_backend() == "gpu":
        return [line for line in lines if made([line], shape) == ["bitcast"] and "/kv_compact/" in line]
    return [line for line in lines if made([line], shape) == ["scatter"]]


def check_in_place(lines, shape, writes=1):
    """Arrays of this type are created only by this number of in-place writes, and never copied."""
    assert len(pool_writes(lines, shape)) == writes
    allowed = {"parameter", "get-tuple-element", "bitcast"}
    if jax.default_backend() != "gpu":
        allowed |= {"scatter", "fusion"}
    makers = made(lines, shape)
    assert set(makers) <= allowed, makers
