"""One file per position encoding: its parameters and the angle matrices that they stand for."""

from __future__ import annotations

from typing import Any

from comrope import _checks
from comrope.methods.base import INITS, Method, has_vanilla_frequencies, joint_angles
from comrope.methods.comrope_ap import ComRoPEAP
from comrope.methods.comrope_ld import ComRoPELD
from comrope.methods.comrope_torus import ComRoPETorus
from comrope.methods.liere import LieRE
from comrope.methods.rope import RoPE
from comrope.methods.rope_mixed import RoPEMixed

__all__ = [
    "INITS",
    "METHODS",
    "Method",
    "create_method",
    "has_vanilla_frequencies",
    "joint_angles",
]

_CLASSES: dict[str, type[Method]] = {
    cls.name: cls for cls in (RoPE, RoPEMixed, LieRE, ComRoPEAP, ComRoPELD, ComRoPETorus)
}
METHODS: tuple[str, ...] = tuple(_CLASSES)


def create_method(name: str, **options: Any) -> Method:
    """The position encoding called ``name``, one of ``METHODS``."""
    return _CLASSES[_checks.one_of("method", name, METHODS)](**options)
