"""README's verdicts are those of the committed notebooks, and its claims about the tree are true."""

import re
from pathlib import Path

import nbformat
import pytest

from course_utils.claims import MIME
from course_utils.tools import readme
from course_utils.tools.notebooks import STAMP, write

ROOT = Path(__file__).parent.parent


@pytest.fixture
def tree(tmp_path):
    """A clone with one rendered chapter that holds one verdict card, and a README with the two marks."""
    card = {"kind": "verdict", "claim_id": "C9", "claim": "…", "word": "holds", "condition": "a|b"}
    card |= {"measured": ["2.0x", "3.0x"], "predicted": "2.5x"}
    output = nbformat.v4.new_output("display_data", {MIME: card, "text/plain": ""})
    nb = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1", outputs=[output])])
    nb.metadata["course"] = {"chapter": 1, "kind": "main", "module": "quantization"}
    nb.metadata[STAMP] = {"machine": "an abacus", "date": "2026-01-02"}
    (tmp_path / "notebooks").mkdir()
    write(nb, tmp_path / "notebooks" / "01_quantization.ipynb")
    (tmp_path / "README.md").write_text(f"above\n{readme.BEGIN}\nyesterday\n{readme.END}\nbelow\n")
    return tmp_path


def test_update_writes_the_cards_between_the_marks(tree):
    assert not readme.is_current(tree)
    readme.update(tree)
    text = (tree / "README.md").read_text()
    assert readme.is_current(tree)
    assert text.startswith("above\n") and text.endswith("\nbelow\n") and "yesterday" not in text
    assert "| C9 | 2.0x<br>3.0x | 2.5x | **holds** | a\\|b |" in text
    assert "Made on: an abacus · 2026-01-02." in text


def test_without_marks_readme_is_left_alone(tree):
    (tree / "README.md").write_text("no marks")
    readme.update(tree)
    assert (tree / "README.md").read_text() == "no marks"


def test_the_committed_readme_is_current():
    assert readme.is_current(ROOT)


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "data/README.md"])
def test_local_links_lead_somewhere(name):
    file = ROOT / name
    for target in re.findall(r"\]\(([^)#:]+)\)", file.read_text()):
        assert (file.parent / target).exists(), f"{name} links to {target}"


def test_make_targets_named_in_the_texts_exist():
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(), re.M))
    for name in ("README.md", "CONTRIBUTING.md"):
        named = set(re.findall(r"(?:`|^)make ([a-z]+)\b", (ROOT / name).read_text(), re.M))
        assert named <= targets, f"{name} names {named - targets}"
