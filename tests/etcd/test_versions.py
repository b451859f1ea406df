import pytest

from etcd.real_etcd import client
from services.etcd.versions import known_fault, warn_of_version


def test_versions_that_may_diverge(subtests: pytest.Subtests) -> None:
    for version in ["3.5.0", "3.5.1", "3.5.2", "3.5.2-rc.1"]:
        with subtests.test(version=version):
            assert "3.5.3" in str(known_fault(version))
    for version in ["3.4.23", "3.5.3", "3.5.10", "3.5.21", "3.6.0", "4.3.5.1", ""]:
        with subtests.test(version=version):
            assert known_fault(version) is None


async def test_only_of_several_members_the_log_is_warned(
    subtests: pytest.Subtests, etcd_endpoint: str, caplog: pytest.LogCaptureFixture
) -> None:
    for members in [1, 2]:
        with subtests.test(members=members):
            async with client(*[etcd_endpoint] * members) as etcd:
                await warn_of_version(etcd)
            assert ("etcd_version_faulty version=3.5.1" in caplog.text) is (members > 1)
