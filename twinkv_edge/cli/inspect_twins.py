"""`twinkv-edge inspect --twins DOC...`: the share of tokens that have a twin."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from .documents import read_document
from .options import ModelOptions
from .output import note, progress
from .room import cells_for, check_model

if TYPE_CHECKING:
    from ..compression import Compression


def measure(documents: list[str], settings: Compression, model: ModelOptions, *, sweep: bool) -> dict[str, Any]:
    """Evaluates the documents one after another and counts their twins.

    Raises:
        InputError: A document cannot be read, or does not fit.
        UnsupportedModelError: The model keeps no cache that can be rewritten.
    """
    from ..inspect import prevalence as measured
    from ..inspect.prevalence import SWEEP, summary
    from .generation import load
    from .prompt import Vocabulary

    facts = check_model(model, settings.layout)
    vocabulary = Vocabulary.load(facts.path)
    names = [name if name == "-" else Path(name).name for name in documents]
    prompts = [vocabulary.tokenize(read_document(d), add_bos=True, special=False) for d in documents]
    n_ctx = max(cells_for(facts, settings, model, len(tokens), len(tokens), 1) for tokens in prompts)
    tau = facts.default_tau if settings.tau is None else settings.tau
    taus = [tau, *(t for t in SWEEP if sweep and t != tau)]
    llm = load(model, n_ctx, settings.with_(policy="knorm"))  # nothing needs to be captured
    found = []
    try:
        for number, (name, tokens) in enumerate(zip(names, prompts, strict=True)):
            if len(names) > 1:
                note(f"[{number + 1}/{len(names)}] {name}, {len(tokens):,} tokens")
            llm.reset()
            with progress("reading", len(tokens), "tokens") as done:
                llm.eval(tokens, lambda n, total, cells, done=done: done(n))  # type: ignore[misc]
            with progress("counting", llm.kv.n_layers, "layers") as done:
                each = measured(
                    llm,
                    name,
                    taus,
                    settings.local_window,
                    settings.key_space,
                    lambda n, _, done=done: done(n),  # type: ignore[misc]
                )
            found.append(each)
    finally:
        llm.close()
    return summary(facts.name, found, settings.local_window, settings.key_space)
