"""Find words that comrope has replaced: names of version 0.1, and phrases that are not plain.

python tools/glossary.py  # prints file:line: old -> new; exits with 1 if there is any

Deprecated aliases and readers of older files keep their old names: see ``ALLOWED``.
"""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parents[1]
SEARCHED = (
    "src", "tests", "tools", "docs", "examples", "benchmarks", "README.md", "CONTRIBUTING.md",
)  # fmt: skip
SUFFIXES = (".py", ".md", ".yaml")
EXCLUDED = (  # history, golden values, what reads them, and this table
    "docs/archive/", "tests/golden/", "tools/guards/", "tools/identity_v1.py",
    "tools/migrate_results.py", "tools/glossary.py", "tests/test_glossary.py",
)  # fmt: skip
# Old names that a file needs: it defines or tests an alias, or reads older files.
ALLOWED = {
    "src/comrope/angles.py": {"Torus", "Line", "Free"},
    "src/comrope/experiments/config/upgrades.py": {"near", "rope_units", "scattered", "turned"},
    "src/comrope/experiments/data/pictures.py": {"in_place"},  # an argument of Pillow
    "src/comrope/experiments/runs/directory.py": {"taken_for"},
    "src/comrope/experiments/train.py": {"experiments.train"},
    "src/comrope/inits.py": {"scattered", "turned"},
    "src/comrope/integrations/__init__.py": {"Places"},
    "src/comrope/integrations/token_positions.py": {"away"},
    "src/comrope/models/vit.py": {"near", "rope_units"},
    "src/comrope/positions.py": {"relative"},
    "src/comrope/rotary.py": {"chosen_backend", "unrotate", "unrotate_before"},
    "tests/experiments/config/test_upgrades.py": {"near", "rope_units", "turned"},
    "tests/experiments/runs/test_directory.py": {"near", "taken_for", "turned"},
    "tests/experiments/runs/test_records.py": {"near", "taken_for", "turned"},
    "tests/methods/test_methods.py": {"turned"},
    "tests/models/test_pretrained.py": {"near", "rope_units"},
    "tests/test_deprecated.py": {
        "Torus", "Line", "Free", "chosen_backend", "experiments.train", "in_place", "packed",
        "relative", "unrotate", "unrotate_before",
    },
    "tests/test_inits.py": {"scattered", "turned"},
    "tests/test_mirror.py": {"experiments/train"},
    "tools/fuzz/targets/overrides.py": {"turned"},
    "tools/fuzz/targets/recipes.py": {"near", "rope_units", "scattered", "turned"},
    "tools/fuzz/targets/store.py": {"near", "taken_for"},
}  # fmt: skip


class Term(NamedTuple):
    """An old word and its replacement."""

    old: str  # a regular expression; its spaces also match the end of a line
    new: str
    where: str = ""  # a regular expression for the paths of the searched files


CODE = r"\.py$"
LIBRARY = r"^(?:src/comrope|tests)/(?!experiments/).*\.py$"
DATA = r"^src/comrope/experiments/(?:data|tasks)/"
TASKS = r"^src/comrope/experiments/tasks/"
QUOTE = "[\"'`]"

