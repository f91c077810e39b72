"""The chapters as a reader runs them: quick, alone, in a fresh process; exercises solved, bugs alive, sentences true."""

import ast
import copy
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import nbformat
import pytest
import torch

from course_utils import claims, exercises
from course_utils.chapters import kv_cache
from course_utils.decoder import Cache
from course_utils.generation import generate

ROOT = Path(__file__).parent.parent
CHAPTERS = sorted(ROOT.glob("notebooks/0*.ipynb"))
DEEP_DIVES = sorted(ROOT.glob("notebooks/deep_dives/0*.ipynb"))
ID = re.compile(r"exercises\.check\((\"[^\"]+\")")
SOLUTION = re.compile(r"<summary>Solution</summary>\s*```python\n(.*?)```", re.S)


def read(chapter: str):
    """The notebook of a chapter ("02") or a deep dive ("01a")."""
    (path,) = (path for path in CHAPTERS + DEEP_DIVES if path.stem.startswith(f"{chapter}_"))
    return nbformat.read(path, as_version=4)


def tagged(notebook, tag: str) -> list[str]:
    return [cell.source for cell in notebook.cells if tag in cell.metadata.get("tags", ())]


def code_cell(notebook, words: str) -> str:
    found = [cell.source for cell in notebook.cells if cell.cell_type == "code" and words in cell.source]
    assert len(found) == 1, f"{len(found)} code cells contain {words!r}"
    return found[0]


# --- a quick run -----------------------------------------------------------------------------------------------------


@pytest.fixture(scope="session", params=CHAPTERS, ids=lambda path: path.stem)
def quick_run(request, tmp_path_factory, real_model):
    """The executed notebook of a chapter, run alone by the command a reader types, and what it printed."""
    build = tmp_path_factory.mktemp("build")
    command = [
        sys.executable,
        "-m",
        "course_utils",
        "run",
        request.param.stem[:2],
        "--quick",
        "--build",
        str(build),
    ]
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path_factory.mktemp("elsewhere"))
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (executed,) = build.glob("*.ipynb")
    return nbformat.read(executed, as_version=4), done.stdout


@pytest.mark.slow
def test_runs_to_the_end_with_every_exercise_unanswered(quick_run):
    notebook, printed = quick_run
    outputs = [out for cell in notebook.cells if cell.cell_type == "code" for out in cell.outputs]
    assert not [out for out in outputs if out.output_type == "error" or out.get("name") == "stderr"]
    texts = [str(out.get("data", {}).get("text/plain", "")) for out in outputs]
    assert sum("not answered yet" in text and "Exercise" in text for text in texts) == 6
    verdicts = [out.data[claims.MIME] for out in outputs if claims.MIME in out.get("data", {})]
    verdicts = [fields for fields in verdicts if fields["kind"] == "verdict"]
    assert verdicts and all(fields["stamp"] == claims.QUICK_STAMP for fields in verdicts)
    assert (
        claims.QUICK_STAMP in printed and verdicts[0]["word"].split()[0] in printed
    )  # long words are wrapped


# --- exercises -------------------------------------------------------------------------------------------------------


def exercise_cells(chapter: str) -> list[tuple[str, str]]:
    """(the exercise's cell, the solution printed below it)"""
    cells = read(chapter).cells
    found = []
    for place, cell in enumerate(cells):
        if cell.cell_type == "code" and "exercise" in cell.metadata.get("tags", ()):
            found.append((cell.source, SOLUTION.search(cells[place + 1].source)[1]))
    return found


def strict_check(source: str) -> str:
    """The cell's ``exercises.check(…)`` with ``strict=True``."""
    (call,) = (
        node.value
        for node in ast.parse(source).body
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)
    )
    call.keywords.append(ast.keyword("strict", ast.Constant(True)))
    return ast.unparse(call)


def solved_in(paths: list[Path]) -> list:
    """(chapter, number) of every exercise that stands in these notebooks."""
    keys = [path.stem.split("_")[0] for path in paths]
    return [(key, number) for key in keys for number in range(len(exercise_cells(key)))]


@pytest.mark.parametrize("path", CHAPTERS + DEEP_DIVES, ids=lambda path: path.stem)
def test_every_exercise_of_the_registry_stands_in_its_notebook(path):
    chapter = path.stem.split("_")[0]
    asked = [ast.literal_eval(ID.search(source)[1]) for source, _ in exercise_cells(chapter)]
    prefix = chapter.lstrip("0").upper()  # 01a: 1A
    assert asked == [f"{prefix}.{n}" for n in range(1, len(asked) + 1)]
    assert set(asked) == {id for id in exercises.EXERCISES if id.split(".")[0] == prefix}
    assert len(asked) == (2 if path in DEEP_DIVES else 6)


@pytest.mark.parametrize(("chapter", "number"), solved_in(CHAPTERS + DEEP_DIVES))
def test_printed_solution_passes(chapter, number, tiny_decoder, capsys):
    source, solution = exercise_cells(chapter)[number]
    names = {"exercises": exercises, "torch": torch, "copy": copy, "KVCache": kv_cache.KVCache}
    names["exact"] = tiny_decoder()
    names["sample"] = torch.randn(64, 192, generator=torch.Generator().manual_seed(0))
    exec(source, names)
    assert "not answered yet" in capsys.readouterr().out
    exec(solution, names)
    exec(strict_check(source), names)
    assert "✓" in capsys.readouterr().out


