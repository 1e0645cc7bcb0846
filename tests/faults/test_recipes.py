"""Recipes that are no recipes, or take much to read: refused in one line that names the file."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.faults import raises_line, refused

import comrope
from comrope.experiments.config import CONFIG, load_recipe, read_config, run_id

LEVELS = "\n".join(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}, *a{n - 1}]" for n in range(1, 9))
BOMB = f"a0: &a0 [x, x, x]\n{LEVELS}\noptim: {{betas: *a8}}\n"
MERGED = "a: &a {x: 1}\n" + "\n".join(f"b{n}: {{<<: [*a, *a]}}" for n in range(20))
# What the file contains, and what the line names besides the file.
FILES = {
    # sizes
    "3,000 open brackets": (b"model: " + b"[" * 3000, "line 1"),
    "100,000 open brackets": (b"model: " + b"[" * 100_000, "line 1"),
    "100,000 open braces": (b"model: " + b"{a: " * 60_000, "line 1"),
    "100,000 dashes": (b"- " * 100_000, "line 1"),
    "deep and closed": (b"model: {base: " + b"[" * 50 + b"]" * 50 + b"}", "line 1"),
    "3.3 million entries": (b"evaluate: {resolutions: [" + b"1," * 3_300_000 + b"]}", "bytes"),
    "100,000 entries": (b"evaluate: {resolutions: [" + b"1," * 100_000 + b"]}", "10000"),
    "1,000 entries": (b"evaluate: {resolutions: [" + b"1," * 1000 + b"]}", "evaluate.resolutions"),
    "100,000 sections": (b"".join(b"a%d: 1\n" % n for n in range(20_000)), "10000"),
    "a bomb of aliases": (BOMB.encode(), "aliases"),
    "a bomb of merged names": (MERGED.encode(), "aliases"),
    "10 MB": (b"#" * 10_000_000, "bytes"),
    "an integer of 5,000 digits": (b"train: {epochs: " + b"9" * 5000 + b"}", "train.epochs"),
    "a float of 5,000 digits": (b"optim: {lr: " + b"9" * 5000 + b"}", "optim.lr"),
    "a name of 1,000 characters": (b"train: {" + b"a" * 1000 + b": 1}", "no such field"),
    "a name of 100,000 characters": (b"train: {" + b"a" * 100_000 + b": 1}", "line 1"),
    "a section of 100,000 characters": (b"a" * 100_000 + b": {b: 1}", "YAML"),
    # syntax
    "an open bracket": (b"train:\n  epochs: [1\n", "line 3, column 1"),
    "a tab": (b"train:\n\tepochs: 1\n", "line 2"),
    "two colons": (b"train: epochs: 1\n", "line 1, column 14"),
    "an open quote": (b"data:\n  root: 'a\n", "line 3"),
    "an unknown alias": (b"train: *a\n", "line 1"),
    "two documents": (b"--- {}\n--- {}\n", "line 2"),
    "a directive": (b"%x\ntrain: {}\n", "line 1"),
    "a zero byte": (b"train: {epochs: 1\x00}", "YAML"),
    "an escape": (b"train: {epochs: \x1b[31m1}", "YAML"),
    "half of a surrogate pair": (b'data: {root: "\\ud800"}', "line 1"),
    # encodings
    "Latin-1": ("# é\n".encode("latin-1"), "UTF-8"),
    "UTF-16": ("train: {epochs: 1}".encode("utf-16"), "UTF-8"),
    "UTF-16 without a mark": ("train: {epochs: 1}".encode("utf-16-le"), "YAML"),
    "a gzip": (b"\x1f\x8b\x08\x00\x00", "UTF-8"),
    # tags and names
    "a call": (b"train: !!python/object/apply:os.system [id]", "line 1"),
    "a tag of its own": (b"train: !x {epochs: 1}", "line 1"),
    "a binary": (b"data: {root: !!binary aGVsbG8=}", "line 1"),
    "a field twice": (b"train:\n  epochs: 1\n  epochs: 2\n", "line 3, column 3"),
    "a section twice": (b"train: {epochs: 1}\ntrain: {seed: 1}\n", "line 2, column 1"),
    "a field twice, quoted": (b"train:\n  epochs: 1\n  'epochs': 2\n", "line 3, column 3"),
    "a list as a name": (b"? [a]\n: 1\n", "line 1"),
    "an alias of itself": (b"train: &a [*a]\n", "train"),
    # other forms
    "a list": (b"- 1\n", "sections"),
    "a number": (b"3\n", "sections"),
    "false": (b"false\n", "sections"),
    "an empty list": (b"[]\n", "sections"),
    "a text": (b"digits\n", "sections"),
    "a number as a section": (b"3: {epochs: 1}\n", "sections"),
    "null as a section": (b"null: {epochs: 1}\n", "sections"),
    "a dotted field": (b"train.epochs: 3\n", "train.epochs"),
    "a dotted section": (b"model.x: {a: 1}\n", "model.x"),
    "a section that is a list": (b"train: [1]\n", "train: expected fields"),
    "a section that is null": (b"train:\n", "train: expected fields"),
    "a field of a number": (b"train: {1: 2}\n", "train.'1'"),
    "a date": (b"train: {epochs: 2001-99-99}\n", "train.epochs"),
    "a number of base 60": (b"train: {epochs: 1:30}\n", "train.epochs"),
    "a number of base 8": (b"train: {epochs: 010}\n", "train.epochs"),
    "options in a list": (b"options: {a: [1]}\n", "options.a"),
    "options in options": (b"options: {a: {b: 1}}\n", "options.a"),
    "options that are not finite": (b"options: {a: .nan}\n", "options.a"),
    "a schema in words": (b"schema: new\n", "schema"),
    "a schema that is true": (b"schema: true\n", "schema"),
    "a schema of the future": (b"schema: 99\n", "schema"),
    "an integer as schema": (b"schema: " + b"9" * 4400 + b"\n", "schema"),
    # bases
    "a base that is a list": (b"base: [digits]\n", "base"),
    "a base that is a number": (b"base: 3\n", "base"),
    "a base that is itself": (b"base: recipe.yaml\n", "itself"),
    "a base that is itself, by another path": (b"base: ./../{FOLDER}/recipe.yaml\n", "itself"),
    "a base that does not exist": (b"base: none.yaml\n", "none.yaml"),
}


@pytest.mark.parametrize("how", FILES)
def test_a_file_that_is_no_recipe_is_one_line(how, tmp_path):
    content, named = FILES[how]
    path = tmp_path / "recipe.yaml"
    path.write_bytes(content.replace(b"{FOLDER}", tmp_path.name.encode()))
    shown = named if how == "a base that does not exist" else path
    line = refused(shown, "recipes", path)
    assert named in line
    assert len(line) < 600 + len(str(path))


def test_a_chain_of_bases_is_limited(tmp_path):
    for number in range(12):
        base = "digits" if number == 11 else f"{number + 1}.yaml"
        (tmp_path / f"{number}.yaml").write_text(f"base: {base}\n")
    assert load_recipe(tmp_path / "3.yaml").data.name == "digits"
    with raises_line(tmp_path / "0.yaml", "bases"):
        load_recipe(tmp_path / "0.yaml")
    (tmp_path / "11.yaml").write_text("base: 10.yaml\n")
    with raises_line(tmp_path / "10.yaml", "itself"):
        load_recipe(tmp_path / "9.yaml")


def test_only_files_are_read(tmp_path):
    path = tmp_path / "recipe.yaml"
    with raises_line(path, "does not exist"):
        load_recipe(path)
    path.mkdir()
    for make in (lambda: os.mkfifo(path), lambda: path.symlink_to("/dev/zero")):
        with raises_line(path, "file"):
            load_recipe(path)
        path.rmdir() if path.is_dir() else path.unlink()
        make()
    with raises_line(path, "file"):
        load_recipe(path)
    path.unlink()
    path.symlink_to(path.name)
    with raises_line(path):
        load_recipe(path)
    for name in ("a\0b.yaml", "a\0b", "X" * 5000):
        with raises_line("recipe"):
            load_recipe(name)


@pytest.mark.parametrize("content", [b"\xef\xbb\xbfbase: digits\n", "# é\nbase: digits\n".encode()])
def test_utf_8_is_read(content, tmp_path):
    (tmp_path / "é.yml").write_bytes(content)
    assert load_recipe(tmp_path / "é.yml") == load_recipe("digits")


def test_anchors_and_merged_names_may_be_used(tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text("train: &a {epochs: 3, seed: 1}\noptions: {<<: *a, seed: 2}\n")
    assert load_recipe(path).options == {"epochs": 3, "seed": 2}


@pytest.mark.parametrize("elsewhere", [False, True])
def test_runs_that_start_from_each_other_have_no_identity(elsewhere, tmp_path):
    names = [str(Path("x", "a")) if elsewhere else "a", "b"]
    folders = [tmp_path / name for name in names]
    for folder, other in zip(folders, reversed(folders), strict=True):
        folder.mkdir(parents=True)
        (folder / CONFIG).write_text(f"base: digits\ntrain: {{start_from: '{other}'}}\n")
    for folder in folders:
        with raises_line(CONFIG, "train.start_from"):
            run_id(*read_config(folder))


@pytest.mark.parametrize("parent", ["[a]", "{a: b}", "3", "''", "a" * 1000])
def test_a_stored_parent_of_another_form_is_named(parent, tmp_path):
    (tmp_path / CONFIG).write_text(f"base: digits\nparent: {parent}\n")
    with raises_line(tmp_path / CONFIG, "parent"):
        read_config(tmp_path)


# Locales

ASCII = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}


def in_ascii(*arguments: str, folder: Path, code: int = 0) -> str:
    command = [sys.executable, "-m", "comrope", *arguments]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | ASCII, capture_output=True, check=False, timeout=600
    )
    assert done.returncode == code, done.stderr[-2000:]
    return (done.stdout if code == 0 else done.stderr).decode("utf-8")


def test_a_recipe_is_utf_8_in_any_locale(tmp_path):
    (tmp_path / "é.yaml").write_text("# é\nbase: digits\noptions: {a: é}\n", encoding="utf-8")
    assert "epochs: 12" in in_ascii("recipes", "é.yaml", folder=tmp_path)
    line = in_ascii("recipes", "ü.yaml", folder=tmp_path, code=2)
    assert line.count("\n") == 1
    assert line.startswith("comrope: recipe")


@pytest.mark.slow
def test_a_folder_may_have_any_name_in_any_locale(tmp_path):
    fields = ("model.name=vit_nano_patch4_12", "train.epochs=1", "evaluate.resolutions=12")
    printed = in_ascii("train", "digits", *fields, "--out", "é/run", "--quiet", folder=tmp_path)
    assert (tmp_path / "é" / "run" / "result.json").is_file()
    assert "12 px" in printed
    printed = in_ascii("eval", "é/run", "--offsets", "0.5", "--quiet", folder=tmp_path)
    assert "moved by" in printed


def calls(file: Path) -> Iterator[tuple[ast.Call, str]]:
    """Calls of methods in a file, and the names of the methods."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            yield node, node.func.attr


def test_no_text_file_has_the_encoding_of_the_locale():
    """Files are read and written as UTF-8, or as bytes."""
    found = 0
    for file in Path(comrope.__file__).parent.rglob("*.py"):
        for call, name in calls(file):
            mode = call.args[0].value if call.args and isinstance(call.args[0], ast.Constant) else 0
            if name in ("read_text", "write_text") or (name == "open" and mode in ("r", "w", "a")):
                helper = ast.unparse(call.func) == "_files.write_text"
                found += 1
                encoded = any(keyword.arg == "encoding" for keyword in call.keywords)
                assert encoded or helper, f"{file}:{call.lineno}"
    assert found > 10
