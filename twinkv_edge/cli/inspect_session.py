"""`twinkv-edge inspect SESSION`: what is inside a session file."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console

from ..session import Session
from .output import megabytes, print_json, progress, share


def inspect_session(path: Path, *, json: bool) -> None:
    """Reads and checks all of a session, and shows what it holds; no model is loaded."""
    found = describe(path)
    print_json(found) if json else Console(highlight=False, markup=False).print(render(found), soft_wrap=True)


def describe(path: Path) -> dict[str, Any]:
    """Everything there is to say of a session, as the JSON has it.

    Raises:
        InputError, SessionError: No session, or a damaged one.
    """
    from .chat_session import kept_by_tenth
    from .saved import KEY, document_names

    with progress("checking", 100, "%") as done:
        session = Session.read(path, progress=lambda n, size: done(100 * n // size))
    contents, positions = session.contents, session.positions
    per_head = (positions >= 0).sum(axis=-1)
    since = session.n_tokens - contents.boundary
    about = contents.metadata.get(KEY)
    held = kept_by_tenth(positions, contents.boundary) if contents.boundary else []
    return {
        "kind": "session",
        "path": str(path),
        "bytes": session.n_bytes,
        "created": contents.created,
        "written_by": {"twinkv_edge": contents.twinkv_edge, "llama_cpp_python": contents.llama_cpp_python},
        "model": asdict(contents.model),
        "cache": asdict(contents.cache),
        "tokens": session.n_tokens,
        "cells": session.n_cells,
        "compressed": {
            "tokens": contents.boundary,
            "kept_least": int(per_head.min()) if contents.boundary else None,
            "kept_most": int(per_head.max()) if contents.boundary else None,
            "ragged": bool((positions < 0).any()),
            "same_for_all_heads": bool((positions == positions[:1, :1]).all()),
            "kept_by_tenth": held,
        },
        "tokens_since": since,
        "protected": contents.n_protected,
        "settings": asdict(contents.compression),
        "tau": contents.tau,
        "documents": document_names(contents),
        "turns": about.get("turns") if isinstance(about, dict) else None,
    }


def render(found: dict[str, Any]) -> str:
    """The same for people."""
    model, cache, settings, done = found["model"], found["cache"], found["settings"], found["compressed"]
    lines = [
        f"{found['path']}: a whole session, {megabytes(found['bytes'])} MB, saved {found['created']}",
        f"model       {model['name']} ({model['architecture']}), fingerprint {model['fingerprint']}",
        f"            then at {model['path']}",
        f"cache       {len(cache['layers'])} layers x {cache['n_head_kv']} KV heads, {cache['type_k']} keys, "
        f"{cache['type_v']} values",
        f"tokens      {found['tokens']:,} in {found['cells']:,} cells ({share(found['cells'], found['tokens'])})",
    ]
    if done["tokens"]:
        kept = f"{done['kept_least']:,}"
        if done["ragged"]:
            kept += f" to {done['kept_most']:,}"
        sets = "one set for all heads" if done["same_for_all_heads"] else "every head its own"
        tenths = " ".join(f"{100 * x:.0f}" for x in done["kept_by_tenth"])
        lines += [
            f"compressed  {done['tokens']:,} tokens, of which heads keep {kept} ({sets}); "
            f"{found['tokens_since']:,} tokens since",
            f"            kept of each tenth, %: {tenths}",
            f"settings    policy {settings['policy']}, ratio {settings['ratio']}, repair {settings['repair']}, "
            f"tau {found['tau']}",
        ]
    if found["turns"] is not None:
        documents = ", ".join(found["documents"]) or "none"
        lines.append(f"chat        {found['turns']} turns; documents: {documents}")
    else:
        lines.append("chat        none: saved from Python")
    return "\n".join(lines)
