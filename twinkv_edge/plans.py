"""Many plans for one cache: every layer is read once and scored once per policy, whatever the ratios and repairs."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from . import pipeline, policies, views
from .compression import Compression
from .kv_cache import KVCache


@dataclass
class _Open:
    """A plan being filled in, with what it shares with others: its scores and, before the repair, its set."""

    cfg: Compression
    tau: float
    policy: policies.Policy
    keep: int
    plan: pipeline.Plan
    scored_alike: str
    kept_alike: str
    left: int = 0


def make_plans(kv: KVCache, wanted: Sequence[Compression], default_tau: float) -> list[pipeline.Plan]:
    """`pipeline.make_plan` for every one of the settings, with the work that they share done once.

    Args:
        kv: The cache; nothing in it is changed.
        wanted: The settings.
        default_tau: What a tau of None stands for.

    Raises:
        InputError, CacheStateError: As `pipeline.make_plan`.
    """
    plans: list[pipeline.Plan | None] = [None] * len(wanted)
    groups: dict[str, list[_Open]] = {}
    for number, cfg in enumerate(wanted):
        tau = default_tau if cfg.tau is None else cfg.tau
        if cfg.layout != "head":
            plans[number] = pipeline.make_plan(kv, cfg, tau)
            continue
        opened = _open(kv, cfg, tau)
        plans[number] = opened.plan
        if not opened.plan.retained.all():
            groups.setdefault(cfg.key_space, []).append(opened)
    for group in groups.values():
        _fill(kv, group)
    return [plan for plan in plans if plan is not None]


def _open(kv: KVCache, cfg: Compression, tau: float) -> _Open:
    policy, keep, plan = pipeline.begin(kv, cfg, tau)
    settings = (cfg.policy, cfg.policy_options, tau, cfg.local_window, cfg.n_sink, cfg.n_recent)
    scored = json.dumps(settings, default=repr, sort_keys=True)
    left = keep * kv.n_layers * kv.n_head_kv
    return _Open(cfg, tau, policy, keep, plan, scored, f"{scored} {keep} {cfg.ratio} {policy.ragged}", left)


def _fill(kv: KVCache, group: Iterable[_Open]) -> None:
    group = list(group)
    scorers: dict[str, policies.Policy] = {}
    for each in group:
        scorers.setdefault(each.scored_alike, each.policy)
    for part in pipeline.checked_parts(kv, group[0].cfg, group[0].plan.notes):
        scores = {alike: policy.score(part.view) for alike, policy in scorers.items()}
        kept: dict[str, npt.NDArray[np.bool_]] = {}
        for each in group:
            if each.kept_alike not in kept:
                found = scores[each.scored_alike]
                kept[each.kept_alike] = pipeline.select_part(kv, each.cfg, each.policy, part, found, each.keep)
            _put(each, part, kept[each.kept_alike], scores[each.scored_alike])
    for each in group:
        pipeline.check_total(each.cfg, each.policy, each.left)


def _put(each: _Open, part: views.Part, kept: npt.NDArray[np.bool_], scores: npt.NDArray[np.float32]) -> None:
    each.left -= int(kept.sum())
    repaired = pipeline.repair_part(each.cfg, part, kept, scores, each.tau, each.plan)
    each.plan.retained[part.view.index][part.heads, part.cells] = repaired
