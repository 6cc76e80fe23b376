"""The commands of docs/tutorial.md run as they stand there, one after the other, in an empty folder."""

from __future__ import annotations

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parent.parent / "docs" / "tutorial.md"
PORT = "8321"


def free_port() -> str:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return str(sock.getsockname()[1])


def test_tutorial(tmp_path: Path) -> None:
    for needed in ("bash", "curl"):
        if shutil.which(needed) is None:
            pytest.skip(f"needs {needed}")
    blocks = re.findall(r"^```sh\n(.*?)^```$", PAGE.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 12
    # the page's port may be taken here
    script = "set -euo pipefail\ntrap 'kill ${server:-} 2>/dev/null || true' EXIT\n" + "".join(
        f"printf '\\n== %s\\n' {number}\n{block}" for number, block in enumerate(blocks)
    ).replace(PORT, free_port())
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    said = re.split(r"^== \d+\n", done.stdout, flags=re.MULTILINE)[1:]
    doctor, _, asked, policies, answered, kept, _, chatted, health, served, _, scripted = said
    assert "error" not in doctor
    assert "5820493" in asked
    assert "snapkv" in policies
    assert "5820493" in answered
    assert "5820493" in kept
    assert "a whole session" in kept
    assert (tmp_path / "station.html").stat().st_size > 50_000
    assert "5820493" in chatted
    assert "cells in use" in chatted
    assert health.strip() == '{"status":"ok"}'
    assert "5820493" in served
    assert re.search(r"(\d+) tokens became (\d+) cells", scripted)
