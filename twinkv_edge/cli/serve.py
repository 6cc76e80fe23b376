"""`twinkv-edge serve`"""

from __future__ import annotations

import dataclasses
import os
from typing import Annotated, Any, cast

import typer

from ..errors import InputError
from .options import AsJson, CompressionOptions, ModelOptions, grouped
from .output import note, print_json
from .room import cells_for, check_model

DEFAULT_N_CTX = 8192
KEY_VARIABLE = "TWINKV_API_KEY"


def _server(help: str, metavar: str | None = None) -> Any:
    return typer.Option(help=help, metavar=metavar, rich_help_panel="Server")


@dataclasses.dataclass(frozen=True)
class ServerOptions:
    """Where and for whom."""

    host: Annotated[str, _server("Address to listen on; 0.0.0.0 lets other machines in.")] = "127.0.0.1"
    port: Annotated[int, _server("Port; 0 takes a free one.")] = 8000
    api_key: Annotated[
        str | None, _server(f"Key that requests must carry (better in {KEY_VARIABLE}: others see a command).", "KEY")
    ] = None
    compress_above: Annotated[
        int | None, _server("Compress prompts longer than N tokens, also when the request does not ask.", "N")
    ] = None
    conversations: Annotated[int, _server("Conversations kept in memory beside the one in the cache.")] = 4
    max_body_mb: Annotated[float, _server("Largest body of a request, in MB.")] = 8.0
    origin: Annotated[
        list[str], _server("Web page that may call the server from a browser; may be repeated.", "URL")
    ] = dataclasses.field(default_factory=list)

    def key(self) -> str | None:
        return self.api_key if self.api_key is not None else os.environ.get(KEY_VARIABLE)

    def check(self) -> None:
        """Raises InputError for values out of range."""
        if not 0 <= self.port < 1 << 16:
            raise InputError(f"--port is {self.port}: give a whole number from 0 to 65535")
        for name, value in (("--compress-above", self.compress_above), ("--conversations", self.conversations)):
            if value is not None and value < 0:
                raise InputError(f"{name} is {value}: give a whole number, 0 or more")
        if not 0 < self.max_body_mb <= 1024:
            raise InputError(f"--max-body-mb is {self.max_body_mb}: give a number above 0 and at most 1024")
        key = self.key()
        if key is not None and (not key.strip() or not key.isascii()):
            raise InputError("the API key is empty or not plain ASCII: give another")


@grouped
def serve(*, json: AsJson = False, server: ServerOptions, compression: CompressionOptions, model: ModelOptions) -> None:
    """Serve the model over HTTP as OpenAI does: chat and text completions, streamed or whole.

    The compression options are defaults: a request may bring its own in a `compression` field, and prompts longer than
    --compress-above are compressed without being asked. Ctrl-C ends it.
    """
    server.check()
    settings = compression.settings()
    facts = check_model(model, settings.layout)
    n_ctx = model.n_ctx or min(DEFAULT_N_CTX, facts.n_ctx_train)
    cells_for(facts, settings, dataclasses.replace(model, n_ctx=n_ctx), min(n_ctx, facts.n_ctx_train) - 1, 0, 1)
    run = _runner()
    sock = run.listen(server.host, server.port)
    if not run.is_loopback(server.host) and server.key() is None:
        note(f"{server.host} can be reached from other machines: set an API key ({KEY_VARIABLE})")
    try:
        _serve(run, sock, server, settings, model, n_ctx, as_json=json)
    finally:
        sock.close()


def _runner() -> Any:
    try:
        from ..server import run
    except ModuleNotFoundError as e:
        raise InputError(
            f"the server's packages are not installed ({e.name}): pip install 'twinkv-edge[server]'"
        ) from e
    return run


def _serve(
    run: Any, sock: Any, server: ServerOptions, settings: Any, model: ModelOptions, n_ctx: int, *, as_json: bool
) -> None:
    from ..server.app import AppSettings
    from ..server.served import ServedLlama
    from .generation import load

    alias = model.path().stem
    llm = load(
        model,
        n_ctx,
        settings,
        make=ServedLlama,
        alias=alias,
        compress_above=server.compress_above,
        conversations=server.conversations,
    )
    address = run.url(sock)

    def ready() -> None:
        found = {"url": address, "model": alias, "n_ctx": n_ctx, "pid": os.getpid(), "needs_key": bool(server.key())}
        if as_json:
            print_json(found)
        else:
            note(f"{alias} with {n_ctx:,} cells at {address}; Ctrl-C ends it")

    hosts = ("localhost", "127.0.0.1", "[::1]", "::1", server.host) if run.is_loopback(server.host) else ()
    app = AppSettings(server.key(), int(server.max_body_mb * (1 << 20)), tuple(server.origin), hosts)
    try:
        run.run(cast(ServedLlama, llm), sock, app, ready)
    finally:
        llm.close()
