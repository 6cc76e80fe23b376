"""The `twinkv-edge` command: its sub-commands, and how errors leave it."""

from __future__ import annotations

import os
import sys
import warnings
from collections.abc import Sequence
from typing import Annotated, Any

import typer

from .._version import __version__
from ..errors import TwinKVError
from . import bench, bench_quality, bench_session, benches, probe
from .ask import ask
from .calibrate import calibrate
from .chat import chat
from .compress import compress
from .doctor import doctor
from .inspect import inspect
from .models import models
from .output import fail, note
from .policies import policies
from .serve import serve

INTERRUPTED = 130  # 128 + SIGINT, as shells have it
BROKEN_PIPE = 141  # 128 + SIGPIPE
FAILED = 2

# The class above all of typer's usage errors; typer brings its own copy of click or uses the installed one.
_UsageError = next(c for c in typer.BadParameter.__mro__ if c.__name__ == "ClickException")

app = typer.Typer(
    name="twinkv-edge",
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
    pretty_exceptions_enable=False,
)


def _version(wanted: bool) -> None:
    if wanted:
        print(f"twinkv-edge {__version__}")
        raise typer.Exit


@app.callback()
def _top(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    """Talk with long documents on a laptop: the KV cache of an unmodified llama.cpp, evicted per head and repaired."""


app.command()(ask)
app.command()(chat)
app.command()(compress)
app.command()(inspect)
app.command()(calibrate)
app.command()(models)
app.command()(policies)
app.command()(serve)
app.command()(doctor)
for measurement in (
    benches.memory,
    benches.speed,
    benches.kernels,
    benches.needle,
    bench_quality.quality,
    bench_quality.needle_grid,
    bench_session.session,
):
    bench.app.command()(measurement)
app.add_typer(bench.app, name="bench")
app.add_typer(probe.app, name="probe")


def _note_warning(message: Warning | str, *details: Any, **more: Any) -> None:
    note(str(message))


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns its exit code.

    Errors are one line on stderr, or one JSON object on stdout with --json, and exit code 2; an interruption is 130.
    """
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = arguments[: arguments.index("--")] if "--" in arguments else arguments
    as_json = "--json" in options
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("always", UserWarning)
            warnings.showwarning = _note_warning
            code = app(arguments, prog_name="twinkv-edge", standalone_mode=False)
        sys.stdout.flush()
    except TwinKVError as e:
        fail(str(e), as_json=as_json)
        return FAILED
    except (BrokenPipeError, SystemExit):  # typer makes the one into the other
        # the reader went away, as `| head` does: whatever is still buffered goes nowhere
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return BROKEN_PIPE
    except (KeyboardInterrupt, typer.Abort):
        code = INTERRUPTED
    except Exception as e:
        if not isinstance(e, _UsageError):
            raise
        message = getattr(e, "format_message", e.__str__)()
        if message:  # none: help was asked for, and shown
            fail(message, as_json=as_json)
        return FAILED
    if code == INTERRUPTED:
        print("\ninterrupted", file=sys.stderr)
    return code if isinstance(code, int) else 0
