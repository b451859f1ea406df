"""As much of etcd as a publisher needs, in memory, with faults and with all of its history."""

import random

from services.etcd.etcd_client import KeyValue, TxnResult
from services.etcd.etcd_errors import LeaseNotFound
from services.etcd.watch import KeyChange
from services.values.errors import Unavailable


class FakeEtcd:
    """`fault`: how the next writes fail: "before" or "after" they are carried out, or None."""

    def __init__(self) -> None:
        self.rng = random.Random(0)
        self.revision = 1
        self.now = 0.0
        self.fault: str | None = None
        self.writes_until_fault = 0
        self.leases: set[int] = set()
        self.kvs: dict[bytes, KeyValue] = {}
        self.history: list[tuple[KeyChange, ...]] = [(), ()]  # by revision

    def clock(self) -> float:
        return self.now

    async def get(self, key: bytes) -> KeyValue | None:
        return self.kvs.get(key)

    async def txn(self, compares, success, failure=(), *, idempotent=False) -> TxnResult:
        fault = self.fault if self.writes_until_fault == 0 else None
        self.writes_until_fault = max(0, self.writes_until_fault - 1)
        if fault == "before":
            raise Unavailable("lost on the way there")
        result = self._txn(compares, success)
        if fault == "after":
            raise Unavailable("the answer was lost")
        return result

    def _txn(self, compares, success) -> TxnResult:
        for compare in compares:
            found = self.kvs.get(compare.key)
            if (found.mod_revision if found else 0) != compare.mod_revision:
                return TxnResult(False, self.revision)
        changes: list[KeyChange] = []
        for operation in success:
            if operation.HasField("request_put"):
                changes.append(self._put(operation.request_put))
            else:
                changes.extend(self._delete(operation.request_delete_range))
        self._commit(changes)
        return TxnResult(True, self.revision)

    def _put(self, put) -> KeyChange:
        if put.lease and put.lease not in self.leases:
            raise LeaseNotFound("requested lease not found")
        self.kvs[put.key] = KeyValue(put.key, put.value, self.revision + 1, put.lease)
        return KeyChange(put.key, put.value, self.revision + 1)

    def _delete(self, request) -> list[KeyChange]:
        gone = [key for key in sorted(self.kvs) if request.key <= key < request.range_end]
        return [self._remove(key) for key in gone]

    def _remove(self, key: bytes) -> KeyChange:
        del self.kvs[key]
        return KeyChange(key, None, self.revision + 1)

    def _commit(self, changes: list[KeyChange]) -> None:
        if changes:
            self.revision += 1
            self.history.append(tuple(changes))

    def lapse(self, lease_id: int) -> None:
        self.leases.discard(lease_id)
        gone = [kv.key for kv in self.kvs.values() if kv.lease_id == lease_id]
        self._commit([self._remove(key) for key in gone])

    def restore(self, revision: int) -> None:
        """What came after this revision has never been; the leases live on."""
        self.kvs = {
            change.key: KeyValue(change.key, change.value or b"", change.mod_revision)
            for change in self.state_at(revision).values()
        }
        self.revision = revision
        del self.history[revision + 1 :]

    def state_at(self, revision: int) -> dict[bytes, KeyChange]:
        """What a listing at this revision shows."""
        state: dict[bytes, KeyChange] = {}
        for changes in self.history[: revision + 1]:
            for change in changes:
                if change.value is None:
                    state.pop(change.key, None)
                else:
                    state[change.key] = change
        return dict(sorted(state.items()))
