import signal
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.long


PROGRAM = """
import asyncio, tempfile
from bench.interrupts import end_as_by_ctrl_c

async def measure():
    print(folder, flush=True)
    await asyncio.sleep(60)

end_as_by_ctrl_c()
with tempfile.TemporaryDirectory() as folder:
    asyncio.run(measure())
"""


def test_what_a_benchmark_made_goes_with_it_when_it_is_terminated(subtests):
    for start in ["", "import signal; signal.signal(signal.SIGINT, signal.SIG_IGN)"]:
        with subtests.test(start=start):
            command = [sys.executable, "-c", start + PROGRAM]
            with subprocess.Popen(
                command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
            ) as process:
                folder = Path(process.stdout.readline().strip())
                assert folder.is_dir()
                process.send_signal(signal.SIGTERM)
                assert "KeyboardInterrupt" in process.communicate()[1]
            assert process.returncode == -signal.SIGINT
            assert not folder.exists()
