"""What we change of SGLang's prefill end, with its own classes: in a process such as it starts."""

import os
import subprocess
import sys
from pathlib import Path

from engine.sglang.settings import sglang_settings
from services.values.rank import Role

CASES = Path(__file__).with_name("prefill_end_cases.py")


def test_cases(checkpoint):
    environment = sglang_settings(checkpoint, role=Role.PREFILL).environment(os.environ)
    command = [sys.executable, "-m", "pytest", "-q", "-m", "sglang", "-p", "no:cacheprovider", str(CASES)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=500)
    assert ran.returncode == 0, ran.stdout
    assert "5 passed" in ran.stdout
