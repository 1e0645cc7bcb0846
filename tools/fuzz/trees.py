"""Trees of JSON and YAML: read, change one part, write. A name may appear twice in them.

A tree is a ``Pairs`` of names and trees, a list of trees, or a plain value. A text such as
``@deep:500`` stands for a value that is too large to be written out (see ``LARGE``).
"""

from __future__ import annotations

import json
import math
import random
import re
from collections.abc import Callable, Iterator
from typing import Any

__all__ = ["HOSTILE", "Pairs", "change", "dump", "get", "mutate", "parse_json", "parse_yaml"]

Path = tuple[Any, ...]  # names of entries, and places in lists
MOST = 20_000  # values of a tree
LARGE: dict[str, Callable[[str], str]] = {
    "@deep:": lambda count: "[" * int(count) + "]" * int(count),
    "@nested:": lambda count: '{"a":' * int(count) + "1" + "}" * int(count),
    "@many:": lambda count: f"[{','.join(['1'] * int(count))}]",
    "@text:": lambda count: f'"{"x" * int(count)}"',
    "@digits:": lambda count: "1" + "0" * int(count),
    "@raw:": str,  # the text itself, without quotation marks
}
PLAIN = re.compile(r"[A-Za-z][\w./+ -]*")

HOSTILE: tuple[Any, ...] = (
    None, True, False, 0, 1, 2, -1, 3, 255, 2**31, 2**53 + 1, 2**63, 2**64, -(2**63),
    0.0, -0.0, 0.5, 1.0, 1.5, -1.0, 1e-9, 1e-320, 1e9, 1e30, 1e308, math.nan, math.inf, -math.inf,
    "", " ", "a", "1", "1e-3", "nan", "null", "yes", "../x", "/", "a/b", "a.b", "a\nb", "a\0b",
    "\x1b[31m", "\u202e", "\ufeff", "é", "²", "\ud800", "__class__", "0" * 12, "0" * 64,
    "@digits:400", "@digits:5000", "@text:100000", "@deep:30", "@deep:50", "@deep:5000",
    "@nested:50", "@nested:5000", "@many:1000", "@raw:1e999", "@raw:-1e999", "@raw:\\",
    "@raw:!!python/object/apply:os.getcwd []", "@raw:2026-01-01", "@raw:0x10", "@raw:1_000",
    "@raw:1:30", "@raw:*a", "@raw:&a 1", "@raw:!!binary aGk=", "@raw:!!set {a, b}", "@raw:<<: 1",
    "@raw:.inf", "@raw:[]]", "@raw:~", "@raw:0b1", "@raw:!!float 1", "@raw:! 1",
)  # fmt: skip


class Pairs(list[tuple[Any, Any]]):
    """Names and values in their order; a name may appear twice."""


def parse_json(text: str) -> Any:
    """Return the tree of a JSON text; raise ``ValueError`` if it is none."""
    return json.loads(text, object_pairs_hook=Pairs)


def parse_yaml(text: str) -> Any:
    """Return the tree of a YAML text; raise ``ValueError`` if it is none, or too large."""
    import yaml

    def plain(node: Any, budget: list[int]) -> Any:
        budget[0] -= 1
        if budget[0] < 0:  # aliases may stand for very large trees
            raise ValueError("too large")
        if isinstance(node, yaml.MappingNode):
            return Pairs((plain(k, budget), plain(v, budget)) for k, v in node.value)
        if isinstance(node, yaml.SequenceNode):
            return [plain(each, budget) for each in node.value]
        return yaml.SafeLoader.construct_object(_Scalars(""), node)

    class _Scalars(yaml.SafeLoader):
        pass

    try:
        node = yaml.compose(text, yaml.SafeLoader)
        return None if node is None else plain(node, [MOST])
    except (yaml.YAMLError, RecursionError, TypeError, LookupError) as error:
        raise ValueError(str(error)) from None


def dump(tree: Any, *, yaml: bool = False) -> str:
    """Return the text of a tree: JSON, or YAML that looks like JSON."""
    if isinstance(tree, Pairs):
        return f"{{{', '.join(f'{_name(n)}: {dump(v, yaml=yaml)}' for n, v in tree)}}}"
    if isinstance(tree, (list, tuple)):
        return f"[{', '.join(dump(each, yaml=yaml) for each in tree)}]"
    if isinstance(tree, str):
        for prefix, write in LARGE.items():
            if tree.startswith(prefix):
                return write(tree.removeprefix(prefix))
    if isinstance(tree, float) and yaml and not math.isfinite(tree):
        return ".nan" if math.isnan(tree) else ".inf" if tree > 0 else "-.inf"
    if isinstance(tree, int) and abs(tree) >= 10**4000:
        return "@digits:4001"
    return json.dumps(tree, default=str)


