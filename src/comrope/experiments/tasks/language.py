"""Causal language modelling: the next byte or token of a text.

Evaluation: all tokens of the validation text, and the end tokens of its documents, are targets once
in every view. A view of length L divides the text into windows of L tokens. A target at position p
of its window has p + 1 tokens of context, so every view scores the same targets with contexts of 1
to L tokens. (The text is cut into stretches of the longest length first. If L does not divide that,
the last window of each stretch is shorter.)

Bits per byte are the bits of all targets, over the bytes of the text. End tokens have no bytes.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

import torch
from accelerate import Accelerator
from torch import Tensor, nn
from torch.utils.data import Dataset

from comrope.experiments.common.distributed import autocast, reshard
from comrope.experiments.common.errors import UserError
from comrope.experiments.config import Config
from comrope.experiments.data.batches import Batch, Validation
from comrope.experiments.data.corpus import Corpus, open_corpus
from comrope.experiments.data.documents import HFDS, Documents, FirstBytes, open_documents
from comrope.experiments.data.sequences import Sequences, Stretches, collate_tokens
from comrope.experiments.data.tokenizers import Tokenizer, load_tokenizer
from comrope.experiments.runs.directory import read_weights
from comrope.experiments.tasks.base import (
    NO_PROBE,
    Advance,
    Coordinates,
    Probe,
    Splits,
    Step,
    Task,
)
from comrope.experiments.tasks.checks import refuse_clips, require_defaults
from comrope.experiments.tasks.init_from import InitReport, fit_weights
from comrope.experiments.tasks.language_models import HF, build_gpt, build_host_model
from comrope.experiments.tasks.token_scores import TokenScores, windows
from comrope.models.gpt import SIZES

__all__ = ["LanguageTask", "TextView"]

OF_DATA = ("name", "root", "train_split", "val_split", "holdout", "workers")
LAYER = re.compile(r"(?:^|\.)(?:layers|h)\.(\d+)\.")
EMBEDDING = re.compile(r"(?:^|\.)(?:embed|embed_tokens|embed_in|wte)\b")


class TextView(NamedTuple):
    """A context length to evaluate at, in tokens."""

    length: int

    @property
    def size(self) -> int:
        """The size of a sample: it is a stretch of text, the same in every view."""
        return 1


class LanguageTask(Task):
    """The next token of a text, by a GPT of comrope or a causal model of transformers."""

    name, headline, unit, samples = "language", "bits_per_byte", "bits per byte", "sequences"
    lower_is_better = True
    embedded = ("stdlib",)

    # Configuration

    def check(self) -> None:
        config, language = self.config, self.config.language
        name, what = config.model.name, "text"
        if name not in SIZES and not name.startswith(HF):
            raise UserError(
                f"model.name: expected one of {', '.join(SIZES)} or {HF}NAME, got {name!r}"
            )
        require_defaults("augment", config.augment, [f.name for f in fields(config.augment)], what)
        others = [f.name for f in fields(config.data) if f.name not in OF_DATA]
        require_defaults("data", config.data, others, what)
        refuse_clips(config, what)
        if config.train.perturbation:
            raise UserError(
                "train.perturbation: expected 0, since positions of tokens are not perturbed, got "
                f"{config.train.perturbation:g}"
            )
        if config.data.holdout >= 1:
            raise UserError(f"data.holdout: expected a share below 1, got {config.data.holdout:g}")
        if not language.lengths or any(length <= 0 for length in language.lengths):
            raise UserError(
                f"language.lengths: expected numbers above 0, got {list(language.lengths)}"
            )
        if language.lora_rank and not name.startswith(HF):
            raise UserError(
                f"language.lora_rank: expected 0 for {name}, since adapters are for models of "
                f"transformers, got {language.lora_rank}"
            )

    def check_evaluation(self, trained: Config) -> None:
        super().check_evaluation(trained)
        for name in ("tokenizer", "context", "lora_rank"):
            mine, theirs = (getattr(c.language, name) for c in (self.config, trained))
            if mine != theirs:
                raise UserError(
                    f"language.{name}: expected {theirs!r} as in training, got {mine!r}"
                )
        if self.config.data.holdout not in (0.0, trained.data.holdout):
            raise UserError(
                f"data.holdout: expected {trained.data.holdout:g}, as in training, or 0, got "
                f"{self.config.data.holdout:g}, which contains training text of the run"
            )

    @property
    def training_view(self) -> TextView:
        return TextView(self.config.language.context)

    def views(self, sizes: Sequence[int] | None = None) -> dict[str, TextView]:
        """Return a view for every context length in tokens, by default ``language.lengths``."""
        found = self._lengths if sizes is None else sizes
        if wrong := [length for length in found if length < 1]:
            raise UserError(f"language.lengths: expected at least one token, got {wrong[0]}")
        return {str(length): TextView(length) for length in found}

    @property
    def _lengths(self) -> list[int]:
        language = self.config.language
        return [round(factor * language.context) for factor in language.lengths]

    @property
    def _longest(self) -> int:
        return max(self.config.language.context, *self._lengths)

    def check_view(self, model: nn.Module, view: TextView) -> None:
        if view.length > self._longest:
            raise UserError(
                f"resolutions: expected at most {self._longest} tokens, the longest of "
                f"language.lengths, got {view.length}"
            )

    # Data

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer of the text."""
        return load_tokenizer(self.config.language.tokenizer)

    def has_data(self) -> bool:
        return super().has_data() or self.config.data.name.startswith(HFDS)

    def open(self, *, train: bool = True) -> Splits:
        data, language = self.config.data, self.config.language
        found = open_documents(
            data.name,
            data.root,
            (data.train_split, data.val_split),
            holdout=data.holdout,
            column=language.text_column,
        )
        validation, limit = found.validation, language.validation_bytes
        if limit:
            validation = FirstBytes(validation, limit)
        about, sequences = {}, None
        if train:
            corpus = open_corpus(found.train, self.tokenizer)
            sequences = self._sequences(corpus)
            about["train"] = _facts(corpus, found.train)
        corpus = open_corpus(validation, self.tokenizer)
        about["validation"] = _facts(corpus, validation)
        stretches = Stretches(corpus, self._longest, about)
        if stretches.targets < stretches.length:
            raise UserError(
                f"language.lengths: expected at most {stretches.targets} tokens, the length of the "
                f"validation text, got {stretches.length}"
            )
        return Splits(sequences, stretches)

    def _sequences(self, corpus: Corpus) -> Sequences:
        language = self.config.language
        if corpus.longest < language.context:
            raise UserError(
                f"language.context: expected at most {corpus.longest}, the tokens of the longest "
                f"training document, got {language.context}"
            )
        return Sequences(corpus, language.context, self.config.train.seed, language.epoch_sequences)

    def dataset(self, source: Any, view: TextView | None) -> Dataset[Any]:
        return source

    def collate(self, items: list[Any]) -> Batch:
        return collate_tokens(items)

    def validation(self, source: Stretches, **share: int) -> Validation:
        """Return this process's share, in batches with the tokens of ``evaluate.batch_size``."""
        found = super().validation(source, **share)
        tokens = found.batch_size * self.config.language.context
        found.batch_size = max(1, tokens // source.length)
        return found

    def describe_data(self, source: Sequences) -> str:
        corpus = source.corpus
        return (
            f"{len(corpus)} training tokens of {corpus.documents} documents, {len(source)} "
            "sequences an epoch"
        )

    def preprocessing(self) -> dict[str, Any]:
        """Return the tokenizer and its end token."""
        return {"tokenizer": self.config.language.tokenizer, "end": self.tokenizer.end}

    # Model

    def create_model(self) -> nn.Module:
        build = build_host_model if self.config.model.name.startswith(HF) else build_gpt
        return build(self.config, self.tokenizer.vocab_size)

    def layer_of(self, name: str) -> int | None:
        """Return the layer of a parameter, as in GPTs or in models of transformers."""
        if EMBEDDING.search(name):
            return 0
        found = LAYER.search(name)
        return super().layer_of(name) if found is None else 1 + int(found[1])

    def coordinates(self, model: nn.Module) -> Coordinates:
        """Return the indices of the tokens of a training sequence, (T, 1)."""
        context = self.config.language.context
        return Coordinates(
            torch.arange(float(context))[:, None],
            scale=torch.ones(1),
            width=torch.full((1,), float(context)),
            unit="token",
            extent=f"sequences of {context} tokens",
        )

    def initialize(self, model: nn.Module) -> InitReport:
        """Load the weights of the run ``train.start_from``, which must have this tokenizer."""
        start = str(self.config.train.start_from)
        config, tensors = read_weights(Path(start), "train.start_from")
        if config.language.tokenizer != self.config.language.tokenizer:
            raise UserError(
                f"language.tokenizer: expected {config.language.tokenizer!r} as in {start}, got "
                f"{self.config.language.tokenizer!r}"
            )
        return fit_weights(model, tensors, start)

    # Training and evaluation

    def loss(self, model: nn.Module, batch: Batch, step: Step) -> Tensor:
        """Return the mean cross-entropy of the next tokens."""
        tokens = batch.inputs.to(step.device, non_blocking=True)
        targets = batch.targets.to(step.device, non_blocking=True)
        logits = model(tokens)
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets.flatten())

    @torch.compiler.set_stance("force_eager")  # every length would be compiled again
    @torch.inference_mode()
    def evaluate(
        self,
        model: nn.Module,
        validation: Validation,
        view: TextView,
        accelerator: Accelerator,
        *,
        probe: Probe = NO_PROBE,
        advance: Advance = lambda samples: None,
    ) -> dict[str, Any]:
        """Return bits per byte, the perplexity of tokens, and bits by position in the context.

        "bits_by_position" are the mean bits of a target, by bins of positions with the edges
        ``position_edges``.
        """
        self.check_probe(model, probe)
        device, source = accelerator.device, validation.source
        scores = TokenScores(view.length, device)
        was_training = model.training
        model.eval()
        for batch in validation.batches(view):
            tokens, targets = (
                windows(part.to(device, non_blocking=True), view.length)
                for part in (batch.inputs, batch.targets)
            )
            with autocast(self.config.train.precision, device):
                logits = model(tokens.clamp_min(0))
            scores.add(logits, targets)
            advance(len(batch.targets) * accelerator.num_processes)
        reshard(model)
        model.train(was_training)
        return {
            **scores.result(accelerator, view, source.corpus.bytes),
            "sequences": len(source) * -(-source.length // view.length),
            "unreadable": 0,
        }

    # Results

    def log_values(self, found: dict[str, Any]) -> dict[str, Any]:
        return {name: found[name] for name in (self.headline, "perplexity")}

    def summarize(self, source: Stretches, by_view: dict[str, Any]) -> dict[str, Any]:
        """Return bits per byte, more metrics in every view ("figures"), and facts ("corpus")."""
        figures = {name: _figures(found) for name, found in by_view.items()}
        return {**super().summarize(source, by_view), "figures": figures, "corpus": source.about}

    def merge(self, result: dict[str, Any], by_view: dict[str, Any]) -> None:
        super().merge(result, by_view)
        result["figures"].update({name: _figures(found) for name, found in by_view.items()})

    def format_value(self, value: float | None) -> str:
        return "–" if value is None else f"{value:.4f} {self.unit}"

    def format_view(self, name: str) -> str:
        return f"{name} tokens" if name.isdigit() else name


def _figures(found: dict[str, Any]) -> dict[str, Any]:
    return {name: found[name] for name in ("perplexity", "bits_by_position")}


def _facts(corpus: Corpus, documents: Documents) -> dict[str, Any]:
    return {
        "title": documents.title,
        "tokens": len(corpus),
        "documents": corpus.documents,
        "bytes": corpus.bytes,
        "digest": corpus.digest,
    }
