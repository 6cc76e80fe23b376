"""How much memory a process may still take before the system or its container runs out."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path


def free_memory(root: Path = Path("/")) -> int | None:
    """Bytes that can still be allocated without swapping, or None where the system does not say.

    Linux: MemAvailable, or less where a control group (a container, a systemd slice) has a limit: its limit
    less what it uses, file cache that would be dropped not counted. macOS: free, inactive, speculative and
    purgeable pages. `root` is where /proc and /sys are looked for.
    """
    if sys.platform == "darwin":
        return _macos()
    available = _mem_available(root / "proc" / "meminfo")
    limits = [*_cgroup_v2(root), *_cgroup_v1(root)]
    known = [n for n in (available, *limits) if n is not None]
    return min(known) if known else None


def _mem_available(meminfo: Path) -> int | None:
    found = re.search(r"^MemAvailable:\s+(\d+) kB$", _read(meminfo), re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except (OSError, ValueError):
        return ""


def _number(path: Path) -> int | None:
    """The one number in a file of a control group; None for "max" or a missing file."""
    text = _read(path).strip()
    return int(text) if text.isdigit() else None


def _group_dirs(mount: Path, group: str) -> list[Path]:
    """The directory of a group and of all groups it is in. Inside a container the path the kernel gives may
    belong to the host's tree: then the mount's root is the container's own group."""
    path = mount / group.strip("/")
    return [p for p in (path, *path.parents) if p.is_relative_to(mount) and p.is_dir()]


def _cgroup_v2(root: Path) -> list[int]:
    group = re.search(r"^0::(/.*)$", _read(root / "proc/self/cgroup"), re.MULTILINE)
    mount = root / "sys/fs/cgroup"
    return [
        left
        for path in (_group_dirs(mount, group[1]) if group else [])
        if (left := _left(path, "memory.max", "memory.current", "inactive_file")) is not None
    ]


def _cgroup_v1(root: Path) -> list[int]:
    group = re.search(r"^\d+:(?:[^:]*,)?memory(?:,[^:]*)?:(/.*)$", _read(root / "proc/self/cgroup"), re.MULTILINE)
    mount = root / "sys/fs/cgroup/memory"
    names = ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")
    return [
        left for path in (_group_dirs(mount, group[1]) if group else []) if (left := _left(path, *names)) is not None
    ]


def _left(group: Path, limit_file: str, usage_file: str, cache_key: str) -> int | None:
    """Bytes between a group's limit and its use; None without a limit (v1 writes a huge number for none)."""
    limit, used = _number(group / limit_file), _number(group / usage_file)
    if limit is None or used is None or limit >= 1 << 60:
        return None
    cache = re.search(rf"^{cache_key} (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
    return max(limit - used + (int(cache[1]) if cache else 0), 0)


def _macos() -> int | None:
    try:
        done = subprocess.run(["vm_stat"], capture_output=True, text=True, timeout=5, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return vm_stat_bytes(done.stdout)


def vm_stat_bytes(text: str) -> int | None:
    """Bytes that can be allocated, from what macOS's `vm_stat` prints."""
    page = re.search(r"page size of (\d+) bytes", text)
    pages = re.findall(r"^Pages (?:free|inactive|speculative|purgeable):\s+(\d+)\.$", text, re.MULTILINE)
    return int(page[1]) * sum(map(int, pages)) if page and pages else None
