"""Continue sequences of tokens with a causal model.

Shapes: B batch, T tokens, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from comrope import _checks
from comrope._dtypes import compute_dtype
from comrope.models.causal import Cache
from comrope.models.transformer import RotaryTransformer

__all__ = ["CausalModel", "check_tokens"]


class CausalModel(RotaryTransformer):
    """A causal model of tokens: ``model(tokens, cache=..., last_only=True)`` returns logits."""

    vocab_size: int

    def new_cache(self, batch_size: int, max_length: int) -> Cache:
        """Return an empty cache for so many sequences of up to so many tokens."""
        raise NotImplementedError

    @torch.no_grad()
    def generate(
        self,
        tokens: Tensor,
        max_new_tokens: int,
        temperature: float = 0.0,
        top_k: int | None = None,
        generator: torch.Generator | None = None,
        use_cache: bool = True,
        *,
        stop_token: int | None = None,
    ) -> Tensor:
        """Continue sequences of tokens.

        Args:
            tokens: The beginnings (B, T), all of one length.
            max_new_tokens: Tokens to add.
            temperature: 0: the most probable token. Otherwise logits are divided by it, and the
                token is drawn.
            top_k: Draw among the most probable tokens only.
            generator: Of the draws, on the device of the model.
            use_cache: Compute every token once. Without it, the results are the same, but slower.
            stop_token: It ends a sequence. All tokens after it are this token too; if all sequences
                have ended, the result is shorter.

        Returns:
            (B, T + max_new_tokens), the beginnings included.

        Raises:
            TypeError, ValueError: As in ``forward``; or logits are not finite.
        """
        check_tokens(tokens, self.vocab_size, on_any_device=True)
        _checks.integer("max_new_tokens", max_new_tokens, 0)
        _checks.real("temperature", temperature)
        for name, value, most in (
            ("top_k", top_k, self.vocab_size),
            ("stop_token", stop_token, self.vocab_size - 1),
        ):
            if value is not None and _checks.integer(name, value, name == "top_k") > most:
                raise ValueError(f"{name}: expected at most {most}, got {value}")
        batch, length = tokens.shape
        cache = self.new_cache(batch, length + max_new_tokens) if use_cache else None
        ended = tokens.new_zeros((batch, 1), dtype=torch.bool)
        new = tokens
        for _ in range(max_new_tokens):
            logits = self(tokens if cache is None else new, cache=cache, last_only=True)[:, 0]
            logits = logits.to(compute_dtype(logits))
            if not logits.isfinite().all():
                raise ValueError("model: expected finite logits, got NaN or infinity among them")
            new = _draw(logits, temperature, top_k, generator)
            if stop_token is not None:
                new = torch.where(ended, stop_token, new)
                ended |= new == stop_token
            tokens = torch.cat((tokens, new), dim=1)
            if stop_token is not None and bool(ended.all()):
                break
        return tokens


def _draw(
    logits: Tensor, temperature: float, top_k: int | None, generator: torch.Generator | None
) -> Tensor:
    """Return the next tokens (B, 1) from logits (B, V)."""
    if temperature == 0:
        return logits.argmax(-1, keepdim=True)
    if top_k is None:
        shares = (logits / temperature).softmax(-1)
        return torch.multinomial(shares, 1, generator=generator)
    largest = logits.topk(top_k)
    shares = (largest.values / temperature).softmax(-1)
    return largest.indices.gather(-1, torch.multinomial(shares, 1, generator=generator))


def check_tokens(tokens: Tensor, vocab_size: int, *, on_any_device: bool = False) -> None:
    """Raise unless ``tokens`` is (B, T), int64, not empty and in the vocabulary.

    Args:
        tokens: The tokens.
        vocab_size: V.
        on_any_device: Check the values on a GPU too, which synchronizes.
    """
    if not isinstance(tokens, Tensor):
        raise TypeError(
            f"tokens: expected a tensor (B, T), sequences of one length, got "
            f"{type(tokens).__name__}; for other lengths make one call per length"
        )
    if tokens.dtype != torch.int64:
        raise TypeError(f"tokens: expected int64, got {tokens.dtype}; convert with .long()")
    if tokens.ndim != 2 or 0 in tokens.shape:
        raise ValueError(
            f"tokens: expected shape (B, T) with at least one token, got {tuple(tokens.shape)}"
        )
    if torch.compiler.is_compiling() or not (on_any_device or tokens.device.type == "cpu"):
        return
    try:
        least, most = (int(x) for x in tokens.aminmax())
    except RuntimeError:  # no values: meta or fake tensors
        return
    if not 0 <= least <= most < vocab_size:
        wrong = least if least < 0 else most
        raise ValueError(f"tokens: expected 0 to {vocab_size - 1}, got {wrong}")
