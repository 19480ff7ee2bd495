"""Memory and cores as /proc, /sys and control groups of either version state them, from trees laid out by hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from suimon.core_engine import machine
from suimon.kernels.cpu_features import has_bfloat16_instructions

MIB = 1 << 20


def lay_out(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def meminfo(available_mib: int) -> dict[str, str]:
    return {"proc/meminfo": f"MemTotal: 99999999 kB\nMemFree: 12 kB\nMemAvailable: {available_mib * 1024} kB\n"}


def test_without_groups_the_kernels_figure_counts(tmp_path: Path) -> None:
    assert machine.available_memory(lay_out(tmp_path, meminfo(700))) == 700 * MIB


def test_a_v2_group_or_one_above_it_limits(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "0::/pods/one\n",
        "sys/fs/cgroup/pods/one/memory.max": "max\n",
        "sys/fs/cgroup/pods/one/memory.current": f"{50 * MIB}\n",
        "sys/fs/cgroup/pods/memory.max": f"{400 * MIB}\n",
        "sys/fs/cgroup/pods/memory.current": f"{300 * MIB}\n",
        "sys/fs/cgroup/pods/memory.stat": f"anon 5\ninactive_file {60 * MIB}\n",
    }
    assert machine.available_memory(lay_out(tmp_path, meminfo(700) | files)) == 160 * MIB
    assert machine.available_memory(lay_out(tmp_path, meminfo(100))) == 100 * MIB


def test_a_v1_group_limits_and_its_no_limit_does_not(tmp_path: Path) -> None:
    files = {
        "proc/self/cgroup": "5:cpu,cpuacct:/\n4:memory:/docker/abc\n",
        "sys/fs/cgroup/memory/memory.limit_in_bytes": f"{500 * MIB}",
        "sys/fs/cgroup/memory/memory.usage_in_bytes": f"{200 * MIB}",
        "sys/fs/cgroup/memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {10 * MIB}\n",
    }
    root = lay_out(tmp_path, meminfo(700) | files)
    assert machine.available_memory(root) == 310 * MIB
    lay_out(root, {"sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712"})
    assert machine.available_memory(root) == 700 * MIB


def test_a_system_without_proc_still_has_memory(tmp_path: Path) -> None:
    assert machine.available_memory(tmp_path) > 0


@pytest.fixture
def eight_threads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Four cores of two threads each: cpus 0 and 4 are one core, and so on."""
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)
    siblings = {
        f"sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list": f"{cpu % 4},{cpu % 4 + 4}\n"
        for cpu in range(8)
    }
    return lay_out(tmp_path, siblings)


def test_threads_of_one_core_count_once(eight_threads: Path) -> None:
    assert machine.usable_cores(eight_threads) == 4


def test_affinity_narrows(eight_threads: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {0, 1, 4})
    assert machine.usable_cores(eight_threads) == 2


@pytest.mark.parametrize(
    "files",
    [
        {"proc/self/cgroup": "0::/\n", "sys/fs/cgroup/cpu.max": "150000 100000\n"},
        {
            "proc/self/cgroup": "3:cpu:/\n",
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "150000",
            "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
        },
    ],
    ids=["v2", "v1"],
)
def test_a_quota_of_processor_time_narrows(eight_threads: Path, files: dict[str, str]) -> None:
    assert machine.usable_cores(lay_out(eight_threads, files)) == 2


@pytest.mark.parametrize("unlimited", [{"cpu.max": "max 100000\n"}, {"cpu/cpu.cfs_quota_us": "-1"}])
def test_no_quota(eight_threads: Path, unlimited: dict[str, str]) -> None:
    files = {f"sys/fs/cgroup/{name}": text for name, text in unlimited.items()}
    lay_out(eight_threads, {"proc/self/cgroup": "3:cpu:/\n0::/\n"} | files)
    assert machine.usable_cores(eight_threads) == 4


@pytest.mark.parametrize(
    ("cpuinfo", "expected"),
    [
        ("processor: 0\nflags\t\t: fpu avx512f avx512_bf16\n", True),
        ("processor: 0\nflags\t\t: fpu avx512f amx_bf16\n", True),
        ("Features\t: fp asimd bf16\n", True),
        ("flags\t\t: fpu avx512f avx512bw\n", False),
        ("", False),
    ],
)
def test_bfloat16_instructions(tmp_path: Path, cpuinfo: str, expected: bool) -> None:
    assert has_bfloat16_instructions(lay_out(tmp_path, {"cpuinfo": cpuinfo}) / "cpuinfo") is expected
    assert has_bfloat16_instructions(tmp_path / "absent") is False
