"""Our ends in SGLang's processes, with its own classes and messages: in a process such as SGLang starts."""

import os
import subprocess
import sys
from pathlib import Path

from engine.sglang.settings import sglang_settings

CASES = [str(Path(__file__).with_name(name)) for name in ("door_cases.py", "prefill_end_cases.py")]


def test_our_ends_work_with_sglangs_own_classes(checkpoint):
    environment = sglang_settings(checkpoint).environment(os.environ)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "sglang", "-p", "no:cacheprovider", *CASES]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stdout
    assert "21 passed" in ran.stdout
