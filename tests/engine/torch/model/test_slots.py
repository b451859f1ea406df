import pytest
import torch

from services.engine.torch.model.kv_groups import State
from services.engine.torch.pools import SlotPool
from services.values.errors import ConfigError, ProtocolError

CONV = State((0, "conv", 0), (6, 4), torch.bfloat16)  # 48 bytes
RECURRENT = State((0, "recurrent", 0), (2, 3, 5), torch.float32)  # 120 bytes
OTHER = State((2, "conv", 1), (7, 4), torch.bfloat16)


def make_slots(num_slots=4):
    return SlotPool([CONV, RECURRENT, OTHER], num_slots=num_slots, device=torch.device("cpu"))


def test_slots(subtests):
    with subtests.test("a slot is one run of bytes with all states of its sequence"):
        slots = make_slots()
        for i, state in enumerate((CONV, RECURRENT, OTHER)):
            of_state = slots.of_state[state.name]
            assert (of_state.shape, of_state.dtype) == ((4, *state.shape), state.dtype)
            of_state[2] = i + 1
        assert slots.slot_bytes == 64 + 128 + 64
        content = bytes(next(slots.read_slots([2])))
        assert len(content) == slots.slot_bytes
        assert torch.frombuffer(bytearray(content[64 : 64 + 120]), dtype=torch.float32).eq(2).all()
        assert set(bytes(next(slots.read_slots([1])))) == set(bytes(next(slots.read_slots([3])))) == {0}
        memory = slots.memory
        assert memory.num_pages == 4
        assert memory.base_address == slots.of_state[CONV.name].data_ptr()
    with subtests.test("copies are made one after the other"):
        slots = make_slots()
        state = slots.of_state[RECURRENT.name]
        state[:] = torch.arange(4.0).view(4, 1, 1, 1)
        slots.copy([(1, 0), (0, 3), (2, 1)])
        assert state[:, 0, 0, 0].tolist() == [1, 2, 2, 1]
    with subtests.test("a slot is zeroed and no other"):
        slots = make_slots()
        for state in slots.of_state.values():
            state[:] = 1
        slots.zero([1, 3])
        assert [set(map(bool, bytes(each))) for each in slots.read_slots([1, 3])] == [{False}] * 2
        assert all(state[[0, 2]].eq(1).all() for state in slots.of_state.values())
    with subtests.test("no slots or too many are refused"):
        with pytest.raises(ConfigError, match="needs slots"):
            make_slots(0)
        with pytest.raises(ConfigError, match=r"--state-slots.* does not fit"):
            make_slots(1 << 50)
    with subtests.test("what is closed is not read"):
        slots = make_slots()
        slots.close()
        with pytest.raises(ProtocolError, match="closed"):
            next(slots.read_slots([0]))
