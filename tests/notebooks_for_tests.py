"""Builders of small notebooks: one that the gate lets through, and the means to break it in one place."""

from __future__ import annotations

import base64
from pathlib import Path

import nbformat
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output

from course_utils.tools.notebooks import COURSE_MIME, KERNELSPEC, write

PNG = base64.b64encode(b"\x89PNG\r\n\x1a\n").decode()


def code(source: str, *tags: str, outputs=(), id: str | None = None):
    """A code cell with tags and outputs."""
    cell = new_code_cell(source, outputs=list(outputs), metadata={"tags": list(tags)} if tags else {})
    if id:
        cell.id = id
    return cell


def text(source: str, *tags: str):
    """A Markdown cell with tags."""
    return new_markdown_cell(source, metadata={"tags": list(tags)} if tags else {})


def printed(words: str, name: str = "stdout"):
    """A stream output."""
    return new_output("stream", name=name, text=words)


def picture(alt: str | None = "a line that climbs"):
    """A figure output, with alt text unless ``alt`` is None."""
    metadata = {"image/png": {"alt": alt}} if alt else {}
    return new_output("display_data", data={"image/png": PNG, "text/plain": alt or ""}, metadata=metadata)


def shown(data: dict):
    """A display output of any mime bundle."""
    return new_output("display_data", data=data, metadata={})


def notebook(*cells, module: str = "toy", chapter: int = 2, kind: str = "main", **metadata):
    """A notebook of the course with the given cells."""
    nb = new_notebook(cells=list(cells))
    nb.metadata.update(
        nbformat.from_dict(
            {
                "kernelspec": KERNELSPEC,
                "language_info": {"name": "python"},
                "course": {"chapter": chapter, "kind": kind, "module": module, "title": "A toy"},
                **metadata,
            }
        )
    )
    for number, cell in enumerate(nb.cells):
        if not cell.id.startswith("own-"):
            cell.id = f"cell-{number}"
    return nb


def parameters(source: str = "quick = False\nseed = 0"):
    """The parameters cell."""
    return code(source, "parameters")


def save(root: Path, nb, name: str = "02_toy") -> Path:
    """Put the notebook where the course keeps it under ``root``; a name like 02a_… goes to the deep dives."""
    folder = root / "notebooks" / ("deep_dives" if name[2].isalpha() else "")
    folder.mkdir(parents=True, exist_ok=True)
    write(nb, folder / f"{name}.ipynb")
    return folder / f"{name}.ipynb"


VERDICT = f"""from IPython.display import display
card = dict(
    kind="verdict",
    claim_id="C3",
    claim="latency falls 4-8x",
    measured=f"{{2 + seed}}x",
    predicted="2.5x",
    word="dated",
    condition="only long ones",
    quick=quick,
)
display({{"text/plain": "card", "{COURSE_MIME}": card}}, raw=True)
"""

DETAILS = "<details>\n<summary>{0}</summary>\n\n{1}\n\n</details>"


def good():
    """A main line in miniature that breaks no rule of the gate; tests break it in one place."""
    return notebook(
        text("# A toy\n\n## 2.0 Which machine? (4 min)\n\nA question."),
        parameters(),
        code("from course_utils.decoder import Cache", "export"),
        code('class Toy(Cache):\n    """A toy."""\n\n    rows = 1', "export"),
        code("print(tokenizer.decode([1, 2]))", outputs=[printed("once upon\n")]),
        text("## Pause (2 min)"),
        code('guess("ms", 3)'),
        code('record("ms", measured=2.0)', outputs=[picture()]),
        text("Which line is wrong?", "bug"),
        code("explorer.show()", "explorer", outputs=[picture()]),
        text("**Exercise 2.1** ● 4 min. You need §2.0. Say one."),
        code('answer = None\ncheck("2.1", answer)', "exercise"),
        text(
            DETAILS.format("Hint", "Count.")
            + "\n\n"
            + DETAILS.format("Solution", "```python\nanswer = 1\n```")
        ),
        code("1 + 1", "one-picture", outputs=[picture()]),
    )
