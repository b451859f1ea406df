"""A worker whose SGLang is one scheduler of the test's: what it answers, and how it breaks off."""

import asyncio
import tempfile
from contextlib import asynccontextmanager

from engine.sglang.settings import sglang_settings
from services.engine.sglang.reports import (
    ORDERS,
    Abort,
    Active,
    Generate,
    Outputs,
    TicketSent,
    decode,
    encode,
)
from services.engine.sglang.service.worker import SglangWorker
from services.values.rank import Generation, RankId

OWN = RankId("w", 0, Generation(1))
PAGE = 16
PAGE_BYTES = 4096


def active(**changes):
    fields = dict(
        role="decode",
        dp_rank=0,
        tp_rank=0,
        cp_rank=0,
        pp_rank=0,
        tp_size=1,
        pid=1,
        endpoint="",
        page_size=PAGE,
        page_bytes=PAGE_BYTES,
        num_pages=512,
        dtype="float32",
        num_layers=2,
        state_kinds=[],
        carried=[],
        draft=None,
        topology={},
    )
    return Active(**{**fields, **changes})


class RunningProcess:
    """In place of SglangProcess: it runs until the test says otherwise."""

    def __init__(self):
        self.ended = asyncio.Event()

    async def stop(self, in_order=True): ...


def tell(worker, *reports):
    """As SGLang's processes do, through the worker's socket."""
    for report in reports:
        worker._take(report)


def chunk(finish_reason=None, ids=(5,), **meta_info):
    """Without its rid."""
    return {"output_ids": list(ids), "meta_info": {"finish_reason": finish_reason, **meta_info}}


class Answer:
    """Of a scheduler to one request."""

    def __init__(self, rid, writer):
        self._rid = rid
        self._writer = writer

    def write(self, chunk):
        self._writer.write(encode(Outputs([{"rid": self._rid, **chunk}])))

    def write_tokens(self, *ids):
        self._writer.write(encode(Outputs([], {self._rid: list(ids)})))

    def break_off(self):
        self._writer.close()


class Scheduler:
    """A process of SGLang's: it tells a ticket of each request, and answers by `generate(answer)`."""

    def __init__(self, reader, writer, generate):
        self._reader = reader
        self._writer = writer
        self._generate = generate
        self.arguments, self.aborted = [], []  # of requests; rids

    async def serve(self):
        self._writer.write(encode(active()))
        async with asyncio.TaskGroup() as answers:
            while line := await self._reader.readline():
                match decode(line, ORDERS):
                    case Generate(arguments=arguments):
                        self.arguments.append(arguments)
                        self._writer.write(encode(TicketSent(arguments["bootstrap_room"], 0, 1)))
                        answers.create_task(self._generate(Answer(arguments["rid"], self._writer)))
                    case Abort(rid=rid):
                        self.aborted.append(rid)


@asynccontextmanager
async def worker_on(generate, model, **settings):
    """`generate(answer)` tells what SGLang would; None: nobody connects. The worker has the `scheduler`."""
    worker = SglangWorker(sglang_settings(model, **settings), {0: OWN})
    worker._process = RunningProcess()
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/reports"
        await worker._open_reports(path)
        ending = asyncio.create_task(worker._close_door_at_end())
        tell(worker, active())
        if generate is not None:
            worker.scheduler = Scheduler(*await asyncio.open_unix_connection(path), generate)
            serving = asyncio.create_task(worker.scheduler.serve())
            while not worker._door.is_open(0):
                await asyncio.sleep(0)
        try:
            yield worker
        finally:
            ending.cancel()
            if generate is not None:
                serving.cancel()
                await asyncio.gather(serving, return_exceptions=True)
                worker.scheduler._writer.close()
            worker._reports.close()
