"""What a run measures: tasks, and the compressions that each sample is answered under."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from ...compression import Compression
from ...errors import InputError

PAPER = ("streaming_llm", "snapkv", "pyramidkv", "expected_attention")  # the policies of the TwinKV paper
POLICIES = (*PAPER, "knorm", "keydiff")
REPAIRS = ("none", "paper", "coverage")
QUESTIONS = ("window", "after")
ALONE = "none"
N_RECENT = 64


@dataclass(frozen=True)
class Config:
    """One compression of a sample. The full cache is policy "none"."""

    policy: str
    ratio: float = 0.0
    repair: str = ALONE
    layout: str = "head"
    tau: float | None = None

    def compression(self) -> Compression:
        return Compression(**asdict(self))


FULL = Config("none")


@dataclass(frozen=True)
class Settings:
    """What decides a sample's outcomes, so that it must be the same when a run goes on.

    Attributes:
        model: Its name and the size of its file in bytes.
        length: Tokens of prompt and answer.
        seed: Of the samples.
        question: "window": the question is evaluated before anything is evicted, so that it stands in the recent window
            and policies see it (the TwinKV paper); "after": it comes after the eviction (KVPress).
        configs: The full cache first.
        threads, type_k, type_v, n_batch: Of the context; sums, and so close calls, depend on them.
        continuation: Tokens of a continuation.
        texts: Files of the user's to go on with, in the order they are used.
    """

    model: str
    length: int
    seed: int
    question: str
    configs: tuple[Config, ...]
    threads: int
    type_k: str = "f16"
    type_v: str = "f16"
    n_batch: int = 512
    continuation: int = 256
    texts: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        return {**asdict(self), "configs": [asdict(c) for c in self.configs], "texts": list(self.texts)}

    @classmethod
    def from_dict(cls, found: dict[str, Any]) -> Settings:
        """Raises InputError where it is not what `to_dict` made."""
        try:
            known = {**found, "configs": tuple(Config(**c) for c in found["configs"]), "texts": tuple(found["texts"])}
            return cls(**known)
        except (TypeError, KeyError) as e:
            raise InputError(f"the settings of that run are not those of this version: {e}") from e

    def differences(self, other: Settings) -> list[str]:
        """What differs, in words."""
        names = [f.name for f in fields(self) if getattr(self, f.name) != getattr(other, f.name)]
        return [
            "configs (policies, ratios, repairs, layouts or taus)"
            if name == "configs"
            else f"{name} ({getattr(other, name)!r} there, {getattr(self, name)!r} now)"
            for name in names
        ]


@dataclass(frozen=True)
class Wanted:
    """Which samples to measure and where to find what they are made of."""

    tasks: tuple[str, ...]
    samples: int
    data: Path | None = None
    texts: tuple[Path, ...] = field(default=())


def configurations(
    policies: Sequence[str] = POLICIES,
    ratios: Sequence[float] = (0.5, 0.7),
    repairs: Sequence[str] = REPAIRS,
    layouts: Sequence[str] = ("head",),
    taus: Sequence[float | None] = (None,),
) -> tuple[Config, ...]:
    """The full cache, and every policy alone and repaired: alone once per ratio and layout, whatever the taus.

    Raises:
        InputError: A value is out of range or no policy, or nothing is to be compared.
    """
    from ... import policies as known

    for policy in policies:
        known.create(policy)
    found = [FULL]
    for layout in layouts:
        for ratio in ratios:
            for policy in policies:
                found.append(Config(policy, ratio, ALONE, layout))
                for repair in repairs:
                    if repair != ALONE:
                        found += [Config(policy, ratio, repair, layout, tau) for tau in taus]
    for config in found:
        config.compression()
    if FULL in found[1:] or any(config.policy == "none" for config in found[1:]):
        raise InputError("policy 'none' is the full cache, which is measured anyway")
    return tuple(dict.fromkeys(found))
