"""What `make sizes` counts."""

from tests.sizes import LONGEST_FUNCTION, measure, report

SOURCE = '''"""About
two lines."""

# why
X = """a value
of two lines"""  # code, with a comment


class Public:
    """One line."""

    size: int
    """Of an attribute."""

    def method(self) -> None:
        pass


def _private() -> None: ...
'''


def test_lines_are_code_comment_or_blank() -> None:
    module = measure("room/file.py", SOURCE)
    assert (module.code, module.comment, module.blank) == (7, 5, 7)
    assert module.lines == SOURCE.count("\n")
    assert (module.room, module.public) == ("room", ("Public",))


def test_long_functions_and_what_exists_twice_are_named() -> None:
    body = "    x = 1\n" * (LONGEST_FUNCTION - 1)
    fits, long = f"def f():\n{body}", f"class C:\n  def g(self):\n{body}    x = 2\n"
    modules = [measure("a/same.py", fits + long), measure("b/same.py", fits), measure("c.py", "")]
    text = report(modules)
    assert f"functions above 60 lines: 1\n  a/same.py: g, {LONGEST_FUNCTION + 1}\n" in text
    assert "file names that exist twice: 1\n  same.py: a/same.py, b/same.py\n" in text
    assert "public names that exist twice: 1\n  f: a/same.py, b/same.py\n" in text
    assert "files above 350 lines: 0\n" in text
    (total,) = [line.split() for line in text.splitlines() if line.startswith("all ")]
    assert total[1:3] == ["3", f"{sum(module.lines for module in modules)}"]
