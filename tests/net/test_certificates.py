"""TLS files are read again when they change, and only as a pair that fits."""

import logging
import os
import shutil
import ssl
import subprocess
import threading
from itertools import product

import pytest
from prometheus_client import CollectorRegistry

from net.certificates import Mounted, make_another, make_certificates
from services.net.certificates import CertificateCollector, Certificates, certificate_health
from services.values.errors import ConfigError

NAME = "DNS:localhost"


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """By one authority: two that are good, and one that ended yesterday."""
    folder = tmp_path_factory.mktemp("made")
    first = make_certificates(folder / "first", NAME)
    make_another(first, folder / "second", NAME, days=1)
    make_another(first, folder / "ended", NAME, days=-1)
    make_certificates(folder / "stranger", NAME)
    return folder


@pytest.fixture
def new_files(made, tmp_path_factory):
    """Return a function that makes copies that may be written to."""
    return lambda: shutil.copytree(made / "first", tmp_path_factory.mktemp("copy") / "files")


@pytest.fixture
def files(new_files):
    return new_files()


def certificates_in(folder):
    return Certificates(folder / "ca.pem", folder / "cert.pem", folder / "key.pem")


def copy(source, folder, *names):
    for name in names:
        shutil.copy(source / name, folder)


def events(caplog):
    return [(record.levelno, record.getMessage().split()[0]) for record in caplog.records]


@pytest.fixture(autouse=True)
def all_lines(caplog):
    caplog.set_level(logging.INFO)


def test_files_that_have_not_changed_are_not_read(files, monkeypatch):
    certificates = certificates_in(files)
    held = certificates.look()
    monkeypatch.setattr(type(files), "read_bytes", lambda path: pytest.fail(f"reads {path}"))
    assert certificates.look() is held


def test_a_secret_that_is_swapped_is_read_and_told(made, tmp_path, caplog):
    mounted = Mounted(tmp_path / "mounted", made / "first")
    certificates = certificates_in(mounted.folder)
    held = certificates.look()
    mounted.swap(made / "second")
    assert certificates.look().cert == (made / "second" / "cert.pem").read_bytes() != held.cert
    assert certificates.look() is certificates.look()
    assert events(caplog) == [(logging.INFO, "tls_files_reloaded")]
    assert "ends=20" in caplog.text and str(mounted.folder / "cert.pem") in caplog.text


def test_files_written_one_after_the_other_change_nothing_until_they_fit(made, files, caplog):
    certificates = certificates_in(files)
    held = certificates.look()
    copy(made / "second", files, "cert.pem")
    for _ in range(3):
        assert certificates.look() is held
    assert events(caplog) == [(logging.WARNING, "tls_files_kept")]  # once, however often it is looked at
    copy(made / "second", files, "key.pem")
    assert certificates.look().key == (made / "second" / "key.pem").read_bytes()
    assert events(caplog)[1:] == [(logging.INFO, "tls_files_reloaded")]


def test_a_half_written_file_changes_nothing(subtests, made, new_files):
    for name, share in product(Mounted.FILES, (0.0, 0.5, 0.95)):
        with subtests.test(name, share=share):
            files = new_files()
            certificates = certificates_in(files)
            held = certificates.look()
            whole = (made / "second" / name).read_bytes() if name != "ca.pem" else (files / name).read_bytes()
            (files / name).write_bytes(whole[: int(share * len(whole))])
            assert certificates.look() is held


def test_a_file_that_is_away_for_a_while(subtests, new_files, caplog):
    for name in Mounted.FILES:
        with subtests.test(name):
            files = new_files()
            caplog.clear()
            certificates = certificates_in(files)
            held = certificates.look()
            content = (files / name).read_bytes()
            (files / name).unlink()
            assert certificates.look() is held and "No such file" in caplog.text
            (files / name).write_bytes(content)
            assert certificates.look() is held
            assert events(caplog) == [(logging.WARNING, "tls_files_kept")]


def test_what_failed_is_read_again_though_the_file_looks_the_same(made, files):
    """Of the same size, and of the same moment by a coarse clock."""
    certificates = certificates_in(files)
    good = (files / "key.pem").read_bytes()
    (files / "key.pem").write_bytes(b"x" * len(good))
    times = (files / "key.pem").stat()
    copy(made / "second", files, "cert.pem")
    held = certificates.look()
    fitting = (made / "second" / "key.pem").read_bytes()
    assert len(fitting) == len(good)
    (files / "key.pem").write_bytes(fitting)
    os.utime(files / "key.pem", ns=(times.st_atime_ns, times.st_mtime_ns))
    assert certificates.look() is not held


