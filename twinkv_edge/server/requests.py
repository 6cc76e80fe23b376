"""What a request may hold: the bodies that llama_cpp.server takes, checked more strictly, and the compression field."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, get_type_hints

from llama_cpp.server import types as theirs
from pydantic import BaseModel, ConfigDict, Field, create_model, model_validator

from .. import policies
from ..compression import Compression
from ..errors import InputError

MAX_TEMPLATE_DEPTH = 32  # of tools and schemas: what builds grammars from them is recursive

_hints = get_type_hints(Compression)

CompressionFields: type[BaseModel] = create_model(
    "CompressionFields",
    __config__=ConfigDict(extra="forbid", strict=True, allow_inf_nan=False),
    **{f.name: (_hints[f.name], None) for f in fields(Compression)},  # type: ignore[call-overload]
)
"""The fields of `Compression`, each of which may be left out: the server's default stands then."""


def merged(defaults: Compression, asked: BaseModel | None) -> Compression:
    """The server's settings with a request's own ones put in.

    Raises:
        InputError: A value is out of range, or a policy option names a file. Policies are looked up later.
    """
    given = {} if asked is None else asked.model_dump(exclude_unset=True)
    if not given:
        return defaults
    if "policy_options" in given:
        _check_options(given["policy_options"])
    elif given.get("policy", defaults.policy) != defaults.policy:
        given["policy_options"] = {}  # those of the server belong to its own policy
    if "ratio" in given and "target_tokens" not in given:
        given["target_tokens"] = None  # it would override the ratio
    return defaults.with_(**given)


def _check_options(options: dict[str, Any]) -> None:
    """Some policies read files that their options name: from a request only numbers and names of policies are taken."""
    for name, value in options.items():
        if name == "base_options" and isinstance(value, dict):
            _check_options(value)
        elif name == "base" and isinstance(value, str):
            if value not in policies.names():
                raise InputError(f"no policy named {value!r}: choose one of {', '.join(policies.names())}")
        elif not isinstance(value, int | float):
            raise InputError(f"policy option {name!r} must be a number here: files are named where the server starts")


class _Strict(BaseModel):
    """Checks that both kinds of request share, and which llama_cpp's own types leave out."""

    compression: CompressionFields | None = Field(default=None, exclude=True)  # type: ignore[valid-type]
    max_completion_tokens: int | None = Field(default=None, exclude=True, ge=1)  # newer clients' name of max_tokens
    max_tokens: int | None = Field(default=None, ge=1)
    temperature: float = Field(default=0.8, ge=0)
    repeat_penalty: float = Field(default=1.0, gt=0)  # theirs is 1.1, which misspells numbers quoted from a document
    n: int | None = Field(default=1, ge=1, le=1)  # one answer each
    model_config = ConfigDict(allow_inf_nan=False)

    @model_validator(mode="after")
    def _check(self) -> Any:
        if self.max_completion_tokens is not None:
            self.max_tokens = self.max_completion_tokens
        asked = self.__dict__
        if asked.get("grammar") is not None:
            raise ValueError("grammar is not taken: llama.cpp crashes on a wrong one; use response_format")
        if asked.get("logprobs") not in (None, False):
            raise ValueError("logprobs are not to be had: the server keeps no logits of earlier tokens")
        if asked.get("mirostat_mode") and not asked.get("temperature"):
            raise ValueError("mirostat_mode needs a temperature above 0")
        return self


class ChatRequest(_Strict, theirs.CreateChatCompletionRequest):  # type: ignore[misc]
    """POST /v1/chat/completions"""

    @model_validator(mode="after")
    def _check_messages(self) -> Any:
        if not self.messages:
            raise ValueError("messages is empty: give at least one")
        for name in ("tools", "functions", "response_format"):
            if _depth(getattr(self, name)) > MAX_TEMPLATE_DEPTH:
                raise ValueError(f"{name} is nested more than {MAX_TEMPLATE_DEPTH} deep")
        return self


class CompletionRequest(_Strict, theirs.CreateCompletionRequest):  # type: ignore[misc]
    """POST /v1/completions"""

    prompt: str | list[str] = ""
    max_tokens: int | None = Field(default=16, ge=1)
    best_of: int | None = Field(default=1, ge=1, le=1)

    @model_validator(mode="after")
    def _check_prompt(self) -> Any:
        if isinstance(self.prompt, list):
            if len(self.prompt) != 1:
                raise ValueError("prompt is a list: give one prompt in a request")
            self.prompt = self.prompt[0]
        if not self.prompt:
            raise ValueError("prompt is empty")
        if self.suffix is not None:
            raise ValueError("suffix is not taken: filling in a middle needs tokens that these models lack")
        return self


def _depth(value: Any) -> int:
    """How deep lists and dictionaries are nested."""
    deepest, level = 0, [value]
    while level := [child for v in level for child in _children(v)]:
        deepest += 1
    return deepest


def _children(value: Any) -> list[Any]:
    return list(value.values()) if isinstance(value, dict) else list(value) if isinstance(value, list) else []
