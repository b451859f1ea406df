"""The scheduler's end of the door, with SGLang's own messages: in a process such as SGLang starts."""

import os
import subprocess
import sys
from pathlib import Path

from engine.sglang.settings import sglang_settings

CASES = Path(__file__).with_name("door_cases.py")


def test_requests_go_in_and_outputs_come_out_past_sglangs_http_server(checkpoint):
    environment = sglang_settings(checkpoint).environment(os.environ)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "sglang", "-p", "no:cacheprovider", str(CASES)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout
    assert "15 passed" in ran.stdout
