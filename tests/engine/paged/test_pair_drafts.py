"""Several tokens a step, from the engine's thread to the answer."""

from itertools import cycle

from engine.paged.core_rank import Guesses
from engine.pair import Pair, core_of
from services.engine.fake import continuation
from services.values.rank import Plan


async def test_the_tokens_of_a_step_come_together(subtests):
    for plan in list(Plan):
        with subtests.test(plan=plan):
            prompt = tuple(range(10, 30))
            async with Pair() as pair:
                guesses = Guesses(continuation, cycle([3]))
                core_of(pair.decode)._drafting = guesses
                async with pair.outputs(pair.request(prompt, 5, plan)) as answer:
                    outputs = [output async for output in answer]
                assert [len(output.token_ids) for output in outputs] == [1, 4]
                assert [output.admitted is not None for output in outputs] == [True, False]
                assert [token for output in outputs for token in output.token_ids] == continuation(prompt, 5)
                assert guesses.noted[guesses.over[0]] == [(3, 3)]
                await pair.assert_nothing_held()
