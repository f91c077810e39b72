"""Guesses, records and verdict cards: words, arithmetic of "nearer", and the one output the runner reads."""

from __future__ import annotations

import json

import pytest

from course_utils import claims

CARD = dict(
    measured=["n = 64: 8.1x", "n = 1,024: 40x"],
    predicted="7.5x; 38x",
    word="holds on a condition",
    condition="Once the context is longer than the ridge.",
    miss="Overhead was left out at n = 64.",
    details="a machine · float32 · n = 7",
)


@pytest.fixture(autouse=True)
def _fresh():
    claims.reset()
    yield
    claims.reset()


def said(capsys) -> str:
    return capsys.readouterr().out.strip()


def test_guess_of_none_shows_nothing(capsys, outputs):
    assert outputs("from course_utils import claims\nclaims.guess('speed-up')") == []
    assert claims.guessed("speed-up") is None and claims.guessed("never named") is None


def test_guess_is_repeated_with_its_unit(capsys):
    claims.guess("ms per token", 12, "ms")
    assert said(capsys) == "★ ms per token: your guess is 12 ms"
    assert claims.guessed("ms per token") == 12


@pytest.mark.parametrize("value", ["four", float("nan"), float("inf"), [4]])
def test_guess_that_is_no_number_says_what_to_write(value):
    with pytest.raises(ValueError, match="write one, such as 12.5, or None"):
        claims.guess("speed-up", value)


@pytest.mark.parametrize(
    ("guess", "predicted", "ending"),
    [
        (10, 40, "guess and prediction were equally near"),  # half and double are equally far from 20
        (19, 40, "your guess was nearer"),
        (5, 10, "the prediction was nearer"),
        (-3, 0, "guess and prediction were equally near"),  # both infinitely far by ratio
    ],
)
def test_record_says_who_was_nearer(capsys, guess, predicted, ending):
    claims.guess("speed-up", guess)
    claims.record("speed-up", measured=20.0, predicted=predicted)
    assert said(capsys).endswith(f"→ {ending}")


def test_nearer_is_judged_by_ratio_not_by_difference(capsys):
    # 5 is 15 away and 40 is 20 away from 20, but 5 is four times off and 40 only twice.
    claims.guess("x", 5)
    claims.record("x", measured=20, predicted=40)
    assert "the prediction was nearer" in said(capsys)


def test_quantities_that_can_be_negative_are_judged_by_difference(capsys):
    claims.guess("gap", -1.5)
    claims.record("gap", measured=-1.0, predicted=-3.0)
    line = said(capsys)
    assert "your guess was nearer" in line and "predicted -3 (2 too low)" in line


def test_record_without_guess_says_nothing_about_guesses(capsys):
    claims.guess("step", None, "ms")
    claims.record("step", measured=20.0, predicted=14, unit="ms", spread=0.4)
    line = said(capsys)
    assert line == "step: measured 20 ms (IQR 0.4) · predicted 14 ms (30 % too low)"
    assert "guess" not in line and "nearer" not in line


def test_record_without_prediction(capsys):
    claims.guess("step", 68)
    claims.record("step", measured=20)
    assert said(capsys).endswith("step: measured 20 · your guess 68 (3.40 times too high)")


def test_guess_and_prediction_inside_the_spread_are_not_ranked(capsys):
    claims.guess("step", 10.1)
    claims.record("step", measured=10.0, predicted=9.9, spread=(9.5, 10.5))
    assert "both lie within the spread" in said(capsys)


def test_record_in_another_unit_than_the_guess_is_refused():
    claims.guess("step", 12, "ms")
    with pytest.raises(ValueError, match="guessed in 'ms' and measured in 's'"):
        claims.record("step", measured=0.012, unit="s")


def test_quick_records_are_stamped(capsys):
    claims.record("step", measured=1.0, quick=True)
    assert said(capsys).endswith("[quick run: not a verdict]")


def test_record_leaves_json(outputs):
    (_, shown) = outputs(
        "from course_utils import claims\nclaims.guess('s', 12, 'ms')\n"
        "claims.record('s', measured=20.0, predicted=14, unit='ms', spread=(19, 21))"
    )
    fields = shown.data[claims.MIME]
    assert fields["kind"] == "record" and fields["nearer"] == "prediction"
    assert (fields["guess"], fields["predicted"], fields["measured"], fields["unit"]) == (12, 14, 20, "ms")
    json.dumps(fields)


