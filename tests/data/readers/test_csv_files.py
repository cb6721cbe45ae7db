import gzip
import logging
import threading
from contextlib import contextmanager

import numpy as np
import psutil
import pytest

from fedrema.data import load_user_data
from fedrema.data.readers.csv_files import CsvFile, find_delimiter
from fedrema.data.roles import TableOptions
from fedrema.errors import BadInput

ROWS = """site,age,colour,target
north,30,red,yes
north,40,blue,no
north,,red,yes
south,50,green,no
south,20,red,yes
south,35,NA,no
"""


def write(path, text, encoding="utf-8"):
    path.write_text(text, encoding=encoding)
    return str(path)


def texts(path):
    file = CsvFile(path)
    return [dict(block) for block in file.blocks(file.names)]


def test_one_file_with_a_client_column(tmp_path):
    federation = load_user_data(write(tmp_path / "all.csv", ROWS))
    assert federation.names == ("north", "south")
    assert federation.class_names == ("no", "yes")
    assert federation.task.name == "binary"
    assert federation.x.dtype == np.float32
    assert federation.y.tolist() == [1, 0, 1, 0, 1, 0]
    assert federation.info == {"federation": "all.csv"}
    assert federation.split("train").count.tolist() == [2, 2]


def test_a_folder_with_one_file_per_client(tmp_path):
    header = "age,target\n"
    for name in ("10", "9"):
        write(tmp_path / f"{name}.csv", header + "1,0\n2,1\n3,0\n")
    (tmp_path / "2.csv.gz").write_bytes(gzip.compress(b"target,age\n1,5\n0,6\n"))
    federation = load_user_data(str(tmp_path))
    assert federation.names == ("2", "9", "10")
    assert federation.split("test").count.tolist() == [1, 1, 1]
    assert federation.y.tolist() == [1, 0, 0, 1, 0, 0, 1, 0]


@pytest.mark.parametrize("mark", [",", ";", "\t", "|"])
def test_delimiters(tmp_path, mark):
    path = tmp_path / "table.csv"
    write(path, f'"a{mark}b"{mark}c\n1{mark}2\n\n"3"{mark}" x""y "\n')
    assert find_delimiter(f'"x,,,,,"{mark}y') == mark
    assert texts(path) == [{f"a{mark}b": ("1", "3"), "c": ("2", ' x"y ')}]


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig"])
def test_a_byte_order_mark_and_line_ends_of_windows(tmp_path, encoding):
    path = tmp_path / "table.csv"
    path.write_bytes("größe,b\r\n1,ü\r\n".encode(encoding))
    assert texts(path) == [{"größe": ("1",), "b": ("ü",)}]


def test_blank_lines_before_the_header(tmp_path):
    path = tmp_path / "table.csv"
    write(path, "\n\na;b\n1;2\n")
    assert texts(path) == [{"a": ("1",), "b": ("2",)}]


def test_every_sample_needs_a_client(tmp_path):
    message = r"column 'site' is empty in data row 2 of t.csv; every sample needs a client\.$"
    with pytest.raises(BadInput, match=message):
        load_user_data(write(tmp_path / "t.csv", "site,a,y\nn,1,0\n,2,1\n"))


def test_a_client_with_test_samples_only_is_refused(tmp_path):
    text = "site,split,a,y\nn,train,1,0\nn,train,2,1\ns,test,3,1\n"
    with pytest.raises(BadInput, match=r"client 's' has only test samples; every client needs at least one training"):
        load_user_data(write(tmp_path / "t.csv", text))


def test_fields_with_line_breaks(tmp_path):
    path = tmp_path / "table.csv"
    write(path, 'a,b\n"one\ntwo",1\n3,4\n5\n')
    with pytest.raises(BadInput, match=r"table.csv, line 5 has 1 fields, but the header names 2 columns \(a, b\)\.$"):
        texts(path)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", r"table.csv is empty; the first line must name the columns\.$"),
        (b"\n\n", r"table.csv is empty"),
        (b"a,b,a\n", r"table.csv has two columns named 'a'; the names of columns must be unique\.$"),
        (b"a,,c\n", r"table.csv: column 2 of the header has no name; name every column\.$"),
        (b"a,b\n1,\xff\n", r"table.csv is not UTF-8 text \(byte 0xff\); save it as UTF-8\.$"),
        (b'client,target,a\n"1"2,3,4\n', r"table.csv is not a valid CSV file: "),
        (b"client,target,a\n", r"table.csv: the table has no rows; there must be at least one sample\.$"),
        (b"client,target,a\n1,2\n", r"table.csv, line 2 has 2 fields, but the header names 3 columns"),
    ],
)
def test_damaged_files_are_refused(tmp_path, content, message):
    path = tmp_path / "table.csv"
    path.write_bytes(content)
    with pytest.raises(BadInput, match=message):
        load_user_data(str(path))