def test_bad_files_are_refused_at_the_start(subtests, new_files):
    for name, content in product(Mounted.FILES, (b"", b"nothing", None)):
        with subtests.test(name, content=content):
            files = new_files()
            (files / name).unlink()
            if content is not None:
                (files / name).write_bytes(content)
            with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
                certificates_in(files)


def test_a_pair_that_cannot_be_used_is_refused_at_the_start(subtests, made, files):
    with subtests.test("a key of another certificate is refused at the start"):
        copy(made / "second", files, "key.pem")
        with pytest.raises(ConfigError, match=r"(?i)mismatch"):
            certificates_in(files)
    with subtests.test("an encrypted key is refused and nobody is asked"):
        words = (
            "openssl",
            "pkcs8",
            "-topk8",
            "-in",
            "key.pem",
            "-out",
            "locked.pem",
            "-passout",
            "pass:secret",
        )
        subprocess.run(words, cwd=files, check=True, capture_output=True)
        with pytest.raises(ConfigError):
            Certificates(files / "ca.pem", files / "cert.pem", files / "locked.pem")


def test_threads_that_look_at_once_see_one_change(made, tmp_path, caplog):
    mounted = Mounted(tmp_path / "mounted", made / "first")
    certificates = certificates_in(mounted.folder)
    mounted.swap(made / "second")
    seen = []
    threads = [threading.Thread(target=lambda: seen.append(certificates.look())) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(set(map(id, seen))) == 1 and len(seen) == 8
    assert events(caplog) == [(logging.INFO, "tls_files_reloaded")]


def test_nothing_is_ready_behind_a_certificate_that_has_ended(made, tmp_path, caplog):
    mounted = Mounted(tmp_path / "mounted", made / "first")
    certificates = certificates_in(mounted.folder)
    assert certificate_health(certificates).ready == ""
    ends = certificates.ends
    assert certificate_health(certificates, clock=lambda: ends).ready == ""
    assert "cert.pem ended at 20" in certificate_health(certificates, clock=lambda: ends + 1).ready
    mounted.swap(made / "ended")
    health = certificate_health(certificates)
    assert "cert.pem ended at 20" in health.ready and not (health.startup or health.live)
    assert (logging.WARNING, "tls_certificate_ended") in events(caplog)
    mounted.swap(made / "second")
    assert certificate_health(certificates).ready == ""


def test_certificates_that_have_ended(subtests, files):
    with subtests.test("files that cannot be used matter once the old ones have ended"):
        certificates = certificates_in(files)
        (files / "cert.pem").write_bytes(b"")
        assert certificate_health(certificates).ready == ""
        assert certificate_health(certificates, clock=lambda: certificates.ends + 1).ready
    with subtests.test("without a certificate of ones own there is nothing to end"):
        certificates = Certificates(files / "ca.pem", None, None)
        assert certificate_health(certificates, clock=lambda: certificates.ends + 1).ready == ""


def test_metrics_say_when_what_is_in_use_begins_and_ends(made, tmp_path):
    mounted = Mounted(tmp_path / "mounted", made / "first")
    registry = CollectorRegistry()
    uses = {
        "services": certificates_in(mounted.folder),
        "etcd": Certificates(made / "stranger" / "ca.pem", None, None),
    }
    registry.register(CertificateCollector(uses))

    def ends(use, file):
        return registry.get_sample_value("isthmus_tls_not_after_seconds", {"use": use, "file": file})

    def by_openssl(path):
        words = ("openssl", "x509", "-in", path, "-noout", "-enddate")
        return ssl.cert_time_to_seconds(subprocess.check_output(words, text=True).strip().partition("=")[2])

    assert ends("services", "cert") == by_openssl(made / "first" / "cert.pem")
    assert ends("services", "ca") == by_openssl(made / "first" / "ca.pem")
    assert ends("etcd", "ca") == by_openssl(made / "stranger" / "ca.pem")
    assert ends("etcd", "cert") is None
    mounted.swap(made / "second")
    assert (
        ends("services", "cert")
        == by_openssl(made / "second" / "cert.pem")
        < by_openssl(made / "first" / "cert.pem")
    )
    lasts = ends("services", "cert") - registry.get_sample_value(
        "isthmus_tls_not_before_seconds", {"use": "services", "file": "cert"}
    )
    assert lasts == 86400


def test_of_two_authorities_the_later_end_counts(made, files):
    """While they are being replaced the old one may end."""
    ended = (made / "ended" / "cert.pem").read_bytes()  # a certificate like any other
    both = Certificates(files / "ca.pem", None, None)
    end = both.ends
    (files / "ca.pem").write_bytes(ended + (files / "ca.pem").read_bytes())
    both.look()
    assert both.ends == end
