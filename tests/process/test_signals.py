import asyncio
import os
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from services.process.signals import stop_on_signals


async def test_a_signal_stops():
    stopping = stop_on_signals()
    assert not stopping.is_set()
    os.kill(os.getpid(), signal.SIGTERM)
    await asyncio.wait_for(stopping.wait(), 10)


# What makes a process the first one of a namespace of processes, as a container's is.
FIRST = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--kill-child")


def ended(code, *, number=None, within=()):
    """(exit code, what it said) of a Python that runs `code`, and gets a signal once it has said a line."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [*within, sys.executable, "-c", f"from services.process.signals import ending_at_once\n{code}"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env, bufsize=1
    )
    with process:
        first = process.stdout.readline()
        if number is not None:
            os.kill(only_child(process.pid) if within else process.pid, number)
        rest = process.stdout.read()
    return process.returncode, first + rest


@pytest.mark.long
@pytest.mark.parametrize(("end", "code"), [("pass", 0), ("sys.exit('no more')", 1), ("1 / 0", 1)])
def test_a_thread_that_computes_does_not_abort_the_end(end, code):
    """Without the guard: "terminate called without an active exception", exit code -6."""
    found, said = ended(
        "import atexit, sys, threading, time, torch\n"
        "def compute():\n"
        "    a = torch.ones(64, 64)\n"
        "    print('computes')\n"
        "    while True: a @ a\n"
        "with ending_at_once():\n"
        "    atexit.register(print, 'the last word')\n"
        "    threading.Thread(target=compute, daemon=True).start()\n"
        "    time.sleep(0.3)\n"
        f"    {end}\n"
    )
    assert found == code, said
    assert said.startswith("computes\n") and "the last word" in said
    assert ("no more" in said) == ("no more" in end) and ("ZeroDivisionError" in said) == ("/ 0" in end)


def test_an_interrupt_ends_a_process_that_cannot_hear_exceptions():
    """A library that is imported may swallow KeyboardInterrupt."""
    code = (
        "import time\n"
        "with ending_at_once():\n"
        "    print('deaf', flush=True)\n"
        "    while True:\n"
        "        try: time.sleep(60)\n"
        "        except BaseException: pass\n"
    )
    assert ended(code, number=signal.SIGINT) == (-signal.SIGINT, "deaf\n")


DEAF = "import time\nprint('deaf', flush=True)\ntime.sleep(20)\nprint('slept', flush=True)\n"


def only_child(pid):
    (child,) = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return int(child)


def end_at_once(number):
    services = "with ending_at_once():\n" + textwrap.indent(DEAF, "    ")
    assert ended(services, number=number, within=FIRST) == (128 + number, "deaf\n")
    if number == signal.SIGTERM:  # Python itself handles the other one.
        run = f"def run(*_):\n{textwrap.indent(DEAF, '    ')}"
        main = "sys.argv[1:], cli._run = ['top'], run\ncli.main()"
        command = f"import sys\nfrom services.cli import __main__ as cli\n{run}\n{main}"
        assert ended(command, number=number, within=FIRST) == (128 + number, "deaf\n")


def test_a_container_s_first_process_ends_at_once(subtests):
    """Linux keeps signals from it that nobody handles: SIGTERM to a pod whose model loads was lost."""
    if subprocess.run([*FIRST, "true"], capture_output=True).returncode:
        pytest.skip("namespaces of processes cannot be made here")
    for number in (signal.SIGTERM, signal.SIGINT):
        with subtests.test(number=number):
            end_at_once(number)
