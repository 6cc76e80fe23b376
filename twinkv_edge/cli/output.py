"""What goes to the terminal, and in which form. Answers and JSON go to stdout, everything else to stderr."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from rich import box
from rich.console import Console
from rich.table import Table

MB = 1 << 20  # as llama.cpp and the rest of this package count it


def stderr_console() -> Console:
    """For progress, notes and tables. Without a terminal rich writes no escape codes."""
    return Console(stderr=True, highlight=False)


def print_json(value: Any) -> None:
    """One JSON object on one line of stdout."""
    sys.stdout.write(json.dumps(value, ensure_ascii=False, default=_plain) + "\n")
    sys.stdout.flush()


def show_measured(
    result: Any,
    markdown: str,
    *,
    json: bool,
    plot: Path | None = None,
    draw: Callable[[Any, Path], None] | None = None,
) -> None:
    """What was measured, as JSON or as tables, and then as a picture: should that fail, the figures are not lost."""
    if json:
        print_json(result)
    else:
        print(markdown, flush=True)
    if plot is not None and draw is not None:
        draw(result, plot)


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    if hasattr(value, "item"):  # a numpy number
        return value.item()
    raise TypeError(f"{type(value).__name__} has no JSON form")


def fail(message: str, *, as_json: bool) -> None:
    """An error in one line: on stderr, or as the one JSON object on stdout."""
    line = " ".join(message.split())
    if as_json:
        print_json({"error": line})
    else:
        print(f"error: {line}", file=sys.stderr)


def note(text: str) -> None:
    """A remark in one line on stderr."""
    print(f"note: {text}", file=sys.stderr)


@contextmanager
def progress(what: str, total: int, unit: str) -> Iterator[Callable[[int], None]]:
    """A progress bar on stderr, only on a terminal; yields the function to call with how many are done so far."""
    if not sys.stderr.isatty():
        yield lambda done: None
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn(what), BarColumn(), MofNCompleteColumn(), TextColumn(unit), TimeElapsedColumn())
    with Progress(*columns, console=stderr_console(), transient=True) as bar:
        task = bar.add_task(what, total=total)
        yield lambda done: bar.update(task, completed=done)


def megabytes(n_bytes: float | None) -> str:
    """Bytes in MB of 2^20."""
    return "-" if n_bytes is None else f"{n_bytes / MB:,.1f}"


def table(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """A table of numbers: the first column, their names, to the left and the others to the right."""
    made = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for index, name in enumerate(columns):
        made.add_column(name, justify="right" if index else "left", overflow="fold")
    for row in rows:
        made.add_row(*row)
    return made


def share(after: float, before: float) -> str:
    """What is left, in percent."""
    return f"{100 * after / before:.0f} %" if before else "-"


def times_faster(before: float, after: float) -> str:
    """How many times as fast."""
    return f"{before / after:.2f}x" if after else "-"
