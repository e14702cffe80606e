"""Expressions that choose rows: their meaning for numbers and text, and invalid ones."""

import pyarrow as pa
import pytest

from diffusion_training.web.filters import find_columns, find_non_number, make_filter

COLUMNS = {"id": range(4), "width": [512, 100, None, 2048], "similarity": [0.31, 0.9, 0.5, -0.1]}
COLUMNS |= {"text": ["a cat", "a dog", None, "a cat"], "nsfw": [False, False, True, None]}


@pytest.mark.parametrize("where, expected", [
    ("width >= 512", [0, 3]),
    ("similarity > 0.3 and width >= 512", [0]),
    ("similarity > 0.3 or width > 1000", [0, 1, 2, 3]),
    ("100 < width <= 512", [0]),
    ("not width == 100", [0, 3]),
    ("similarity > -0.2 and similarity < 0", [3]),
    ("text == 'a cat'", [0, 3]),
    ("text in ['a dog', 'a bird']", [1]),
    ("text not in ('a dog',)", [0, 3]),
    ("width != 100 or width is None", [0, 2, 3]),
    ("text is not None and not width == 100", [0, 3]),
    ("nsfw == False", [0, 1]),
    ("not nsfw", [0, 1]),
    ("  width != 100 and (text == 'a cat' or nsfw)", [0, 3]),
])  # fmt: skip
@pytest.mark.parametrize("kind", ["numbers", "text"])
def test_make_filter_chooses_the_rows_of_an_expression(where, expected, kind):
    """CSV columns are text, and are converted to compare them with a number.

    A missing value fulfils no comparison; `is None` asks for it.
    """
    table = pa.table(COLUMNS)
    if kind == "text":
        if "nsfw" in where:
            return
        names = ["width", "similarity"]
        table = table.cast(
            pa.schema([f.with_type(pa.string()) if f.name in names else f for f in table.schema])
        )
    assert table.filter(make_filter(where, table.schema))["id"].to_pylist() == expected


def test_find_columns_lists_the_columns_of_an_expression():
    assert find_columns(None) == []
    assert find_columns("column('aspect ratio') > 1 or b > 1") == ["aspect ratio", "b"]
    table = pa.table({"aspect ratio": ["1", "2", None]})
    assert table.filter(make_filter("column('aspect ratio') > 1", table.schema)).num_rows == 1
    assert find_columns(" b > 1 and (a == 'c' or not b in [1, 2])") == ["a", "b"]


def test_text_compared_with_a_number_is_named_with_its_column():
    columns = {"text": ["a", "b"], "width": ["7", "wide"], "id": [1, 2]}
    large = {"text": pa.large_string(), "width": pa.large_string(), "id": pa.int64()}  # of polars
    for schema in (None, pa.schema(large)):
        table = pa.table(columns, schema=schema)
        where = "text == 'a' and width > 512"
        assert table[:1].filter(make_filter("width > 5", table.schema)).num_rows == 1
        with pytest.raises(pa.ArrowInvalid):
            table.filter(make_filter(where, table.schema))
        assert find_non_number(where, table) == "column 'width' holds 'wide', which is not a number"
        with pytest.raises(ValueError, match="column 'id' holds int64, but '1' is text"):
            make_filter("id == '1'", table.schema)
    table = table.set_column(1, "width", pa.array(["7", "1024"]).dictionary_encode())
    assert table.filter(make_filter("width > 512", table.schema))["id"].to_pylist() == [2]


@pytest.mark.parametrize("where", [
    "", "width >", "width = 3", "__import__('os').system('true')", "width + 1 > 2", "width > [1]",
    "a.b > 1", "a is b", "lambda: 1", "width > 1 if a else b", "a[0] > 1", "text > b'1'",
    "f(a) > 1", "column(a) > 1", "x in y", "x in []", "None",
    pytest.param("not " * 3000 + "x", id="deep"),
])  # fmt: skip
def test_invalid_filter_expressions_are_refused_and_never_run(where):
    with pytest.raises(ValueError, match="is not a|is nested too deeply"):
        find_columns(where)
