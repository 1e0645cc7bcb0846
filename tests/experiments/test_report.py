"""``comrope report``: a document whose tables and figures are those of the runs that are kept."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from comrope.experiments.cli import app
from comrope.experiments.common.errors import UserError
from comrope.experiments.studies.report import MARKED, report
from experiments.results import finish_runs

ROOT = Path(__file__).parent.parent.parent
DOCUMENT = """# Results

Before, <!-- a comment -->.

<!-- reproduce comparison --seeds 2 -->
typed by hand: 99.9
<!-- end -->

Between.

<!-- reproduce video --preset small -->
<!-- end -->

After.
"""


def accuracy(config, resolution: int) -> float:
    return 60.0 + config.train.seed + resolution / 1000


@pytest.fixture
def written(tmp_path) -> Path:
    finish_runs(tmp_path / "results", "comparison", accuracy)
    document = tmp_path / "docs" / "results.md"
    document.parent.mkdir()
    document.write_text(DOCUMENT)
    return document


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_marks_are_filled_and_the_rest_stays(written):
    filled = report(written, written.parent.parent / "results")
    assert filled == ["comparison --seeds 2", "video --preset small"]
    text = written.read_text()
    assert "typed by hand" not in text
    assert "60.6 ± 0.7" in text  # 128 px, of seeds 0 and 1
    assert "Not run yet: `comrope reproduce video --preset small`." in text
    (picture,) = re.findall(r"!\[.*\]\((.*)\)", text)
    assert (written.parent / picture).read_bytes().startswith(b"\x89PNG")
    assert "`comrope reproduce comparison --seeds 2`" in text
    outside = MARKED.sub("", text)
    assert outside == MARKED.sub("", DOCUMENT)


def test_a_second_time_changes_nothing(written):
    out = written.parent.parent / "results"
    report(written, out)
    before = everything(written.parent.parent)
    report(written, out)
    assert everything(written.parent.parent) == before


def test_a_run_that_changes_changes_the_document(written):
    out = written.parent.parent / "results"
    report(written, out)
    before = written.read_text()
    for file in out.rglob("*-s1-*/result.json"):
        file.unlink()
    report(written, out)
    assert written.read_text() != before


def test_a_brief_mark_has_a_short_table_and_its_picture_where_it_says(written):
    out = written.parent.parent / "results"
    mark = "comparison --brief pictures/short.png --seeds 2"
    written.write_text(f"<!-- reproduce {mark} -->\n<!-- end -->\n")
    report(written, out)
    text = written.read_text()
    assert "| APE | 60.6 ± 0.7 |" in text
    assert "`comrope reproduce comparison --seeds 2`, GPU" in text
    assert "(pictures/short.png)" in text
    assert [p.name for p in written.parent.rglob("*.png")] == ["short.png"]
    before = everything(written.parent)
    report(written, out)
    assert everything(written.parent) == before


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("comparision", "name: expected one of .*, got 'comparision'"),
        (
            "comparison --preset huge",
            "preset: expected one of demo, tiny, small, paper, got 'huge'",
        ),
        ("comparison --size 3", "mark: expected --preset, .* got --size"),
        ("comparison --seeds two", "mark: expected a number of --seeds, got 'two'"),
        ("cost", "mark: the study cost has no runs"),
        ("video --brief a.png", "mark: expected --brief of comparison only, got video"),
    ],
)
def test_marks_that_mean_nothing_are_named_and_nothing_is_written(written, mark, message):
    written.write_text(wrong := DOCUMENT.replace("video --preset small", mark))
    with pytest.raises(UserError, match=message):
        report(written, written.parent.parent / "results")
    assert written.read_text() == wrong
    assert not (written.parent / "images").exists()


def test_a_mark_without_an_end_is_refused_and_a_folder_without_runs(written, tmp_path):
    out = written.parent.parent / "results"
    with pytest.raises(UserError, match="out: expected a folder with runs/"):
        report(written, tmp_path / "nowhere")
    assert written.read_text() == DOCUMENT
    first, rest = DOCUMENT.split("<!-- end -->", 1)
    written.write_text(first + rest)
    with pytest.raises(UserError, match="got 2, of which 1 have an end"):
        report(written, out)
    assert written.read_text() == first + rest


def test_documents_without_marks_are_refused(tmp_path):
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match="document: expected a file"):
        report(tmp_path / "none.md", tmp_path)
    (tmp_path / "plain.md").write_text("Nothing to fill.\n")
    with pytest.raises(UserError, match="document: expected marks"):
        report(tmp_path / "plain.md", tmp_path)


def test_the_command(written, capsys):
    app(
        ["report", str(written), "--out", str(written.parent.parent / "results")],
        standalone_mode=False,
    )
    assert capsys.readouterr().out.splitlines()[0] == "comrope reproduce comparison --seeds 2"


def test_our_own_results_are_those_of_the_runs_that_are_kept(tmp_path):
    """The text: pictures depend on the fonts of a machine, so they have to be there."""
    document, ours = tmp_path / "document.md", ROOT / "docs/results.md"
    document.write_text(ours.read_text())
    report(document, ROOT / "results")
    assert document.read_text() == ours.read_text()
    for picture in re.findall(r"!\[.*?\]\(([\w/]*images/.*?)\)", document.read_text()):
        assert (ours.parent / picture).is_file()
