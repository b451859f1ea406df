"""The rendered command lines start a real etcd of three members: 3.5.1 from PyPI, not the chart's own."""

import re
from pathlib import Path

from charts.etcd_pods import NUM_MEMBERS, SET, EtcdPods
from charts.rendering import NAMESPACE, RELEASE

OPERATIONS = Path(__file__).parents[2] / "docs" / "operations.md"
ALL = range(NUM_MEMBERS)


def documented(heading):
    """The commands under a heading of docs/operations.md, for this release; ID is still to be filled in."""
    _, _, section = OPERATIONS.read_text().partition(f"\n### {heading}\n")
    block = re.search(r"```sh\n(.*?)```", section, re.DOTALL)[1]
    names = {"FULLNAME-etcd": SET, "RELEASE": RELEASE, "NAMESPACE": NAMESPACE}
    for name, value in names.items():
        block = block.replace(name, value)
    return block.splitlines()


def id_of(member, listed):
    """As an operator reads it in what `member list` prints: ID, status, name, URLs."""
    (line,) = [line for line in listed.splitlines() if f" {SET}-{member}, " in line]
    return line.partition(",")[0]


def test_three_members_find_each_other_and_say_that_they_are_healthy(tmp_path):
    with EtcdPods(tmp_path) as pods:
        metrics = pods.fetch(0, "/metrics")
    assert "etcd_server_quota_backend_bytes 4.294967296e+09" in metrics
    log = pods.log(0).read_text()
    assert '"auto-compaction-mode":"periodic"' in log and '"auto-compaction-retention":"10m0s"' in log


def test_a_member_that_lost_its_volume_is_replaced_as_documented(tmp_path):
    with EtcdPods(tmp_path) as pods:
        pods.etcdctl(1, "put", "kept", "1")
        pods.lose(0)
        assert "has already been bootstrapped" in pods.until_ended(0)
        listed = ""
        for command in documented("Replace one member"):
            printed = pods.run(
                command.replace(" ID", f" {id_of(0, listed)}") if " ID" in command else command
            )
            listed = listed or printed
        pods.until_healthy(*ALL)
        assert "kept" in pods.etcdctl(0, "get", "kept")
        members = pods.etcdctl(0, "member", "list").splitlines()
        assert len(members) == NUM_MEMBERS and all(", started, " in member for member in members)
        assert id_of(0, "\n".join(members)) != id_of(0, listed)


def test_removed_and_not_waited_for_it_can_never_join(tmp_path):
    """Why the documented way keeps the member from starting until it may."""
    with EtcdPods(tmp_path) as pods:
        pods.stop(0)
        removed = id_of(0, pods.etcdctl(1, "member", "list"))
        pods.etcdctl(1, "member", "remove", removed)
        pods.start(0)
        pods.stop(0)
        pods.volume(0).rename(tmp_path / "lost")
        pods.start(0)
        assert "permanently removed from the cluster" in pods.until_ended(0)


def test_when_most_volumes_are_lost_a_new_etcd_is_founded_as_documented(tmp_path):
    """Whatever the state was set to, and whatever the last volume holds."""
    with EtcdPods(tmp_path) as pods:
        pods.run(f"helm upgrade {RELEASE} charts/isthmus -f VALUES --set etcd.initialClusterState=existing")
        pods.etcdctl(1, "put", "lost", "1")
        for member in (0, 1):
            pods.lose(member)
        for command in documented("Throw it away"):
            pods.run(command)
        pods.until_healthy(*ALL)
        assert "lost" not in pods.etcdctl(0, "get", "lost")
        assert pods.etcdctl(0, "member", "list").count(", started, ") == NUM_MEMBERS