def test_a_truncated_compressed_file_is_refused(tmp_path):
    path = tmp_path / "table.csv.gz"
    path.write_bytes(gzip.compress((ROWS * 100).encode())[:60])
    with pytest.raises(BadInput, match=r"table.csv.gz is truncated or damaged"):
        load_user_data(str(path))
    path.write_bytes(b"no gzip")
    with pytest.raises(BadInput, match=r"cannot read .*table.csv.gz"):
        load_user_data(str(path))


def test_clients_must_have_the_same_columns(tmp_path):
    write(tmp_path / "north.csv", "a,b,target\n1,2,0\n")
    write(tmp_path / "south.csv", "a,target\n1,0\n")
    message = "client 'north' has a column 'b' and client 'south' has none; all clients need the same columns"
    with pytest.raises(BadInput, match=message):
        load_user_data(str(tmp_path))
    write(tmp_path / "south.csv", "a,b,target\n")
    with pytest.raises(BadInput, match=r"south.csv has no rows; every client needs at least one sample"):
        load_user_data(str(tmp_path))
    write(tmp_path / "south.csv.gz", "a,b,target\n")
    with pytest.raises(BadInput, match=r"south.csv and south.csv.gz are files of one client"):
        load_user_data(str(tmp_path))


def test_a_column_that_is_text_at_one_client_is_text_at_all(tmp_path):
    write(tmp_path / "north.csv", "dose,target\n1.0,0\n2.50,1\n1.0,0\n2.50,1\n")
    write(tmp_path / "south.csv", "dose,target\nhigh,0\n1.0,1\nhigh,0\nlow,1\n")
    federation = load_user_data(str(tmp_path), test_share=0.01, options=TableOptions())
    assert federation.x.shape == (8, 5)  # 1.0, 2.50, high, low, other: as written
    assert federation.x[0].tolist() == federation.x[5].tolist()


def test_a_split_column(tmp_path):
    text = "client,split,a,y\n1,train,1,0\n1,test,2,1\n2,TRAIN,3,1\n2,Test,4,0\n"
    federation = load_user_data(write(tmp_path / "t.csv", text))
    assert federation.test.tolist() == [False, True, False, True]
    assert federation.x.shape == (4, 1)
    for good, bad in (("train", "maybe"), ("test", "")):
        with pytest.raises(BadInput, match=r"column 'split' has .* in data row \d of t.csv; valid are train and test"):
            load_user_data(write(tmp_path / "t.csv", text.replace(good, bad)))
    numbers = text.replace("train", "0").replace("TRAIN", "0.0").replace("test", "1").replace("Test", "true")
    assert load_user_data(write(tmp_path / "t.csv", numbers)).test.tolist() == [False, True, False, True]


def test_a_client_with_two_samples_has_one_for_training_and_a_warning(tmp_path, caplog):
    text = "client,a,y\nbig,1,0\nbig,2,1\nbig,3,1\nsmall,4,0\nsmall,5,1\n"
    with caplog.at_level(logging.WARNING, "fedrema"):
        federation = load_user_data(write(tmp_path / "t.csv", text))
    assert federation.split("train").count.tolist() == [2, 1]
    assert federation.split("test").count.tolist() == [1, 1]
    assert caplog.messages == ["Warning: 1 clients have fewer than 3 samples: small."]


@contextmanager
def peak_growth():
    """Yield a list that receives how much memory this process needs in addition."""
    process, growth, done = psutil.Process(), [0], threading.Event()
    before = process.memory_info().rss

    def watch():
        while not done.wait(0.02):
            growth.append(process.memory_info().rss - before)

    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield growth
    finally:
        done.set()
        thread.join()


def test_memory_is_proportional_to_the_numbers(tmp_path):
    rows, columns = 200_000, 50
    line = ",".join(f"{number}.25" for number in range(columns))
    other = ",".join(f"{number}.5" for number in range(columns))
    names = ",".join(f"c{number}" for number in range(columns))
    path = tmp_path / "t.csv"
    with path.open("w") as stream:
        stream.write(f"client,y,{names}\n")
        stream.writelines(f"{row % 3},{row % 2},{other if row % 2 else line}\n" for row in range(rows))
    with peak_growth() as growth:
        federation = load_user_data(str(path))
    stored = 4 * rows * columns
    assert federation.x.nbytes == stored
    # 8 GB for 10 million rows of 50 columns are four times what is stored as float32; blocks add a constant.
    assert max(growth) < 4 * stored + 80e6


def test_row_numbers_without_a_name_are_ignored(tmp_path):
    file = tmp_path / "table.csv"
    file.write_text('"",a,b\n"1",2,x\n"2",3,y\n')
    table = CsvFile(file)
    assert table.names == ["a", "b"]
    (block,) = table.blocks(["b", "a"])
    assert {name: list(values) for name, values in block.items()} == {"b": ["x", "y"], "a": ["2", "3"]}
