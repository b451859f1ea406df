"""A file of keys, and the keys that are read from it."""

import pytest

from services.router.api_keys import ApiKeys, KeyRefusals


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "keys"
    path.write_text("first-key\n\n  second-key  \n")
    return path


@pytest.fixture
def counted():
    return []


@pytest.fixture
def keys(file, counted):
    return ApiKeys(file, KeyRefusals(lambda *labels: counted.append(labels)))


@pytest.fixture
def of_tenants(file):
    file.write_text("bare-key\nacme-key tenant=acme\nb-key tenant=b\nours-key operator\n")
    return ApiKeys(file)
