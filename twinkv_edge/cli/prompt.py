"""From messages to tokens, by the model's own chat template."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jinja2
import llama_cpp
from llama_cpp import _internals
from llama_cpp.llama_chat_format import Jinja2ChatFormatter

from ..errors import InputError

_MARK = "\u2063twinkv\u2063"  # stands for a text while the template around it is looked at


class Vocabulary:
    """Tokens of a model and their text. Loading it alone takes a fraction of a second, whatever the model's size.

    Raises:
        InputError: The vocabulary cannot be read.
    """

    def __init__(self, model: Any) -> None:
        self._model = model
        self.metadata: dict[str, str] = model.metadata()

    @classmethod
    def load(cls, path: Path) -> Vocabulary:
        params = llama_cpp.llama_model_default_params()
        params.vocab_only = True
        try:
            return cls(_internals.LlamaModel(path_model=str(path), params=params, verbose=False))
        except ValueError as e:
            raise InputError(f"llama.cpp cannot read the vocabulary of {path}") from e

    def tokenize(self, text: str, *, add_bos: bool = False, special: bool = True) -> list[int]:
        """With `special`, the text of control tokens becomes those tokens."""
        tokens: list[int] = self._model.tokenize(text.encode("utf-8", errors="replace"), add_bos, special)
        return tokens

    def piece(self, token: int) -> bytes:
        """The bytes a token stands for; none for control tokens."""
        size = 64
        while True:
            buffer = ctypes.create_string_buffer(size)
            n = llama_cpp.llama_token_to_piece(self._model.vocab, token, buffer, size, 0, False)
            if n >= 0:
                return buffer.raw[:n]
            size = -n

    def ends_answer(self, token: int) -> bool:
        return bool(llama_cpp.llama_vocab_is_eog(self._model.vocab, token))

    def is_control(self, token: int) -> bool:
        return bool(llama_cpp.llama_vocab_is_control(self._model.vocab, token))

    def text(self, token: int) -> str:
        """Name of a token as the vocabulary has it; "" for -1, no token."""
        return str(self._model.token_get_text(token)) if token != -1 else ""

    @property
    def bos(self) -> str:
        return self.text(self._model.token_bos())

    @property
    def eos(self) -> str:
        return self.text(self._model.token_eos())


class ChatPrompt:
    """Prompts of a conversation. The same tokens that `create_chat_completion` makes, except that text that looks like
    a control token, inside a message, stays text.

    Models without a chat template get plain text.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        template = vocabulary.metadata.get("tokenizer.chat_template")
        self.has_template = template is not None
        try:
            self._formatter = Jinja2ChatFormatter(
                template or _PLAIN_TEMPLATE, eos_token=vocabulary.eos, bos_token=vocabulary.bos
            )
        except jinja2.TemplateError as e:
            raise InputError(f"the model's chat template cannot be used: {e}") from e

    def begin(self, messages: list[dict[str, str]]) -> list[int]:
        """Tokens of a conversation whose last message is the user's, up to where the answer begins."""
        text = self._render(messages)
        return self._tokens(text, messages, add_bos=not self.has_template)

    def go_on(self, messages: list[dict[str, str]]) -> list[int]:
        """Tokens from where the last answer ended up to where the next one begins.

        `messages` ends with an answer and the user's next message. What came before is in the cache already, and its
        tokens need not be what the template would make of its text: so only the rest is taken from the template.
        """
        marked = [*messages[:-2], {**messages[-2], "content": _MARK}, messages[-1]]
        _, found, text = self._render(marked).rpartition(_MARK)
        if not found:
            raise InputError("the model's chat template leaves out earlier answers: start a new conversation")
        return self._tokens(text, marked, add_bos=False)

    def ending(self, messages: list[dict[str, str]]) -> list[int]:
        """Tokens that follow the last message, which is the user's, up to where the answer begins."""
        _, found, text = self._render([*messages[:-1], {**messages[-1], "content": _MARK}]).rpartition(_MARK)
        if not found:
            raise InputError("the model's chat template leaves out the user's message")
        return self.vocabulary.tokenize(text)

    def _tokens(self, text: str, messages: list[dict[str, str]], *, add_bos: bool) -> list[int]:
        content = messages[-1]["content"].strip()  # many templates strip it too
        tokenize = self.vocabulary.tokenize
        if not any(map(self.vocabulary.is_control, tokenize(content))) or content not in text:
            return tokenize(text, add_bos=add_bos)
        before, after = text.rsplit(content, 1)
        return [*tokenize(before, add_bos=add_bos), *tokenize(content, special=False), *tokenize(after)]

    def _render(self, messages: list[dict[str, str]]) -> str:
        try:
            return str(self._formatter(messages=messages).prompt)
        except (jinja2.TemplateError, ValueError, TypeError) as e:
            raise InputError(f"the model's chat template does not take this conversation: {e}") from e


_PLAIN_TEMPLATE = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}Answer: {% endif %}"
    "{{ message['content'] }}\n\n{% endfor %}Answer:"
)


def question_about(document: str, question: str) -> dict[str, str]:
    """One message: the document first and the question last, where the recent window protects it."""
    return {"role": "user", "content": f"{document.rstrip()}\n\n{question.strip()}"}


def tail_length(prompt: ChatPrompt, document: str, tokens: list[int]) -> int:
    """How many of a prompt's last tokens come after the document: the question and the template's end."""
    return len(tokens) - common_prefix(tokens, prompt.begin([question_about(document, "")]))


def shared_beginning(tokens: Callable[[str], list[int]]) -> list[int]:
    """The first tokens of a prompt that are the same whatever is asked: `tokens(question)` makes it.

    One token less than that: where the document and the question meet, a token may hold some of both.
    """
    one, other = tokens("Why?"), tokens("No.")
    return one[: max(0, common_prefix(one, other) - 1)]


def common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    """How many first elements two sequences share."""
    for i, (ours, theirs) in enumerate(zip(a, b, strict=False)):
        if ours != theirs:
            return i
    return min(len(a), len(b))
