"""What the text of a compiled program says."""

import re


def computations(text):
    """Instructions of each computation of a program, by name; the main one's is ENTRY."""
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
    """The instructions of the loop's body and of all that it calls."""
    parts = computations(text)
    queue, reached = re.findall(r" while\(.*body=%?([\w.-]+)", text), {}
    for name in queue:
        reached[name] = parts[name]
        for line in parts[name]:
            queue += [part for part in re.findall(r"[\w.-]+", line) if part in parts and part not in queue]
    return [line for lines in reached.values() for line in lines]


def made(lines, shape):
    """The opcodes of the instructions whose result is of that type."""
    return [opcode(line) for line in lines if re.search(rf" = {re.escape(shape)}\S* ", line)]
