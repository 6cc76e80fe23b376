"""What an operation did: operations report, callers do not guess."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any


@dataclass(frozen=True)
class Footprint:
    """What the evictable KV cache occupies, over all its layers.

    Attributes:
        cells: Cells in use (per head).
        cells_allocated: Cells the context was made with.
        bytes_allocated: Bytes of the K and V tensors.
        bytes_used: Bytes of the cells in use.
        bytes_resident: Bytes of the tensors that are in memory now (equal to allocated where the system cannot tell).
    """

    cells: int
    cells_allocated: int
    bytes_allocated: int
    bytes_used: int
    bytes_resident: int

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class CompressionReport:
    """What a compression did.

    Attributes:
        n_before, n_after: Cells in use before and after, of the head that uses most.
        n_after_mean: Tokens left, mean over layers and heads; smaller than n_after where heads keep different numbers.
        n_tokens: Tokens of the conversation, kept or not: the next one is decoded at this position.
        swaps, orphans, donors: Of the repair pass, summed over layers and heads (cell layout: of the one common set).
        seconds: Wall time by stage: "score", "repair", "evict", "release".
        bytes_before, bytes_after: Bytes of the cells in use.
        resident_before, resident_after: Bytes of the cache in memory.
        policy, repair, layout, tau, key_space: The settings that were used, tau resolved.
        backend: Which twin kernel ran ("" when none was needed).
        notes: What was not done as asked, in words: a shrunk window, for instance. Each is warned of, too.
    """

    n_before: int
    n_after: int
    n_tokens: int
    bytes_before: int
    bytes_after: int
    resident_before: int
    resident_after: int
    swaps: int = 0
    orphans: int = 0
    donors: int = 0
    seconds: dict[str, float] = field(default_factory=dict)
    policy: str = ""
    repair: str = "none"
    layout: str = "head"
    tau: float | None = None
    key_space: str = "rope"
    backend: str = ""
    notes: tuple[str, ...] = ()
    n_after_mean: float | None = None

    @property
    def total_seconds(self) -> float:
        return sum(self.seconds.values())

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)
