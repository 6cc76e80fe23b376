"""Shell completion: typer's own, left switched on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = str(Path(sys.executable).with_name("twinkv-edge"))


@pytest.mark.skipif(not Path(SCRIPT).exists(), reason="the console script is not installed beside this Python")
@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("twinkv-edge s", "serve"),
        ("twinkv-edge serve --compress", "--compress-above"),
        ("twinkv-edge bench ev", "evict"),
    ],
)
def test_bash_is_offered(typed: str, offered: str) -> None:
    words = {"COMP_WORDS": typed, "COMP_CWORD": str(typed.count(" ")), "_TWINKV_EDGE_COMPLETE": "complete_bash"}
    done = subprocess.run([SCRIPT], env={**os.environ, **words}, capture_output=True, text=True)
    assert offered in done.stdout.split()


def test_it_can_be_installed() -> None:
    done = subprocess.run([SCRIPT, "--help"], capture_output=True, text=True, check=True)
    assert "--install-completion" in done.stdout