TERMS = (
    # angles, initializations and options of models
    Term(r"\bTorus\b", "CommutingAngles", LIBRARY),
    Term(r"\bLine\b", "CollinearAngles", LIBRARY),
    Term(r"\bFree\b", "GeneralAngles", LIBRARY),
    Term(rf"(?<={QUOTE})turned(?={QUOTE})|(?<=init[=:])turned\b", "rope-random-axes"),
    Term(r"(?<=init:)\sturned\b|\bturned(?= axes\b)", "rope-random-axes"),
    Term(r"\bturned(?! axes\b)", "rotated, or rope-random-axes", r"\.md$"),
    Term(rf"(?<={QUOTE})scattered(?={QUOTE})|(?<=init[=:])scattered\b", "isotropic"),
    Term(r"(?<=init:)\sscattered\b|\bscattered(?= frequencies\b)", "isotropic"),
    Term(rf"(?<={QUOTE})near(?={QUOTE})|(?<=model\.)near\b|\bnear(?==|: \d)", "locality_bias"),
    Term(r"\b(?:start|look)(?:s|ing)? near\b", "locality bias, or locality-biased heads"),
    Term(r"\b[Vv]alues (?:that )?turn\b|(?<!otate\s)\bvalues too\b", "rotated values"),
    Term(r"\brope_units\b", "position_units"),
    # rotary.py and positions.py
    Term(r"\bunrotate\b", "rotate(..., inverse=True)"),
    Term(r"\bunrotate_before\b", "_inverse_with_projection"),
    Term(r"(?<=\.)packed(?=\()", "rotate_qkv"),
    Term(r"\bin_place(?==)", "inplace"),
    Term(r"\bwith_spectrum\b", "cache_spectrum"),
    Term(r"\bangles\.known\b", "cached_spectrum"),
    Term(r"\bat(?: |_)hand\b", "precomputed"),
    Term(r"\bjoint_angles\b", "batched_angles"),
    Term(r"\bper_layer\b", "split_layers"),
    Term(r"(?<=comrope\.)relative\b|(?<=def\s)relative(?=\()", "normalize", CODE),
    # ops and kernels
    Term(r"\b_turn_one\b", "_rotate_single"),
    Term(r"\bTurning\b", "RotationArgs", CODE),
    Term(r"(?<=\.)turn(?=\()", "launch_forward", CODE),
    Term(r"\bturn_back\b", "launch_backward"),
    Term(r"\bChoice\b", "BackendChoice", CODE),
    Term(r"\bchosen_backend\b", "select_backend"),
    Term(r"\b_obstacle\b", "_reason_unsupported"),
    Term(r"\bsettled_when_compiled\b", "compile_time_constant"),
    Term(r"\bnumbers_like\b", "constants_like"),
    Term(r"\bwiden\b", "to_compute_dtype", CODE),
    Term(r"(?<=[\"'])(?:there|back)(?=[\"'])", "forward, backward", r"^src/comrope/ops/"),
    Term(r"\b_leave_\w+", "_store_*", CODE),
    # integrations and export
    Term(r"\bPlaces\b", "TokenPositions", CODE),
    Term(rf"(?<={QUOTE})away(?={QUOTE})|(?<=\.)away\b", "disabled", CODE),
    Term(r"\bput_away\b", "disable"),
    Term(r"\bbring_back\b", "restore"),
    Term(r"\bstill_there\b", "deref"),
    Term(r"\b_door_of\b", "_forward_attribute"),
    Term(r"\brebound\b", "with_global_replaced", CODE),
    Term(r"\bExponentials\b", "MatrixExponential", CODE),
    Term(r"\bPlanes\b", "a folded rope-mixed", r"^src/comrope/models/"),
    Term(r"\b_simplify\b", "_fold_attention", CODE),
    # benchmarks
    Term(r"\bstir\b", "perturb_angles", CODE),
    Term(r"\bSubject\b", "Benchmark", CODE),
    Term(r"\byardstick\b", "reference row"),
    Term(r"\bby_best\b", "prefer_compiled"),
    Term(r"\bof_copy\b", "fraction_of_copy_bandwidth"),
    # studies
    Term(r"\bBeside\b", "Measurement", CODE),
    Term(r"\blook_beside\b", "measure_run"),
    Term(r"\bis_at_hand\b", "has_measurement"),
    Term(r"\bbeyond\.py\b|\bstudies\.beyond\b", "fair/rows.py"),
    Term(r"\bbeyond the paper\b", "in addition to the paper"),
    Term(r"\bCell\b", "Row", CODE),
    Term(r"\bfull_rows\b", "extended_rows"),
    Term(r"\brow_key\b", "row_id"),
    Term(r"\bADDED\b", "EXTENSIONS"),
    Term(r"\bhow_much_added\b", "num_extensions"),
    Term(r"\bmore_over_less\b", "extension_pairs"),
    Term(r"\bours_over_others\b", "ours_vs_baselines"),
    Term(r"\bis_longer\b", "epochs_factor"),
    Term(r"\bA_QUARTER\b", "1.25"),
    Term(r"\ba quarter (?:longer|more epochs)\b", "1.25× epochs"),
    Term(r"\btimeless\b|\bnot told the time\b", "time axis removed"),
    Term(r"\btold_apart\b", "pair_accuracy"),
    Term(r"\btaken_for\b", "confusion"),
    Term(r"\bmade_elsewhere\b|\bELSEWHERE\b", "nothing: it was removed"),
    Term(r"\bbeside_the_papers\b", "with_paper_table"),
    Term(r"\bsaid(?=\()|\b[a-z]+_said\b", "format_view, row_label, row_name or describe_*"),
    Term(r"\bdecided_together\b", "holm"),
    Term(r"(?<=\.)chance\b|\bchance(?==)", "p_value", CODE),
    Term(r"\bCAUTION\b", "NOTE_INTERVALS"),
    Term(r"\bUNLIKE\b", "NOTE_EXTENSIONS"),
    Term(r"\bTOGETHER\b", "NOTE_HOLM"),
    # other experiments
    Term(r"\bAdopted\b", "TimmModel", CODE),
    Term(r"\badopt(?=\()", "build_timm_model"),
    Term(r"\bITS_OWN\b", "DECIDED_BY_TIMM"),
    Term(r"\bbegin_with\b", "init_from_weights"),
    Term(r"\b(?:experiments|tasks)[./]start\b", "tasks/init_from.py"),
    Term(r"^(?:ANGLES|APE|HEAD)\b(?= =)", "*_KEYS", TASKS),
    Term(r"\bObjective\b", "Task", CODE),
    Term(r"\bexperiments[./]run\b", "experiments/training/trainer.py"),
    Term(r"\bexperiments[./]train\b", "experiments/training/train.py"),
    Term(r"\bexperiments[./]runner\b", "experiments/launch.py"),
    Term(r"\bSoften\b", "MixAndSmooth", CODE),
    Term(r"\bKept\b", "PixelCache", DATA),
    Term(r"\bCuts\b", "ClipDataset", DATA),
    Term(r"\bPart\b", "Subset", DATA),
    Term(r"\bBoxed\b", "BoxSource", DATA),
    Term(r"\busual_view\b", "task.training_view"),
    Term(r"\bviews_of(?=\()", "task.views"),
    Term(r"\bvit_of(?=\()", "task.backbone"),
    Term(r"\bmode_of(?=\()", "pil_mode"),
    Term(r"\bsame_for_all\b", "broadcast"),
    Term(
        r"\bdistributed(?:\.| import .*\b)(?:full|like|whole|total)\b",
        "gather_state, sum_over_processes, or nothing",
    ),
    Term(r"\bwrite_whole\b", "write_files"),
    Term(r"\bwhole or not at all\b", "atomically"),
    Term(r"\bclaim(?=\()", "check_run_dir"),
    # plain language
    Term(r"\brooms?\b", "package"),
    Term(r"\bdoors?\b", "entry point"),
    Term(r"\btwins?\b", "reference implementation, or counterpart"),
    Term(r"\bhonest corollary\b", "corollary"),
    Term(r"\b(?:is|are|was|were) told\b", "is reported, or receives"),
    Term(r"\bas (?:it is|they are)(?=[,.;:)])", "unchanged"),
    Term(r"\bof what \w+ takes besides\b", "other options of"),
    Term(r"\bwhat (?:it|a row) has more\b", "the extension"),
    Term(r"\b(?:that|which) (?:is|are) there\b", "existing"),
    Term(r", and nothing else\b|\band nothing else\.", "only, or nothing"),
)
# What may be between two words: also the end of a line in a comment or in a string.
BETWEEN = r"[\s#\"]+"
PATTERNS = [re.compile(term.old.replace(" ", BETWEEN), re.MULTILINE) for term in TERMS]


