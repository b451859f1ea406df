"""Real text for a real checkpoint: what people ask for whose answers stand in their prompts, or do not.

edit     a program to be repeated with small changes: most of the answer stands in the prompt
quote    a text and questions that ask for its own words
chat     questions without a text
again    the same questions as chat, which others of the salt were answered before

Conversations go through the checkpoint's chat template, answers end where the model ends them, and it is
sampled by its generation_config.json.
"""

import json
import random
from collections.abc import Sequence
from pathlib import Path

from transformers import AutoTokenizer

from bench.speculative.workload import Case, Conversation
from services.engine.paged.drafters import Mode
from services.values.request import SamplingParams

_MODES: tuple[Mode, ...] = ("lookup", "tree")
CASES = tuple(
    Case(name, 0.0, 0, _MODES, shared_salt=name == "again") for name in ("edit", "quote", "chat", "again")
)

_PROGRAM = '''def average(numbers):
    """The mean of a list; 0 of an empty one."""
    total = 0
    for number in numbers:
        total += number
    return total / len(numbers) if numbers else 0


for values in ([1, 2, 3], [], [10.5, 2]):
    print(values, average(values))'''
_TEXT = (
    "The lock keeper's log for March says that forty-one barges passed the upper gate, nine of them at "
    "night. Two waited for more than an hour, because the gate's chain had slipped off its wheel and had "
    "to be put back by hand. On the twelfth the river rose by eighty centimetres within a day, and the "
    "gate stayed shut until the fifteenth. Nobody was hurt, but a boat that was loaded with bricks lost "
    "its rudder and was towed to the yard at Millbrook."
)
_QUESTIONS: dict[str, Sequence[tuple[str, str]]] = {
    "edit": (
        (
            f"```python\n{_PROGRAM}\n```\n\nRepeat this program, word for word.",
            "Repeat it with `mean` for `average`.",
        ),
        (
            f"Correct the spelling in this program, if it is wrong, and print all of it:\n\n{_PROGRAM}",
            "Once more.",
        ),
    ),
    "quote": (
        (f"{_TEXT}\n\nQuote the sentence about the river.", "Now quote the sentence about the boat."),
        (f"Read this:\n\n{_TEXT}\n\nWhy did two barges wait?", "And what happened on the twelfth?"),
    ),
    "chat": (
        ("Why is the sky blue?", "And why is it red in the evening?"),
        ("Name three uses of an old newspaper.", "Which of them is the best, and why?"),
    ),
}
_MARK = "\ufffc"  # for an answer, in a chat's text


class RealText:
    """Conversations in the ids of a checkpoint, by its own chat template."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(directory)
        config = json.loads((directory / "generation_config.json").read_text())
        self._sampling = SamplingParams(
            temperature=config.get("temperature", 1.0), top_p=config.get("top_p", 1.0)
        )
        ends = config["eos_token_id"]
        self._ends = tuple(ends) if isinstance(ends, list) else (ends,)

    def conversations(self, case: Case, count: int, num_turns: int, seed: int) -> list[Conversation]:
        """The case's questions in turn. With another seed salt (but for `again`) and chance are others."""
        chance = random.Random(f"{case.name} {seed}")
        asked = _QUESTIONS["chat" if case.name == "again" else case.name]
        return [
            Conversation(
                "shared" if case.shared_salt else f"own-{chance.getrandbits(64)}",
                chance.getrandbits(32),
                self._turns(asked[(seed + number) % len(asked)])[:num_turns],
                self._sampling,
                self._ends,
            )
            for number in range(count)
        ]

    def _turns(self, questions: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Each piece is the chat from one answer to the next."""
        messages = []
        for question in questions:
            messages += [{"role": "user", "content": question}, {"role": "assistant", "content": _MARK}]
        text = self._tokenizer.apply_chat_template(messages, tokenize=False)
        pieces = text.split(_MARK)[: len(questions)]
        return tuple(tuple(self._tokenizer(piece, add_special_tokens=False).input_ids) for piece in pieces)
