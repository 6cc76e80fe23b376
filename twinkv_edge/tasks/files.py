"""Reading a benchmark's official files from a folder of the user's: JSON Lines, JSON or Parquet."""

from __future__ import annotations

import json
from functools import lru_cache
from pathlib import Path
from typing import Any

from ..errors import InputError

ENDINGS = (".jsonl", ".json", ".parquet")


def find(folder: Path, *names: str) -> Path | None:
    """The first of the names that lies in the folder or below it, with any of the endings; None if none does.

    Parquet files of the hub carry a number: "name/test-00000-of-00001.parquet", "name-test.parquet" are found too.
    """
    if not folder.is_dir():
        return None
    files = sorted(p for p in folder.rglob("*") if p.suffix in ENDINGS and p.is_file())
    for name in names:
        exact = [p for p in files if p.stem == name]
        hub = [p for p in files if p.suffix == ".parquet" and (p.parent.name == name or p.stem.startswith(f"{name}-"))]
        test = [p for p in hub if "test" in p.stem]
        if found := exact or test or hub:
            return found[0]
    return None


@lru_cache(maxsize=4)
def rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a file.

    Raises:
        InputError: It cannot be read, is broken, or holds no rows.
    """
    try:
        if path.suffix == ".parquet":
            found = _parquet(path)
        elif path.suffix == ".jsonl":
            found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        else:
            found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise InputError(f"cannot read {path}: {e.strerror}") from e
    except ValueError as e:
        raise InputError(f"{path} is broken: {e}") from e
    if not isinstance(found, list) or not found or not all(isinstance(row, dict) for row in found):
        raise InputError(f"{path} holds no rows of a benchmark: get the official file again")
    return found


def _parquet(path: Path) -> list[dict[str, Any]]:
    try:
        from pyarrow import ArrowException, parquet
    except ImportError as e:
        raise InputError("Parquet files need a package: pip install 'twinkv-edge[quality]'") from e
    try:
        found: list[dict[str, Any]] = parquet.read_table(path).to_pylist()
    except ArrowException as e:
        raise InputError(f"{path} is no Parquet file: {e}") from e
    return found


def field(row: dict[str, Any], path: Path, *names: str) -> Any:
    """The first of the fields that the row has. Raises InputError where it has none."""
    for name in names:
        if name in row:
            return row[name]
    raise InputError(f"{path} has a row without {' or '.join(names)}: it is not the official file")
