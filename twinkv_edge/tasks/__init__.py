"""What a compressed cache is judged by: a context, a question, and what counts as right. Tasks are found by name."""

from __future__ import annotations

from collections.abc import Iterable

from ..errors import InputError
from . import continuation, longbench, loogle, mmlu_pro, ruler_niah, ruler_qa, ruler_vt, ruler_words
from .base import Request, Sample, Task

__all__ = ["Request", "Sample", "Task", "available", "chosen", "create"]

_TASKS: dict[str, type[Task]] = {
    cls.name: cls
    for module in (ruler_niah, ruler_vt, ruler_words, ruler_qa, continuation, longbench, loogle, mmlu_pro)
    for cls in module.TASKS
}


def available() -> dict[str, type[Task]]:
    """Every task by name, in the order of the tables."""
    return dict(_TASKS)


def groups() -> list[str]:
    """Names that stand for several tasks."""
    return list(dict.fromkeys(cls.group for cls in _TASKS.values()))


def create(name: str) -> Task:
    """Makes a task. Raises InputError where there is none of that name."""
    if name not in _TASKS:
        raise InputError(f"no task named {name!r}: choose of {', '.join(_TASKS)}, or of {', '.join(groups())}")
    return _TASKS[name]()


def chosen(names: Iterable[str]) -> list[str]:
    """Names of tasks, groups spelled out, each once and in the order of the tables. Raises InputError as `create`."""
    wanted: set[str] = set()
    for name in names:
        found = {n for n, cls in _TASKS.items() if cls.group == name}
        wanted |= found or {create(name).name}
    return [name for name in _TASKS if name in wanted]
