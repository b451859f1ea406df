"""A slot of the pool of states is one run of bytes, the states of all recurrent layers of one sequence."""

from collections.abc import Sequence

import torch
from torch import Tensor

from services.engine.torch.model.remembered import State, StateName
from services.engine.torch.page_reader import PageReader, page_reader
from services.engine.torch.pool import allocate, closed_pool, pool_memory
from services.values.errors import ConfigError
from services.values.kv import PoolMemory

_ALIGNMENT = 64  # in bytes: no state shares a cache line with another


class SlotPool:
    """This owns the memory; a state's numbers are in the model's own type, recurrent ones mostly float32."""

    def __init__(self, states: Sequence[State], *, num_slots: int, device: torch.device) -> None:
        """Allocate and zero the pool.

        Raises:
            ConfigError: it is empty, or larger than all the memory that the device has.
            Unavailable: there is not so much memory now.
        """
        if num_slots < 1:
            raise ConfigError(f"a pool of states needs slots: {num_slots=}")
        places, self.slot_bytes = _places(states)
        memory = allocate(
            num_slots * self.slot_bytes, device, f"a pool of {num_slots} states (--state-slots)"
        )
        self._slots = memory.view(num_slots, self.slot_bytes)
        self.of_state: dict[StateName, Tensor] = {  # [num_slots, *state.shape]
            state.name: self._slots[:, place].view(state.dtype).unflatten(1, state.shape)
            for state, place in places.items()
        }
        self.read_slots: PageReader = page_reader(self._slots)

    @property
    def num_slots(self) -> int:
        return len(self._slots)

    @property
    def memory(self) -> PoolMemory:
        return pool_memory(self._slots, self.num_slots)

    def zero(self, slots: Sequence[int]) -> None:
        self._slots[list(slots)] = 0

    def copy(self, moves: Sequence[tuple[int, int]]) -> None:
        for source, target in moves:
            self._slots[target] = self._slots[source]

    def close(self) -> None:
        self.of_state = {}
        self._slots = self._slots.new_empty(0, self.slot_bytes)
        self.read_slots = closed_pool


def _places(states: Sequence[State]) -> tuple[dict[State, slice], int]:
    places, end = {}, 0
    for state in states:
        places[state] = slice(end, end + state.size_bytes)
        end += -(-state.size_bytes // _ALIGNMENT) * _ALIGNMENT
    return places, end