class Match(NamedTuple):
    """An old word in a file."""

    line: int
    old: str
    new: str


def main() -> int:
    """Print the old words of all tracked files; return 1 if there are any."""
    found = [
        f"{name}:{match.line}: {match.old} -> {match.new}"
        for name in _tracked()
        for match in disallowed((HERE / name).read_text(), name)
    ]
    print(*found, sep="\n", end="\n" if found else "")
    return int(bool(found))


def disallowed(text: str, name: str) -> list[Match]:
    """Return the old words of a file that it may not use, in the order of its lines."""
    return [match for match in matches(text, name) if match.old not in ALLOWED.get(name, ())]


def matches(text: str, name: str) -> list[Match]:
    """Return all old words of a file, in the order of its lines.

    Args:
        text: The content of the file.
        name: Its path from the root of the repository.
    """
    return sorted(
        Match(text.count("\n", 0, found.start()) + 1, _one_line(found[0]), term.new)
        for term, pattern in zip(TERMS, PATTERNS, strict=True)
        if re.search(term.where, name)
        for found in pattern.finditer(text)
    )


def _one_line(phrase: str) -> str:
    return re.sub(BETWEEN, " ", phrase).strip()


def _tracked() -> Iterator[str]:
    """Yield the searched files that git tracks."""
    command = ["git", "-C", str(HERE), "ls-files", "-z", "--", *SEARCHED]
    for name in subprocess.check_output(command, text=True).split("\0"):
        exists = (HERE / name).is_file()  # not while a removal is not yet committed
        if exists and name.endswith(SUFFIXES) and not name.startswith(EXCLUDED):
            yield name


if __name__ == "__main__":
    raise SystemExit(main())
