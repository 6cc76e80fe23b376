"""Which models' caches can be evicted from, and if not, why."""

from __future__ import annotations

from ..errors import UnsupportedModelError
from .model_facts import ModelFacts


def why_not_rewritable(model: ModelFacts, layout: str | None = None) -> str | None:
    """The reason, a predicate without subject, why the model's cache can't be evicted from; None if it can.

    `layout`: "cell", "head", or None for what holds in both. Only ALiBi makes a difference: attention is
    biased by the position of a cell, so all heads must hold the same token in it.
    """
    layers = model.cache_layers
    one_shape = len({(layer.n_head_kv, layer.head_dim_k, layer.head_dim_v) for layer in layers}) <= 1
    reasons = (
        (model.is_part, "is a projector or draft head that runs beside another model: give that model"),
        (model.is_recurrent, "is recurrent: it keeps a state of fixed size and no KV cache"),
        (model.is_hybrid, "mixes recurrent layers with attention: its state can't be evicted from"),
        (model.is_encoder, "is an encoder or a diffusion model: it keeps no causal KV cache"),
        (model.is_mla, "uses multi-head latent attention (MLA): its cache has no keys per head"),
        (model.has_indexer, "uses sparse attention with a second cache, of indexer keys"),
        (model.is_m_rope, "uses M-RoPE: its cells have several positions each"),
        (model.shares_cache, "shares caches between layers: one layer's eviction would be another's"),
        (not one_shape, "has K/V heads whose number or size varies by layer"),
        (all(layer.sliding for layer in layers), "has a sliding window in every layer: its cache is bounded"),
        (model.is_alibi and layout == "head", 'biases attention by cell (ALiBi): use layout="cell"'),
    )
    return next((reason for holds, reason in reasons if holds), None)


def require_rewritable(model: ModelFacts, layout: str | None = None) -> None:
    """Raise UnsupportedModelError, with a reason of one line, if the model's cache can't be evicted from."""
    reason = why_not_rewritable(model, layout)
    if reason:
        raise UnsupportedModelError(f"{model.name} ({model.architecture}) {reason}")
