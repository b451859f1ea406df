"""Certificates for tests, by the openssl command."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

_NEW_KEY = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes")


def make_certificates(folder: Path, alt_name: str, days: int = 2) -> Path:
    """A CA (ca.pem) and one certificate of its own (cert.pem, key.pem) for `alt_name`, "DNS:localhost" say.

    Skips the test where there is no such command.
    """
    if shutil.which("openssl") is None:
        print("skipped: there is no openssl command to make certificates with")
        pytest.skip("there is no openssl command to make certificates with")
    folder.mkdir(exist_ok=True)
    _openssl(folder, "req", "-x509", *_NEW_KEY, "-keyout ca.key -out ca.pem -subj /CN=ca -days 2")
    return make_another(folder, folder, alt_name, days)


def make_another(authority: Path, folder: Path, alt_name: str, days: int = 2) -> Path:
    """Another one by the CA that `make_certificates` left in `authority`. -1 day: it ended yesterday."""
    folder.mkdir(exist_ok=True)
    _openssl(folder, "req", *_NEW_KEY, "-keyout key.pem -out csr.pem -subj /CN=isthmus")
    (folder / "ext").write_text(f"subjectAltName={alt_name}\n")
    ca = authority.absolute()
    signer = f"-CA {ca}/ca.pem -CAkey {ca}/ca.key -CAcreateserial -extfile ext -days {days}"
    _openssl(folder, "x509", "-req -in csr.pem -out cert.pem", signer)
    if folder != authority:
        shutil.copy(ca / "ca.pem", folder)
    return folder


def _openssl(folder: Path, *arguments: str) -> None:
    words = " ".join(arguments).split()
    subprocess.run(["openssl", *words], cwd=folder, check=True, capture_output=True)


class Mounted:
    """A Secret's files as a kubelet mounts them: each a link through ..data, which alone is swapped.

    https://pkg.go.dev/k8s.io/kubernetes/pkg/volume/util#AtomicWriter
    """

    FILES = ("ca.pem", "cert.pem", "key.pem")

    def __init__(self, folder: Path, first: Path) -> None:
        folder.mkdir()
        self.folder = folder
        self._num_versions = 0
        self.swap(first)
        for name in self.FILES:
            (folder / name).symlink_to(f"..data/{name}")

    def swap(self, new: Path) -> None:
        """All files at once."""
        self._num_versions += 1
        version = self.folder / f"..{self._num_versions}"
        version.mkdir()
        for name in self.FILES:
            shutil.copy(new / name, version)
        (self.folder / "..data_tmp").symlink_to(version.name)
        os.replace(self.folder / "..data_tmp", self.folder / "..data")
