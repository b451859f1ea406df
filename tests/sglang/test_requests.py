"""These tests show what a request is to SGLang, and what its answer says of the time it took."""

import asyncio

import pytest

from engine.sglang.stand_in import OWN, PAGE_BYTES, chunk, worker_on
from services.engine.sglang.service.sglang_engines import SglangDecodeEngine, SglangPrefillEngine, _stages
from services.values.errors import InvalidRequest, NoCapacity
from services.values.rank import Generation, RankAddress, RankId
from services.values.request import FinishReason, GenerationRequest, PrefillResult, SamplingParams


async def test_a_priority_is_heeded_or_refused(subtests, checkpoint):
    for engine in [SglangDecodeEngine, SglangPrefillEngine]:
        with subtests.test(engine=engine):
            request = GenerationRequest("r", (1, 2, 3), SamplingParams(), priority=2)
            plain = GenerationRequest("r", (1, 2, 3), SamplingParams())
            async with worker_on(None, checkpoint) as worker:
                with pytest.raises(InvalidRequest, match="priority"):
                    engine(worker, OWN)._body(request, 7, 0)
                assert "priority" not in engine(worker, OWN)._body(plain, 7, 0)
            async with worker_on(None, checkpoint, engine_arg=("--enable-priority-scheduling",)) as worker:
                assert engine(worker, OWN)._body(request, 7, 0)["priority"] == 2
                assert engine(worker, OWN)._body(plain, 7, 0)["priority"] == 0


async def test_a_prefill_rank_registers_the_longest_prompt_that_it_takes(checkpoint):
    async with worker_on(None, checkpoint) as worker:
        prefill, decode = SglangPrefillEngine(worker, OWN), SglangDecodeEngine(worker, OWN)

        def prompt(num_tokens: int) -> GenerationRequest:
            return GenerationRequest("r", (1,) * num_tokens, SamplingParams())

        prefill._body(prompt(prefill.max_context_tokens), 7, 0)
        with pytest.raises(NoCapacity, match=f"this rank holds {decode.max_context_tokens} with"):
            prefill._body(prompt(prefill.max_context_tokens + 1), 7, 0)


def test_stages_are_those_that_sglang_measured(subtests):
    for meta_info, stages in [
        ({"queue_time": 0.5, "forward_entry_time": 100.0, "prefill_finished_time": 102.0}, (0.5, 2.0)),
        ({"queue_time": 0.5}, (0.5, 3.5)),
        ({}, (0.0, 4.0)),
        # The clocks of two processes.
        ({"queue_time": 1.0, "forward_entry_time": 100.0, "prefill_finished_time": 104.0}, (1.0, 3.0)),
        ({"queue_time": 9.0, "forward_entry_time": 100.0, "prefill_finished_time": 99.0}, (4.0, 0.0)),
    ]:
        with subtests.test(meta_info=meta_info, stages=stages):
            assert _stages(meta_info, 4.0) == stages


async def prefilled(request, rendezvous):
    return PrefillResult(5, None, 0, len(request.all_ids), kv_bytes_moved=PAGE_BYTES)


prefilled.peer = RankAddress(RankId("p", 0, Generation(2)), "127.0.0.1:9")
STEPS = [(5,), (6, 7, 8), (9, 3)]  # of a decode that speculates
DRAFTS = {"spec_num_proposed_drafts": 6, "spec_num_correct_drafts": 3}  # of SGLang's last chunk


async def test_several_tokens_of_a_step_come_together_and_end_at_a_stop_token(subtests, checkpoint):
    for stop, answered, finish in [
        (99, [(5,), (6, 7, 8), (9, 3)], FinishReason.LENGTH),
        (7, [(5,), (6, 7)], FinishReason.STOP),
        (3, [(5,), (6, 7, 8), (9, 3)], FinishReason.STOP),
    ]:
        with subtests.test(stop=stop, answered=answered, finish=finish):

            async def generate(answer):
                for step in STEPS[:-1]:
                    answer.write_tokens(*step)
                answer.write(chunk({"type": "length"}, STEPS[-1], **DRAFTS))

            async with worker_on(generate, checkpoint) as worker:
                outputs = SglangDecodeEngine(worker, OWN).generate(request_of(stop), prefilled)
                told = [output async for output in outputs]
            said = [(output.token_ids, output.finished) for output in told]
            assert said == [*((step, None) for step in answered[:-1]), (answered[-1], finish)]
            counted = (told[-1].drafted_tokens, told[-1].accepted_draft_tokens)
            assert counted == ((6, 3) if len(answered) == len(STEPS) else (0, 0))


def request_of(stop):
    sampling = SamplingParams(max_tokens=6, temperature=0, stop_token_ids=(stop,))
    return GenerationRequest("r", (1, 2, 3), sampling)


async def test_tokens_behind_the_first_are_told_without_an_output(subtests, checkpoint):
    for stop, said in [(99, [(5,), 6, 7, 8, (9, 3)]), (7, [(5,), (6, 7)]), (3, [(5,), 6, 7, 8, (9, 3)])]:
        with subtests.test(stop=stop, said=said):
            first_is_there = asyncio.Event()

            async def generate(answer, first_is_there=first_is_there):
                answer.write_tokens(*STEPS[0])
                await first_is_there.wait()
                answer.write_tokens(*STEPS[1])
                answer.write(chunk({"type": "length"}, STEPS[2]))

            told = []
            async with worker_on(generate, checkpoint) as worker:
                engine = SglangDecodeEngine(worker, OWN)
                async for output in engine.generate(request_of(stop), prefilled, told.append):
                    told.append(output.token_ids)
                    assert (output.admitted is None) == first_is_there.is_set()
                    # What is told from here on comes when whoever reads has asked for more.
                    asyncio.get_running_loop().call_soon(first_is_there.set)
            assert told == said
