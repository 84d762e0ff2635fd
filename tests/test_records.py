"""Recorded runs, and what is made of them: the tables in the kernels' READMEs and the picture."""

import json
import pathlib
import re

import pytest

from experiments import plot, tables
from gdn_jax.bench.rows import record

ROOT = pathlib.Path(__file__).parent.parent
RESULTS = ROOT / "experiments/results"
README_OF = {
    "ceiling": "bandwidth",
    "gemv": "q4_gemv",
    "batches": "q4_gemv",
    "gemm": "q4_gemm",
    "delta": "delta_step",
    "chunk": "delta_chunk",
    "layer": "project_in",
}
PICTURE = ("bench-gemv-h200.jsonl", "bench-layer-h200.jsonl")
OPTIONS = ("--batch", "1", "--without", "product", "limbs")


@pytest.mark.parametrize("name", tables.TABLES)
def test_tables_of_the_readmes_are_those_of_the_records(name):
    readme = (ROOT / "pallas_kernels" / README_OF[name] / "README.md").read_text()
    assert "\n".join(tables.markdown(tables.TABLES[name]())) in readme
    assert f"python -m experiments.tables {name}" in readme


@pytest.mark.parametrize(
    "file", [f"bench-{subject}-h200.jsonl" for subject in ("ceiling", "gemv", "gemm", "delta", "chunk", "layer")]
)
def test_a_recorded_row_is_read_as_it_was_written(file):
    for text in (RESULTS / file).read_text().splitlines():
        line = json.loads(text)
        again = record(plot.as_row(line), line["ceiling_gb_per_s"] * 1e9)
        assert again == {name: pytest.approx(line[name]) for name in again}
        assert line["passed"]
        assert not line["commit"].endswith("-dirty")


def draw(folder, *arguments):
    picture = folder / "out.svg"
    assert plot.main([*(str(RESULTS / file) for file in PICTURE), str(picture), *arguments]) == 0
    return picture.read_text()


def labels(picture):
    return sorted(re.findall(r">(\d+x\d+[^<]*|qwen[^<]*)</text>", picture))


def test_the_picture_is_the_one_that_the_command_draws(tmp_path):
    kept = (RESULTS / "roofline-h200.svg").read_text()
    assert len(kept) < 100_000
    assert "read ceiling, 4.56 TB/s" in kept
    assert labels(draw(tmp_path, *OPTIONS)) == labels(kept)
    lines = [json.loads(line) for file in PICTURE for line in (RESULTS / file).read_text().splitlines()]
    wanted = [line["case"] for line in lines if line["us"] and line["batch"] == 1]
    assert labels(kept) == sorted(case for case in wanted if not case.endswith(("product", "limbs")))


def test_the_same_rows_give_the_same_picture(tmp_path):
    assert draw(tmp_path, "--batch", "8") == draw(tmp_path, "--batch", "8")


def test_rows_of_two_devices_are_not_drawn_together(tmp_path):
    [line, *_] = (RESULTS / PICTURE[0]).read_text().splitlines()
    other, picture = tmp_path / "other.jsonl", tmp_path / "never.svg"
    other.write_text(line.replace("NVIDIA H200", "another"))
    with pytest.raises(SystemExit, match="of one device, got NVIDIA H200, another"):
        plot.main([str(RESULTS / PICTURE[0]), str(other), str(picture)])
    assert not picture.exists()
