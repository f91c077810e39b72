"""Exporting: what is copied, what is refused, and that the committed modules equal their notebooks."""

from __future__ import annotations

import subprocess
import sys

import pytest

from course_utils.tools import export
from course_utils.tools.notebooks import ROOT, CourseError
from tests.notebooks_for_tests import code, notebook, parameters, save, text

IMPORTS = code("import torch\nfrom torch import Tensor", "export")


def exported(root, *cells, **about):
    """Export a notebook of these cells and return the module's text."""
    save(root, notebook(parameters(), *cells, **about))
    export.main([], root)
    return (root / "course_utils" / "chapters" / f"{about.get('module', 'toy')}.py").read_text()


def refusal(root, *cells, **about) -> str:
    with pytest.raises(CourseError) as error:
        exported(root, *cells, **about)
    assert not (root / "course_utils").exists()  # nothing is written
    return str(error.value)


def test_cells_are_copied_in_order(tmp_path):
    """With a header that says generated, from where, never to edit; untagged cells stay out."""
    module = exported(
        tmp_path,
        IMPORTS,
        code("toy = Toy()\nprint(toy)"),
        code("SIZES = (1, -2)\nNAMES: dict = {'a': [1.5, None]}", "export"),
        code(
            "class Toy:\n    def twice(self, x: Tensor) -> Tensor:\n        return 2 * x * SIZES[0]\n",
            "export",
        ),
        text("no code", "bug"),
    )
    header, body = module.split('"""', 2)[1:]
    assert "Generated" in header and "never edit" in header and "notebooks/02_toy.ipynb" in header
    assert body == (
        "\n\nimport torch\nfrom torch import Tensor\n\n\n"
        "SIZES = (1, -2)\nNAMES: dict = {'a': [1.5, None]}\n\n\n"
        "class Toy:\n    def twice(self, x: Tensor) -> Tensor:\n        return 2 * x * SIZES[0]\n"
    )


def test_main_line_first_then_deep_dives_and_destinations(tmp_path):
    save(tmp_path, notebook(code("B = 2", "export"), kind="deep_dive"), "02b_late")
    save(tmp_path, notebook(code("A = 1", "export"), kind="deep_dive"), "02a_early")
    kernel = code("def kernel():\n    import numba\n\n    return numba.njit", "export:toy_kernels")
    module = exported(tmp_path, code("M = 0", "export"), kernel)
    assert [line for line in module.splitlines() if line[1:3] == " ="] == ["M = 0", "A = 1", "B = 2"]
    assert "deep_dives/02a_early.ipynb" in module
    assert "import numba" in (tmp_path / "course_utils" / "chapters" / "toy_kernels.py").read_text()


REFUSED = {
    "undefined name": (["def f():\n    return width"], "`width` is used but no export cell defines it"),
    "undefined base": (["class A(Missing):\n    pass"], "`Missing` is used"),
    "undefined annotation": (["def f(x: Tensor):\n    return x"], "`Tensor` is used"),
    "undefined default": (["def f(x=limit):\n    return x"], "`limit` is used"),
    "undefined in a comprehension": (["def f():\n    return [g(i) for i in range(3)]"], "`g` is used"),
    "undefined in a method": (["class A:\n    def f(self):\n        return B()"], "`B` is used"),
    "IPython": (["def f():\n    display(1)"], "`display` is used"),
    "line magic": (["%matplotlib inline\nX = 1"], "magic `%matplotlib inline`"),
    "cell magic": (["%%time\nX = 1"], "magic `%%time`"),
    "shell": (["!ls"], "magic `!ls`"),
    "not Python": (["def f(:"], "is not Python"),
    "a call": (["def f():\n    pass\n\nf()"], "`f()` runs code"),
    "a computed constant": (["X = len('abc')"], "`X = len('abc')` runs code"),
    "a loop": (["for i in range(3):\n    pass"], "runs code"),
    "a patched method": (["class A:\n    pass", "A.f = 1"], "`A.f = 1` runs code"),
    "a condition": (["if True:\n    X = 1"], "runs code"),
    "an augmented constant": (["X = 1\nX += 1"], "`X += 1` runs code"),
    "__future__": (["from __future__ import annotations"], "leave it out"),
    "foreign import": (["import transformers"], "imports transformers: only torch, numpy"),
    "foreign from": (["from numba.core import types"], "imports numba.core: only torch, numpy"),
    "the tools": (["from course_utils.tools import run"], "imports course_utils.tools: the maintainers'"),
    "the tools, sideways": (
        ["from course_utils import tools"],
        "imports course_utils.tools: the maintainers'",
    ),
    "itself": (["from course_utils.chapters.toy import X"], "not an earlier chapter's module"),
    "a later chapter": (["from course_utils.chapters import batching"], "not an earlier chapter's module"),
    "relative": (["from . import kv_cache"], "relative import"),
    "star": (["from torch import *"], "imports * from torch"),
    "defined twice": (["X = 1", "def X():\n    pass"], "`X` is defined a second time (first in "),
    "import and definition": (
        ["from torch import Tensor", "class Tensor:\n    pass"],
        "`Tensor` is defined a second",
    ),
    "a kernel": (["def f():\n    import triton\n    return triton"], "tag the cell export:toy_kernels"),
}


