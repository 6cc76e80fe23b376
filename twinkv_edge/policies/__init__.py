"""Eviction policies, one file each, found by name.

A third-party package adds its own by an entry point in the group `twinkv_edge.policies`; see docs/adding-a-policy.md.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from importlib import metadata
from typing import Any

from ..errors import InputError
from .adakv import AdaKV
from .base import FloatArray, LayerView, Needs, Policy
from .chunkkv import ChunkKV
from .duo_attention import DuoAttention
from .expected_attention import ExpectedAttention
from .h2o import H2O
from .keydiff import KeyDiff
from .knorm import KNorm
from .none import NoEviction
from .observed_attention import ObservedAttention
from .pyramidkv import PyramidKV
from .qfilters import QFilters
from .random import Random
from .snapkv import SnapKV
from .streaming_llm import StreamingLLM
from .tova import TOVA
from .twinkv import TwinKV

__all__ = ["FloatArray", "LayerView", "Needs", "Policy", "available", "create", "names", "register"]

_BUILT_IN: tuple[type[Policy], ...] = (
    StreamingLLM,
    SnapKV,
    PyramidKV,
    AdaKV,
    ChunkKV,
    ExpectedAttention,
    H2O,
    ObservedAttention,
    TOVA,
    KNorm,
    KeyDiff,
    QFilters,
    DuoAttention,
    TwinKV,
    Random,
    NoEviction,
)
_registered: dict[str, type[Policy]] = {cls.name: cls for cls in _BUILT_IN}


def register(cls: type[Policy]) -> type[Policy]:
    """Makes a policy available under its name in this process. Usable as a class decorator.

    Raises:
        InputError: Not a Policy, or its name is taken by another class.
    """
    if not (isinstance(cls, type) and issubclass(cls, Policy) and getattr(cls, "name", None)):
        raise InputError(f"{cls!r} is no policy: subclass twinkv_edge.policies.Policy and give it a name")
    if _registered.get(cls.name, cls) is not cls:
        raise InputError(f"a policy named {cls.name!r} is registered already")
    _registered[cls.name] = cls
    return cls


def available() -> dict[str, type[Policy]]:
    """Every policy by name: built in, registered, and those of installed packages."""
    found = dict(_registered)
    for entry in metadata.entry_points(group="twinkv_edge.policies"):
        if entry.name not in found:
            cls = entry.load()
            if not (isinstance(cls, type) and issubclass(cls, Policy)):
                raise InputError(f"entry point {entry.name!r} ({entry.value}) names no subclass of Policy")
            found[entry.name] = cls
    return found


def names() -> list[str]:
    """Names of all policies, built-in ones first."""
    return list(available())


def create(name: str, options: Mapping[str, Any] | None = None, defaults: Mapping[str, Any] | None = None) -> Policy:
    """Makes a policy.

    Args:
        name: One of `names()`.
        options: Its keyword arguments; unknown ones are an error.
        defaults: Settings of the compression (tau, n_sink, ...) that the policy takes if it has an argument of that
            name and `options` does not give it. A policy with an argument `base` wraps another: it gets that policy
            made, by the name and the options in `base` and `base_options`.

    Raises:
        InputError: Unknown policy or option.
    """
    policies = available()
    if name not in policies:
        raise InputError(f"no policy named {name!r}: choose one of {', '.join(policies)}")
    cls = policies[name]
    options = dict(options or {})
    parameters = inspect.signature(cls).parameters
    accepted = set(parameters)
    if "base" in accepted:
        base, base_options = options.pop("base", parameters["base"].default), options.pop("base_options", {})
        if base == name:
            raise InputError(f"policy {name!r} cannot wrap itself")
        options["base"] = base if isinstance(base, Policy) else create(base, base_options, defaults)
        accepted.add("base_options")
    if unknown := sorted(set(options) - accepted):
        raise InputError(
            f"policy {name!r} has no option {', '.join(unknown)}"
            + (f": it takes {', '.join(sorted(accepted))}" if accepted else "")
        )
    inherited = {k: v for k, v in (defaults or {}).items() if k in parameters and k not in options}
    return cls(**inherited, **options)
