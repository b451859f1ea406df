"""This module has a rank go on in its other role, as an operator asks.

asked --> nothing new is taken --> nothing runs: `decided`, and this life of the rank ends
                               '--> the time is over: requests are taken again
"""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TYPE_CHECKING

from services.rank.intake import Intake, RankAdapters
from services.rank.leaving import Leaving
from services.values.errors import ConfigError, Unavailable
from services.values.rank import RankId, Role
from services.values.rank_reports import Registration

if TYPE_CHECKING:
    from services.rank.rank_role import RankRole


class RoleChange:
    def __init__(
        self,
        role: Role,
        intake: Intake,
        leaving: Leaving,
        adapting: RankAdapters,
        turn: Callable[[], "tuple[RankId, RankRole]"],
    ) -> None:
        """`turn` makes the rank's next life, not started, or raises ConfigError."""
        self.decided = asyncio.Event()
        self.next_life: tuple[RankId, RankRole] | None = None
        self.others: Callable[[], Awaitable[list[Registration]]] | None = None  # which could serve instead
        self._role = role
        self._intake = intake
        self._leaving = leaving
        self._adapting = adapting
        self._turn = turn
        self._changing = asyncio.Lock()

    async def change(self, role: Role, wait_s: float | None, force: bool) -> None:
        """Return when it is decided.

        Raises:
            ConfigError: the rank has that role, keeps the one it has, or is the last one, without `force`.
            Unavailable: requests still run after `wait_s`, or the rank is being stopped.
        """
        async with self._changing:
            if self._intake.is_stopping or self.decided.is_set():
                raise Unavailable("the rank is being stopped, or changes its role already")
            if role is self._role:
                raise ConfigError(f"it is a {role.value} rank already")
            next_life = self._turn()
            if not force:
                await self._check_others()
            await self._drain(wait_s, force)
            self._leaving.undo()  # What it has cached stays.
            self.next_life = next_life
            self.decided.set()

    async def _check_others(self) -> None:
        if self.others is None:
            raise Unavailable("the rank is not registered yet")
        if not await self.others():
            last = f"it is the last {self._role.value} rank of its model that takes requests"
            raise ConfigError(f"{last}, and changes only with force")

    async def _drain(self, wait_s: float | None, force: bool) -> None:
        drained_before, num_running = self._intake.draining, self._intake.num_running
        if wait_s == 0 and num_running:
            raise Unavailable(f"{num_running} requests run there")
        drains = self._intake.num_drains + 1
        self._adapting.freeze()  # The next life begins with what is loaded.
        try:
            await self._intake.drain(0.0)
            if not force:  # Another one may change its role, too: each has said so before it looks.
                await self._check_others()
            if num_running := await self._intake.drain(wait_s, only_wait=True):
                raise Unavailable(f"{num_running} requests still run there")
            if not force:  # Another one may have been drained meanwhile.
                await self._check_others()
                self._intake.running_of_drained()  # It raises where somebody has undrained the rank since.
            if self._intake.num_drains != drains:  # Then others take over what it has cached.
                raise Unavailable("the rank is being stopped, or drained, instead")
        except BaseException:
            self._adapting.thaw()
            if not drained_before and self._intake.num_drains == drains:
                # It takes them again in any case, and the log has what etcd lacks.
                with suppress(Unavailable):
                    await self._intake.undrain()
            raise
