"""Models: the embedded one, what a GGUF says about itself, random ones of true shapes, and what they cost."""

from .embedded import default_model, gemma3_270m
from .model_facts import CacheLayer, ModelFacts, facts
from .random_gguf import random_model
from .rewritable import require_rewritable, why_not_rewritable

__all__ = [
    "CacheLayer",
    "ModelFacts",
    "default_model",
    "facts",
    "gemma3_270m",
    "random_model",
    "require_rewritable",
    "why_not_rewritable",
]
