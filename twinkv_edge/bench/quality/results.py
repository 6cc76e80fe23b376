"""The results file: a header with the run's settings, then one line per sample, appended whole or not at all."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ...errors import InputError
from .settings import Settings

FORMAT = "twinkv-edge quality 1"
Line = dict[str, Any]


class Results:
    """Lines of one run, on disk and in memory, by (task, index).

    Args:
        path: The file; it is made where there is none. A torn last line, as a kill leaves it, is cut off.
        settings: Of this run.

    Raises:
        InputError: The file cannot be written, is no results file, or holds a run of other settings.
    """

    def __init__(self, path: Path, settings: Settings) -> None:
        self.path = path
        self.lines: dict[tuple[str, int], Line] = {}
        try:
            if path.exists() and path.stat().st_size:
                found = self._read(settings)
                if found is not None:
                    return
            path.parent.mkdir(parents=True, exist_ok=True)
            self._append({"format": FORMAT, "settings": settings.to_dict()})
        except OSError as e:
            raise InputError(f"cannot use {path} for results: {e.strerror}") from e

    def _read(self, settings: Settings) -> Settings | None:
        found, lines, whole = read(self.path)
        if whole < self.path.stat().st_size:
            os.truncate(self.path, whole)
        if found is None:
            return None
        if differs := settings.differences(found):
            raise InputError(
                f"{self.path} holds a run with other settings: {'; '.join(differs)}. Give the same settings to go on "
                "with it, or another --out"
            )
        self.lines = lines
        return found

    def add(self, line: Line) -> None:
        """Appends a sample's line. Raises OSError when the disk is full: the file is then as a kill leaves it."""
        self._append(line)
        self.lines[line["task"], line["index"]] = line

    def _append(self, line: Line) -> None:
        data = (json.dumps(line, ensure_ascii=False, separators=(",", ":")) + "\n").encode()
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
        try:
            while data:
                data = data[os.write(descriptor, data) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read(path: Path) -> tuple[Settings | None, dict[tuple[str, int], Line], int]:
    """Settings (None: not even the header is whole), lines, and the bytes up to the last whole line.

    Raises:
        InputError: Something else than the end of the file is broken, or it is no results file.
        OSError: It cannot be read.
    """
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    settings: Settings | None = None
    lines: dict[tuple[str, int], Line] = {}
    texts = data[:whole].splitlines()
    if not texts and not data.startswith(b'{"format":'[: len(data)]):
        raise InputError(f"{path} is no file of results: choose another --out")
    for number, text in enumerate(texts, 1):
        try:
            line = json.loads(text)
            if number == 1:
                if line["format"] != FORMAT:
                    raise InputError(f"{path} has the format {line['format']!r}, not {FORMAT!r}: choose another --out")
                settings = Settings.from_dict(line["settings"])
            else:
                lines[line["task"], line["index"]] = line
        except (ValueError, KeyError, TypeError) as e:
            raise InputError(f"line {number} of {path} is no line of results: choose another --out") from e
    return settings, lines, whole
