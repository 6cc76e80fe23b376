"""What to keep and how: the settings of one compression, checked when they are made."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any, Literal

from .errors import InputError

RepairMode = Literal["none", "paper", "consistent"]
Layout = Literal["head", "cell"]
KeySpace = Literal["rope", "unrotated", "pair_norm"]

REPAIR_MODES = ("none", "paper", "consistent")
LAYOUTS = ("head", "cell")
KEY_SPACES = ("rope", "unrotated", "pair_norm")


@dataclass(frozen=True)
class Compression:
    """Settings of one compression.

    Attributes:
        policy: Name of the eviction policy (`twinkv_edge.policies.names()`).
        ratio: Fraction of the cache that is REMOVED, in [0, 1): the papers' rho (TwinKV, section 3.1).
        repair: "paper" (TwinKV section 3.4, judged once), "consistent" (ours, re-judged after every swap) or "none".
        layout: "head": every layer and head keeps its own tokens; "cell": one set for all, chosen by votes.
        tau: Similarity above which two keys are twins; None: 0.85 for models with QK-norm, 0.90 otherwise (section 4.4).
        local_window: Tokens nearer than this to each other are never twins (w of Eq. 2).
        n_sink: Leading tokens that are always kept.
        n_recent: Trailing tokens that are always kept: they carry the question.
        key_space: Which keys are compared: "rope" as cached, "unrotated" with RoPE taken back, "pair_norm" the norms of
            the rotary pairs (invariant to any rotary schedule).
        target_tokens: The budget K as a number of tokens; overrides `ratio`.
        policy_options: Keyword arguments of the policy, e.g. {"seed": 1} for "random".

    Raises:
        InputError: A value is out of range.
    """

    policy: str = "streaming_llm"
    ratio: float = 0.5
    repair: RepairMode = "paper"
    layout: Layout = "head"
    tau: float | None = None
    local_window: int = 32
    n_sink: int = 4
    n_recent: int = 64
    key_space: KeySpace = "rope"
    target_tokens: int | None = None
    policy_options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not (isinstance(self.ratio, int | float) and math.isfinite(self.ratio) and 0 <= self.ratio < 1):
            raise InputError(
                f"ratio is {self.ratio!r}: give the fraction of the cache to remove, at least 0 and below 1"
            )
        for name, allowed in (("repair", REPAIR_MODES), ("layout", LAYOUTS), ("key_space", KEY_SPACES)):
            if getattr(self, name) not in allowed:
                raise InputError(f"{name} is {getattr(self, name)!r}: choose one of {', '.join(allowed)}")
        if self.tau is not None and not (math.isfinite(self.tau) and -1 < self.tau <= 1):
            raise InputError(f"tau is {self.tau!r}: give a cosine similarity above -1 and at most 1, or None")
        for name in ("local_window", "n_sink", "n_recent"):
            value = getattr(self, name)
            if not isinstance(value, int) or value < 0:
                raise InputError(f"{name} is {value!r}: give a whole number of tokens, 0 or more")
        if self.target_tokens is not None and (not isinstance(self.target_tokens, int) or self.target_tokens < 1):
            raise InputError(f"target_tokens is {self.target_tokens!r}: give a whole number of tokens, 1 or more")

    def budget(self, n: int) -> int:
        """Tokens each head keeps of n: ceil((1 - ratio) * n), in integers, or target_tokens (at most n).

        Raises:
            InputError: The budget is smaller than the sinks and recent tokens that are always kept.
        """
        if self.policy == "none":
            return n
        if self.target_tokens is not None:
            keep = min(self.target_tokens, n)
        else:
            # the ratio as it is written: Fraction("0.1") is a tenth, Fraction(0.1) is not
            keep = n - math.floor(Fraction(str(self.ratio)) * n)
        protected = min(n, self.n_sink + self.n_recent)
        if keep < protected and keep < n:
            raise InputError(
                f"a budget of {keep} of {n} tokens is smaller than the {protected} that are always kept "
                f"(n_sink={self.n_sink}, n_recent={self.n_recent}): lower the ratio, or n_recent"
            )
        return keep

    def with_(self, **changes: Any) -> Compression:
        """A copy with some settings changed."""
        return replace(self, **changes)
