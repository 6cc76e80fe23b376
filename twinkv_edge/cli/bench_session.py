"""`twinkv-edge bench session`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..compression import Compression
from ..errors import InputError
from .options import AsJson, ModelOptions, grouped
from .output import print_json, progress
from .room import round_up


@grouped
def session(
    *,
    tokens: Annotated[int, typer.Option(help="Tokens of text.")] = 4096,
    ratio: Annotated[float, typer.Option(help="Fraction of the cache to remove before saving.")] = 0.5,
    policy: Annotated[str, typer.Option(help="Eviction policy.")] = "knorm",
    repeats: Annotated[int, typer.Option(help="Loads of each kind; medians are shown.")] = 5,
    prefills: Annotated[int, typer.Option(help="Prefills; the median is shown.")] = 3,
    folder: Annotated[
        Path | None, typer.Option(help="Where the file is written (default: the system's temporary folder).")
    ] = None,
    json: AsJson = False,
    model: ModelOptions,
) -> None:
    """Load a saved session, against reading its text again: medians of one run, and the logits are compared."""
    from .. import policies
    from ..bench import session as bench
    from .generation import load

    model.check()
    for name, value in (("--tokens", tokens), ("--repeats", repeats), ("--prefills", prefills)):
        if value < 1:
            raise InputError(f"{name} is {value}: give a whole number, 1 or more")
    if folder is not None and not folder.is_dir():
        raise InputError(f"there is no folder {folder}: make it first")
    settings = Compression(policy=policy, ratio=ratio)
    policies.create(policy)
    settings.budget(tokens)
    llm = load(model, model.n_ctx or round_up(tokens + 1), settings)
    try:
        with progress("reading", tokens * prefills, "tokens") as done:
            found = bench.measure(
                llm, folder, n_tokens=tokens, settings=settings, repeats=repeats, prefills=prefills, progress=done
            )
    finally:
        llm.close()
    print_json(found) if json else print(bench.markdown(found))
