import pytest

from etcd.real_etcd import client
from services.etcd.versions import known_fault, warn_of_version


@pytest.mark.parametrize("version", ["3.5.0", "3.5.1", "3.5.2", "3.5.2-rc.1"])
def test_members_that_may_diverge(version: str) -> None:
    assert "3.5.3" in str(known_fault(version))


@pytest.mark.parametrize("version", ["3.4.23", "3.5.3", "3.5.10", "3.5.21", "3.6.0", "4.3.5.1", ""])
def test_members_that_do_not(version: str) -> None:
    assert known_fault(version) is None


@pytest.mark.parametrize("members", [1, 2])
async def test_only_of_several_members_the_log_is_warned(
    etcd_endpoint: str, caplog: pytest.LogCaptureFixture, members: int
) -> None:
    async with client(*[etcd_endpoint] * members) as etcd:
        await warn_of_version(etcd)
    assert ("etcd_version_faulty version=3.5.1" in caplog.text) is (members > 1)
