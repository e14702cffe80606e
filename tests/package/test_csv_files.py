"""CSV files: a stray quote or a row of wrong length is an error that names the line."""

import gzip

import pytest

from diffusion_training.csv_files import find_csv_fault


@pytest.mark.parametrize("name, content, said", [
    # six rows, which other readers take for four
    ("a.csv", 'url,text\nu1,a\nu2,"red cat\nu3,b\nu4,"blue\nu5,c\nu6,d\n', "begins in line 3 "),
    ("a.csv", 'url,text\nu1,a\nu2,"red cat\nu3,b\n', "begins in line 3 .*unexpected end"),
    ("a.csv", 'url,text\n"u\n1",a\n\nu2,"red" cat\n', "begins in line 5 "),
    ("a.csv", "url,text\nu1,a\nu2\n", "begins in line 3 .*1 values instead of 2"),  # pandas: None
    ("a.csv", "url,text\nu1,a,b\nu2,c,d\n", "begins in line 2 .*3 values instead of 2"),
    ("A.TSV.GZ", 'url\ttext\nu1\t"red" cat\n', "begins in line 2 "),
])  # fmt: skip
def test_check_csv_names_the_line_of_a_malformed_row(tmp_path, name, content, said):
    data = content.encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith("GZ") else data)
    with pytest.raises(ValueError, match=said):
        find_csv_fault(f"file://{tmp_path}/{name}")


def test_check_csv_accepts_good_files_and_counts_multiline_rows(tmp_path):
    path = tmp_path / "a.csv"
    path.write_bytes(b'\xef\xbb\xbfurl,text\r\nu1,"a ""red"" cat, \xff"\r\n\r\nu2,5" wide\r\n')
    assert find_csv_fault(str(path)) is None
    path.write_text('url,text\nu1,a\nu2,"red cat\nu3,b"\nu4,c\nu5,"d\n\n"\n')
    assert "2 rows span several lines, the first one begins in line 3" in find_csv_fault(str(path))
