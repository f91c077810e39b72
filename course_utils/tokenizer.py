"""Text to token ids and back, and a conversation to the text that the model was trained on."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from torch import Tensor

from course_utils.model_files import CheckpointError, read_json

# Tokens that end an answer in the models of the families, whether or not the model's files say so.
END_TOKENS = ("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|end_of_text|>", "</s>")


class Tokenizer:
    """Text to token ids and back, from a folder's ``tokenizer.json``, with the model's chat template.

    eos_ids: frozenset of ids at which the model has finished. Raises CheckpointError for a folder without the file.
    """

    def __init__(self, folder: str | os.PathLike) -> None:
        from tokenizers import Tokenizer as Backend

        folder = Path(folder)
        if not (folder / "tokenizer.json").is_file():
            raise CheckpointError(
                f"{folder} has no tokenizer.json; write one with transformers: "
                "AutoTokenizer.from_pretrained(folder).save_pretrained(folder)"
            )
        self._backend = Backend.from_file(str(folder / "tokenizer.json"))
        self._settings = read_json(folder / "tokenizer_config.json", {})
        self._template = _chat_template(folder, self._settings)
        self.eos_ids = self._find_eos(folder)
        self._anchor = self._backend.encode("a", add_special_tokens=False).ids[-1:]

    @property
    def vocab_size(self) -> int:
        """Number of tokens, added ones included (a model's embedding may have more rows than that)."""
        return self._backend.get_vocab_size(with_added_tokens=True)

    def get_vocab(self) -> dict[str, int]:
        """Token in the tokenizer's own spelling (a leading space may be written Ġ) -> id."""
        return self._backend.get_vocab(with_added_tokens=True)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Token ids of the text; with the start token where the model's own tokenizer adds one (SmolLM2: none)."""
        return self._backend.encode(text, add_special_tokens=add_special_tokens).ids

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of the ids (a list, or a 1-D tensor); an incomplete character becomes U+FFFD."""
        return self._backend.decode(_as_ints(ids), skip_special_tokens=skip_special_tokens)

    def pieces(self, ids: Iterable[int]) -> list[str]:
        """The text of each token by itself; a token with part of a character only shows as U+FFFD."""
        # Behind another token, because some decoders drop a space at the start of a text.
        before = self._backend.decode(self._anchor)
        return [self.decode([*self._anchor, token])[len(before) :] for token in _as_ints(ids)]

    def chat(self, messages: str | list[dict], system: str | None = None) -> list[int]:
        """Token ids of a conversation up to where the assistant's answer starts.

        messages: the user's one message, or a list of {"role": …, "content": …}. system: instructions put before it.
        Raises ValueError where the model has no chat template, or two system messages are given.
        """
        return self.encode(self.chat_text(messages, system), add_special_tokens=False)

    def chat_text(self, messages: str | list[dict], system: str | None = None) -> str:
        """The text that :meth:`chat` encodes."""
        if self._template is None:
            raise ValueError(
                "this model has no chat template; use encode(text), or an instruct version of the model"
            )
        if isinstance(messages, str):
            messages = [{"role": "user", "content": messages}]
        if system is not None:
            if messages and messages[0].get("role") == "system":
                raise ValueError("a system message is in messages already; leave out system=")
            messages = [{"role": "system", "content": system}, *messages]
        return _render(self._template, messages, self._special_tokens())

    def _special_tokens(self) -> dict[str, str]:
        named = {key: value for key, value in self._settings.items() if key.endswith("_token")}
        return {
            key: value["content"] if isinstance(value, dict) else value
            for key, value in named.items()
            if isinstance(value, str) or (isinstance(value, dict) and "content" in value)
        }

    def _find_eos(self, folder: Path) -> frozenset[int]:
        ids: set[int] = set()
        for file in ("generation_config.json", "config.json"):
            value = read_json(folder / file, {}).get("eos_token_id")
            ids.update([value] if isinstance(value, int) else value or ())
        for token in (self._special_tokens().get("eos_token"), *END_TOKENS):
            found = self._backend.token_to_id(token) if token else None
            if found is not None:
                ids.add(found)
        return frozenset(ids)


def _as_ints(ids: Iterable[int]) -> list[int]:
    return ids.tolist() if isinstance(ids, Tensor) else [int(token) for token in ids]


def _chat_template(folder: Path, settings: Mapping) -> str | None:
    file = folder / "chat_template.jinja"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    template = settings.get("chat_template")
    if isinstance(template, list):  # several, by name
        template = {each["name"]: each["template"] for each in template}.get("default")
    return template


def _render(template: str, messages: list[dict], special_tokens: Mapping[str, str]) -> str:
    """The conversation as text, by the rules of transformers' chat templates (templates are foreign code: sandbox)."""
    from datetime import datetime

    from jinja2.exceptions import TemplateError
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    def raise_exception(message: str) -> None:
        raise ValueError(f"the model's chat template refuses this conversation: {message}")

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.filters["tojson"] = lambda value, **options: json.dumps(
        value, **{"ensure_ascii": False, **options}
    )
    try:
        compiled = environment.from_string(template)
        return compiled.render(messages=messages, add_generation_prompt=True, **special_tokens)
    except TemplateError as error:
        raise ValueError(f"the model's chat template failed: {error}") from error
