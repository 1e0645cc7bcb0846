"""Tests mirror the source: the tests of ``package/module.py`` are in ``package/test_module.py``."""

from __future__ import annotations

from pathlib import Path

import pytest

import comrope

SOURCE, TESTS = Path(comrope.__file__).parent, Path(__file__).parent
# Modules, or packages with all in them, that have no test file of their own, and why.
WITHOUT_TESTS = {
    "_checks.py": "by every function that takes arguments: test_errors",
    "_inputs.py": "by every rotation: test_errors and test_rotary",
    "_dtypes.py": "by every op",
    "methods": "all methods have the same tests: methods/test_methods",
    "ops/reference.py": "is what all other ops are compared with",
    "ops/layout.py": "by every op",
    "ops/kernels": "through the ops that launch them: ops/test_*_kernel",
    "models/arguments.py": "by files of saved models: models/test_pretrained",
    "experiments/train.py": "is an old name: test_deprecated",
    "experiments/common/errors.py": "has names only",
}
# Test files of no single module.
ACROSS = {
    "test_compile.py": "rotations under torch.compile",
    "test_errors.py": "bad input",
    "test_extending.py": "how many files an extension touches",
    "test_glossary.py": "old words: tools/glossary.py",
    "test_gpu.py": "what needs a GPU",
    "test_import.py": "what imports load",
    "test_layering.py": "which package may import which",
    "test_mirror.py": "this file",
    "test_offset.py": "scores depend on offsets only: all methods",
    "test_properties.py": "properties of all methods, by random examples",
    "test_readme.py": "the commands and examples of documents",
    "faults": "damaged and hostile files, signals, streams, locales",
    "ops/test_free_kernel.py": "a kernel",
    "ops/test_inverse.py": "inverse rotations: all backends",
    "ops/test_kernel_operators.py": "kernels as operators of torch",
    "ops/test_rotation_kernel.py": "a kernel",
    "ops/test_spectrum_kernel.py": "a kernel",
    "experiments/test_outside.py": "a task and a study outside of the package",
    "experiments/runs/test_kept.py": "the runs in the folder results",
}


def modules() -> list[str]:
    return [
        path.relative_to(SOURCE).as_posix()
        for path in SOURCE.rglob("*.py")
        if path.name not in ("__init__.py", "__main__.py")
    ]


def files_of_tests() -> list[str]:
    return [path.relative_to(TESTS).as_posix() for path in TESTS.rglob("test_*.py")]


def is_mirror(test: str) -> bool:
    """Whether a test file is named after a module, a topic of one, or its package."""
    folder, name = Path(test).parent, Path(test).stem.removeprefix("test_")
    names = {Path(m).stem.lstrip("_") for m in modules() if Path(m).parent == folder}
    topic = any(name.startswith(f"{module}_") for module in names)
    return name in names or topic or name == folder.name


def test_every_module_has_its_tests():
    tests = set(files_of_tests())
    for module in modules():
        path = Path(module)
        if {module, *(parent.as_posix() for parent in path.parents)} & set(WITHOUT_TESTS):
            continue
        test = path.with_name(f"test_{path.name.lstrip('_')}").as_posix()
        assert test in tests, f"{module} has no {test}"


def test_every_test_file_has_its_module():
    for test in files_of_tests():
        across = test in ACROSS or Path(test).parts[0] in ACROSS
        assert is_mirror(test) != across, test


@pytest.mark.parametrize(("listed", "root"), [(WITHOUT_TESTS, SOURCE), (ACROSS, TESTS)])
def test_exceptions_exist(listed, root):
    for name in listed:
        assert (root / name).exists(), name
    if root is SOURCE:
        has_tests = {f"{Path(t).parent}/{Path(t).stem}" for t in files_of_tests()}
        for name in listed:
            path = Path(name)
            assert f"{path.parent}/test_{path.stem.lstrip('_')}" not in has_tests, name
