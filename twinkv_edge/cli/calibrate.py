"""`twinkv-edge calibrate`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..compression import Compression
from ..errors import InputError
from .documents import read_document
from .options import AsJson, ModelOptions, grouped
from .output import note, print_json, progress
from .room import check_model


@grouped
def calibrate(
    *,
    text: Annotated[str, typer.Argument(help='Text like yours (UTF-8), or "-" for standard input.', metavar="TEXT|-")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", "-o", help="Keep the filters here (default: where qfilters looks for them).", dir_okay=False
        ),
    ] = None,
    json: AsJson = False,
    model: ModelOptions,
) -> None:
    """Find the main directions of the model's queries, which policy qfilters needs, from a text.

    Once per model; a few thousand tokens of prose like what will be compressed are enough. With --out, give the file
    to the policy by `--policy-options filters=FILE`.
    """
    from ..calibrate import CONTEXT, load, shortfall
    from ..calibrate import calibrate as find
    from ..models.fingerprint import fingerprint
    from .generation import load as load_model
    from .prompt import Vocabulary

    facts = check_model(model, "head")
    tokens = Vocabulary.load(facts.path).tokenize(read_document(text), special=False)
    if reason := shortfall(len(tokens)):
        raise InputError(reason)
    if out is not None and not out.parent.is_dir():
        raise InputError(f"{out.parent} is no folder: make it first")
    llm = load_model(model, model.n_ctx or min(CONTEXT, facts.n_ctx_train), Compression(policy="none"))
    try:
        with progress("reading", len(tokens), "tokens") as done:
            path = find(llm, tokens, out, lambda read, _: done(read))
        mark, name = fingerprint(facts.path), llm.facts.name
    finally:
        llm.close()
    kept = load(path, mark)
    shape = dict(zip(("layers", "heads", "dims"), kept.directions.shape, strict=True))
    if json:
        print_json({"model": name, "path": path, "tokens": len(tokens), **shape})
        return
    print(path)
    note(f"directions of {shape['layers']} layers x {shape['heads']} heads of {name}, from {len(tokens):,} tokens")
    if out is not None:
        note(f"use them with: --policy qfilters --policy-options filters={path}")
