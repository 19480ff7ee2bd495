"""What this machine lets the process use: memory and cores. Knows /proc, /sys and control groups.

A container sees the whole machine in /proc, so its control group's limits are read too, old (v1) and new (v2). Every
function takes the file system's root, for tests. Where a file is missing (another system, a hidden /sys) the limit it
would state is taken not to exist.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path

ROOT = Path("/")
# A v1 group without a limit states the largest page-aligned 64-bit number.
_NO_LIMIT = 1 << 60


def available_memory(root: Path = ROOT) -> int:
    """Bytes that can be allocated now: what the kernel calls available, or what the control groups leave if less."""
    values = [_meminfo(root, "MemAvailable"), *(_group_headroom(group) for group in _groups(root, "memory"))]
    known = [value for value in values if value is not None]
    return min(known) if known else _physical_memory()


def usable_cores(root: Path = ROOT) -> int:
    """Physical cores that the process may run on, and no more than its control group's quota of processor time."""
    allowed = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set(range(os.cpu_count() or 1))
    cores = {_siblings(root, cpu) for cpu in allowed}
    quotas = [quota for group in _groups(root, "cpu") if (quota := _quota(group)) is not None]
    return max(1, min([len(cores), *(math.ceil(quota) for quota in quotas)]))


def _meminfo(root: Path, key: str) -> int | None:
    for line in _read(root / "proc/meminfo").splitlines():
        if line.startswith(f"{key}:"):
            return int(line.split()[1]) * 1024
    return None


def _physical_memory() -> int:
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _groups(root: Path, controller: str) -> Iterator[Path]:
    """The process's control group and those above it, as folders that exist: a limit may be set on any of them."""
    for line in _read(root / "proc/self/cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and controller not in controllers.split(","):
            continue
        mount = root / "sys/fs/cgroup" / (controller if controllers else "")
        # Inside a container the path may be the host's, of which only the mount itself is visible.
        own = mount / path.lstrip("/")
        folders = [own, *own.parents[: len(own.relative_to(mount).parts)], mount]
        yield from (folder for folder in dict.fromkeys(folders) if folder.is_dir())


def _group_headroom(group: Path) -> int | None:
    """Bytes below the group's limit; file pages that it can drop count as free."""
    limit = _number(group / "memory.max") or _number(group / "memory.limit_in_bytes")
    used = _number(group / "memory.current") or _number(group / "memory.usage_in_bytes")
    if limit is None or used is None or limit >= _NO_LIMIT:
        return None
    droppable = 0
    for line in _read(group / "memory.stat").splitlines():
        name, _, value = line.partition(" ")
        if name in ("inactive_file", "total_inactive_file"):
            droppable = max(droppable, int(value))
    return max(0, limit - max(0, used - droppable))


def _quota(group: Path) -> float | None:
    """The group's quota in cores."""
    new = _read(group / "cpu.max").split()
    if len(new) == 2 and new[0].isdigit():
        return int(new[0]) / int(new[1])
    quota, period = _number(group / "cpu.cfs_quota_us"), _number(group / "cpu.cfs_period_us")
    return quota / period if quota and period else None


def _siblings(root: Path, cpu: int) -> str:
    """The threads of the cpu's core as the kernel writes them, its own number if that is not told."""
    return _read(root / f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").strip() or str(cpu)


def _number(path: Path) -> int | None:
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:
        return ""
