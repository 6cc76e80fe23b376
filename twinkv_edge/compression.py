"""What to keep and how: the settings of one compression, checked when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal, get_args

from .errors import InputError

RepairMode = Literal["auto", "none", "paper", "consistent", "coverage"]
Layout = Literal["head", "cell"]
Prefill = Literal["full", "bounded"]
KeySpace = Literal["rope", "unrotated", "pair_norm"]

CHOICES: dict[str, tuple[str, ...]] = {
    "repair": get_args(RepairMode),
    "layout": get_args(Layout),
    "key_space": get_args(KeySpace),
    "prefill": get_args(Prefill),
}


def kept_tokens(n: int, ratio: float, target_tokens: int | None = None) -> int:
    """Tokens a head keeps of n: ceil((1 - ratio) * n), or the target where it is smaller (TwinKV, section 3.1).

    Computed on the decimal the ratio is written as: 0.9 of 10 leaves 1, not 2.

    Raises:
        InputError: A ratio outside [0, 1) or a target below 1.
    """
    if target_tokens is not None:
        if target_tokens < 1:
            raise InputError(f"target_tokens must be at least 1, not {target_tokens}")
        return min(n, target_tokens)
    if not 0 <= ratio < 1:
        raise InputError(f"ratio must be in [0, 1), not {ratio}: it is the fraction of tokens removed")
    return n - math.floor(n * Fraction(str(float(ratio))))


@dataclass(frozen=True)
class Compression:
    """Settings of one compression.

    Attributes:
        policy: Name of the eviction policy (`twinkv_edge.policies.names()`).
        ratio: Fraction of the cache that is REMOVED, in [0, 1): the papers' rho (TwinKV, section 3.1).
        repair: "coverage" (ours: no threshold; keys without RoPE, and values), "paper" (TwinKV section 3.4),
            "consistent" (its rule, judged again after every swap) or "none". "auto" is "coverage". The cell layout
            repairs by votes with the paper's rule, whichever is asked for.
        layout: "head": every layer and head keeps its own tokens; "cell": one set for all, chosen by votes.
        tau: Similarity above which two keys are twins; None: 0.85 for models with QK-norm, else 0.90 (section 4.4).
        local_window: Tokens nearer than this to each other are never twins (w of Eq. 2).
        n_sink: Leading tokens that are always kept.
        n_recent: Trailing tokens that are always kept: they carry the question.
        key_space: Which keys are compared: "rope" as cached, "unrotated" with RoPE taken back, "pair_norm" the norms of
            the rotary pairs (invariant to any rotary schedule). "coverage" takes RoPE back in any case.
        target_tokens: The budget K as a number of tokens; overrides `ratio`.
        prefill: "full": a prompt is evaluated whole before anything is evicted; "bounded": whenever the cache would
            pass target_tokens plus one batch it is evicted down to target_tokens: a prompt of any length fits.
        trigger_tokens: Evict by itself when the cache is about to pass this many cells: before a new turn, or while an
            answer is decoded. None: only when `compress()` is called (and in bounded prefill).
        policy_options: Keyword arguments of the policy, e.g. {"seed": 1} for "random".

    Raises:
        InputError: A value is out of range.
    """

    policy: str = "snapkv"
    ratio: float = 0.5
    repair: RepairMode = "auto"
    layout: Layout = "head"
    tau: float | None = None
    local_window: int = 32
    n_sink: int = 4
    n_recent: int = 64
    key_space: KeySpace = "rope"
    target_tokens: int | None = None
    prefill: Prefill = "full"
    trigger_tokens: int | None = None
    policy_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (isinstance(self.ratio, int | float) and math.isfinite(self.ratio) and 0 <= self.ratio < 1):
            raise InputError(
                f"ratio is {self.ratio!r}: give the fraction of the cache to remove, at least 0 and below 1"
            )
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise InputError(f"{name} is {getattr(self, name)!r}: choose one of {', '.join(allowed)}")
        if self.tau is not None and not (math.isfinite(self.tau) and -1 < self.tau <= 1):
            raise InputError(f"tau is {self.tau!r}: give a cosine similarity above -1 and at most 1, or None")
        for name in ("local_window", "n_sink", "n_recent"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise InputError(f"{name} is {value!r}: give a whole number of tokens, 0 or more")
        for name in ("target_tokens", "trigger_tokens"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise InputError(f"{name} is {value!r}: give a whole number of tokens, 1 or more")
        self._check_automatic()

    def _check_automatic(self) -> None:
        if self.prefill == "bounded" and self.target_tokens is None:
            raise InputError("prefill='bounded' needs target_tokens: the cells to evict down to")
        if self.trigger_tokens is not None and self.trigger_tokens <= (self.target_tokens or 0):
            raise InputError(
                f"trigger_tokens ({self.trigger_tokens}) must be larger than target_tokens ({self.target_tokens})"
            )
        if self.policy == "none" and (self.prefill == "bounded" or self.trigger_tokens is not None):
            raise InputError("policy 'none' evicts nothing: choose another for bounded prefill or trigger_tokens")

    @property
    def repair_mode(self) -> str:
        """The repair that is made: what "auto" stands for."""
        if self.layout == "cell" and self.repair != "none":
            return "paper"
        return "coverage" if self.repair == "auto" else self.repair

    @property
    def repair_space(self) -> KeySpace:
        """The key space in which the repair compares: coverage is about what a token says, not where it stands."""
        return "unrotated" if self.repair_mode == "coverage" and self.key_space == "rope" else self.key_space

    def budget(self, n: int) -> int:
        """Tokens each head keeps of n: ceil((1 - ratio) * n), in integers, or target_tokens (at most n).

        Raises:
            InputError: The budget is smaller than the sinks and recent tokens that are always kept.
        """
        if self.policy == "none":
            return n
        keep = kept_tokens(n, self.ratio, self.target_tokens)
        protected = min(n, self.n_sink + self.n_recent)
        if keep < protected and keep < n:
            raise InputError(
                f"a budget of {keep} of {n} tokens is smaller than the {protected} that are always kept "
                f"(n_sink={self.n_sink}, n_recent={self.n_recent}): lower the ratio, or n_recent"
            )
        return keep

    def with_(self, **changes: Any) -> Compression:
        """A copy with some settings changed. Raises InputError for a setting that does not exist."""
        unknown = sorted(set(changes) - set(Compression.__dataclass_fields__))
        if unknown:
            raise InputError(f"no setting named {', '.join(unknown)}")
        return replace(self, **changes)
