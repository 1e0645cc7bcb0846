"""Models of transformers in runs: swapped without a change of outputs, with adapters, refused."""

from __future__ import annotations

import json
import re
import runpy
import shutil
import sys
from pathlib import Path

import pytest
import torch
from helpers import raises_for, relative_error
from safetensors.torch import load_file, save_file
from support.faults import pickled
from support.language_models import build, tokens
from support.runs import same, stop_after, weights
from support.text import make_tokenizer, spoken

from comrope.analysis import rotary_modules
from comrope.experiments.common.errors import UserError
from comrope.experiments.runs.directory import read_result
from comrope.experiments.tasks import task_of
from comrope.experiments.training.evaluate import evaluate_run, load_run
from comrope.experiments.training.train import train

transformers = pytest.importorskip("transformers")
pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    """A tiny Llama that reads bytes, as Hugging Face saves it."""
    folder = tmp_path_factory.mktemp("host") / "llama"
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=257, hidden_size=64, intermediate_size=96, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, rope_parameters={
            "rope_type": "default", "rope_theta": 500.0},
    )  # fmt: skip
    transformers.LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def hosted(host, **fields):
    return spoken(model__name=f"hf:{host}", **fields)


@pytest.mark.parametrize("position", ["rope", "rope-mixed", "comrope-ld", "comrope-torus"])
@pytest.mark.parametrize("values", [False, True])
def test_the_first_outputs_are_those_of_the_stock_model(position, values, host):
    if values and position == "rope":
        return
    config = hosted(host, model__position=position, model__rotate_values=values)
    task = task_of(config)
    model = task.build_model()
    stock = transformers.AutoModelForCausalLM.from_pretrained(host)
    text = torch.randint(257, (2, 20))
    with torch.no_grad():
        assert relative_error(model(text), stock(text).logits) < 1e-5
    assert len(list(task.blocks(model))) == 2
    assert task.position_parameters(model) == sum(
        p.numel() for n, p in model.named_parameters() if ".comrope" in n
    )
    assert len(rotary_modules(model)) == (4 if values else 2)
    assert {task.layer_of(name) for name, _ in model.named_parameters()} == {0, 1, 2, None}


def test_a_run_is_resumed_loaded_and_evaluated(host, tmp_path):
    config = hosted(host, model__rotate_values=True, train__ema=0.9)
    result = train(config, tmp_path / "run", progress=False)
    stop_after(5, config, tmp_path / "parts")
    train(config, tmp_path / "parts", progress=False)
    assert same(weights(tmp_path / "parts"), weights(tmp_path / "run"))
    model = load_run(tmp_path / "run")[1]
    assert same(model.state_dict(), weights(tmp_path / "run"))
    (entry,) = evaluate_run(tmp_path / "run", resolutions=[16], progress=False)
    assert entry["bits_per_byte"] == result["bits_per_byte"]["16"]


def test_adapters_leave_the_weights_alone(host, tmp_path):
    pytest.importorskip("peft")
    config = hosted(host, language__lora_rank=4)
    before = task_of(config).build_model()
    learned = {name for name, p in before.named_parameters() if p.requires_grad}
    assert all("lora" in name or "comrope" in name for name in learned)
    assert any("lora" in name for name in learned)
    assert len([name for name in learned if "comrope" in name]) == 4
    train(config, tmp_path / "run", progress=False)
    start, after = before.state_dict(), weights(tmp_path / "run")
    changed = {name for name in start if not torch.equal(start[name], after[name])}
    assert changed == learned
    assert (
        task_of(config).position_parameters(before)
        == read_result(tmp_path / "run")["position_parameters"]
    )
    (entry,) = evaluate_run(tmp_path / "run", resolutions=[16], progress=False)
    assert entry["bits_per_byte"] == read_result(tmp_path / "run")["bits_per_byte"]["16"]
    with raises_for("language.lora_rank", UserError):
        evaluate_run(tmp_path / "run", overrides={"language.lora_rank": 2}, progress=False)


def test_a_tokenizer_of_another_vocabulary_is_refused(host, tmp_path):
    tokenizer = make_tokenizer(tmp_path / "tokenizer")
    with raises_for("language.tokenizer", UserError, naming="257"):
        task_of(hosted(host, language__tokenizer=str(tokenizer))).build_model()


