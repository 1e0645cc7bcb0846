"""Tokenizers of text corpora: bytes, and those of Hugging Face by name or folder."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np

from comrope.experiments.common.errors import UserError

__all__ = ["BYTES", "Bytes", "HubTokenizer", "Tokenizer", "load_tokenizer"]

BYTES = "bytes"


class Tokenizer(Protocol):
    """From text to tokens.

    Attributes:
        identity: A text that differs between tokenizers with other tokens.
        vocab_size: Tokens, including the end of a document.
        end: The token at the end of a document; ``encode`` does not add it.
        dtype: The NumPy type of stored tokens. It need not hold ``end``.
        reads_bytes: Whether any bytes have tokens; otherwise only UTF-8.
    """

    identity: str
    vocab_size: int
    end: int
    dtype: str
    reads_bytes: bool

    def encode(self, pieces: Sequence[bytes]) -> list[np.ndarray]:
        """Return the tokens of every piece of text, of ``dtype``."""
        ...


class Bytes:
    """Every byte is a token; the end of a document is token 256."""

    identity, dtype, reads_bytes = BYTES, "uint8", True
    vocab_size, end = 257, 256

    def encode(self, pieces: Sequence[bytes]) -> list[np.ndarray]:
        return [np.frombuffer(piece, np.uint8) for piece in pieces]


class HubTokenizer:
    """A fast tokenizer of Hugging Face. No code that comes with it is run.

    Args:
        name: Its name, or its folder.

    Raises:
        UserError: It cannot be loaded, or has no end token.
    """

    reads_bytes = False

    def __init__(self, name: str) -> None:
        try:
            from transformers import AutoTokenizer
        except ModuleNotFoundError:
            raise UserError(
                f"language.tokenizer: {name} needs transformers: pip install 'comrope[swap]'"
            ) from None
        try:
            loaded: Any = AutoTokenizer.from_pretrained(name, trust_remote_code=False)
        except Exception as error:  # of many kinds, from several libraries
            reason = " ".join(str(error).split())[:300]
            raise UserError(
                f"language.tokenizer: expected bytes, or the name or folder of a tokenizer of "
                f"Hugging Face; {name!r} cannot be loaded ({reason})"
            ) from None
        if not getattr(loaded, "is_fast", False):
            raise UserError(
                f"language.tokenizer: expected a tokenizer with a tokenizer.json, {name} has none"
            )
        if loaded.eos_token_id is None:
            raise UserError(
                f"language.tokenizer: {name} has no end token, which separates documents; set "
                "eos_token in its tokenizer_config.json"
            )
        self.backend = loaded.backend_tokenizer
        self.backend.no_truncation()
        self.backend.no_padding()
        self.end, self.vocab_size = int(loaded.eos_token_id), len(loaded)
        self.dtype = "uint16" if self.vocab_size <= 2**16 else "uint32"
        digest = hashlib.sha256(self.backend.to_str().encode()).hexdigest()
        self.identity = f"{digest} {self.end} {self.vocab_size}"

    def encode(self, pieces: Sequence[bytes]) -> list[np.ndarray]:
        texts = [piece.decode() for piece in pieces]
        found = self.backend.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(each.ids, self.dtype) for each in found]


@functools.cache
def load_tokenizer(name: str) -> Tokenizer:
    """Return a tokenizer: "bytes", or one of Hugging Face by name or folder."""
    return Bytes() if name == BYTES else HubTokenizer(name)
