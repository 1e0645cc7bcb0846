"""No code of comrope runs what is not trusted, or keeps what it no longer needs."""

from __future__ import annotations

import ast
import gc
import threading
from pathlib import Path

import psutil
import pytest
import torch
from helpers import make
from support.runs import Memory, trainer_of
from support.toy import curve

import comrope

SOURCE = Path(comrope.__file__).parent
# Calls that execute data, read pickles, start a shell or choose a name that others can guess.
UNSAFE = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.load",
    "torch.jit.load", "pickle.load", "pickle.loads", "marshal.loads", "shelve.open",
    "yaml.unsafe_load", "yaml.full_load", "tempfile.mktemp", "np.load", "numpy.load",
}  # fmt: skip


def unsafe(text: str) -> list[str]:
    """Calls in a module that are not safe, and their lines."""
    found = []
    for node in ast.walk(ast.parse(text)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        options = {k.arg: ast.unparse(k.value) for k in node.keywords}
        # yaml.load is safe with a loader; np.load does not read pickles unless asked to.
        plain_yaml = name == "yaml.load" and len(node.args) + len(node.keywords) < 2
        pickles = options.get("allow_pickle", "False") != "False"
        safe_numpy = name.endswith(".load") and name[:2] in ("np", "nu") and not pickles
        shell = options.get("shell", "False") != "False"
        if (name in UNSAFE and not safe_numpy) or plain_yaml or pickles or shell:
            found.append(f"{node.lineno}: {name}")
    return found


def test_no_code_is_executed_from_data():
    found = {
        path.relative_to(SOURCE).as_posix(): calls
        for path in SOURCE.rglob("*.py")
        if (calls := unsafe(path.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    "text",
    [
        "eval('1')", "torch.load(path)", "pickle.loads(content)", "yaml.load(text)",
        "subprocess.run(command, shell=True)", "np.load(path, allow_pickle=True)",
    ],
)  # fmt: skip
def test_unsafe_calls_are_found(text):
    assert unsafe(text)
    assert not unsafe("model.eval(); np.load(path); yaml.load(text, Loader)")


def test_steps_open_no_files_and_start_no_threads():
    def used() -> tuple[int, int]:
        gc.collect()
        return psutil.Process().num_fds(), threading.active_count()

    class Used(Memory):
        def should_stop(self, step: int) -> bool:
            if step % 50 == 0:
                found.append(used())
            return False

    found: list[tuple[int, int]] = []
    trainer = trainer_of(curve(train__epochs=40), Used())
    trainer.fit()
    trainer.close()
    assert len(found) == 6
    assert len(set(found)) == 1


def test_threads_may_share_a_module(method):
    rope = make(method, dtype=torch.float32)
    q, k = torch.randn(2, 1, 2, 5, rope.head_dim).unbind(0)
    positions = torch.rand(5, 2)

    def once() -> list[torch.Tensor]:
        x = q.clone().requires_grad_()
        outputs = rope(x, k, positions)
        loss = sum((y * y.roll(1, 2)).sum() for y in outputs)
        return [*outputs, *torch.autograd.grad(loss, [x, *rope.parameters()])]

    def run() -> None:
        start.wait()
        for _ in range(20):
            same = zip(once(), expected, strict=True)
            equal.append(all(torch.equal(a, b) for a, b in same))

    expected, equal, start = once(), [], threading.Barrier(4)
    threads = [threading.Thread(target=run) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal == [True] * 80
