"""Settings that cannot work: one sentence, and the exit code that keeps a supervisor from trying again."""

import asyncio
import sys

import pytest

from processes.harness import LONG_S, parse_line

FAKE = ["--engine=fake", "--transport=local"]
REFUSED = {
    "sizes that do not fit": (
        ["services.decode", *FAKE, "--page-size=3", "--index-block=64"],
        "isthmus-decode: --index-block 64 must be a multiple of --page-size 3",
    ),
    "no checkpoint": (
        ["services.decode", "--engine=torch", "--model=no-such-directory", "--transport=local"],
        "isthmus-decode: no checkpoint directory at no-such-directory",
    ),
    "an address of another machine": (
        ["services.prefill", *FAKE, "--host=192.0.2.1"],
        "isthmus-prefill: cannot listen on 192.0.2.1",
    ),
    "no certificate": (
        ["services.prefill", *FAKE, "--tls-cert=no-such-file", "--tls-key=no-such-file"],
        "isthmus-prefill: cannot read the TLS file no-such-file",
    ),
}


_IMPORTS_TORCH = "no checkpoint"


@pytest.mark.long
async def test_a_worker_says_what_is_wrong_and_exits_78():
    await asyncio.gather(*(refuse_to_start(case) for case in REFUSED if case != _IMPORTS_TORCH))


@pytest.mark.long
async def test_a_worker_without_a_checkpoint_says_so():
    await refuse_to_start(_IMPORTS_TORCH)


async def refuse_to_start(case):
    (module, *flags), sentence = REFUSED[case]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", module, "--worker=w", "--etcd=127.0.0.1:1", *flags),
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(LONG_S):
            output, _ = await process.communicate()
    except TimeoutError:
        process.terminate()
        raise
    said = [line for line in output.decode().splitlines() if parse_line("w", line) is None]
    assert process.returncode == 78, output.decode()
    assert len(said) == 1, output.decode()
    assert said[0].startswith(sentence)