def test_guesses_table_counts_stars(capsys):
    for name, mine in (("a", 10), ("b", 1), ("c", None), ("d", 3)):
        claims.guess(name, mine, "ms")
    claims.record("a", measured=11, predicted=20, unit="ms")
    claims.record("b", measured=11, predicted=20, unit="ms")
    claims.record("c", measured=11, predicted=20, unit="ms")
    capsys.readouterr()
    claims.guesses()
    table = said(capsys)
    rows = {line[0]: line for line in table.splitlines() if line[1:2] == " "}
    assert "★ your guess" in rows["a"] and "★" not in rows["b"] + rows["c"] + rows["d"]
    assert "prediction" in rows["b"] and "not yet" in rows["d"]
    assert "Your guess was nearer than the prediction in 1 of 2." in table


def test_guesses_table_without_any_guess_says_how(capsys):
    claims.record("a", measured=11, predicted=20, quick=True)
    capsys.readouterr()
    claims.guesses()
    out = said(capsys)
    assert "No guess was written down" in out and claims.QUICK_STAMP in out


def test_verdict_refuses_another_word():
    with pytest.raises(ValueError, match="'true' is not a verdict.*'holds on a condition'"):
        claims.verdict("C3", "…", **CARD | {"word": "true"})


@pytest.mark.parametrize("word", claims.WORDS)
def test_card_holds_every_field_in_both_faces(capsys, word):
    card = claims.verdict("C3", "With it O(n) & 4–8x < all", **CARD | {"word": word})
    text, html = said(capsys), card.html()
    for part in (
        "C3",
        word,
        "n = 64: 8.1x",
        "n = 1,024: 40x",
        "7.5x; 38x",
        *(CARD[k] for k in ("condition", "miss")),
    ):
        assert part in text and part in html
    assert "O(n) & 4–8x < all" in text and "O(n) &amp; 4–8x &lt; all" in html
    assert claims.QUICK_STAMP not in text + html
    assert (
        "<style" not in html and "class=" not in html
    )  # nothing a sanitizer would have to strip to be readable


def test_quick_verdict_is_stamped_in_all_faces(capsys):
    card = claims.verdict("C3", "…", quick=True, **CARD)
    assert all(claims.QUICK_STAMP in face for face in (said(capsys), card.html(), card.fields["stamp"]))
    assert card.fields["quick"] is True


def test_verdict_without_details_describes_this_machine(capsys, monkeypatch):
    monkeypatch.setattr(claims, "_machine", lambda: "a machine, 2 threads")
    card = claims.verdict("C3", "…", **CARD | {"details": ""})
    assert card.details == "a machine, 2 threads"


def test_verdict_is_one_output_even_as_last_expression(outputs):
    code = f"from course_utils import claims\ncard = claims.verdict('C3', 'quoted', **{CARD!r})\ncard"
    (shown,) = outputs(code)
    assert set(shown.data) == {"text/plain", "text/html", claims.MIME}
    fields = shown.data[claims.MIME]
    assert (
        fields["kind"] == "verdict" and fields["claim"] == "quoted" and fields["measured"] == CARD["measured"]
    )
    assert not any(name.startswith("_") for name in fields)
    json.dumps(fields)
    assert len(outputs("card")) == 1  # asked for again in another cell: shown again


def test_number_keeps_three_digits():
    said = [
        claims.number(v, u)
        for v, u in ((12.345, "ms"), (8.08, "x"), (25705, "tokens"), (1234.6, ""), (0.01234, "s"))
    ]
    assert said == ["12.3 ms", "8.08x", "25,705 tokens", "1,235", "0.0123 s"]


def test_tables_line_up():
    text = claims.text_table(("a", "bb"), [("long", "x"), ("s", "y")])
    assert text.splitlines() == ["a     bb", "--------", "long  x", "s     y"]
    html = claims.html_table(("a",), [("<b>1</b>",)])
    assert html.startswith("<table>") and "<b>1</b>" in html and html.count("<tr>") == 2


def test_emit_prints_text_outside_ipython(capsys):
    claims.emit("<b>x</b>", "x", {"kind": "x"})
    assert said(capsys) == "x"
