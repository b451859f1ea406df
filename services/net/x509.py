"""This module reads when certificates begin and end from PEM (RFC 7468) and DER (RFC 5280, section 4.1)."""

import base64
import binascii
import re
from dataclasses import dataclass
from datetime import UTC, datetime

_BEGIN, _END = rb"-----BEGIN (?:X509 )?CERTIFICATE-----", rb"-----END (?:X509 )?CERTIFICATE-----"
_PEM = re.compile(_BEGIN + rb"(.*?)" + _END, re.DOTALL)
_VERSION = 0xA0  # This is the tag of the first field, explicit and optional.
_UTC_TIME = 0x17  # Its year has two digits: 50 to 99 mean 1950 to 1999.


@dataclass(frozen=True, slots=True)
class Validity:
    not_before: float  # Both are Unix times in seconds, and belong to the validity themselves.
    not_after: float


def validities(pem: bytes) -> list[Validity]:
    return [_validity(_der(body)) for body in _PEM.findall(pem)]


def _der(body: bytes) -> bytes:
    try:
        return base64.b64decode(b"".join(body.split()), validate=True)
    except binascii.Error as error:
        raise ValueError(f"a certificate is no base64: {error}") from error


def _validity(der: bytes) -> Validity:
    try:
        (_, certificate), *_ = _elements(der)
        (_, to_be_signed), *_ = _elements(certificate)
        fields = [content for tag, content in _elements(to_be_signed) if tag != _VERSION]
        _serial, _algorithm, _issuer, validity, *_ = fields
        begin, end = (_time(tag, content) for tag, content in _elements(validity))
    except (IndexError, ValueError) as error:
        raise ValueError(f"a certificate cannot be read: {error}") from error
    return Validity(begin, end)


def _elements(der: bytes) -> list[tuple[int, bytes]]:
    elements = []
    while der:
        tag, length, start = der[0], der[1], 2
        if length & 0x80:  # The other bits then are the number of bytes of the length.
            start += length & 0x7F
            length = int.from_bytes(der[2:start], "big")
        if start + length > len(der):
            raise ValueError("it is cut short")
        elements.append((tag, der[start : start + length]))
        der = der[start + length :]
    return elements


def _time(tag: int, content: bytes) -> float:
    text = content.decode("ascii")
    if tag == _UTC_TIME:
        text = ("19" if text >= "50" else "20") + text
    return datetime.strptime(text, "%Y%m%d%H%M%SZ").replace(tzinfo=UTC).timestamp()
