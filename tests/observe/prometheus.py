"""A real Prometheus, as a child process."""

import json
import os
import shutil
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request

import yaml

from services.host.ports import free_ports

SCRAPE_S = 2
KUBERNETES = "edge"  # what the installation calls its cluster, as many do
BINARY = os.environ.get("PROMETHEUS") or shutil.which("prometheus")


class Prometheus:
    """`with Prometheus(folder, {job: targets}, rules) as prometheus`. The answers are the API's."""

    def __init__(self, folder, targets, rules):
        (port,) = free_ports("127.0.0.1", 1)
        self.url = f"http://127.0.0.1:{port}"
        config = folder / "prometheus.yaml"
        jobs = [
            {
                "job_name": job,
                "honor_labels": True,
                "static_configs": [{"targets": addresses, "labels": {"cluster": KUBERNETES}}],
            }
            for job, addresses in targets.items()
        ]
        times = {"scrape_interval": f"{SCRAPE_S}s", "evaluation_interval": f"{SCRAPE_S}s"}
        config.write_text(
            yaml.safe_dump(
                {"global": times, "rule_files": [str(rule) for rule in rules], "scrape_configs": jobs}
            )
        )
        self._log = folder / "prometheus.log"
        self._command = [
            BINARY,
            f"--config.file={config}",
            f"--storage.tsdb.path={folder / 'tsdb'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--enable-feature=exemplar-storage",
        ]

    def __enter__(self):
        assert BINARY, "make observe-test installs prometheus; or set PROMETHEUS"
        with self._log.open("w") as log:
            self._process = subprocess.Popen(self._command, stdout=log, stderr=log)
        deadline = time.monotonic() + 60
        while True:
            try:
                urllib.request.urlopen(f"{self.url}/-/ready", timeout=5).close()
                return self
            except (urllib.error.URLError, OSError):
                assert self._process.poll() is None and time.monotonic() < deadline, self._log.read_text()
                time.sleep(0.1)

    def __exit__(self, *exc):
        self._process.terminate()
        self._process.wait()

    def ask(self, path, **parameters):
        """The `data` of an answer. Raises AssertionError with Prometheus's sentence."""
        assert self._process.poll() is None, f"it ended with {self._process.returncode}: {self._log}"
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        try:
            with urllib.request.urlopen(url, timeout=60) as response:
                return json.load(response)["data"]
        except urllib.error.HTTPError as error:
            raise AssertionError(error.read().decode()) from error

    def now(self, expr, at_s):
        return self.ask("query", query=expr, time=at_s)["result"]

    def over(self, expr, start_s, end_s, step_s):
        return self.ask("query_range", query=expr, start=start_s, end=end_s, step=step_s)["result"]
