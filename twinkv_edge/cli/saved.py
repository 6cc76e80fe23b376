"""Conversations in session files: what the file's metadata holds of them, and opening the model they belong to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..errors import InputError, SessionError
from ..session import Session
from .generation import load
from .options import AnswerOptions, ModelOptions
from .output import progress
from .room import round_up

if TYPE_CHECKING:
    from ..compression import Compression
    from ..llama import CompressedLlama
    from ..session.contents import Contents
    from .chat_session import ChatSession

KEY = "chat"  # in the metadata


def save(chat: ChatSession, path: str, *, documents: list[str], force: bool = False) -> Session:
    """Saves a conversation.

    Args:
        documents: Names of the documents that were read, for `inspect`.

    Raises:
        InputError, CacheStateError: See `Session.save`.
    """
    chat.settle()
    state, llm = chat.state, chat.llm
    about = {
        "messages": [dict(message) for message in state.messages],
        "rest": list(state.tokens[llm.n_tokens :]),
        "turns": state.turns,
        "open": state.open,
        "n_before": state.n_before,
        "joint": list(state.joint),
    }
    metadata = {KEY: about, "documents": documents, "report": chat.last.to_dict() if chat.last else None}
    with progress("saving", 1, "") as done:
        return Session.save(
            llm, Path(path).expanduser(), metadata=metadata, force=force, progress=lambda n, size: done(n // size)
        )


def restore(chat: ChatSession, path: str) -> Session:
    """Loads a conversation into a session of the same model and kind of cache; returns what the file holds.

    Raises:
        InputError, SessionError: See `Session.load`, or it holds no conversation. The old one goes on.
    """
    from .chat_session import State

    where = Path(path).expanduser()
    about = conversation(Session.peek(where), where)
    session = Session.load(chat.llm, where)
    tokens = (*session.tokens.tolist(), *about.rest)
    state = State(tuple(about.messages), tokens, about.turns, about.open, about.n_before, tuple(about.joint))
    chat.resume(state, session.contents.n_protected)
    return session


@dataclass(frozen=True)
class Conversation:
    """What the metadata says of a conversation; see chat_session.State."""

    messages: list[dict[str, str]]
    rest: list[int]
    turns: int
    open: str
    n_before: int
    joint: list[int]


def conversation(contents: Contents, path: Path) -> Conversation:
    """Raises InputError where a session holds no conversation, SessionError where it is not as we write it."""
    about = contents.metadata.get(KEY)
    if about is None:
        raise InputError(
            f"{path} was saved from Python and holds no conversation of this command line: load it with "
            "tk.Session.load, or make one with `twinkv-edge compress`"
        )
    try:
        found = Conversation(**about)
        messages_ok = all(
            set(m) == {"role", "content"} and all(isinstance(v, str) for v in m.values()) for m in found.messages
        )
        numbers = [*found.rest, *found.joint, found.turns, found.n_before]
        if not messages_ok or not all(type(n) is int and n >= 0 for n in numbers) or not isinstance(found.open, str):
            raise TypeError("a wrong type")
    except (TypeError, AttributeError) as e:
        raise SessionError(f"the conversation in {path} is not as this version writes it ({e})") from None
    return found


def document_names(contents: Contents) -> list[str]:
    """Names of the documents a conversation was given."""
    names = contents.metadata.get("documents")
    return [str(name) for name in names] if isinstance(names, list) else []


def model_for(contents: Contents, path: Path, options: ModelOptions) -> ModelOptions:
    """The options with the model and the cache that a session needs: the model given, or the one it was made with, or
    the embedded one.

    Raises:
        InputError: --type-k or --type-v is another, or no model was given and the session's is not there.
        SessionError: The model is another.
    """
    from ..models.fingerprint import fingerprint

    options.check()
    kind = contents.cache
    for option, given, ours in (("--type-k", options.type_k, kind.type_k), ("--type-v", options.type_v, kind.type_v)):
        if given.lower() not in ("f16", ours):  # f16 is what the option says when it is left out
            raise InputError(f"{option} is {given}, but {path} holds a cache of {ours}: leave it out")
    then = Path(contents.model.path)
    model = options.path() if options.model is not None or not then.is_file() else then
    if fingerprint(model) != contents.model.fingerprint:
        raise SessionError(
            f"{path} was made with another model, {contents.model.name}: give it with --model (it was at {then})"
        )
    return replace(options, model=model, type_k=kind.type_k, type_v=kind.type_v)


def open_llm(
    contents: Contents, path: Path, options: ModelOptions, answer: AnswerOptions, settings: Compression, room: int
) -> CompressedLlama:
    """Loads the model with a context that takes a session, and `room` more tokens.

    Raises:
        InputError, SessionError: See `model_for`; or --n-ctx is too small.
    """
    options = model_for(contents, path, options)
    least = contents.n_cells + room
    if options.n_ctx is not None and options.n_ctx < contents.n_cells:
        raise InputError(f"--n-ctx is {options.n_ctx}, but {path} holds {contents.n_cells} cells: give {least} or more")
    n_ctx = options.n_ctx or round_up(least)
    return load(options, n_ctx, settings, seed=answer.seed, flash_attn=not contents.cache.v_transposed)


def facts_of(session: Session) -> dict[str, Any]:
    """What `--json` says of a session."""
    contents = session.contents
    return {
        "path": str(session.path),
        "bytes": session.n_bytes,
        "created": contents.created,
        "model": contents.model.name,
        "tokens": session.n_tokens,
        "cells": session.n_cells,
        "documents": document_names(contents),
    }
