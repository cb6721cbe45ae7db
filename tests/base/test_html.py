from fedrema.base.html import Bold, escaped, html_table, paragraph, title_line


def test_text_is_escaped_everywhere():
    bad = '<script>alert("1")</script>'
    for made in (escaped(bad), paragraph(bad), title_line(bad, bad), html_table([bad], [[bad], [Bold(bad)]])):
        assert "<script" not in made
        assert "&lt;script&gt;" in made


def test_control_characters_become_visible():
    assert escaped("a\x1b[31mb\u202e") == "a\\x1b[31mb\\u202e"


def test_numbers_are_right_aligned_and_no_colour_is_set():
    made = html_table(["name", "value"], [["a", 1]])
    assert made.count("text-align: left") == made.count("text-align: right") == 2
    assert "color" not in made
    assert "background" not in made
