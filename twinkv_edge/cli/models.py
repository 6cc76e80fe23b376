"""`twinkv-edge models`"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from ..errors import InputError
from .options import AsJson
from .output import print_json


def models(
    model: Annotated[
        Path | None, typer.Argument(help="GGUF file (default: the embedded model).", metavar="[MODEL.gguf]")
    ] = None,
    n_ctx: Annotated[int | None, typer.Option(help="One context length, instead of the usual ones.")] = None,
    ratio: Annotated[float, typer.Option(help="Fraction of the cache that is evicted.")] = 0.5,
    target_tokens: Annotated[int | None, typer.Option(help="Tokens that are kept, instead of a fraction.")] = None,
    json: AsJson = False,
) -> None:
    """Describe the embedded model or a GGUF file: its shape, whether it can be evicted from, and what it costs."""
    from ..models import default_model, describe, render

    if n_ctx is not None and n_ctx < 1:
        raise InputError(f"--n-ctx is {n_ctx}: give a whole number, 1 or more")
    found = describe(model if model is not None else default_model(), n_ctx, ratio=ratio, target_tokens=target_tokens)
    found["embedded"] = model is None
    if json:
        print_json(found)
    else:
        Console(highlight=False).print(render(found))
