"""These tests show what certificates say of when they begin and end."""

import base64
import ssl

import certifi
import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.net.x509 import Validity, validities


def pem_of(der: bytes) -> bytes:
    return b"-----BEGIN CERTIFICATE-----\n" + base64.encodebytes(der) + b"-----END CERTIFICATE-----\n"


def test_a_hundred_authorities_are_read_as_openssl_reads_them():
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(certifi.where())
    expected = {
        (ssl.cert_time_to_seconds(known["notBefore"]), ssl.cert_time_to_seconds(known["notAfter"]))
        for known in context.get_ca_certs()
    }
    with open(certifi.where(), "rb") as file:
        found = validities(file.read())
    assert len(found) >= 100
    assert {(each.not_before, each.not_after) for each in found} == expected


def der(tag: int, content: bytes) -> bytes:
    """By the book: X.690, section 8.1."""
    size = len(content)
    if size < 0x80:
        return bytes([tag, size]) + content
    length = size.to_bytes((size.bit_length() + 7) // 8, "big")
    return bytes([tag, 0x80 | len(length)]) + length + content


def certificate(begin: bytes, end: bytes, version: bytes = b"", issuer: bytes = b"") -> bytes:
    fields = (
        version + der(2, b"\1") + der(0x30, b"") + der(0x30, issuer) + der(0x30, begin + end) + der(0x30, b"")
    )
    return der(0x30, der(0x30, fields) + der(0x30, b"") + der(3, b"\0"))


UTC_50, UTC_49 = der(0x17, b"500101000000Z"), der(0x17, b"491231235959Z")
NEVER = der(0x18, b"99991231235959Z")


def test_both_forms_of_time_in_certificates_of_every_length(subtests):
    for version in [b"", der(0xA0, der(2, b"\2"))]:
        for issuer_bytes in [0, 200, 70_000]:
            with subtests.test(version=version, issuer_bytes=issuer_bytes):
                made = certificate(UTC_50, NEVER, version, b"\0" * issuer_bytes)
                assert validities(pem_of(made)) == [Validity(-631152000.0, 253402300799.0)]
                assert validities(pem_of(certificate(UTC_50, UTC_49, version)))[0].not_after == 2524607999.0


@given(st.data())
def test_damaged_bytes_are_refused_and_nothing_else_happens(data):
    whole = certificate(UTC_50, NEVER)
    damaged = bytearray(whole[: data.draw(st.integers(0, len(whole)))])
    for _ in range(data.draw(st.integers(0, 3))):
        if damaged:
            damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = validities(pem_of(bytes(damaged)))
    except ValueError as error:
        assert "a certificate" in str(error)
    else:
        assert len(found) == 1


def test_files_are_read_in_their_order(subtests):
    with subtests.test("a file is read in its order and what stands between is passed over"):
        first, second = certificate(UTC_50, UTC_49), certificate(UTC_50, NEVER)
        text = "subject=Zoë\n".encode() + pem_of(first) + b"\n-----BEGIN PRIVATE KEY-----\n" + pem_of(second)
        assert [each.not_after for each in validities(text)] == [2524607999.0, 253402300799.0]
        assert validities(b"nothing") == []
    with subtests.test("what is no base64 is refused"), pytest.raises(ValueError, match="base64"):
        validities(b"-----BEGIN CERTIFICATE-----\n!!\n-----END CERTIFICATE-----")
