"""Extend the context of a language model from 256 to 1,024 tokens, with learned rotations.

    python examples/extend_context.py                 # about ten minutes on one core
    python examples/extend_context.py --model NAME --tokenizer NAME --context 2048 --to 8192

A tiny Llama is trained on the source of Python's standard library first; with --model that step is
left out. Then two copies are fine-tuned at the new length, for as many steps: one keeps its
rotation, in the other comrope.swap put learned rotations, also of values. Both start with the
outputs of the model. Needs transformers.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import transformers

from comrope.experiments.config import load_recipe
from comrope.experiments.training.evaluate import load_run
from comrope.experiments.training.train import train
from comrope.integrations import unswap

# The position encodings of the two copies; "rope" is the model's own rotation.
COPIES: dict[str, dict[str, Any]] = {
    "rope": {"model.position": "rope"},
    "comrope-ld": {"model.position": "comrope-ld", "model.rotate_values": True},
}


def main() -> None:
    options = arguments()
    if options.model is None:
        first = options.out / "llama"
        make_llama(first)
        own = {"model.position": "rope", "optim.lr": 2e-3}
        before = run(options, first, options.out / "short", options.context, options.steps, own)
        model: Any = load_run(options.out / "short")[1]
        name = options.out / f"llama-{options.context}"
        unswap(model.model).save_pretrained(name)
        show(f"trained at {options.context}", before)
    else:
        name = options.model
    for label, fields in COPIES.items():
        after = run(options, name, options.out / label, options.to, options.more_steps, fields)
        show(f"{label}, fine-tuned at {options.to}", after)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", help="a causal language model, by name or folder")
    parser.add_argument("--tokenizer", default="bytes", help="its tokenizer, by name or folder")
    parser.add_argument("--context", type=int, default=256, help="tokens of its training")
    parser.add_argument("--to", type=int, default=1024, help="tokens of the fine-tuning")
    parser.add_argument("--steps", type=int, default=600, help="of the first training")
    parser.add_argument("--more-steps", type=int, default=100, help="of the fine-tuning")
    parser.add_argument("--tokens", type=int, default=4096, help="of a step")
    parser.add_argument("--validation-bytes", type=int, default=131072)
    parser.add_argument("--out", type=Path, default=Path("out/extend_context"))
    return parser.parse_args()


def make_llama(folder: Path) -> None:
    """Save a random Llama of 0.9 million parameters that reads bytes and the end of documents."""
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=128, intermediate_size=384, num_hidden_layers=4,
        num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True,
    )  # fmt: skip
    transformers.set_seed(0)
    transformers.LlamaForCausalLM(config).save_pretrained(folder)


def run(
    options: argparse.Namespace,
    model: Path | str,
    out: Path,
    context: int,
    steps: int,
    fields: dict[str, Any],
) -> dict[str, float]:
    """Train a model in a folder, or resume that; return bits per byte by context length."""
    batch = max(1, options.tokens // context)
    config = load_recipe("language").with_overrides(
        {
            "model.name": f"hf:{model}",
            "language.tokenizer": options.tokenizer,
            "language.context": context,
            "language.epoch_sequences": steps * batch,
            "language.validation_bytes": options.validation_bytes,
            "language.lengths": [n * options.context / context for n in (1, 2, 4, 8)],
            "train.batch_size": batch,
            **fields,
        }
    )
    found: dict[str, float] = train(config, out)["bits_per_byte"]
    return found


def show(label: str, bits: dict[str, float]) -> None:
    values = ", ".join(f"{value:.3f} at {length}" for length, value in bits.items())
    print(f"{label}: bits per byte {values}")


if __name__ == "__main__":
    main()
