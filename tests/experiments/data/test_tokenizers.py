"""Tokenizers: bytes, and one of Hugging Face that is made here."""

from __future__ import annotations

import json
import sys

import numpy as np
import pytest
from helpers import raises_for
from support.text import END, make_tokenizer, prose

from comrope.experiments.common.errors import UserError
from comrope.experiments.data.tokenizers import Bytes, HubTokenizer, load_tokenizer


def test_every_byte_is_a_token():
    tokenizer = load_tokenizer("bytes")
    text = bytes(range(256))
    (found,) = tokenizer.encode([text])
    assert found.tobytes() == text
    assert found.dtype == tokenizer.dtype
    assert tokenizer.end == tokenizer.vocab_size - 1 == 256
    assert isinstance(tokenizer, Bytes)
    assert load_tokenizer("bytes") is tokenizer


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    pytest.importorskip("transformers")
    return make_tokenizer(tmp_path_factory.mktemp("tokenizer"))


def test_a_tokenizer_of_hugging_face(folder):
    tokenizer = load_tokenizer(str(folder))
    texts = [prose(500, seed) for seed in range(3)]
    found = tokenizer.encode([text.encode() for text in texts])
    assert [tokenizer.backend.decode(each.tolist()) for each in found] == texts
    assert all(len(each) < len(text) / 2 for each, text in zip(found, texts, strict=True))
    assert all(each.dtype == np.uint16 for each in found)
    assert max(each.max() for each in found) < tokenizer.vocab_size
    assert tokenizer.backend.id_to_token(tokenizer.end) == END
    assert not any((each == tokenizer.end).any() for each in found)
    assert not tokenizer.reads_bytes


def test_other_tokens_have_another_identity(folder, tmp_path):
    same = HubTokenizer(str(make_tokenizer(tmp_path / "same")))
    other = HubTokenizer(str(make_tokenizer(tmp_path / "other", size=290)))
    identity = HubTokenizer(str(folder)).identity
    assert same.identity == identity
    assert other.identity != identity


def test_truncation_in_the_files_has_no_effect(tmp_path):
    """Tokenizers of models are often saved with it."""
    folder = make_tokenizer(tmp_path)
    whole = HubTokenizer(str(folder)).encode([b"a b a b a b"])[0]
    path = folder / "tokenizer.json"
    content = json.loads(path.read_text())
    content["truncation"] = {
        "direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0
    }  # fmt: skip
    path.write_text(json.dumps(content))
    assert np.array_equal(HubTokenizer(str(folder)).encode([b"a b a b a b"])[0], whole)


def test_tokenizers_that_cannot_be_used(tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    with raises_for("language.tokenizer", UserError, naming=str(tmp_path)):
        HubTokenizer(str(tmp_path))
    make_tokenizer(tmp_path, end=None)
    with raises_for("language.tokenizer", UserError, naming="eos_token"):
        HubTokenizer(str(tmp_path))
    (tmp_path / "tokenizer.json").write_text("{")
    with raises_for("language.tokenizer", UserError, naming=str(tmp_path)) as raised:
        HubTokenizer(str(tmp_path))
    assert "\n" not in str(raised.value)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with raises_for("language.tokenizer", UserError, naming="pip install"):
        HubTokenizer("gpt2")
