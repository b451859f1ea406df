"""A rank of which one thread hangs in native code, while its loop runs on and says that it is well."""

import os

import pytest

from processes.harness import ProcessCluster, prompt_of, until

# Slow: a limit that no crowded machine passes by itself is to pass.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

DECODE = ["decode-0/0", "decode-1/0"]
# In place of a kernel, or a transport call, that never ends. The file says of which worker; its rank hangs in
# its next one.
HANG = """
import ctypes, sys
from pathlib import Path

if any(text.startswith("--rank-index=") for text in sys.orig_argv):
    from services.engine.fake import FakeRunner
    from services.transfer.local import LocalTransport

    def hanging(verb):
        def hang_or_do(self, *arguments):
            while "--worker=" + Path({file!r}).read_text() in sys.orig_argv:
                ctypes.CDLL(None).sleep(1000)
            return verb(self, *arguments)

        return hang_or_do

    FakeRunner.run = hanging(FakeRunner.run) if "services.decode" in sys.orig_argv else FakeRunner.run
    LocalTransport.write = hanging(LocalTransport.write)
"""


@pytest.fixture
def hung(tmp_path, monkeypatch):
    """The file with the worker's name."""
    file, site = tmp_path / "hung", tmp_path / "site"
    file.write_text("nobody")
    site.mkdir()
    (site / "sitecustomize.py").write_text(HANG.format(file=str(file)))
    paths = (str(site), os.environ.get("PYTHONPATH", ""))
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, paths)))
    return file


async def test_a_hung_engine_loses_its_streams_and_its_rank_is_started_again(tmp_path, model_dir, hung):
    flags = ("--step-limit-s=10",)
    async with ProcessCluster(
        tmp_path / "data", model_dir, rank_flags=flags, decode_workers=2, decode_dp_size=1
    ) as cluster:
        streams = [cluster.open(prompt_of(i), 250) for i in range(6)]
        for stream in streams:
            await stream.has(3)
        before = cluster.rank((await cluster.running(DECODE))[0])
        hung.write_text(before.name.partition("/")[0])
        await until(lambda: cluster.events("engine_hangs", before.name), "the rank notices")
        hung.write_text("nobody")  # the next life is well, and this one sleeps on
        for stream in streams:
            await stream.exact()
        assert {line.fields["left"] for line in cluster.events("request_moved")} == {before.name}
        after = await cluster.restarted(before)
        assert after.lives == 2 and not cluster.events("rank_hangs")  # it has ended by itself
        await cluster.until_used(before.name, await cluster.generation(before.name))

        async def idle():
            return not await cluster.running(cluster.rank_names)

        await until(idle, "nothing is left of them")


async def test_a_hung_sender_loses_its_requests_and_its_rank_is_started_again(tmp_path, model_dir, hung):
    flags = ("--step-limit-s=10",)
    async with ProcessCluster(
        tmp_path / "data", model_dir, rank_flags=flags, prefill_workers=2, decode_dp_size=1
    ) as cluster:
        before = cluster.rank("prefill-0/0")
        hung.write_text("prefill-0")
        streams = [cluster.open(prompt_of(i), 30) for i in range(12)]
        await until(lambda: cluster.events("sender_hangs", before.name), "the rank notices")
        hung.write_text("nobody")  # the next life is well, and this one sleeps on
        for stream in streams:
            await stream.exact()
        after = await cluster.restarted(before)
        assert after.lives == 2 and not cluster.events("rank_hangs")  # it has ended by itself
        await cluster.until_used(before.name, await cluster.generation(before.name))
        await cluster.assert_nothing_held()
