"""One compression, layer by layer: score, select, repair, and then evict all at once."""

from __future__ import annotations

import os
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from . import policies, select, twins, views
from ._install import native
from .compression import Compression, kept_tokens
from .content import balance, compared
from .errors import CacheStateError, InputError
from .kv_cache import KVCache
from .repair import repair
from .report import CompressionReport

Progress = Callable[[int, int], None]


@dataclass
class Plan:
    """What to keep, bool [L, H, n], and how it came about."""

    retained: npt.NDArray[np.bool_]
    swaps: int = 0
    orphans: int = 0
    donors: int = 0
    seconds: dict[str, float] = field(default_factory=lambda: {"score": 0.0, "repair": 0.0})
    backend: str = ""
    notes: list[str] = field(default_factory=list)

    @contextmanager
    def timed(self, stage: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        self.seconds[stage] += time.perf_counter() - start


def scores(kv: KVCache, policy: policies.Policy, space: str = "rope") -> npt.NDArray[np.float32]:
    """Scores of every layer, float32 [L, H, n], -inf where a cell is hidden. Warns of what the policy has to say."""
    notes: list[str] = []
    result = np.full((kv.n_layers, kv.n_head_kv, kv.n_cells), -np.inf, dtype=np.float32)
    for index in range(kv.n_layers):
        for part in views.parts(kv, index, space, notes):
            result[index][part.heads, part.cells] = policy.score(part.view)
    _warn(notes)
    return result


def _warn(notes: list[str]) -> None:
    for note in notes:
        warnings.warn(note, stacklevel=3)


def make_policy(cfg: Compression, tau: float, model: str | os.PathLike[str]) -> policies.Policy:
    """The policy of a compression, with the settings they share, for the model in that file.

    Raises:
        InputError: Unknown policy or option, or something that the policy needs for this model is missing.
    """
    defaults = {"tau": tau, "local_window": cfg.local_window, "n_sink": cfg.n_sink, "n_recent": cfg.n_recent}
    policy = policies.create(cfg.policy, cfg.policy_options, defaults)
    policy.bind(model)
    return policy


def make_plan(kv: KVCache, cfg: Compression, tau: float, progress: Progress | None = None) -> Plan:
    """Decides what to keep; changes nothing.

    Raises:
        InputError: The budget is smaller than the protected tokens, or an unknown policy or option.
        CacheStateError: The cache is empty, or holds keys that are not finite; queries that the policy needs were not
            captured; or one set for all heads is wanted of a cache whose heads hold different tokens already.
    """
    policy, keep, plan = begin(kv, cfg, tau)
    if plan.retained.all():
        return plan
    (_plan_heads if cfg.layout == "head" else _plan_cells)(kv, cfg, policy, keep, tau, plan, progress)
    _warn(plan.notes)
    return plan


def begin(kv: KVCache, cfg: Compression, tau: float) -> tuple[policies.Policy, int, Plan]:
    """The policy, the tokens that each head keeps, and a plan to fill in: it keeps nothing yet, or everything where
    there is nothing to evict. Raises as `make_plan` does.
    """
    n = kv.n_cells
    if n == 0:
        raise CacheStateError("the cache is empty: evaluate a prompt before compressing it")
    keep = cfg.budget(n)
    policy = make_policy(cfg, tau, kv.facts.path)
    plan = Plan(np.full((kv.n_layers, kv.n_head_kv, n), keep == n, dtype=np.bool_))
    if keep < n and policy.ragged and (reason := _why_uniform(kv, cfg)):
        plan.notes.append(f"every head keeps the same number of tokens: {reason}")
        policy.ragged = False
    return policy, keep, plan


def _why_uniform(kv: KVCache, cfg: Compression) -> str:
    """Why a policy's uneven budgets cannot be used, or nothing."""
    if cfg.layout == "cell":
        return "the cell layout has one set for all"
    if not kv.can_hide:
        return "cells can be hidden from single heads only where the cache is in host memory"
    if cfg.prefill == "bounded" or cfg.trigger_tokens is not None:
        return "evicting by itself holds the cache to a number of cells"
    if kv.ragged:
        return "this cache was compressed unevenly before, and each head now loses the same share of what it has"
    return ""


def checked_parts(
    kv: KVCache, cfg: Compression, notes: list[str], progress: Progress | None = None
) -> Iterator[views.Part]:
    """Every layer in its parts; raises CacheStateError where a key is not finite or has no length."""
    for index in range(kv.n_layers):
        for part in views.parts(kv, index, cfg.key_space, notes):
            views.check_keys(part.view)
            yield part
        if progress:
            progress(index + 1, kv.n_layers)


def _plan_heads(
    kv: KVCache,
    cfg: Compression,
    policy: policies.Policy,
    keep: int,
    tau: float,
    plan: Plan,
    progress: Progress | None,
) -> None:
    left = keep * kv.n_layers * kv.n_head_kv
    for part in checked_parts(kv, cfg, plan.notes, progress):
        with plan.timed("score"):
            scores = policy.score(part.view)
            retained = select_part(kv, cfg, policy, part, scores, keep)
        left -= int(retained.sum())
        plan.retained[part.view.index][part.heads, part.cells] = repair_part(cfg, part, retained, scores, tau, plan)
    check_total(cfg, policy, left)


def select_part(
    kv: KVCache, cfg: Compression, policy: policies.Policy, part: views.Part, scores: npt.NDArray[np.float32], keep: int
) -> npt.NDArray[np.bool_]:
    """What a policy keeps of a part of a layer by its scores, bool [H, n]; raises InputError for impossible budgets."""
    always = select.protected(part.view.positions, kv.n_tokens, cfg.n_sink, cfg.n_recent)
    return select.top(scores, _budgets(cfg, policy, part, scores, keep, always), always)


def repair_part(
    cfg: Compression,
    part: views.Part,
    retained: npt.NDArray[np.bool_],
    scores: npt.NDArray[np.float32],
    tau: float,
    plan: Plan,
) -> npt.NDArray[np.bool_]:
    """The set after the repair that is asked for, bool [H, n], by the policy's scores; the plan counts what it did."""
    if cfg.repair == "none":
        return retained
    with plan.timed("repair"):
        vectors, weight = compared(cfg, part)
        done = repair(
            vectors,
            retained,
            tau=tau,
            local_window=cfg.local_window,
            n_sink=cfg.n_sink,
            n_recent=cfg.n_recent,
            mode=cfg.repair_mode,
            positions=part.view.positions,
            priority=scores,
            weight=weight,
            margin=balance(part.view).margin,
            n_threads=part.view.n_threads,
        )
        plan.swaps += int(np.sum(done.n_swaps))
        plan.orphans += int(np.sum(done.n_orphans))
        plan.donors += int(np.sum(done.n_donors))
        plan.backend = done.backend
    return done.retained


def check_total(cfg: Compression, policy: policies.Policy, left: int) -> None:
    """Raises InputError where an uneven policy kept more than the ratio leaves: `left` of it is unused."""
    if policy.ragged and left < 0:
        raise InputError(f"policy {cfg.policy!r} gives its heads {-left} tokens more than the ratio leaves them")


def _budgets(
    cfg: Compression,
    policy: policies.Policy,
    part: views.Part,
    scores: npt.NDArray[np.float32],
    keep: int,
    always: npt.NDArray[np.bool_],
) -> npt.NDArray[np.int32]:
    """Tokens that each head of the part keeps, int32 [H].

    Raises:
        InputError: The policy gives a head less than its protected tokens or more than it has.
    """
    n_heads, n = scores.shape
    least = always.sum(axis=-1)
    if not part.whole:  # a head that holds its own number of tokens loses its share of those
        keep = max(kept_tokens(n, cfg.ratio, cfg.target_tokens), int(least[0]))
    if not policy.ragged:
        return np.full(n_heads, keep, dtype=np.int32)
    budgets = np.asarray(policy.budgets(part.view, scores, keep, always))
    if budgets.shape != (n_heads,) or (budgets < least).any() or (budgets > n).any():
        raise InputError(
            f"policy {cfg.policy!r} gives the heads of layer {part.view.index} budgets of {budgets.tolist()} tokens: "
            f"each must keep its {least.max()} protected tokens, and has {n}"
        )
    return budgets.astype(np.int32)


def _plan_cells(
    kv: KVCache,
    cfg: Compression,
    policy: policies.Policy,
    keep: int,
    tau: float,
    plan: Plan,
    progress: Progress | None,
) -> None:
    positions = kv._positions_by_head(0)[0]
    for index in range(kv.n_layers):
        if (kv._positions_by_head(index) != positions).any():
            raise CacheStateError(
                "this cache was compressed per head, so its cells hold different tokens for different heads; "
                "compress it again with layout='head'"
            )
    always = select.protected(positions, kv.n_tokens, cfg.n_sink, cfg.n_recent)
    ballot = select.Ballot(kv.n_cells)
    for part in checked_parts(kv, cfg, plan.notes, progress):
        with plan.timed("score"):
            layer_scores = policy.score(part.view)
            ballot.add(select.top(layer_scores, keep, np.broadcast_to(always, layer_scores.shape)), layer_scores)
    retained = ballot.elect(keep, always)
    if cfg.repair != "none":
        with plan.timed("repair"):
            votes = select.RepairVotes(retained, always)
            for index in range(kv.n_layers):
                layer = views.parts(kv, index, cfg.key_space)[0].view
                each = np.broadcast_to(retained, layer.positions.shape)
                best = twins.best_twin(
                    layer.compared_keys,
                    each,
                    cfg.local_window,
                    positions=layer.positions,
                    n_threads=layer.n_threads,
                )
                votes.add(best, tau, np.ones(retained.shape, dtype=np.bool_))
            retained, plan.swaps, plan.orphans, plan.donors = votes.swap()
            plan.backend = twins.active_backend()
    plan.retained[:] = retained


def compress(kv: KVCache, cfg: Compression, tau: float, progress: Progress | None = None) -> CompressionReport:
    """Plans, evicts, and reports. If anything fails the cache is as it was."""
    return carry_out(kv, make_plan(kv, cfg, tau, progress), cfg, tau)


def carry_out(kv: KVCache, plan: Plan, cfg: Compression, tau: float) -> CompressionReport:
    """Evicts what a plan made by these settings leaves out, and reports. The cache must hold what it held then; tokens
    may have been decoded and taken back since.
    """
    report = kv.evict(plan.retained)
    native.trim_heap()  # what scoring and repairing took
    return replace(
        report,
        swaps=plan.swaps,
        orphans=plan.orphans,
        donors=plan.donors,
        seconds={**plan.seconds, **report.seconds},
        policy=cfg.policy,
        repair=cfg.repair_mode,
        layout=cfg.layout,
        tau=tau,
        key_space=cfg.repair_space,
        backend=plan.backend,
        notes=tuple(plan.notes),
    )