@pytest.mark.parametrize("sources, says", REFUSED.values(), ids=REFUSED)
def test_refused(tmp_path, sources, says):
    """The message names notebook and cell, and nothing is written."""
    said = refusal(tmp_path, *(code(source, "export") for source in sources))
    assert says in said
    assert "notebooks/02_toy.ipynb, code cell " in said


def test_allowed(tmp_path):
    """Names that Python gives, local names, closures, the lower rooms, torch's and numpy's inside, the same import twice."""
    module = exported(
        tmp_path,
        IMPORTS,
        code(
            "import functools\nfrom torch import Tensor\nimport numpy as np\nimport torch.nn.functional as F",
            "export",
        ),
        code("from course_utils.decoder import Cache\nfrom course_utils import timing", "export"),
        code(
            "@functools.lru_cache\ndef f(n: int, *rest, **named):\n    import psutil\n\n    total = sum(rest)\n\n"
            "    def inner():\n        nonlocal total\n        total += n\n        return [a for a, b in named.items()]\n\n"
            "    try:\n        return inner(), __name__, (np, F, timing, psutil, later())\n"
            "    except ValueError as error:\n        raise TypeError(str(error))",
            "export",
        ),
        code(
            "class Toy(Cache):\n    rows: int = 1\n    def __init__(self):\n        super().__init__()",
            "export",
        ),
        code("def later():\n    return lambda x: x + (y := 2) * y", "export"),
    )
    compile(module, "toy", "exec")


def test_an_earlier_chapter_may_be_imported(tmp_path):
    save(tmp_path, notebook(code("X = 1", "export"), module="first", chapter=1), "01_first")
    assert "first import X" in exported(tmp_path, code("from course_utils.chapters.first import X", "export"))


def test_a_tag_without_a_module_is_an_error(tmp_path):
    with pytest.raises(CourseError, match="no module to export to"):
        exported(tmp_path, code("X = 1", "export"), module="")


def test_check_shows_a_short_difference(tmp_path, capsys):
    """Status 1 and some lines of the difference; 0 again after an export."""
    exported(tmp_path, code("X = 1", "export"))
    path = tmp_path / "course_utils" / "chapters" / "toy.py"
    path.write_text(path.read_text().replace("X = 1", "X = 2"))
    capsys.readouterr()
    assert export.main(["--check"], tmp_path) == 1
    said = capsys.readouterr().out
    assert "course_utils/chapters/toy.py differs from its notebook; run `make export`" in said
    assert "-X = 2" in said and "+X = 1" in said
    assert "X = 2" in path.read_text()  # --check writes nothing
    export.main([], tmp_path)
    assert export.main(["--check"], tmp_path) == 0


def test_a_module_without_a_notebook_goes(tmp_path, capsys):
    """Only generated ones: a file somebody wrote by hand is nobody's to delete."""
    exported(tmp_path, code("X = 1", "export"))
    own = tmp_path / "course_utils" / "chapters" / "__init__.py"
    own.write_text('"""By hand."""')
    save(tmp_path, notebook(parameters(), code("X = 1", "export"), module="renamed"))
    assert "toy.py: no notebook exports to it" in " ".join(export.differences(tmp_path))
    export.main([], tmp_path)
    assert sorted(path.name for path in own.parent.iterdir()) == ["__init__.py", "renamed.py"]


# --- the committed modules ---------------------------------------------------------------------------------------

MODULES = sorted(
    path.stem for path in (ROOT / "course_utils" / "chapters").glob("*.py") if path.stem != "__init__"
)


@pytest.mark.skipif(not MODULES, reason="no chapter has been exported yet")
def test_committed_modules_equal_their_notebooks():
    assert export.differences() == []
    modules = export.collect()
    assert [problem for module in modules for problem in export.problems(module, modules)] == []


@pytest.mark.parametrize("module", MODULES)
def test_each_module_imports_alone(module, tmp_path):
    """In a fresh process, from another folder; nothing is printed, nothing heavy is pulled in."""
    heavy = "{'transformers', 'numba', 'triton', 'bitsandbytes', 'matplotlib'}"
    program = f"import sys, course_utils.chapters.{module}\nprint(sorted({heavy} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True)
    assert (done.returncode, done.stdout.strip(), done.stderr) == (0, "[]", "")
