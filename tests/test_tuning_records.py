"""Every row of a tuning table names the record, file and line, of a measurement, and that measurement bears it out."""

import functools
import json
import pathlib

import pytest

from pallas_kernels.attend import tuning as attend
from pallas_kernels.delta_step import tuning as delta_step
from pallas_kernels.delta_window import tuning as delta_window
from pallas_kernels.q4_gemm import tuning as q4_gemm
from pallas_kernels.q4_gemv import tuning as q4_gemv

ROOT = pathlib.Path(__file__).parent.parent


@functools.cache
def lines(file):
    return [json.loads(line) for line in (ROOT / file).read_text().splitlines()]


def record(source):
    """The cited line, and the others of its file."""
    file, _, line = source.rpartition(":")
    cited = lines(file)[int(line) - 1]
    return cited, [other for other in lines(file) if other is not cited]


def assert_unbeaten(cited, rivals):
    """No rival was faster by more than what repetitions of the two differ by."""
    assert rivals
    for rival in rivals:
        assert rival["us"] >= cited["us"] - max(cited["spread_us"], rival["spread_us"]), rival


@pytest.mark.parametrize("key", q4_gemv.TABLE, ids=str)
def test_rows_of_the_dot_product_form(key):
    tile, source = q4_gemv.TABLE[key]
    cited, others = record(source)
    assert q4_gemv.Tile(cited["rows"], cited["groups"], cited["warps"]) == tile
    assert not cited["prefetch"]
    assert_of_bucket(cited, key)
    # Loading the next step's weights ahead is an option that the kernel no longer has.
    assert_unbeaten(cited, [other for other in others if of_same_product(other, cited) and not other["prefetch"]])


@pytest.mark.parametrize("key", q4_gemv.MOSAIC_TABLE, ids=str)
def test_rows_of_the_tensor_core_form(key):
    tile, source = q4_gemv.MOSAIC_TABLE[key]
    cited, others = record(source)
    assert cited["form"] == "mosaic"
    assert q4_gemv.MosaicTile(*cited["cut"]) == tile
    assert_of_bucket(cited, key)
    assert_unbeaten(cited, [other for other in others if of_same_product(other, cited)])


@pytest.mark.parametrize("key", q4_gemm.TABLE, ids=str)
def test_rows_of_the_prompt_product(key):
    tile, source = q4_gemm.TABLE[key]
    cited, others = record(source)
    assert q4_gemm.Tile(*cited["tile"]) == tile
    assert (cited["device"], cited["pieces"]) == (key.device_kind, key.pieces)
    assert key.rows // 2 < cited["N"] <= key.rows
    assert key.tokens // 2 < cited["M"] <= key.tokens
    # The first runs of that record still had a copy of x in every product.
    same = [other for other in others if all(other[name] == cited[name] for name in ("N", "K", "M", "pieces"))]
    assert_unbeaten(cited, [other for other in same if not other["glue_included"]])


def assert_of_bucket(cited, key):
    assert (cited["device"], cited["batch"], cited["limbs"]) == (key.device_kind, key.batch, key.limbs)
    assert key.rows // 2 < cited["N"] <= key.rows
    assert key.columns // 2 < cited["K"] <= key.columns


def of_same_product(other, cited):
    return all(other[name] == cited[name] for name in ("N", "K", "batch", "limbs"))


@pytest.mark.parametrize("row", delta_step.MEASURED + delta_window.MEASURED, ids=str)
def test_rows_of_the_delta_rule(row):
    cited, others = record(row.measurement)
    assert (cited["kernel"], cited["device"]) == (row.kernel, row.device_kind)
    assert (cited["K"], cited["V"], cited["B"] * cited["H"]) == (row.key_dim, row.value_dim, row.heads)
    assert delta_step.Tiles(cited["block_v"], cited["warps"]) == row.tiles
    same = {"kernel", "B", "H", "K", "V", "T", "count"} & cited.keys()
    assert_unbeaten(cited, [other for other in others if all(other.get(name) == cited[name] for name in same)])


@pytest.mark.parametrize("row", attend.MEASURED, ids=str)
def test_rows_of_full_attention(row):
    cited, others = record(row.measurement)
    assert (cited["device"], cited["head_dim"]) == (row.device_kind, row.head_dim)
    assert attend.Cut(cited["slots"], cited["splits"], cited["warps"]) == row.cut
    same = [other for other in [cited, *others] if other["capacity"] == row.capacity]
    for rows in {other["rows"] for other in same}:
        [own] = [other for other in same if other["rows"] == rows and of_cut(other, row.cut)]
        assert_unbeaten(own, [other for other in same if other["rows"] == rows and other is not own])


def of_cut(line, cut):
    return (line["slots"], line["splits"], line["warps"]) == cut
