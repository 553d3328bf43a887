"""Text to token ids and back through the policy's own tokenizer files.

Reads tokenizer.json with the `tokenizers` library alone: importing transformers takes seconds, and it is only needed
for a chat template.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer


class TokenizerError(ValueError):
    """The folder holds no tokenizer this stage can read, or a text has no tokens in it."""


class PolicyTokenizer:
    """Args: folder: a HF folder with tokenizer.json (a "fast" tokenizer). Raises TokenizerError."""

    def __init__(self, folder: Path) -> None:
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise TokenizerError(f"{path} does not exist; set tokenizer_path to a folder with a fast tokenizer")
        self.folder = folder
        self._tokenizer = Tokenizer.from_file(str(path))
        self._chat: Any = None

    def encode(self, text: str) -> list[int]:
        """Ids of `text` with the special tokens that the tokenizer itself puts around it (a BOS, for some)."""
        ids: list[int] = self._tokenizer.encode(text).ids
        if not ids:
            raise TokenizerError(f"the prompt {text!r} has no tokens")
        return ids

    def encode_chat(self, message: str) -> list[int]:
        """Ids of one user message through the chat template, ready for the assistant's turn. Raises TokenizerError."""
        if self._chat is None:
            from transformers import AutoTokenizer

            self._chat = AutoTokenizer.from_pretrained(self.folder, local_files_only=True)
        if not self._chat.chat_template:
            raise TokenizerError(f"{self.folder} has no chat template; set task.params.chat=false")
        text = self._chat.apply_chat_template(
            [{"role": "user", "content": message}], tokenize=False, add_generation_prompt=True
        )
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False).ids
        return ids

    def decode(self, completions: list[list[int]]) -> list[str]:
        """Texts without special tokens."""
        texts: list[str] = self._tokenizer.decode_batch(completions, skip_special_tokens=True)
        return texts
