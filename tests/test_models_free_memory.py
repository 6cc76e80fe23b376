"""How much memory is free: the system's word, a container's limit, and what to say when nobody knows."""

from __future__ import annotations

from pathlib import Path

import pytest

from twinkv_edge import models
from twinkv_edge.models.free_memory import free_memory, vm_stat_bytes


def linux_tree(root: Path, group: str, files: dict[str, str]) -> Path:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/meminfo").write_text("MemTotal:       16000000 kB\nMemAvailable:    8000000 kB\n")
    (root / "proc/self/cgroup").write_text(group)
    for name, content in files.items():
        (root / "sys/fs/cgroup" / name).parent.mkdir(parents=True, exist_ok=True)
        (root / "sys/fs/cgroup" / name).write_text(content)
    return root


STAT = "anon 5\ninactive_file 1000000\ntotal_inactive_file 2000000\n"


@pytest.mark.parametrize(
    ("group", "files", "expected"),
    [
        ("", {}, 8_192_000_000),
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/b/memory.current": "5\n"}, 8_192_000_000),
        (
            "0::/a/b\n",
            {"a/b/memory.max": "9000000\n", "a/b/memory.current": "4000000\n", "a/b/memory.stat": STAT},
            6_000_000,
        ),
        (  # the limit of the slice around counts too
            "0::/a/b\n",
            {"a/b/memory.max": "max\n", "a/memory.max": "3000000\n", "a/memory.current": "2500000\n"},
            500_000,
        ),
        (  # inside a container: the kernel's path is not there, the mount's root is the group
            "0::/../../docker/1234\n",
            {"memory.max": "3000000\n", "memory.current": "4000000\n"},
            0,
        ),
        (
            "12:cpu,memory:/box\n3:pids:/box\n",
            {
                "memory/box/memory.limit_in_bytes": "7000000\n",
                "memory/box/memory.usage_in_bytes": "6000000\n",
                "memory/box/memory.stat": STAT,
            },
            3_000_000,
        ),
        (  # v1's way to say that there is no limit
            "4:memory:/\n",
            {
                "memory/memory.limit_in_bytes": "9223372036854771712\n",
                "memory/memory.usage_in_bytes": "6000000\n",
            },
            8_192_000_000,
        ),
    ],
)
@pytest.mark.skipif("sys.platform == 'darwin'")
def test_free_memory_of_linux(group: str, files: dict[str, str], expected: int, tmp_path: Path) -> None:
    assert free_memory(linux_tree(tmp_path, group, files)) == expected


@pytest.mark.skipif("sys.platform == 'darwin'")
def test_free_memory_unknown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert free_memory(tmp_path) is None
    monkeypatch.setattr("twinkv_edge.models.footprint.free_memory", lambda: None)
    got = models.estimate(models.default_model())
    assert (got.free, got.fits, got.suggestion) == (None, None, None)


def test_free_memory_here() -> None:
    free = free_memory()
    assert free is None or 1 << 20 < free < 1 << 50


def test_macos_vm_stat() -> None:
    text = (
        "Mach Virtual Memory Statistics: (page size of 16384 bytes)\n"
        "Pages free:                               10000.\n"
        "Pages active:                            300000.\n"
        "Pages inactive:                           20000.\n"
        "Pages speculative:                          300.\n"
        "Pages wired down:                         90000.\n"
        "Pages purgeable:                              7.\n"
    )
    assert vm_stat_bytes(text) == 16384 * 30307
    assert vm_stat_bytes("") is None
