"""A right response gets 1 and a wrong one 0, however the answer is written; else it is refused."""

import subprocess
import sys

import pytest

from rltrain.environments.rewards import math_verify

TABLE = [
    # answer, right responses, wrong responses
    ("42", ["The answer is 42", r"\boxed{42}", "42.", r"\boxed{42.}", "#### 42"], ["41", "", "no"]),
    (42, [r"\boxed{42.0}"], [r"\boxed{4.2}"]),
    ("0.5", [r"so it is \boxed{\frac{1}{2}}", "1/2", r"\boxed{0.50}"], ["0.05", "5"]),
    (r"\frac{1}{2}", [r"$\frac{2}{4}$", "0.5", r"\boxed{1/2}"], [r"\frac{2}{1}", "1", "2"]),
    (r"\$32", [r"\$32", "$32", "It costs $32.", r"\boxed{\$32}", "32 dollars"], [r"\$33", "3"]),
    ("$1,000", ["1000", "1,000", r"\$1,000", r"\boxed{1{,}000}", r"\boxed{1\,000}"], ["1", "100"]),
    ("-$5", [r"\boxed{-5}", r"-\$5"], ["5", r"\boxed{5}"]),
    ("32$", ["32", r"\boxed{32}"], ["3"]),
    (r"$\$32$", ["32", r"\boxed{\$32}"], ["3"]),
    ("€5", ["5", "€5", r"\boxed{5}"], ["6"]),
    (r"32\%", ["32%", r"\boxed{32\%}", r"\boxed{32}", "0.32", "32 percent"], ["3.2%", "0.032"]),
    ("0.32", [r"\boxed{32\%}", "32%"], ["3.2%"]),
    ("-5", ["-5", "\u22125", r"\boxed{-5}"], ["5", r"\boxed{5}"]),
    ("1.5e3", ["1500", "1.5e3", r"\boxed{1.5\times10^{3}}", "1,500"], ["1.5", "3", "150"]),
    ("1e-3", ["0.001", "1e-3", r"\boxed{10^{-3}}"], ["1", "-3", "1000"]),
    (r"1.5\times10^{-3}", [r"\boxed{0.0015}", "1.5e-3"], ["1.5", r"\boxed{1.5\times10^{3}}"]),
    ("2.5 million", ["2,500,000", r"\boxed{2.5 \text{ million}}", "2.5 million"], ["2.5"]),
    ("1_000", ["1000"], ["1", "0"]),
    ("10 000", ["10,000", r"\boxed{10\,000}"], ["10", "0"]),
    ("10**6", ["1000000", r"\boxed{10^6}"], ["10", "6"]),
    ("1 1/2", ["1.5", r"\boxed{1\frac{1}{2}}", "3/2", "1 1/2"], ["1", "1/2", "11/2"]),
    ("72 km/h", ["72", "72 km/h", r"\boxed{72\text{ km/h}}", r"\boxed{72 km/h}"], ["7", "72.5"]),
    (r"12\text{ cm}^2", ["12", r"\boxed{12 cm^2}", r"\boxed{12\,\mathrm{cm}^2}"], ["2", "144"]),
    ("5 apples", ["5", "5 apples", r"\boxed{5\text{ apples}}"], ["6 apples"]),
    (r"90^\circ", ["90", r"\boxed{90^\circ}"], ["9"]),
    ("She has 5 + 67 = 72.\n#### 72", ["72", "5 + 67\n#### 72", r"\boxed{72}"], ["#### 5", "67"]),
    ("#### 1,200", ["1200", "The answer is 5.\n#### 1,200"], ["1,200\n#### 5"]),
    (r"so \boxed{7}", ["7", r"\boxed{7}"], ["8"]),
    ("1, 2", [r"\boxed{1, 2}", r"\boxed{2,1}", r"$1$ and $2$", "1, 2"], ["1", "2", r"\boxed{1,3}"]),
    ("$5$ and $6$", [r"\boxed{5, 6}"], ["5", "6"]),
    (r"\{1,2\}", [r"\boxed{\{2,1\}}"], [r"\boxed{\{1\}}"]),
    ("(1,2]", [r"\boxed{(1,2]}", "(1,2]"], [r"\boxed{(1,2)}", r"\boxed{[1,2]}"]),
    (r"(-\infty, 3]", [r"\boxed{(-\infty,3]}"], [r"\boxed{3}", r"\boxed{(-\infty,3)}"]),
    ("(1, -2)", [r"\boxed{(1,-2)}", "(1, -2)"], [r"\boxed{(-2,1)}"]),
    (
        r"\begin{pmatrix}1&2\\3&4\end{pmatrix}",
        [r"\boxed{\begin{bmatrix}1&2\\3&4\end{bmatrix}}"],
        [r"\boxed{\begin{pmatrix}1&2\\3&5\end{pmatrix}}"],
    ),
    ("$(x+1)^2$", [r"\boxed{x^2+2x+1}"], [r"\boxed{x^2+1}"]),
    ("x=5", [r"\boxed{5}", r"\boxed{x=5}"], [r"\boxed{6}"]),
    (r"2\sqrt{3}", [r"\boxed{\sqrt{12}}"], [r"\boxed{2}", r"\boxed{\sqrt{3}}"]),
    (r"\text{Monday}", [r"\boxed{\text{Monday}}", r"\boxed{Monday}"], [r"\boxed{Sunday}", ""]),
    ("no solution", [r"\boxed{\text{no solution}}"], [r"\boxed{solution no}", r"\boxed{0}"]),
    ("(C)", [r"\boxed{C}", r"\boxed{\text{(C)}}"], [r"\boxed{D}"]),
]


@pytest.mark.parametrize(("answer", "right", "wrong"), TABLE, ids=[str(row[0]) for row in TABLE])
def test_math_verify(answer, right, wrong):
    given = {response: math_verify(response, answer, prompt="?") for response in (*right, *wrong)}
    assert given == dict.fromkeys(right, 1.0) | dict.fromkeys(wrong, 0.0)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        ("", "finds no mathematics in the answer ''"),
        ("?", "finds no mathematics"),
        ("½", "finds no mathematics"),
        ("sqrt(2)", "finds no mathematics"),
        ("2√3", "'2√3' as 2 and leaves out '3'"),
        ("log 2", "leaves out 'log 2'"),
        ("20_{10}", "as 20 and leaves out '10'"),
        (r"0.\overline{3}", "as 0 and leaves out '3'"),
        ("$5 and $6$", "leaves out '[$]5 and"),
        ("17 apples and 3 pears", "leaves out '17'|leaves out '3'|leaves out"),
        ("First 5 + 67, so she has 72.", "leaves out"),
    ],
)
def test_an_answer_that_would_be_read_in_part_is_refused(answer, said):
    with pytest.raises(ValueError, match=said) as caught:
        math_verify("1", answer)
    assert repr(answer) in str(caught.value)


def test_nothing_is_said_of_a_time_limit_that_is_ours():
    code = "from rltrain.environments.math_answers import is_equal; is_equal('1', '1')"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr == ""
