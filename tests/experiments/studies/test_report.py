"""``comrope report``: the tables and figures of documents are those of kept results."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from support.studies import finish_runs

from comrope.experiments.cli import app
from comrope.experiments.common.errors import UserError
from comrope.experiments.studies.report import MARK, fill, report

ROOT = Path(__file__).parent.parent.parent.parent
DOCUMENTS = ("README.md", "docs/fast.md", "docs/reproduce.md", "docs/results.md", "docs/theory.md")
DOCUMENT = """# Results

Before, <!-- a comment -->.

<!-- reproduce perturbation --preset small --seeds 2 -->
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
    finish_runs(tmp_path / "results", "perturbation", accuracy)
    document = tmp_path / "docs" / "results.md"
    document.parent.mkdir()
    document.write_text(DOCUMENT)
    return document


def everything(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_marks_are_filled_and_the_rest_stays(written):
    filled = report([written], written.parent.parent / "results")
    assert filled == [
        "reproduce perturbation --preset small --seeds 2",
        "reproduce video --preset small",
    ]
    text = written.read_text()
    assert "typed by hand" not in text
    assert "60.6 ± 0.7" in text  # 128 px, of seeds 0 and 1
    assert "Not run yet: `comrope reproduce video --preset small`." in text
    (picture,) = re.findall(r"!\[.*\]\((.*)\)", text)
    assert (written.parent / picture).read_bytes().startswith(b"\x89PNG")
    assert "`comrope reproduce perturbation --preset small --seeds 2`" in text
    outside = MARK.sub("", text)
    assert outside == MARK.sub("", DOCUMENT)


def test_a_second_time_changes_nothing(written):
    out = written.parent.parent / "results"
    report([written], out)
    before = everything(written.parent.parent)
    report([written], out)
    assert everything(written.parent.parent) == before


def test_a_run_that_changes_changes_the_document(written):
    out = written.parent.parent / "results"
    before, _ = fill(written, out)
    for file in out.rglob("*-s1-*/result.json"):
        file.unlink()
    assert fill(written, out)[0] != before


def test_a_brief_mark_has_a_short_table_and_its_picture_where_it_says(written):
    out = written.parent.parent / "results"
    mark = "comparison --preset small --brief pictures/short.png --seeds 2"
    finish_runs(out, "comparison", accuracy, methods=("ape", "comrope-ld"))
    written.write_text(f"<!-- reproduce {mark} -->\n<!-- end -->\n")
    report([written], out)
    text = written.read_text()
    assert "| APE | 60.6 ± 0.7 |" in text
    assert "`comrope reproduce comparison --preset small --seeds 2`, GPU" in text
    assert "(pictures/short.png)" in text
    assert [p.name for p in written.parent.rglob("*.png")] == ["short.png"]
    before = everything(written.parent)
    report([written], out)
    assert everything(written.parent) == before


@pytest.mark.parametrize(
    ("mark", "message"),
    [
        ("reproduce comparision", "^name: .*did you mean comparison"),
        ("reproduce comparison --preset huge", "^preset: "),
        ("reproduce comparison --size 3", "^mark: .*--size"),
        ("reproduce comparison --seeds two", "^mark: --seeds: "),
        ("reproduce cost", "^mark: .*--from FILE"),
        ("reproduce cost --from none.json", "^mark: --from: "),
        ("reproduce video --brief a.png", "^mark: --brief: "),
        ("bench vit", "^mark: .*--from FILE"),
        ("bench vit --preset small", "^mark: .*--preset"),
    ],
)
def test_wrong_marks_are_named_and_nothing_is_written(written, mark, message):
    written.write_text(wrong := DOCUMENT.replace("reproduce video --preset small", mark))
    with pytest.raises(UserError, match=message):
        report([written], written.parent.parent / "results")
    assert written.read_text() == wrong
    assert not (written.parent / "images").exists()


def test_a_mark_without_an_end_is_refused_and_a_folder_without_runs(written, tmp_path):
    out = written.parent.parent / "results"
    with pytest.raises(UserError, match=r"^known: "):
        report([written], tmp_path / "nowhere")
    assert written.read_text() == DOCUMENT
    first, rest = DOCUMENT.split("<!-- end -->", 1)
    written.write_text(first + rest)
    with pytest.raises(UserError, match=r"^document: .*got 2, of which 1 have an end"):
        report([written], out)
    assert written.read_text() == first + rest


def test_a_part_of_a_table_is_made_from_a_file_beside_the_document(written):
    (written.parent / "cost.json").write_text(
        (ROOT / "benchmarks/results/cost-h200-eager.json").read_text()
    )
    mark = "reproduce cost --from cost.json"
    written.write_text(f"<!-- {mark} --part parameters -->\n<!-- end -->\n")
    report([written], written.parent)
    assert "| LieRE | 8 | 147,456 | L N d b | 147,456 |" in written.read_text()
    assert "train step" not in written.read_text()
    written.write_text(f"<!-- {mark} -->\n<!-- end -->\n")
    report([written], written.parent)
    assert "train step" in written.read_text()
    written.write_text(f"<!-- {mark} --part colours -->\n<!-- end -->\n")
    with pytest.raises(UserError, match=r"^mark: --part: .*parameters, times"):
        report([written], written.parent)


def test_documents_without_marks_are_refused(tmp_path):
    (tmp_path / "runs").mkdir()
    with pytest.raises(UserError, match="document: expected a file"):
        report([tmp_path / "none.md"], tmp_path)
    (tmp_path / "plain.md").write_text("Nothing to fill.\n")
    with pytest.raises(UserError, match="document: expected marks"):
        report([tmp_path / "plain.md"], tmp_path)


def test_the_command(written, capsys):
    results = str(written.parent.parent / "results")
    written.write_text("<!-- reproduce video --preset small -->\n<!-- end -->\n")
    for option in ("--known", "--out"):
        app(["report", str(written), option, results], standalone_mode=False)
        first = capsys.readouterr().out.splitlines()[0]
        assert first == "comrope reproduce video --preset small"


@pytest.mark.parametrize("name", DOCUMENTS)
def test_our_own_documents_are_those_of_kept_results(name):
    """The text: the pixels of figures depend on the fonts of a machine, so they have to exist."""
    document = ROOT / name
    if not MARK.search(document.read_text()):
        pytest.skip("no marks")
    text, sections = fill(document, ROOT / "results")
    assert text == document.read_text(), f"comrope report {name}"
    pictures = [section.picture for section in sections.values() if section.picture]
    assert all((document.parent / picture).is_file() for picture in pictures)
