from array import array

from hypothesis import given
from hypothesis import strategies as st

from services.router.text.chat_memory import AnswerMemory, RememberedAnswer

KEYS = [bytes([number]) for number in range(6)]


def answer(number: int, length: int = 1) -> RememberedAnswer:
    return RememberedAnswer(array("I", [number] * length), array("I"), b"said")


class Oracle:
    """It keeps all answers in the order of their last use, and looks through every one of them."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.answers: list[tuple[int, list[bytes], RememberedAnswer]] = []
        self.number = 0

    def remember(self, keys: list[bytes], remembered: RememberedAnswer) -> bool:
        if remembered.size_bytes(len(keys)) > self.max_bytes:
            return False
        self.number += 1
        self.answers.append((self.number, keys, remembered))
        while sum(each.size_bytes(len(names)) for _, names, each in self.answers) > self.max_bytes:
            self.answers.pop(0)
        return True


Operation = tuple[list[bytes], int, int] | bytes
operations = st.lists(
    st.tuples(st.lists(st.sampled_from(KEYS), min_size=1, max_size=3), st.integers(0, 3), st.integers(0, 600))
    | st.sampled_from(KEYS),
    max_size=40,
)


@given(operations, st.integers(1000, 8000))
def test_what_is_found_was_remembered_under_that_key_alone(
    operations: list[Operation], max_bytes: int
) -> None:
    memory, oracle = AnswerMemory(max_bytes), Oracle(max_bytes)
    for operation in operations:
        if isinstance(operation, bytes):
            found = memory.recall("t", operation)
            under = [each for each in oracle.answers if operation in each[1]]
            latest = max(under, default=None, key=lambda each: each[0])
            # Of those that are left, all under the key are the same, and the last of them is the one.
            if found is not None:
                assert latest is not None and found == latest[2]
                assert all(each[2] == found for each in under)
                oracle.answers.remove(latest)
                oracle.answers.append(latest)
            elif latest is not None:
                assert any(number != latest[2] for number in oracle_history(operations, operation))
        else:
            keys, number, length = operation
            assert memory.remember("t", keys, answer(number, length)) == oracle.remember(
                keys, answer(number, length)
            )
        assert len(memory) == len(oracle.answers)
        assert (
            memory.size_bytes
            == sum(each.size_bytes(len(names)) for _, names, each in oracle.answers)
            <= max_bytes
        )
    assert set(memory._owners) <= {key for _, keys, _ in oracle.answers for key in keys}


def oracle_history(operations: list[Operation], key: bytes) -> list[RememberedAnswer]:
    """Return all that was ever to be remembered under the key."""
    kept = [each for each in operations if not isinstance(each, bytes) and key in each[0]]
    return [answer(number, length) for _, number, length in kept]


def test_a_key_of_two_answers_finds_neither_until_one_is_forgotten() -> None:
    memory = AnswerMemory(3 * answer(1).size_bytes(2))
    memory.remember("t", [b"1", b"shared"], answer(1))
    memory.remember("t", [b"2", b"shared"], answer(2))
    assert memory.recall("t", b"shared") is None
    assert (memory.recall("t", b"1"), memory.recall("t", b"2")) == (answer(1), answer(2))
    memory.remember("t", [b"3", b"shared"], answer(3))
    assert memory.recall("t", b"shared") is None

    memory = AnswerMemory(4 * answer(1).size_bytes(2))
    for name in (b"1", b"2"):
        memory.remember("t", [name, b"shared"], answer(1))
    assert memory.recall("t", b"shared") == answer(1)


def test_the_least_recently_used_goes_first_and_what_is_too_large_never_comes() -> None:
    memory = AnswerMemory(2 * answer(1).size_bytes(1))
    for number in (1, 2):
        memory.remember("t", [bytes([number])], answer(number))
    memory.recall("t", b"\1")
    memory.remember("t", [b"\3"], answer(3))
    assert [memory.recall("t", bytes([number])) is not None for number in (1, 2, 3)] == [True, False, True]

    memory = AnswerMemory(answer(1, 10).size_bytes(1))
    assert not memory.remember("t", [b"1"], answer(1, 11))
    assert memory.remember("t", [b"1"], answer(1, 10))
    assert (len(memory), memory.size_bytes) == (1, answer(1, 10).size_bytes(1))

    memory = AnswerMemory(answer(1).size_bytes(2))
    assert not memory.remember("t", [b"1", b"2", b"3"], answer(1))
    assert memory.remember("t", [b"1", b"2"], answer(1))


def test_one_tenants_answers_take_nothing_from_another_below_its_share() -> None:
    memory = AnswerMemory(10 * answer(1).size_bytes(1))
    for number in range(5):
        assert memory.remember("quiet", [b"q%d" % number], answer(number))
    for number in range(100):
        assert memory.remember("busy", [b"b%d" % number], answer(number))
    assert all(memory.recall("quiet", b"q%d" % number) == answer(number) for number in range(5))
    assert [memory.recall("busy", b"b%d" % number) is not None for number in (94, 95, 99)] == [
        False,
        True,
        True,
    ]
    assert len(memory._owners) == 10
