"""Text for tests: files, a tokenizer without a download, runs of seconds."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from pathlib import Path

from comrope.experiments.config import Config, load_recipe

WORDS = ["the", "rotation", "of", "größe", "a", "b\n", "\t", "0123456789", "∑", "def f():\n"]
END = "<end>"


class Texts:
    """Documents in memory, in blocks of some bytes."""

    title = "some texts"

    def __init__(self, texts: Sequence[bytes], block: int = 1000) -> None:
        self.texts, self.block = texts, block

    def __iter__(self) -> Iterator[tuple[str, Iterator[bytes]]]:
        for number, text in enumerate(self.texts):
            starts = range(0, len(text), self.block)
            yield f"text {number}", (text[first : first + self.block] for first in starts)

    def signature(self) -> Iterator[str]:
        yield repr(self.texts)


def prose(size: int, seed: int = 0) -> str:
    """About ``size`` characters of words that follow each other by simple rules."""
    rng, found, length = random.Random(seed), list[str](), 0
    while length < size:
        found.append(WORDS[(len(found) * 3 + rng.choice((0, 0, 0, 1))) % len(WORDS)])
        length += len(found[-1]) + 1
    return " ".join(found)


def make_texts(folder: Path, files: int = 6, size: int = 3000) -> Path:
    """Write a folder of text files."""
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(files):
        (folder / f"{number}.txt").write_text(prose(size + number, number), encoding="utf-8")
    return folder


def make_tokenizer(folder: Path, *, end: str | None = END, size: int = 300) -> Path:
    """Train a byte-pair tokenizer and save it as Hugging Face does."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[] if end is None else [end],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator([prose(5000)], trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end).save_pretrained(folder)
    return folder


def spoken(**overrides: object) -> Config:
    """A run of 12 steps on the standard library, which takes two seconds."""
    fields = {
        "model__name": "gpt_nano",
        "language__context": 16,
        "language__epoch_sequences": 48,
        "language__validation_bytes": 3000,
        "language__lengths": (1.0, 2.0),
        "train__batch_size": 8,
        "train__epochs": 2,
        "train__log_every": 1,
        "train__checkpoint_every": 4,
    }
    named = {name.replace("__", "."): value for name, value in {**fields, **overrides}.items()}
    return load_recipe("language").with_overrides(named)
