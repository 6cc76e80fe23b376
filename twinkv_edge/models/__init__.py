"""Models: the embedded one, what a GGUF says about itself, random ones of true shapes, and what they cost."""

from .description import describe, render
from .embedded import default_model, gemma3_270m
from .footprint import Estimate, estimate
from .free_memory import free_memory
from .model_facts import CacheLayer, ModelFacts, facts
from .random_gguf import random_model
from .rewritable import require_rewritable, why_not_rewritable

__all__ = [
    "CacheLayer",
    "Estimate",
    "ModelFacts",
    "default_model",
    "describe",
    "estimate",
    "facts",
    "free_memory",
    "gemma3_270m",
    "random_model",
    "render",
    "require_rewritable",
    "why_not_rewritable",
]
