"""Users and roles of an etcd, made with its own tool as an operator does."""

import subprocess

from services.etcd.embedded import EmbeddedEtcd, etcd_binary

CHEAP = "--bcrypt-cost=4"  # an argument of etcd


def require_users(server: EmbeddedEtcd) -> None:
    """From now on nobody may do anything without a name; root's password is "secret"."""
    etcdctl(server, "user", "add", "root", "--new-user-password=secret")
    etcdctl(server, "user", "grant-role", "root", "root")
    etcdctl(server, "auth", "enable")


def add_user(server: EmbeddedEtcd, name: str, password: str, prefix: str) -> None:
    """Who may read and write what is under the prefix, and nothing else. Before `require_users`."""
    etcdctl(server, "user", "add", name, f"--new-user-password={password}")
    etcdctl(server, "role", "add", name)
    etcdctl(server, "role", "grant-permission", name, "readwrite", prefix, "--prefix=true")
    etcdctl(server, "user", "grant-role", name, name)


def etcdctl(server: EmbeddedEtcd, *arguments: str) -> None:
    binary = etcd_binary().with_name("etcdctl")
    subprocess.run([binary, "--endpoints", server.endpoint, *arguments], check=True, capture_output=True)
