"""Figures have every method's style, and are written and closed."""

from __future__ import annotations

from matplotlib import pyplot as plt

import comrope
from comrope.experiments.common.figures import MORE_STYLES, STYLES, new_figure, save, style_of


def test_every_method_has_a_style():
    assert all({"color", "marker"} == set(style_of(method)) for method in comrope.METHODS)
    styles = (*STYLES.values(), *MORE_STYLES)
    for key in ("color", "marker"):
        assert len({style[key] for style in styles}) == len(styles)


def test_a_method_without_an_entry_has_a_style_too(monkeypatch):
    for method in comrope.METHODS:
        monkeypatch.delitem(STYLES, method, raising=False)
    first, second, *_ = comrope.METHODS
    assert [style_of(first), style_of(second)] == [*MORE_STYLES[:2]]


def test_a_figure_is_a_grid_of_axes_and_is_closed(tmp_path):
    figure, axes = new_figure(3, 2, width=2.0, height=1.0)
    assert axes.shape == (2, 3)
    assert figure.get_size_inches().tolist() == [6, 2]
    save(figure, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")
    assert figure.number not in plt.get_fignums()