def test_helpers_take_an_edited_class(tiny_decoder, capsys):
    """A reader edits ``KVCache`` in the notebook while helpers import the module's: only the protocol counts."""
    decoder = tiny_decoder()
    source = code_cell(read("02"), "class KVCache(CausalCache)").replace(
        "held = slice(", "self.seen = held = slice("
    )
    names = {
        "torch": torch,
        "copy": copy,
        "CausalCache": type("CausalCache", (kv_cache.CausalCache, Cache), {}),
    }
    exec(source, names)
    edited = names["KVCache"]
    assert edited is not kv_cache.KVCache
    wanted = generate(decoder, [1, 2, 3], 8)
    assert generate(decoder, [1, 2, 3], 8, cache=edited(decoder.config)) == wanted
    source, solution = exercise_cells("02")[5]
    names |= {"exercises": exercises}
    exec(solution, names)
    exec(strict_check(source), names)
    assert "✓" in capsys.readouterr().out


# --- bugs ------------------------------------------------------------------------------------------------------------


@pytest.fixture
def broken(tiny_decoder):
    """The chapter's three faulty caches by name, and a decoder for them."""
    import dataclasses

    decoder = tiny_decoder()
    config = decoder.config
    names = {"torch": torch, "dataclasses": dataclasses, "KVCache": kv_cache.KVCache}
    names["group"] = config.num_heads // config.num_kv_heads
    bugs = tagged(read("02"), "bug")
    assert len(bugs) == 3
    for source in bugs:
        exec(source, names)
    return decoder, names


def logits(decoder, cache, pieces=(5, 1, 1)):
    tokens = torch.arange(7)[None]
    with torch.inference_mode():
        return torch.cat([decoder(piece, cache) for piece in tokens.split(pieces, dim=1)], dim=1)


@pytest.mark.parametrize("name", ["CacheOne", "CacheTwo"])
def test_a_wrong_place_or_mask_spoils_what_follows_the_prompt(broken, name):
    decoder, names = broken
    plain = decoder(torch.arange(7)[None])
    found = logits(decoder, names[name](decoder.config))
    torch.testing.assert_close(found[:, :5], plain[:, :5], atol=1e-4, rtol=0)  # the prompt itself is right
    assert (found[:, 5:] - plain[:, 5:]).abs().max() > 0.1


def test_query_heads_in_the_cache_change_the_bill_only(broken):
    decoder, names = broken
    wide, right = names["CacheThree"](decoder.config), kv_cache.KVCache(decoder.config)
    torch.testing.assert_close(logits(decoder, wide), logits(decoder, right), atol=1e-4, rtol=0)
    assert wide.nbytes == names["group"] * right.nbytes


# --- sentences -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "gains, word, where, longest",
    [
        ((0.7, 0.8, 0.9, 1.0, 1.1), "does not hold here", "4x is not reached up to n = 1024", "less than"),
        ((1.2, 1.3, 2.0, 3.0, 3.9), "does not hold here", "8x is not reached up to n = 1024", "less than"),
        ((9.0, 12.0, 20.0, 30.0, 50.0), "does not hold here", "8x is passed before n = 64", "more than"),
        ((4.5, 5.0, 6.0, 7.0, 7.9), "holds", "4x is passed before n = 64, 8x is not reached", "within the"),
        (
            (2.0, 4.0, 9.0, 16.0, 30.0),
            "holds on a condition",
            "8x is passed between n = 128 and n = 256",
            "more than",
        ),
    ],
)
def test_the_verdict_follows_the_measurement(gains, word, where, longest):
    """Also where the technique loses, the card says what was measured."""
    sizes = (64, 128, 256, 512, 1024)
    timed = SimpleNamespace(median=2.0, samples=(2.0,) * 5)
    names = {
        "claims": claims,
        "sizes": sizes,
        "gains": dict(zip(sizes, gains, strict=True)),
        "predicted": dict.fromkeys(sizes, (3.0, 1.0)),
        "measured": dict.fromkeys(sizes, {"plain": timed, "cached": timed}),
        "miss": lambda n: 1.1,
        "about": lambda repeats: f"{repeats} runs",
        "new": 24,
        "given": [1] * 128,
        "whole_run": 0.9,
        "reply_predicted": 1.2,
        "quick": False,
    }
    for helper in ("def passed_at(", "def missed("):
        exec(code_cell(read("02"), helper), names)
    source = code_cell(read("02"), "claims.verdict(").replace("claims.verdict(", "card = claims.verdict(")
    exec(source, names)
    card = names["card"]
    assert card.word == word
    assert card.measured[0] == f"a step {gains[0]:.1f}x at n = 64"
    assert where in card.condition
    assert f"n = 1024 gives {gains[-1]:.1f}x, {longest}" in card.condition
    assert "plain 1.50 and cached 0.50 times the measured time" in card.miss
    assert card.predicted[-2] == f"a step {1.1 * gains[-1]:.1f}x at n = 1024"
    # A whole reply stands apart from the steps, predicted as well as measured.
    assert card.measured[-1] == "a reply of 24 tokens after 128, in the library: 0.9x"
    assert card.predicted[-1] == "a reply of 24 tokens after 128, ours: 1.2x"
