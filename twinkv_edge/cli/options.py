"""The options that commands share, each in one place, and the decorator that gives them to a command."""

from __future__ import annotations

import functools
import inspect
import json
import os
from collections.abc import Callable, Iterable
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from pathlib import Path
from typing import Annotated, Any, TypeVar, cast, get_type_hints

import typer

from ..compression import CHOICES, Compression
from ..errors import InputError
from ..models.ggml_types import CACHE_TYPES
from ..plotting import pyplot

Command = TypeVar("Command", bound=Callable[..., Any])


def _drawable(path: Path | None) -> Path | None:
    """Refuses a picture that could not be written before anything is measured for it."""
    if path is not None:
        if os.path.isdir(path) or not os.access(path.absolute().parent, os.W_OK):
            raise InputError(f"cannot write {path}: give a file in a folder that exists and can be written to")
        pyplot()
    return path


AsJson = Annotated[bool, typer.Option("--json", help="Print JSON and nothing else on standard output.")]
PlotFile = Annotated[
    Path | None,
    typer.Option("--plot", help="Write a picture (PNG) here too.", metavar="PNG", callback=_drawable),
]


def grouped(command: Command) -> Command:
    """Lets a command take whole groups of options: typer knows parameters only one by one.

    A parameter annotated with a dataclass below is replaced by an option for each of its fields; the command gets
    the dataclass filled in.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, type[Any]] = {
        name: p.annotation
        for name, p in signature.parameters.items()
        if isinstance(p.annotation, type) and is_dataclass(p.annotation)
    }
    flat: list[inspect.Parameter] = []
    for name, parameter in signature.parameters.items():
        if name not in groups:
            flat.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))
            continue
        hints = get_type_hints(groups[name], include_extras=True)
        for f in fields(groups[name]):
            default = f.default_factory() if f.default_factory is not MISSING else f.default
            kind = inspect.Parameter.KEYWORD_ONLY
            flat.append(inspect.Parameter(f.name, kind, default=default, annotation=hints[f.name]))

    @functools.wraps(command)
    def flattened(**given: Any) -> Any:
        for name, group in groups.items():
            given[name] = group(**{f.name: given.pop(f.name) for f in fields(group)})
        return command(**given)

    vars(flattened).pop("__wrapped__", None)
    vars(flattened)["__signature__"] = signature.replace(parameters=flat)
    flattened.__annotations__ = {p.name: p.annotation for p in flat}
    return cast(Command, flattened)


def _default(name: str) -> Any:
    return Compression.__dataclass_fields__[name].default


def _compression(help: str, metavar: str | None = None) -> Any:
    return typer.Option(help=help, metavar=metavar, rich_help_panel="What to keep")


def choice(names: Iterable[str]) -> str:
    """How help shows that one of these is to be given."""
    return f"[{'|'.join(names)}]"


@dataclass(frozen=True)
class CompressionOptions:
    """The fields of `Compression`, by their own names."""

    policy: Annotated[str, _compression("Eviction policy; `twinkv-edge policies` lists them.", "NAME")] = _default(
        "policy"
    )
    ratio: Annotated[float, _compression("Fraction of the cache to REMOVE, at least 0 and below 1.")] = _default(
        "ratio"
    )
    target_tokens: Annotated[
        int | None, _compression("Keep this many tokens per head, instead of a fraction.", "K")
    ] = None
    repair: Annotated[
        str, _compression("Swap redundant kept tokens for lost unique ones.", choice(CHOICES["repair"]))
    ] = _default("repair")
    layout: Annotated[str, _compression("One set of tokens per head, or one for all.", choice(CHOICES["layout"]))] = (
        _default("layout")
    )
    tau: Annotated[
        float | None,
        _compression("Cosine similarity from which two keys are twins (default: 0.85 with QK-norm, else 0.90)."),
    ] = None
    local_window: Annotated[int, _compression("Tokens nearer to each other than this are never twins.")] = _default(
        "local_window"
    )
    n_sink: Annotated[int, _compression("Leading tokens that are always kept.")] = _default("n_sink")
    n_recent: Annotated[int, _compression("Trailing tokens that are always kept.")] = _default("n_recent")
    key_space: Annotated[str, _compression("Which keys are compared.", choice(CHOICES["key_space"]))] = _default(
        "key_space"
    )
    prefill: Annotated[
        str,
        _compression(
            "full: evict after the whole document was read; bounded: evict while reading, so that the cache never "
            "holds more than --target-tokens and one batch.",
            choice(CHOICES["prefill"]),
        ),
    ] = _default("prefill")
    trigger_tokens: Annotated[
        int | None, _compression("Evict by itself, also during an answer, when the cache is about to pass this.", "N")
    ] = None
    policy_options: Annotated[
        list[str], _compression("An option of the policy, e.g. seed=1; may be repeated.", "NAME=VALUE")
    ] = field(default_factory=list)

    def settings(self) -> Compression:
        """The settings, checked.

        Raises:
            InputError: A value is out of range, or there is no such policy or policy option.
        """
        from .. import policies

        values = {f.name: getattr(self, f.name) for f in fields(self)}
        values["policy_options"] = dict(_policy_option(text) for text in self.policy_options)
        settings = Compression(**values)
        policies.create(settings.policy, settings.policy_options)
        return settings


def _policy_option(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not (name.isidentifier() and equals):
        raise InputError(f"policy option {text!r} is not of the form name=value")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value  # a plain word


def _model(help: str, metavar: str | None = None) -> Any:
    return typer.Option(help=help, metavar=metavar, rich_help_panel="Model and cache")


@dataclass(frozen=True)
class ModelOptions:
    """Which model, and the cache it gets."""

    model: Annotated[Path | None, _model("GGUF file (default: the embedded SmolLM2-135M-Instruct).", "GGUF")] = None
    n_ctx: Annotated[int | None, _model("Cells of the cache (default: just enough).")] = None
    type_k: Annotated[str, _model("Type of the cached keys.", choice(CACHE_TYPES))] = "f16"
    type_v: Annotated[str, _model("Type of the cached values.", choice(CACHE_TYPES))] = "f16"
    n_batch: Annotated[int, _model("Most tokens that are read at once.")] = 512
    threads: Annotated[int | None, _model("Threads for prefill and decoding (default: all cores).")] = None

    def n_threads(self) -> int:
        """Raises InputError below 1."""
        return _at_least_one("--threads", self.threads) or usable_cores()

    def path(self) -> Path:
        """Raises InputError when no model is given and the embedded one is not installed."""
        from ..models import default_model

        return self.model if self.model is not None else default_model()

    def check(self) -> None:
        """Raises InputError for a number that is no size, or a type that llama.cpp does not take for a cache."""
        from ..models.ggml_types import cache_type

        self.n_threads()
        _at_least_one("--n-ctx", self.n_ctx)
        _at_least_one("--n-batch", self.n_batch)
        cache_type(self.type_k)
        cache_type(self.type_v)


def _at_least_one(option: str, value: int | None) -> int | None:
    if value is not None and value < 1:
        raise InputError(f"{option} is {value}: give a whole number, 1 or more")
    return value


def usable_cores() -> int:
    """Cores this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _answer(help: str, *names: str) -> Any:
    return typer.Option(*names, help=help, rich_help_panel="Answer")


