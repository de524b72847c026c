"The link checker finds each fault that it promises to find, and is content with a sound site."
import check_links
import pytest

HEAD = '<html><head><link rel="stylesheet" href="a.css"></head><body>'


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.css").write_text("p { background: url(data:image/png;base64,AA==) }")
    (tmp_path / "b.html").write_text(HEAD + '<p id="there">b</p></body></html>')
    return tmp_path


@pytest.mark.parametrize("body, fault", [
    ('<a href="b.html">b</a> <a href="b.html#there">b</a> <a href="#">top</a>', None),
    ('<a href="https://example.org">out</a> <a href="mailto:a@example.org">mail</a>', None),
    ('<img src="a.css" alt="a picture">', None),
    ('<a href="c.html">c</a>', "a.html: c.html leads nowhere"),
    ('<a href="b.html#elsewhere">b</a>', "a.html: b.html#elsewhere: the page has no such anchor"),
    ('<a href="#elsewhere">here</a>', "a.html: #elsewhere: the page has no such anchor"),
    ('<a href="../secret.html">up</a>', "a.html: ../secret.html leads out of the site"),
    ('<a href="http://example.org">plain http</a>', "a.html: http://example.org is not an https address"),
    ('<img src="a.css">', "a.html: the picture a.css has no alt text"),
    ('<img src="a.css" alt=" ">', "a.html: the picture a.css has no alt text"),
    ('<script src="https://example.org/x.js"></script>', "a.html: loads https://example.org/x.js from outside"),
    ('<script src="//example.org/x.js"></script>', "a.html: loads //example.org/x.js from outside"),
    ('<a href="b.html">/home/somebody</a>', "a.html: holds the path /home/somebody"),
])
def test_each_fault_is_named(folder, body, fault):
    (folder / "a.html").write_text(f"{HEAD}{body}</body></html>")
    assert check_links.problems(folder, forbidden=("/home/somebody",)) == ([fault] if fault else [])


def test_stylesheets_load_nothing_from_outside(folder):
    (folder / "a.css").write_text('@import "https://example.org/font.css"; p { background: url("gone.png") }')
    assert check_links.problems(folder) == ["a.css: gone.png leads nowhere",
                                            "a.css: loads https://example.org/font.css from outside"]
