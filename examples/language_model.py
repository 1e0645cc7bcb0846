"""Fine-tune a language model with LoRA and learned rotations, then fold them into plain RoPE.

    python examples/language_model.py                         # a tiny random Llama, on a CPU
    python examples/language_model.py --model NAME_OR_FOLDER --text my.txt --steps 500 --tokens 2048

Needs transformers and peft. The swap does not change outputs, so the first loss is the stock one.
"""

from __future__ import annotations

import argparse
import inspect
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn

import comrope


def main() -> None:
    options = arguments()
    torch.manual_seed(0)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model, encode = load(options.model, device)
    text = torch.tensor(encode(options.text.read_text() if options.text else own_text()))
    if len(text) <= options.tokens:
        sys.exit(f"--text: expected more than --tokens {options.tokens} tokens, got {len(text)}")
    train, held_out = text[: -len(text) // 10], text[-len(text) // 10 - options.tokens :]
    batch = next(batches(held_out, options, device))
    stock = loss_of(model, batch)

    comrope.swap(model, options.method, block_size=options.block_size)
    swapped = loss_of(model, batch)
    # modules_to_save: train the rotations without LoRA, and save them with the adapters.
    lora = LoraConfig(r=options.rank, target_modules="all-linear", modules_to_save=["comrope"])
    learner: Any = get_peft_model(model, lora)
    learner.print_trainable_parameters()
    rates = {"lr": options.lr, "angle_lr": options.angle_lr}
    groups = comrope.parameter_groups(learner, weight_decay=0.01, **rates)
    optimizer = torch.optim.AdamW(groups)
    print(f"held-out loss: stock {stock:.4f}, swapped {swapped:.4f}")
    stream = batches(train, options, device)
    for step in range(1, options.steps + 1):
        inputs = next(stream)
        learner.train()
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"):
            loss = learner(input_ids=inputs, labels=inputs).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % max(1, options.steps // 5) == 0:
            print(f"step {step:5}: loss {loss.item():.4f}, held out {loss_of(learner, batch):.4f}")

    learner.save_pretrained(options.out)
    plain = learner.merge_and_unload()
    merged = loss_of(plain, batch)
    comrope.fold(plain)
    print(f"held-out loss: adapters merged {merged:.4f}, folded to plain RoPE "
          f"{loss_of(plain, batch):.4f}; adapters and angles: {options.out}")  # fmt: skip


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--model", help="a causal language model, by name or folder")
    parser.add_argument("--text", type=Path, help="training text; by default Python source code")
    parser.add_argument("--method", default="comrope-ld", choices=comrope.METHODS)
    parser.add_argument("--block-size", type=int, default=8)
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--angle-lr", type=float, default=1e-3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--out", type=Path, default=Path("out/language_model"))
    return parser.parse_args()


def load(name: str | None, device: str) -> tuple[nn.Module, Any]:
    """Return a model, and a function from text to its tokens."""
    if name is not None:
        tokenizer = transformers.AutoTokenizer.from_pretrained(name)
        model: Any = transformers.AutoModelForCausalLM.from_pretrained(name)
        return model.to(device), tokenizer.encode
    config = transformers.LlamaConfig(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2,
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config)
    return model.to(device), lambda text: list(text.encode())


def own_text() -> str:
    return inspect.getsource(argparse)


def batches(text: Tensor, options: argparse.Namespace, device: str) -> Any:
    generator = torch.Generator().manual_seed(0)
    window = torch.arange(options.tokens)
    while True:
        starts = torch.randint(len(text) - options.tokens, (options.batch,), generator=generator)
        yield text[starts[:, None] + window].to(device)


@torch.no_grad()
def loss_of(model: nn.Module, inputs: Tensor) -> float:
    model.eval()
    return float(model(input_ids=inputs, labels=inputs).loss)


if __name__ == "__main__":
    main()
