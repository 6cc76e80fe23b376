"""`twinkv-edge doctor`: a sound installation, and what it says of broken ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from cli_common import Run, runner

from twinkv_edge import _install, doctor


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


@pytest.fixture
def unprobed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Spares a test the model."""
    monkeypatch.setattr(doctor, "_evicting", lambda: iter(()))


def by_name(found: Any) -> dict[str, dict[str, str]]:
    return {check["name"]: check for check in found["checks"]}


def test_sound_installation(run: Run) -> None:
    result = run("doctor", "--json")
    checks = by_name(result.json)
    assert result.code == 0
    assert result.json["ok"]
    assert "error" not in {check["status"] for check in checks.values()}
    for name in ("native extension", "backend native", "backend numba", "embedded model", "evicting", "freed pages"):
        assert checks[name]["status"] == "ok", checks[name]
    assert "swaps" in checks["evicting"]["found"]
    assert "extra demo" in checks
    assert "extra lint" not in checks


def test_text(run: Run, unprobed: None) -> None:
    result = run("doctor")
    lines = result.out.splitlines()
    assert result.code == 0
    assert lines[0].startswith("ok       python  ")
    assert "\x1b" not in result.out


def test_llama_cpp_that_crashes(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PROBE", "import os, signal; os.kill(os.getpid(), signal.SIGILL)")
    result = run("doctor")
    assert result.code == 1
    assert "error    evicting           ended by signal 4\n" in result.out
    assert "-mno-amx-tile" in result.out


def test_probe_that_raises_is_told_by_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "_PROBE", "raise ValueError('no room')")
    (finding,) = doctor._evicting()
    assert finding.status == "error"
    assert finding.found == "failed: ValueError: no room"


def test_without_the_extension(run: Run, unprobed: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_install, "reason", "not built here")
    monkeypatch.setattr(_install, "native", _install._Missing("not built here"))
    result = run("doctor", "--json")
    checks = by_name(result.json)
    assert result.code == 1
    assert not result.json["ok"]
    assert checks["native extension"]["found"] == "not built here"
    assert checks["memory"]["status"] == "ok"  # the other lines are there all the same


def test_another_llama_cpp(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.metadata, "version", lambda name: "0.3.99")
    (finding,) = doctor._llama_cpp()
    assert finding.status == "error"
    assert finding.found.startswith("0.3.99, but built against 0.3.")
    assert "reinstall" in finding.remedy


def test_llama_cpp_built_for_less_than_the_processor_has(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "cpu_flags", lambda: {"avx2", "avx512f", "amx_int8"})
    monkeypatch.setattr(llama_cpp, "llama_print_system_info", lambda: b"CPU : AVX2 = 1 | ")
    _, finding = doctor._llama_cpp()
    assert finding.status == "warning"
    assert finding.found == "does not use AVX512, which this processor has"


def test_pages_that_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    stay = dict.fromkeys(("allocated", "resident", "resident_before", "resident_after", "bytes_before"), 100)
    found = {**stay, "bytes_after": 40, "n_before": 300, "n_after": 120, "swaps": 3}
    monkeypatch.setattr(doctor, "probe", lambda command: found)
    _, pages = doctor._evicting()
    assert pages.status == "warning"
    assert "move_to_context" in pages.remedy


def test_no_embedded_model(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("twinkv_edge.models.embedded.metadata.files", lambda package: [])
    result = run("doctor")
    assert result.code == 0  # every command works with --model
    assert "warning  embedded model" in result.out
    assert "evicting" not in result.out


def test_little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor.models, "free_memory", lambda: 200 << 20)
    (finding,) = doctor._memory()
    assert (finding.status, finding.found) == ("warning", "200 MB free")


def test_extras_of_extras(monkeypatch: pytest.MonkeyPatch) -> None:
    requires = {
        "a": ["x>=1 ; extra == 'plot'", 'b[net,ui,all]>=0.3 ; extra == "serve"', "y"],
        "b": ["sockets; extra == 'net'", "windows; extra == 'ui'", "b[net,all]; extra == 'all'", "z; extra == 'x'"],
    }
    monkeypatch.setattr(doctor.metadata, "requires", lambda name: requires[name])
    monkeypatch.setattr(doctor, "_installed", lambda name: name != "windows")
    assert doctor.extras("a") == {"plot": ["x"], "serve": ["b", "sockets", "windows", "b"]}
    monkeypatch.setattr(doctor, "DISTRIBUTION", "a")
    plot, serve = doctor._extras()
    assert plot.found == "installed"
    assert serve.found == "not installed (windows)"
    assert "pip install 'a[serve]'" in serve.remedy


def test_flags_of_a_processor(tmp_path: Path) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor\t: 0\nflags\t\t: fpu avx2 avx512f\nbugs\t\t: none\n")
    assert doctor.cpu_flags(cpuinfo) == {"fpu", "avx2", "avx512f"}
    assert doctor.cpu_flags(tmp_path / "none") == set()
