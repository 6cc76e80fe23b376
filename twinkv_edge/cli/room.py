"""Whether a session fits: cells of the cache, and memory of the machine, before anything is loaded."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..errors import InputError
from .options import ModelOptions
from .output import megabytes

if TYPE_CHECKING:
    from ..compression import Compression
    from ..models import ModelFacts

N_CTX_STEP = 256  # llama.cpp rounds a context up to this anyway


def round_up(n: int) -> int:
    """The next size a context can have."""
    return -(-n // N_CTX_STEP) * N_CTX_STEP


def check_model(model: ModelOptions, layout: str) -> ModelFacts:
    """Facts of the model, once the options for it are sound and its cache can be rewritten.

    Raises:
        InputError: No such file, not a usable GGUF, or an option out of range or wrong for this model.
        UnsupportedModelError: The model keeps no cache that can be rewritten.
    """
    from .. import models

    model.check()
    facts = models.facts(model.path())
    models.require_rewritable(facts, layout)
    facts.bytes_per_token(model.type_k, model.type_v)
    return facts


def cells_for(
    facts: ModelFacts, settings: Compression, model: ModelOptions, n_prompt: int, n_document: int, n_more: int
) -> int:
    """Cells of the cache: the ones asked for, or just enough for a prompt and n_more tokens.

    Raises:
        InputError: The prompt fits neither the cells nor the model's trained length, or there is not enough memory.
    """
    if n_prompt >= facts.n_ctx_train:
        most = max(0, facts.n_ctx_train - (n_prompt - n_document) - n_more)
        raise InputError(
            f"the document and what goes with it are {n_prompt} tokens, but {facts.name} was trained for "
            f"{facts.n_ctx_train}: shorten the document from {n_document} to at most {most} tokens, or give a --model "
            "trained for longer ones"
        )
    at_once = n_prompt
    if settings.prefill == "bounded":
        at_once = min(n_prompt, (settings.target_tokens or 0) + model.n_batch)
    enough = round_up(at_once + n_more)
    n_ctx = model.n_ctx or min(enough, round_up(facts.n_ctx_train))
    if n_ctx < at_once:
        target = n_ctx - model.n_batch
        possible = settings.prefill == "full" and target >= settings.n_sink + settings.n_recent + model.n_batch
        instead = f", or --prefill bounded --target-tokens {target}" if possible else ""
        raise InputError(
            f"the document and what goes with it are {n_prompt} tokens, of which {at_once} must be in the cache at "
            f"once, but it has {n_ctx} cells: give --n-ctx {enough}, or leave it out{instead}"
        )
    _check_memory(facts, settings, model, n_ctx, n_prompt)
    return n_ctx


def _check_memory(facts: ModelFacts, settings: Compression, model: ModelOptions, n_ctx: int, n_tokens: int) -> None:
    from ..models import estimate

    cost = estimate(
        facts,
        n_ctx,
        n_tokens,
        type_k=model.type_k,
        type_v=model.type_v,
        ratio=settings.ratio,
        target_tokens=settings.target_tokens,
        prefill=settings.prefill,
        n_batch=model.n_batch,
    )
    if cost.fits is False:
        raise InputError(
            f"this needs {megabytes(cost.needed)} MB (weights {megabytes(cost.weights)}, cache "
            f"{megabytes(cost.cache_allocated)}, compute {megabytes(cost.compute)}), but {megabytes(cost.free)} are "
            f"free; what would fit: {cost.suggestion}"
        )
