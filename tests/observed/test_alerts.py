"""The alerts of docs/alerts.yml fire: for a job whose saves fail from the start, and one whose uploads do.

Run by Prometheus itself, of the PATH or of `make .prometheus/.ready`.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import time
from pathlib import Path
from urllib.request import urlopen

import pytest
import torch

import asyncckpt
from asyncckpt.events import prometheus_events
from tests.ranks.processes import free_port

ROOT = Path(__file__).resolve().parents[2]
RULES = ROOT / "docs" / "alerts.yml"
SCRAPED_S = 60.0
OF_UNIT_TESTS = """
rule_files: [%s]
evaluation_interval: 1m
tests:
  - interval: 1m
    input_series:
      - {series: 'asyncckpt_newest_time_seconds{path="old"}', values: '0x180'}
      - {series: 'asyncckpt_opened_time_seconds{path="old"}', values: '0x180'}
      - {series: 'asyncckpt_newest_time_seconds{path="new"}', values: '0x180'}
      - {series: 'asyncckpt_opened_time_seconds{path="new"}', values: '7200x180'}
      - {series: 'asyncckpt_saves_total{path="old",what="save",outcome="failed"}', values: '0x100 1x80'}
      - {series: 'asyncckpt_saves_total{path="new",what="save",outcome="failed"}', values: '5x180'}
      - {series: 'asyncckpt_saves_total{path="old",what="upload",outcome="failed"}', values: '0+1x180'}
      - {series: 'asyncckpt_saves_total{path="old",what="upload",outcome="committed"}', values: '3x180'}
      - {series: 'asyncckpt_saves_total{path="new",what="upload",outcome="failed"}', values: '0+1x180'}
      - {series: 'asyncckpt_saves_total{path="new",what="upload",outcome="committed"}', values: '0+1x180'}
    promql_expr_test:
      - {expr: 'count(ALERTS{path="old",alertname="NoCheckpoints"})', eval_time: 59m}
      - {expr: 'count(ALERTS{path="old",alertname="NoCheckpoints"})', eval_time: 62m, exp_samples: [{value: 1}]}
      - {expr: 'count(ALERTS{path="new",alertname="NoCheckpoints"})', eval_time: 170m}
      - {expr: 'count(ALERTS{path="old",alertname="CheckpointsFail"})', eval_time: 90m}
      - {expr: 'count(ALERTS{path="old",alertname="CheckpointsFail"})', eval_time: 110m, exp_samples: [{value: 1}]}
      - {expr: 'count(ALERTS{path="new",alertname="CheckpointsFail"})', eval_time: 110m}
      - {expr: 'count(ALERTS{path="old",alertname="UploadsFail"})', eval_time: 90m, exp_samples: [{value: 1}]}
      - {expr: 'count(ALERTS{path="new",alertname="UploadsFail"})', eval_time: 90m}
"""


def tool(name: str) -> str:
    found = shutil.which(name, path=f"{ROOT / '.prometheus/usr/bin'}:{os.environ['PATH']}")
    if found is None:
        pytest.skip(f"no {name} here: make .prometheus/.ready, or apt-get install prometheus")
    return found


def test_rules_fire_when_they_should(tmp_path: Path) -> None:
    (tmp_path / "tests.yml").write_text(OF_UNIT_TESTS % RULES)
    done = subprocess.run(
        [tool("promtool"), "test", "rules", "tests.yml"], cwd=tmp_path, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_job_that_never_commits_is_scraped(tmp_path: Path) -> None:
    """Of it there was no series at all, so that no alert could ask for one."""
    prometheus = pytest.importorskip("prometheus_client")
    program = tool("prometheus")
    registry, port, own = prometheus.CollectorRegistry(), free_port(), free_port()
    served, _ = prometheus.start_http_server(port, "127.0.0.1", registry)
    (tmp_path / "prometheus.yml").write_text(
        f"rule_files: [{RULES}]\n"
        "global: {scrape_interval: 1s, evaluation_interval: 1s}\n"
        f"scrape_configs: [{{job_name: job, static_configs: [{{targets: ['127.0.0.1:{port}']}}]}}]\n"
    )

    def fails(_: object) -> object:
        raise ValueError("as planned")

    listen = f"--web.listen-address=127.0.0.1:{own}"
    options = ["--config.file=prometheus.yml", "--storage.tsdb.path=data", listen, "--log.level=error"]
    debug = asyncckpt.DebugOptions(on_event=prometheus_events(registry))
    with (
        subprocess.Popen([program, *options], cwd=tmp_path) as running,
        asyncckpt.Saver(path=tmp_path / "run", tensors={"w": torch.ones(3)}, filter_func=fails, debug=debug) as saver,  # type: ignore[arg-type]
    ):
        try:
            failed = 'asyncckpt_saves_total{what="save",outcome="failed"}'
            assert asked(own, failed) == [0.0]
            assert asked(own, "asyncckpt_newest_step") == [-1.0]
            assert asked(own, 'ALERTS{alertname="CheckpointsFail"}', wants=False) == []
            saver.save_async(1).exception()
            assert asked(own, 'ALERTS{alertname="CheckpointsFail"}') == [1.0]
        finally:
            running.kill()
            served.shutdown()


def asked(port: int, query: str, *, wants: bool = True) -> list[float]:
    """The values that Prometheus has, once it has any."""
    until = time.monotonic() + SCRAPED_S
    while True:
        try:
            with urlopen(f"http://127.0.0.1:{port}/api/v1/query?query={query.replace(' ', '%20')}") as answer:
                found = [float(one["value"][1]) for one in json.load(answer)["data"]["result"]]
        except OSError:
            found = []
        if found or not wants or time.monotonic() > until:
            return found
        time.sleep(0.2)
