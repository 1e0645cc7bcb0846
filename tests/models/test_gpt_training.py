"""The GPT under autocast, checkpointing and torch.compile; folded, saved and copied."""

from __future__ import annotations

import copy

import pytest
import torch
from helpers import raises_for, relative_error
from support.copies import crossings
from support.gpts import CASES, VARIANTS, VOCABULARY, nano, text
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses.fake_tensor import FakeTensorMode

import comrope
from comrope.analysis import rotary_modules
from comrope.models import GPT, ViT
from comrope.models.export import Exportable
from comrope.models.gpt import POSITIONS


def gradients(model, tokens):
    loss = model(tokens).log_softmax(-1)[..., 0].sum()
    return torch.autograd.grad(loss, [*model.parameters()])


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_gradient_checkpointing_changes_nothing(options):
    model, tokens = nano("comrope-torus", **options).train(), text()
    expected = gradients(model, tokens)
    model.set_grad_checkpointing()
    for a, b in zip(gradients(model, tokens), expected, strict=True):
        assert relative_error(a, b) < 1e-13


@pytest.mark.parametrize("options", VARIANTS.values(), ids=VARIANTS)
def test_autocast_and_low_precision(options):
    model, tokens = nano("comrope-ld", dtype=torch.float32, **options), text()
    expected = model(tokens)
    streams = []
    model.blocks[1].register_forward_pre_hook(lambda _, args: streams.append(args[0].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(tokens)
    assert (logits.dtype, streams) == (torch.bfloat16, [torch.float32])
    assert relative_error(logits.float(), expected) < 0.05
    assert relative_error(model.bfloat16()(tokens).float(), expected) < 0.2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("position", "variant"),
    [
        ("comrope-torus", "values"),
        ("comrope-torus", "halves"),
        ("comrope-ld", "groups"),
        ("liere", "layers"),
        ("rope", "sharper"),
    ],
)
@torch._dynamo.config.patch(recompile_limit=16)
def test_compiled_blocks_train_and_generate(position, variant):
    """In one graph, with few compilations for any lengths."""
    torch._dynamo.reset()
    model = nano(position, **VARIANTS[variant])
    texts = [text(2, length) for length in (20, 5, 9, 30, 13)]
    expected = [gradients(model, tokens) for tokens in texts]
    continued = [model.generate(tokens, 9) for tokens in texts]
    counter = CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.compile(fullgraph=True, backend=counter)
    for tokens, each in zip(texts, expected, strict=True):
        for a, b in zip(gradients(model, tokens), each, strict=True):
            assert relative_error(a, b) < 1e-9
    assert counter.frame_count <= 3
    for tokens, each in zip(texts, continued, strict=True):
        assert torch.equal(model.generate(tokens, 9), each)
    before = counter.frame_count
    model.generate(text(2, 17), 20)
    assert counter.frame_count == before <= 10
    torch._dynamo.reset()


@pytest.mark.parametrize(("position", "options"), CASES)
def test_folding_and_exporting_change_nothing(position, options, tmp_path):
    model, tokens = nano(position, **options), text()
    before = model(tokens).detach()
    constant = Exportable(model)
    assert relative_error(constant(tokens), before) < 1e-12
    assert relative_error(model(tokens), before) == 0  # it is a copy
    if position == "none":
        with raises_for("model"):
            comrope.fold(model)
        return
    names = set(rotary_modules(model))
    comrope.fold(model)
    assert relative_error(model(tokens), before) < 1e-12
    assert {name: rope.name for name, rope in rotary_modules(model).items()} == dict.fromkeys(
        names, "rope-mixed"
    )
    assert torch.equal(model.generate(tokens, 5), model.generate(tokens, 5, use_cache=False))
    model.save_pretrained(tmp_path)
    assert torch.equal(GPT.from_pretrained(tmp_path)(tokens), model(tokens))


@pytest.mark.parametrize(("position", "options"), CASES)
def test_saved_and_loaded(position, options, tmp_path):
    model, tokens = nano(position, **options), text()
    model.save_pretrained(tmp_path)
    loaded = GPT.from_pretrained(tmp_path)
    assert loaded.arguments() == model.arguments()
    assert {n: t.dtype for n, t in loaded.state_dict().items()} == {
        n: t.dtype for n, t in model.state_dict().items()
    }
    assert torch.equal(loaded(tokens), model(tokens))


def test_files_of_other_models(tmp_path):
    nano().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"config\.json: architecture: expected 'ViT'"):
        ViT.from_pretrained(tmp_path)
    with raises_for("num_classes"):
        GPT.from_pretrained(tmp_path, num_classes=3)


def test_a_copy_is_independent():
    for options in VARIANTS.values():
        model, tokens = nano("comrope-ld", **options), text()
        expected, copied = model(tokens), copy.deepcopy(model)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(1)
        assert torch.equal(copied(tokens), expected)


@pytest.mark.parametrize("position", POSITIONS)
def test_nothing_is_copied_between_devices(position):
    backend = {} if position == "none" else {"backend": "spectral"}
    with FakeTensorMode():
        with torch.device("cuda"):
            model = GPT(
                vocab_size=VOCABULARY, context=4, embed_dim=32, num_heads=2, depth=2,
                position=position, attention_temperature="log", **backend,
            )  # fmt: skip
            tokens = torch.zeros(2, 8, dtype=torch.int64)
            cache = model.new_cache(2, 20)

        def forward():
            return model(tokens), model(tokens, cache=cache), model(tokens, cache=cache)

        assert crossings(forward) == []
