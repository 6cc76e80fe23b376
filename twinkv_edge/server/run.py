"""Opening the port, running until a signal comes, and closing what was opened."""

from __future__ import annotations

import contextlib
import signal
import socket
import sys
from collections.abc import Callable, Iterator
from copy import deepcopy
from typing import Any

import uvicorn
from uvicorn.config import LOGGING_CONFIG

from ..errors import InputError
from .app import AppSettings, create_app
from .served import ServedLlama

MAX_CONNECTIONS = 128  # each may hold one body
SHUTDOWN_S = 10  # an answer stops at its next token; this is for a batch of a prompt that is being read


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; port 0 takes a free one.

    Raises:
        InputError: The address is not this machine's, or the port is taken.
    """
    try:
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=family, backlog=MAX_CONNECTIONS)
    except (OSError, UnicodeError, OverflowError) as e:
        reason = getattr(e, "strerror", None) or str(e)
        raise InputError(f"cannot listen on {host}, port {port} ({reason}): give another --port or --host") from e


def is_loopback(host: str) -> bool:
    """Whether only this machine can reach that address."""
    return host in ("localhost", "::1") or host.startswith("127.")


def url(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return f"http://[{host}]:{port}/v1" if ":" in host else f"http://{host}:{port}/v1"


def run(llm: ServedLlama, sock: socket.socket, settings: AppSettings, ready: Callable[[], None]) -> None:
    """Serves until SIGINT or SIGTERM, then lets running answers end at their next token and returns.

    Connections are taken from `listen` on; `ready` is called when they begin to be answered.
    """
    app = create_app(llm, settings)
    config = uvicorn.Config(
        app,
        log_config=_log_config(),
        limit_concurrency=MAX_CONNECTIONS,
        timeout_graceful_shutdown=SHUTDOWN_S,
        server_header=False,
    )
    server = uvicorn.Server(config)
    llm.stopping = lambda: server.should_exit
    with _signals_end_quietly():
        ready()
        with contextlib.redirect_stdout(sys.stderr):  # llama_cpp.server prints
            server.run(sockets=[sock])


@contextlib.contextmanager
def _signals_end_quietly() -> Iterator[None]:
    """uvicorn raises the signals it was ended by once more when it is done: they have had their effect by then."""
    before = {s: signal.signal(s, lambda *_: None) for s in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _log_config() -> dict[str, Any]:
    """uvicorn's own, all of it on stderr. It logs addresses and paths, never bodies."""
    config = deepcopy(LOGGING_CONFIG)
    for handler in config["handlers"].values():
        handler["stream"] = "ext://sys.stderr"
    return config
