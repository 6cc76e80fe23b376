"""What `twinkv-edge serve` says of options that cannot be, before it loads a model."""

from __future__ import annotations

import socket
import sys

import pytest
from cli_common import Run, runner


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    return runner(capsys, monkeypatch)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--port", "70000"], "--port is 70000"),
        (["--compress-above", "-1"], "--compress-above is -1"),
        (["--conversations", "-1"], "--conversations is -1"),
        (["--max-body-mb", "0"], "--max-body-mb is 0.0"),
        (["--api-key", " "], "API key is empty"),
        (["--policy", "nope"], "no policy named 'nope'"),
        (["--host", "no-such-host.invalid"], "cannot listen on no-such-host.invalid"),
    ],
)
def test_options(run: Run, options: list[str], said: str) -> None:
    result = run("serve", *options)
    assert result.code == 2
    assert result.err.startswith("error: ")
    assert result.err.count("\n") == 1
    assert said in result.err


def test_port_that_is_taken(run: Run) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        result = run("serve", "--port", str(taken.getsockname()[1]))
    assert result.code == 2
    assert "give another --port" in result.err


def test_without_the_extra(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [n for n in sys.modules if n.startswith("twinkv_edge.server")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    result = run("serve", "--port", "0")
    assert result.code == 2
    assert "pip install 'twinkv-edge[server]'" in result.err
