"""The plan of large runs: its figures match the pages, and its bottleneck is the slowest part."""

import re
import sys

import pytest
from conftest import ROOT

sys.path.insert(0, str(ROOT / "benchmarks"))

import data_plan
import driver
import plan

PAGES = "".join(path.read_text() for path in ROOT.glob("docs/*.md"))


@pytest.mark.parametrize("name", data_plan.MEASURED)
def test_measured_figures_are_in_the_pages_and_have_a_benchmark(name):
    figure = data_plan.MEASURED[name]
    assert (ROOT / "benchmarks" / figure.benchmark.split()[0]).is_file()
    (row,) = [line for line in PAGES.splitlines() if line.startswith(figure.row)]
    cell = row.strip("| ").split(" | ")[figure.column]
    assert f"{figure.value:g}" in re.findall(r"[\d.]+", cell.replace(",", ""))


def test_data_plan_matches_the_cluster_page(capsys):
    data_plan.main([])
    rows = [line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")]
    page = (ROOT / "docs/cluster.md").read_text().split("## What a large run takes")[1]
    kept = [line for line in page.splitlines() if line.startswith("| ")]
    assert len(kept) > 8 and [row for row in kept if row not in rows] == []
    (training,) = [row for row in rows if row.startswith("| 2e+09 images, once, hours |")]
    hours = re.search(r"takes ([\d,]+) hours of an H200", page)[1]
    assert f"| {hours} of an H200" in training


@pytest.mark.long
def test_plan_matches_the_page_and_says_how_many_cores_a_gpu_needs(capsys):
    plan.main(plan.parse_args([]))
    rows = {line for line in capsys.readouterr().out.splitlines() if line.startswith("| ")}
    kept = re.findall(r"^\| (?:prx_[\w.]+|unet_\d+) \|.*", PAGES, re.M)
    assert len(kept) == 6 and [row for row in kept if row not in rows] == []
    stage = data_plan.plan_stages(data_plan.parse_args([]))["cache"]
    cores = f"one H100 encodes what {stage.cores / stage.gpus:.1f} cores decode"
    assert cores in " ".join(PAGES.split())


def test_the_bottleneck_is_the_slowest_part_of_a_stage(monkeypatch):
    monkeypatch.setattr(data_plan, "count_encoding", lambda resolution, text_cache: 0.4)
    expected = {
        "web": [],
        "cores": ["--web_speed=1e9"],
        "network of the machines": ["--web_speed=1e9", "--machine_gbps=1"],
        "bytes of the storage": ["--store_gbps=0.001"],
        "requests of the storage": ["--store_requests=0.001"],
        "driver": ["--cores=10000000", "--store_gbps=1e9", "--store_requests=1e9"],
    }
    for part, argv in expected.items():
        stage = data_plan.plan_stages(data_plan.parse_args(argv))["download"]
        assert stage.bottleneck == part and stage.speed == min(stage.limits.values())
    args = data_plan.parse_args(["--gpus=8", "--gpu_price=2", "--core_price=0"])
    stage = data_plan.plan_stages(args)["cache"]
    # 989 TFLOP/s, of which 40 % are used
    assert stage.speed == pytest.approx(8 * 989 * 0.4 / 0.4) and stage.price == 16
    assert stage.row_bytes == 2 * (8 * 32 * 32 + 77 * 1024)
    args = data_plan.parse_args(["--text_cache=ids"])
    assert data_plan.plan_stages(args)["cache"].row_bytes == 2 * 8 * 32 * 32 + 4 * 77


@pytest.mark.long
def test_driver_benchmark_stops_and_restarts(capsys):
    driver.main(["--shards", "20", "--whats", "cache", "ray_data", "downloads"])
    rows = [line.split(" | ") for line in capsys.readouterr().out.splitlines() if "| 20 |" in line]
    assert len(rows) == 3 and all(float(row[2]) > 0 for row in rows)
