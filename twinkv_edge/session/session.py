"""A compressed cache on disk."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from importlib import metadata as installed
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .._version import __version__
from ..errors import CacheStateError, InputError, SessionError
from . import layout
from .contents import CacheKind, Contents, ModelIdentity

if TYPE_CHECKING:
    from ..llama import CompressedLlama


@dataclass(frozen=True, eq=False)
class Session:
    """A saved conversation: what its file holds beside the cache itself.

    Attributes:
        path: The file.
        n_bytes: Its size.
        contents: Model, cache, settings, and numbers of tokens and cells.
        tokens: int32 [n_tokens], kept or evicted.
        positions: int32 [L, H, K]: true position of every compressed cell, -1 where a head hides it. K is 0 where
            nothing was compressed; tokens from `contents.boundary` on follow, one cell each.
    """

    path: Path
    n_bytes: int
    contents: Contents
    tokens: npt.NDArray[np.int32]
    positions: npt.NDArray[np.int32]

    @property
    def n_tokens(self) -> int:
        """Tokens of the conversation; the next one is decoded at this position."""
        return self.contents.n_tokens

    @property
    def n_cells(self) -> int:
        """Cells the cache takes."""
        return self.contents.n_cells

    @property
    def metadata(self) -> dict[str, Any]:
        """What the caller of `save` put in."""
        return self.contents.metadata

    @classmethod
    def save(
        cls,
        llm: CompressedLlama,
        path: str | os.PathLike[str],
        *,
        metadata: Mapping[str, Any] | None = None,
        force: bool = False,
        mode: int = 0o600,
        progress: layout.Progress | None = None,
    ) -> Session:
        """Writes the cache of `llm`, compressed or not, its true positions, tokens and settings into one file.

        The file is written beside `path` and takes its name when it is whole and on disk: a kill at any moment leaves
        the old file or the new one. Memory: one copy of the cells in use.

        Not saved: logits, and what policies captured of queries. So sampling after a load begins with decoding a token:
        leave the prompt's last one out before saving, as `generate` will decode it. Policies that score with queries
        (snapkv, tova, h2o, expected_attention) see those of tokens evaluated after the load, the others go on.

        Args:
            path: A file that is not there yet, or a session, which is replaced.
            metadata: Anything of yours that JSON can hold; `load` and `read` give it back.
            force: Replace a file that is no session, too.
            mode: Permissions; the default lets only you read what may be a private document.
            progress: Called with (bytes written, bytes in all).

        Raises:
            CacheStateError: The cache is empty, or was changed from outside.
            InputError: The path does not take a file, holds something else, or `metadata` is no JSON.
        """
        path = Path(path)
        check_target(path, force=force)
        llm._follow()
        kv = llm.kv
        if kv.n_tokens == 0:
            raise CacheStateError("the cache is empty: evaluate a prompt before saving it")
        kv._check_untouched()
        snapshot = kv.snapshot()
        table = snapshot.table if snapshot.table is not None else np.empty((kv.n_layers, kv.n_head_kv, 0), np.int32)
        contents = Contents(
            created=datetime.now(timezone.utc).isoformat(timespec="seconds"),
            twinkv_edge=__version__,
            llama_cpp_python=installed.version("llama-cpp-python"),
            model=ModelIdentity.of(llm),
            cache=CacheKind.of(kv),
            compression=llm.compression,
            n_tokens=kv.n_tokens,
            n_cells=kv.n_cells,
            boundary=kv.boundary,
            n_protected=llm._rolling.n_protected,
            tau=float(llm.tau),
            metadata=_plain(metadata or {}),
        )
        tokens = np.array(llm.input_ids[: kv.n_tokens], dtype=np.int32)
        arrays: dict[str, layout.Array] = {"tokens": tokens, "positions": table, "state": kv.sequence_state()}
        try:
            n_bytes = layout.write(path, contents.to_head(), arrays, mode=mode, progress=progress)
        except TypeError as e:
            raise InputError(f"the settings cannot be saved: {e}") from None
        return cls(path, n_bytes, contents, tokens, table)

    @classmethod
    def load(
        cls, llm: CompressedLlama, path: str | os.PathLike[str], *, progress: layout.Progress | None = None
    ) -> Session:
        """Replaces the cache of `llm` by a saved one; decoding goes on exactly as it would have when it was saved.

        n_ctx need only hold the cells, whatever it was then. The settings of `llm` stay; the saved ones are in
        `contents.compression`. All is checked before anything changes, and whatever is raised, `llm` is as it was.
        Memory: one copy of the cells in use, and one of the old cells if there are any.

        Args:
            progress: Called with (bytes read, bytes in all).

        Raises:
            InputError: No such file, or it cannot be read.
            SessionError: It is no session, damaged, of a newer format, or of another model, cache type or layout of V;
                or it needs more cells than this context has.
            CacheStateError: The cache of `llm` was changed from outside.
        """
        from .restore import restore, snapshot_of

        llm._follow()
        with layout.SessionFile(path) as file:
            contents = Contents.from_head(file.head, file.path)
            contents.model.check(file.path, ModelIdentity.of(llm))
            contents.cache.check(file.path, CacheKind.of(llm.kv))
            if contents.n_cells > llm.kv.n_cells_allocated:
                raise SessionError(
                    f"{file.path} holds {contents.n_cells} cells, and this context has {llm.kv.n_cells_allocated}: "
                    f"open the model with n_ctx={contents.n_cells + 256} or more"
                )
            arrays = file.arrays(progress)
        snapshot = snapshot_of(contents, arrays, file.path, llm.n_vocab())
        restore(llm, snapshot, arrays["state"], arrays["tokens"], file.path)
        llm._rolling.resume(contents.n_protected)
        return cls(file.path, file.size, contents, arrays["tokens"], arrays["positions"])

    @classmethod
    def read(cls, path: str | os.PathLike[str], *, progress: layout.Progress | None = None) -> Session:
        """Reads and checks all of a file without a model.

        Raises:
            InputError, SessionError: As `load`.
        """
        with layout.SessionFile(path) as file:
            contents = Contents.from_head(file.head, file.path)
            arrays = file.arrays(progress)
        tokens, positions = arrays.get("tokens"), arrays.get("positions")
        if tokens is None or positions is None or positions.ndim != 3:
            raise SessionError(f"{path} holds no tokens or positions; make it again")
        return cls(file.path, file.size, contents, tokens, positions)

    @staticmethod
    def peek(path: str | os.PathLike[str]) -> Contents:
        """The head alone, checked by its own checksum: enough to know which model and cache to open.

        Raises:
            InputError, SessionError: As `load`, as far as the head shows it.
        """
        with layout.SessionFile(path) as file:
            return Contents.from_head(file.head, file.path)


def check_target(path: Path, *, force: bool = False) -> None:
    """Raises InputError where a session should not, or cannot, be written: ask before the long work begins."""
    if "\0" in str(path):
        raise InputError(f"cannot write {str(path)!r}: a name with a NUL in it")
    try:
        if path.is_dir() or (path.exists() and not path.is_file()):
            raise InputError(f"{path} is not a file: give the name of one")
        if path.is_file() and not force and not layout.is_session(path):
            raise InputError(
                f"{path} is there and is not a session: give another name, or replace it with force (--force)"
            )
        if not path.parent.is_dir():
            raise InputError(f"there is no folder {path.parent}: make it first")
        if not os.access(os.path.realpath(path.parent), os.W_OK):
            raise InputError(f"the folder {path.parent} cannot be written to")
    except OSError as e:
        raise InputError(f"cannot write {path}: {(e.strerror or str(e)).lower()}") from None


def _plain(metadata: Mapping[str, Any]) -> dict[str, Any]:
    try:
        plain: dict[str, Any] = json.loads(json.dumps(dict(metadata), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as e:
        raise InputError(f"metadata must be what JSON can hold: {e}") from None
    return plain
