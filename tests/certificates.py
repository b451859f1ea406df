"""Certificates for tests, by the openssl command."""

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificates(folder: Path, alt_name: str) -> Path:
    """A CA (ca.pem) and one certificate of its own (cert.pem, key.pem) for `alt_name`, "DNS:localhost" say.

    Skips the test where there is no such command.
    """
    if shutil.which("openssl") is None:
        print("skipped: there is no openssl command to make certificates with")
        pytest.skip("there is no openssl command to make certificates with")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    new_key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256", "-nodes"]
    openssl("req", "-x509", *new_key, "-keyout", "ca.key", "-out", "ca.pem", "-subj", "/CN=ca", "-days", "2")
    openssl("req", *new_key, "-keyout", "key.pem", "-out", "csr.pem", "-subj", "/CN=isthmus")
    (folder / "ext").write_text(f"subjectAltName={alt_name}\n")
    signer = ["-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "ext", "-days", "2"]
    openssl("x509", "-req", "-in", "csr.pem", "-out", "cert.pem", *signer)
    return folder