def _name(name: Any) -> str:
    """Return a name; JSON has only texts, YAML quotes other names when they are read again."""
    return json.dumps(name if isinstance(name, str) else dump(name))


def places(tree: Any, path: Path = ()) -> Iterator[Path]:
    """Yield the path of every part of a tree; of parts with the same name, of the last one."""
    yield path
    if isinstance(tree, Pairs):
        for name, value in {str(name): (name, value) for name, value in tree}.values():
            yield from places(value, (*path, name))
    elif isinstance(tree, list):
        for number, value in enumerate(tree):
            yield from places(value, (*path, number))


def get(tree: Any, path: Path) -> Any:
    """Return a part of a tree; raise ``KeyError`` if there is none."""
    for part in path:
        tree = _children(tree)[_index(tree, part)]
    return tree


def change(tree: Any, how: str, path: Path, value: Any = None) -> Any:
    """Return a tree with a change of one part.

    Args:
        tree: The tree, which may be changed itself.
        how: "set" replaces the part, "drop" removes it, "twice" repeats it, "rename" replaces its
            name, "add" appends to it, "wrap" puts it into a list.
        path: The place of the part.
        value: The new value, or the new name.

    Raises:
        KeyError: There is no such part, or no such change.
    """
    if not path:
        return {"set": value, "wrap": [tree]}.get(how, tree)
    parent = get(tree, path[:-1])
    place = _index(parent, path[-1])
    name, own = parent[place] if isinstance(parent, Pairs) else (None, parent[place])

    def put(new: Any) -> None:
        parent[place] = (name, new) if isinstance(parent, Pairs) else new

    if how == "set":
        put(value)
    elif how == "wrap":
        put([own])
    elif how == "drop":
        del parent[place]
    elif how == "twice":
        parent.append(parent[place])
    elif how == "rename" and isinstance(parent, Pairs):
        parent[place] = (value, own)
    elif how == "add" and isinstance(own, list):
        own.append(("more", value) if isinstance(own, Pairs) else value)
    else:
        raise KeyError(how)
    return tree


CHANGES = ("set", "set", "set", "set", "drop", "twice", "rename", "add", "wrap")


def draw_change(tree: Any, rng: random.Random) -> tuple[str, list[Any], Any]:
    """Draw a change of a tree: how, path and value, as ``change`` takes them."""
    how = rng.choice(CHANGES)
    path = rng.choice(list(places(tree)))
    value = _draw_value(tree, path, how, rng)
    return how, list(path), value


def mutate(tree: Any, rng: random.Random) -> Any:
    """Return a tree with one to three random changes."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        how, path, value = draw_change(tree, rng)
        try:
            tree = change(tree, how, tuple(path), value)
        except (KeyError, RecursionError):
            continue
    return tree


def _draw_value(tree: Any, path: Path, how: str, rng: random.Random) -> Any:
    every = list(places(tree))
    if how == "rename":
        names = [place[-1] for place in every if place and isinstance(place[-1], str)]
        return rng.choice([*names, "", "a", "a\nb", "__class__", "base", "x" * 200])
    own = get(tree, path)
    kind = rng.random()
    if kind < 0.2:  # a value from elsewhere
        return get(tree, rng.choice(every))
    if kind < 0.5 and type(own) in (int, float):
        return _near(own, rng)
    if kind < 0.5 and isinstance(own, str) and own:
        place = rng.randrange(len(own))
        return own[:place] + rng.choice(("", "\n", "\0", "é", "x", "/", "..")) + own[place + 1 :]
    return rng.choice(HOSTILE)


def _near(number: float, rng: random.Random) -> Any:
    """Return a number, or a text, that is close to another one."""
    new = rng.choice(
        (lambda n: -n, lambda n: n + 1, lambda n: n - 1, lambda n: n * 2, lambda n: n * 1e6,
         lambda n: n / 3, str, float, lambda n: [n], bool, lambda n: n + 0.5)
    )  # fmt: skip
    try:
        return new(number)
    except (OverflowError, ValueError):
        return 0


def _children(tree: Any) -> list[Any]:
    return [value for _, value in tree] if isinstance(tree, Pairs) else tree


def _index(tree: Any, part: Any) -> int:
    """Return the place of a part; the last one, if its name appears twice."""
    if isinstance(tree, Pairs):
        found = [place for place, (name, _) in enumerate(tree) if name == part]
        if found:
            return found[-1]
    elif isinstance(tree, list) and isinstance(part, int) and 0 <= part < len(tree):
        return part
    raise KeyError(part)