def remote_code(folder, marker):
    """A model whose configuration asks for code of its own."""
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "mine.Mine", "AutoConfig": "mine.MineConfig"}
    config["model_type"] = "mine"
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "mine.py").write_text(f"import os\nos.mkdir({str(marker)!r})\n")


def only_pickles(folder, marker):
    (folder / "model.safetensors").unlink()
    (folder / "pytorch_model.bin").write_bytes(pickled(marker))


def change(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


NORM, DOWN = "model.norm.weight", "model.layers.1.mlp.down_proj.weight"
FAULTS = {
    "a missing tensor": lambda folder, marker: change(folder, lambda t: t.pop(NORM)),
    "another shape": lambda folder, marker: change(
        folder, lambda t: t.update({NORM: torch.ones(5)})
    ),
    "NaN": lambda folder, marker: change(folder, lambda t: t[DOWN].fill_(torch.nan)),
    "rotations": lambda folder, marker: change(
        folder, lambda t: t.update({"model.layers.0.self_attn.comrope.method.P": torch.ones(2)})
    ),
    "remote code": remote_code,
    "only pickles": only_pickles,
    "no weights": lambda folder, marker: (folder / "model.safetensors").unlink(),
    "cut weights": lambda folder, marker: (folder / "model.safetensors").write_bytes(
        (folder / "model.safetensors").read_bytes()[:5000]
    ),
    "no configuration": lambda folder, marker: (folder / "config.json").unlink(),
    "nothing": lambda folder, marker: shutil.rmtree(folder),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_models_that_cannot_be_loaded_are_refused(fault, host, tmp_path):
    folder, marker = shutil.copytree(host, tmp_path / "copy"), tmp_path / "marker"
    FAULTS[fault](folder, marker)
    with raises_for("model.name", UserError, naming=str(folder)) as raised:
        task_of(hosted(folder)).build_model()
    assert "\n" not in str(raised.value)
    assert not marker.exists()


@pytest.mark.parametrize(
    ("field", "value", "named"),
    [
        ("model.position", "none", "model.position"),
        ("model.position", "nosuch", "model.position"),
        ("model.share_rotations", "heads", "model.share_rotations"),
        ("model.attention_temperature", "log", "model.attention_temperature"),
        ("model.block_size", 7, "model"),
        ("model.init", "nosuch", "model"),
    ],
)
def test_fields_that_do_not_fit_are_refused(field, value, named, host):
    with raises_for(named, UserError):
        task_of(hosted(host).with_overrides({field: value})).build_model()


def test_models_that_swap_does_not_support_are_refused(tmp_path):
    config = transformers.GPT2Config(n_layer=1, n_embd=16, n_head=2, vocab_size=257)
    transformers.GPT2LMHeadModel(config).save_pretrained(tmp_path)
    with raises_for("model", UserError, naming="gpt2"):
        task_of(hosted(tmp_path)).build_model()
    for family in ("phi", "gpt_neox"):  # rotated values where there are fused projections
        folder = tmp_path / family
        build(family).save_pretrained(folder)
        fields = {"model__block_size": 4, "language__tokenizer": "bytes"}
        with raises_for("language.tokenizer", UserError, naming="65"):
            task_of(hosted(folder, **fields)).build_model()


def test_the_layers_of_every_family():
    from comrope.experiments.tasks.language_models import HostModel

    for family in ("llama", "gpt_neox", "gemma"):
        model = HostModel(build(family))
        assert len(list(model.blocks)) == 2
        assert model(tokens()).shape == (2, 24, 65)


@pytest.mark.slow
def test_the_example(tmp_path, monkeypatch, capsys):
    script = Path(__file__).parents[3] / "examples" / "extend_context.py"
    options = {"steps": 40, "more-steps": 10, "context": 32, "to": 128, "tokens": 512,
               "validation-bytes": 3000, "out": tmp_path}  # fmt: skip
    words = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    monkeypatch.setattr(sys, "argv", [str(script), *words])
    runpy.run_path(str(script), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    before, rope, learned = (
        [float(value) for value in re.findall(r"([\d.]+) at", line)]
        for line in lines
        if "bits per byte" in line
    )
    assert before[0] < 6
    for after in (rope, learned):  # they go on from its outputs
        assert after[0] == pytest.approx(before[0], abs=0.3)
