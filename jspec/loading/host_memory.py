"""The memory of a CPU machine: what the kernel can give, and what control groups such as those of a container allow."""

from collections.abc import Iterator
from pathlib import Path

_UNLIMITED = 1 << 60
"""A limit of a control group of at least this many bytes is none."""


def free_bytes(root: Path = Path("/")) -> tuple[int, int] | None:
    """Bytes that this process can still allocate without swapping, and the limit of them all; None if unknown.

    root: where `proc` and `sys` are mounted.
    """
    meminfo = _keyed_counts(root / "proc/meminfo")
    if meminfo.keys() < {"MemAvailable", "MemTotal"}:
        return None
    counts = [(1024 * meminfo["MemAvailable"], 1024 * meminfo["MemTotal"]), *_group_memory(root)]
    return max(0, min(free for free, _ in counts)), min(limit for _, limit in counts)


def _group_memory(root: Path) -> Iterator[tuple[int, int]]:
    """Free bytes and limit of each control group that this process belongs to and that has a limit."""
    for line in _text(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            top, names = root / "sys/fs/cgroup", ("memory.max", "memory.current", "inactive_file")
        elif "memory" in controllers.split(","):
            top = root / "sys/fs/cgroup/memory"
            names = "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"
        else:
            continue
        # Inside a container, the group that `path` names may be mounted as the top.
        group = top / path.lstrip("/")
        for folder in {top, group, *(parent for parent in group.parents if top in parent.parents)}:
            limit, used = (_text(folder / name).strip() for name in names[:2])
            if limit.isdigit() and used.isdigit() and int(limit) < _UNLIMITED:
                # Pages of files that were not read lately are given back before an allocation fails.
                cached = _keyed_counts(folder / "memory.stat").get(names[2], 0)
                yield int(limit) - int(used) + cached, int(limit)


def _keyed_counts(path: Path) -> dict[str, int]:
    """The counts of a file that has a name and a count on each line."""
    fields = [line.replace(":", " ").split() for line in _text(path).splitlines()]
    return {name: int(count) for name, count, *_ in filter(lambda parts: len(parts) > 1, fields) if count.isdigit()}


def _text(path: Path) -> str:
    """The text of a file; "" if there is none that can be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""
