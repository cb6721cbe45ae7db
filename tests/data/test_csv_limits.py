"""Tables that would exhaust time or memory are refused quickly."""

import gzip
import time

import pytest

import fedrema


def test_a_gzipped_table_that_expands_without_end_is_refused(tmp_path):
    file = tmp_path / "bomb.csv.gz"
    with gzip.open(file, "wb", compresslevel=9) as stream:
        stream.write(b"client,x,y\n")
        for _ in range(150):
            stream.write(b"a,0,0\n" * (10**6 // 6))
    began = time.monotonic()
    with pytest.raises(fedrema.BadInput, match=r"bomb.csv.gz grows by more than a factor of 200"):
        fedrema.federation_from(file, target="y", client_column="client")
    assert time.monotonic() - began < 40


def test_a_table_with_a_million_columns_is_refused_at_once(tmp_path):
    file = tmp_path / "wide.csv"
    file.write_text(",".join(f"c{n}" for n in range(10**6)) + "\n")
    began = time.monotonic()
    with pytest.raises(fedrema.BadInput, match="has 1000000 columns; at most 20000 are valid"):
        fedrema.federation_from(file)
    assert time.monotonic() - began < 10