@dataclass(frozen=True)
class AnswerOptions:
    """How answers are sampled."""

    max_tokens: Annotated[int, _answer("Longest answer, in tokens.", "--max-tokens", "-n")] = 256
    temperature: Annotated[float, _answer("0: always the likeliest token.", "--temperature", "--temp")] = 0.0
    top_k: Annotated[int, _answer("Sample among this many likeliest tokens; 0: all.")] = 40
    top_p: Annotated[float, _answer("Sample among the likeliest tokens that add up to this probability.")] = 0.95
    min_p: Annotated[float, _answer("Leave out tokens less likely than this share of the likeliest.")] = 0.05
    repeat_penalty: Annotated[float, _answer("Above 1: recently used tokens become less likely.")] = 1.0
    presence_penalty: Annotated[float, _answer("Taken from the logit of every token that was used recently.")] = 0.0
    frequency_penalty: Annotated[float, _answer("The same, for each time it was used.")] = 0.0
    seed: Annotated[int, _answer("Seed of the sampler, when the temperature is not 0.")] = 0

    def sampler(self) -> dict[str, Any]:
        """Arguments of `Llama.generate`."""
        return {
            "temp": self.temperature,
            "top_k": self.top_k,
            "top_p": self.top_p,
            "min_p": self.min_p,
            "repeat_penalty": self.repeat_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
        }

    def check(self) -> None:
        """Raises InputError for values out of range."""
        _at_least_one("--max-tokens", self.max_tokens)
        if not 0 <= self.temperature < float("inf"):
            raise InputError(f"--temperature is {self.temperature}: give a number, 0 or more")
        if self.top_k < 0:
            raise InputError(f"--top-k is {self.top_k}: give a whole number, 0 or more")
        for name, value in (("--top-p", self.top_p), ("--min-p", self.min_p)):
            if not 0 <= value <= 1:
                raise InputError(f"{name} is {value}: give a number from 0 to 1")
        if not 0 < self.repeat_penalty < float("inf"):
            raise InputError(f"--repeat-penalty is {self.repeat_penalty}: give a number above 0")
        for name, value in (("presence", self.presence_penalty), ("frequency", self.frequency_penalty)):
            if not -2 <= value <= 2:  # the range that OpenAI's API has
                raise InputError(f"--{name}-penalty is {value}: give a number from -2 to 2")
        if not 0 <= self.seed < 1 << 32:
            raise InputError(f"--seed is {self.seed}: give a whole number from 0 to 4294967295")
