"""An SGLang in which our plugin is not active would speak its own handshake: it is refused at the start."""

import asyncio
import os
import sys
import tempfile
from importlib.metadata import EntryPoint, EntryPoints
from pathlib import Path

import psutil
import pytest

from engine.sglang.settings import sglang_settings
from engine.sglang.stand_in import active, tell
from services.engine.sglang.reports import Load
from services.engine.sglang.service import sglang_process as process_module
from services.engine.sglang.service import worker
from services.values.errors import ConfigError
from services.values.rank import Generation, RankId, Role

EXIT_S = 120.0


def shadowed(folder):
    """A path on which isthmus is a package without entry points: the first metadata on it counts."""
    info = folder / "isthmus-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: isthmus\nVersion: 0.1.0\n")
    return os.pathsep.join(filter(None, (str(folder), os.environ.get("PYTHONPATH", ""))))


async def test_a_plugin_that_is_not_installed_is_a_sentence_and_exit_code_78(checkpoint, tmp_path):
    flags = ["--engine=sglang", f"--model={checkpoint}", "--worker=p", "--etcd=127.0.0.1:1"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.prefill", *flags),
        env={**os.environ, "PYTHONPATH": shadowed(tmp_path)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(EXIT_S):
            output, _ = await process.communicate()
    except TimeoutError:
        process.terminate()
        raise
    assert process.returncode == 78, output.decode()
    assert "isthmus-prefill: the plugin is not installed" in output.decode()


def test_a_plugin_that_was_installed_from_other_sources_is_refused(subtests, monkeypatch):
    """SGLang would start without it, and end again and again at what only the plugin knows."""
    for module in ["services.engine.sglang.gone", "services.gone.plugin"]:
        with subtests.test(module=module):
            plugin = EntryPoint("isthmus", f"{module}:register", "sglang.srt.plugins")
            monkeypatch.setattr(
                process_module, "entry_points", lambda *, plugin=plugin, **_: EntryPoints([plugin])
            )
            with pytest.raises(ConfigError, match=f"installed as {module}:register, which does not exist"):
                process_module.require_entry_point()


async def test_a_worker_that_is_stopped_while_sglang_loads_ends_in_order(checkpoint, tmp_path):
    flags = ["--engine=sglang", f"--model={checkpoint}", "--worker=p", "--etcd=127.0.0.1:1"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "services.prefill", *flags),
        env={**os.environ, "TMPDIR": str(tmp_path)},
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
    )
    try:
        async with asyncio.timeout(EXIT_S):
            while b"sglang_started" not in (line := await process.stdout.readline()):
                assert line, "it ended by itself"
            (rank,) = psutil.Process(process.pid).children()
            (sglang,) = rank.children()
            process.terminate()
            output = await process.stdout.read()
            await process.wait()
    finally:
        if process.returncode is None:
            process.kill()
    assert process.returncode == 0, output.decode()
    assert "rank_exited" in output.decode() and "Traceback" not in output.decode()
    assert not sglang.is_running()
    assert not list(tmp_path.glob("isthmus-worker-*"))


class HealthySglang:
    """In place of SGLang's process and its HTTP API: healthy, and then what reports it is made to send."""

    def __init__(self, *_arguments):
        self.ended = asyncio.Event()

    async def start(self): ...

    async def stop(self, in_order=True): ...

    def note_tree(self): ...

    async def healthy(self):
        return True

    async def abort_all(self): ...

    async def close(self): ...


@pytest.fixture
def make_worker(checkpoint, monkeypatch):
    def make(num_pages=512):
        settings = sglang_settings(checkpoint, role=Role.PREFILL, page_size=16, kv_pages=num_pages)
        made = worker.SglangWorker(settings, {0: RankId("p", 0, Generation(1))})
        tell(made, Load({"dp_rank": 0, "max_total_num_tokens": 512 * 16}))
        return made

    monkeypatch.setattr(worker, "SglangProcess", HealthySglang)
    monkeypatch.setattr(worker, "SglangHttp", HealthySglang)
    monkeypatch.setattr(worker, "_ACTIVE_TIMEOUT_S", 0.5)
    return make


def report(to, *tp_ranks, tp_size):
    for tp_rank in tp_ranks:
        tell(to, active(role="prefill", tp_rank=tp_rank, tp_size=tp_size))


async def test_every_process_must_say_that_the_plugin_is_active(subtests, make_worker):
    for told, missing in [((), "[(0, 0)]"), ((0,), "[(0, 1)]"), ((0, 1), "")]:
        with subtests.test(told=told, missing=missing):
            started = make_worker()
            report(started, *told, tp_size=2)
            if missing:
                with pytest.raises(ConfigError) as refused:
                    await started.start()
                assert missing in str(refused.value)
            else:
                await started.start()
                await started.stop()


async def test_a_pool_that_is_smaller_than_asked_for_is_refused_with_its_size(make_worker):
    started = make_worker(num_pages=513)
    report(started, 0, tp_size=1)
    with pytest.raises(ConfigError, match="--kv-pages=513: SGLang has memory for 512 pages"):
        await started.start()


async def test_a_model_whose_state_is_not_known_is_refused(make_worker):
    """Whatever its config.json says: SGLang itself knows best."""
    started = make_worker()
    tell(started, active(role="prefill", state_kinds=["dsa", "c128_state"]))
    with pytest.raises(ConfigError, match=r"is not known here \(c128_state\)"):
        await started.start()


async def test_what_is_part_of_each_page_or_carried_passes(subtests, make_worker):
    for kind in ["block_scale", "swa", "mamba"]:
        with subtests.test(kind=kind):
            started = make_worker()
            tell(started, active(role="prefill", state_kinds=["dsa", kind]))
            await started.start()
            await started.stop()


@pytest.mark.parametrize("refused", [False, True])
async def test_temporary_files_of_sglangs_go_with_their_worker(make_worker, monkeypatch, tmp_path, refused):
    folders = []

    class Leaving(HealthySglang):
        def __init__(self, arguments, environment):
            super().__init__()
            folders.append(Path(environment["TMPDIR"]))
            (folders[0] / "tmpx").mkdir()
            (folders[0] / "tmpx" / "counter_1.db").write_text("x")

    monkeypatch.setattr(worker, "SglangProcess", Leaving)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    started = make_worker(num_pages=513 if refused else 512)
    report(started, 0, tp_size=1)
    if refused:
        with pytest.raises(ConfigError):
            await started.start()
    else:
        await started.start()
        assert folders[0].parent == tmp_path and (folders[0] / "tmpx" / "counter_1.db").exists()
        await started.stop()
    assert folders and not list(tmp_path.iterdir())


async def test_a_model_that_sglang_spreads_over_stages_is_refused(subtests, make_worker):
    for place in [{"cp_rank": 1}, {"pp_rank": 1}]:
        with subtests.test(place=place):
            started = make_worker()
            tell(started, active(role="prefill"))
            tell(started, active(role="prefill", **place))
            with pytest.raises(ConfigError, match="not supported"):
                await started.start()
