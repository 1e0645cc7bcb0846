"""Build language models from a configuration: our GPTs, and causal models of transformers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from comrope._checks import nonfinite
from comrope.analysis import rotary_modules
from comrope.experiments.common.errors import UserError
from comrope.experiments.config import Config
from comrope.experiments.tasks.build import model_options
from comrope.experiments.tasks.checks import require_defaults
from comrope.integrations import swap
from comrope.methods import METHODS
from comrope.models.gpt import GPT, create_gpt

__all__ = ["HF", "HostModel", "build_gpt", "build_host_model"]

HF = "hf:"  # prefix of names of models of transformers
SWAPPED = re.compile(r"\.comrope(_values)?\.")  # names of rotations in saved weights
# Fields of the section ``model`` that swap takes; "position" is its "method".
OF_SWAP = ("position", "block_size", "init", "spread", "base", "rotate_values")


def build_gpt(config: Config, vocab_size: int) -> GPT:
    """Return the GPT of a configuration with random weights."""
    try:
        return create_gpt(
            config.model.name,
            vocab_size=vocab_size,
            context=config.language.context,
            **model_options(config.model, GPT),
        )
    except ValueError as error:
        raise UserError(f"model: {error}") from None


class HostModel(nn.Module):
    """A causal model of transformers with the attributes of ``GPT`` that experiments use."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    @property
    def blocks(self) -> Iterable[nn.Module]:
        """The layers: the first list with as many modules as the model has layers."""
        count = self.model.config.get_text_config().num_hidden_layers
        lists = (m for m in self.model.modules() if isinstance(m, nn.ModuleList))
        return next((found for found in lists if len(found) == count), ())

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits (B, T, V) of the token after each of tokens (B, T)."""
        logits: Tensor = self.model(input_ids=tokens, use_cache=False).logits
        return logits


def build_host_model(config: Config, vocab_size: int) -> HostModel:
    """Return the model of ``hf:NAME`` with its weights, and learned rotations swapped in.

    Only safetensors are read, and no code that comes with the model is run.

    Raises:
        UserError: It cannot be loaded, or does not fit the configuration.
    """
    fields = config.model
    name = fields.name.removeprefix(HF)
    others = [field for field in vars(fields) if field not in ("name", *OF_SWAP)]
    require_defaults("model", fields, others, "a model of transformers")
    if fields.position not in METHODS:
        raise UserError(
            f"model.position: expected one of {', '.join(METHODS)} for a model of transformers "
            f"('rope' keeps its own rotation), got {fields.position!r}"
        )
    model = _load(name)
    rows = model.get_input_embeddings().num_embeddings
    if vocab_size > rows:
        raise UserError(
            f"language.tokenizer: {config.language.tokenizer} has {vocab_size} tokens, but the "
            f"weights of {name} have {rows}; expected the tokenizer of the model"
        )
    try:
        swap(
            model,
            fields.position,
            block_size=fields.block_size,
            init=fields.init,
            spread=fields.spread,
            base=fields.base,
            rotate_values=fields.rotate_values,
        )
    except (ValueError, ImportError) as error:
        raise UserError(f"model: {error}") from None
    if config.language.lora_rank:
        model = _with_adapters(model, config.language.lora_rank)
    return HostModel(model)


def _load(name: str) -> Any:
    try:
        import transformers
    except ModuleNotFoundError:
        raise UserError(
            f"model.name: {HF}{name} needs transformers: pip install 'comrope[swap]'"
        ) from None
    try:
        loaded: Any = transformers.AutoModelForCausalLM.from_pretrained(
            name,
            dtype="float32",
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
        )
    except Exception as error:  # of many kinds, from several libraries
        reason = " ".join(str(error).split())[:300]
        raise UserError(f"model.name: {HF}{name} cannot be loaded ({reason})") from None
    model, about = loaded
    rotations = [tensor for tensor in about["unexpected_keys"] if SWAPPED.search(tensor)]
    for problem, tensors in (
        ("has no weights", about["missing_keys"]),
        ("has weights of another shape", [key[0] for key in about["mismatched_keys"]]),
        ("has rotations, which would be lost,", rotations),
        ("has values that are not finite", nonfinite(model.state_dict())),
    ):
        if first := min(tensors, default=None):
            raise UserError(
                f"model.name: {HF}{name} {problem} for {first}; expected a complete model "
                "of transformers"
            )
    return model


def _with_adapters(model: Any, rank: int) -> Any:
    """Return a model of which only adapters (LoRA) and rotations are trained."""
    try:
        from peft import LoraConfig, get_peft_model
    except ModuleNotFoundError:
        raise UserError("language.lora_rank: adapters need peft: pip install peft") from None
    model = get_peft_model(model, LoraConfig(r=rank, target_modules="all-linear"))
    for rotation in rotary_modules(model).values():
        rotation.requires_grad_(True)
    return model
