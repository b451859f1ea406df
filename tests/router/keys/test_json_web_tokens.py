"""Tokens beside API keys: who signed them, for whom, until when."""

import json
import math
import os
import time

import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from router.http.backend import FakeBackend, client
from services.router.api_keys import BAD_TOKEN, EXPIRED_TOKEN, NO_KEY, WRONG_KEY, ApiKeys
from services.router.callers import Caller
from services.router.json_web_tokens import TokenRules, Tokens
from services.router.router_config import RouterConfig
from services.values.errors import ConfigError, Unauthenticated

NOW = 1_000_000.0


class Provider:
    """It signs tokens, and publishes its keys."""

    def __init__(self, *kids):
        self.keys = {kid: ec.generate_private_key(ec.SECP256R1()) for kid in kids}

    def publish(self, path, *others):
        read = [self.public(kid) for kid in self.keys]
        new = path.with_suffix(".new")
        new.write_text(json.dumps({"keys": [*read, *others]}))
        os.replace(new, path)
        return path

    def public(self, kid):
        key = self.keys[kid].public_key()
        return {**jwt.algorithms.ECAlgorithm.to_jwk(key, as_dict=True), "kid": kid}

    def sign(self, kid, **claims):
        claims = {"tenant": "acme", "exp": NOW + 60} | claims
        present = {name: value for name, value in claims.items() if value is not None}
        return jwt.encode(present, self.keys[kid], "ES256", headers={"kid": kid})


def refused(tokens, token):
    try:
        tokens.caller(token)
    except Unauthenticated as error:
        return str(error)
    return None


def test_which_tokens_are_accepted(tmp_path, subtests):
    ours, stranger, now = Provider("a", "b"), Provider("a"), [NOW]
    path = ours.publish(tmp_path / "jwks")
    tokens = Tokens(path, TokenRules("us", "idp"), clock=lambda: now[0])
    good = {"aud": "us", "iss": "idp"}
    for claims, problem in [
        ({}, None),
        ({"aud": ["others", "us"]}, None),
        ({"aud": "others"}, BAD_TOKEN),
        ({"aud": None}, BAD_TOKEN),
        ({"iss": "another"}, BAD_TOKEN),
        ({"iss": None}, BAD_TOKEN),
        ({"exp": NOW}, EXPIRED_TOKEN),
        ({"exp": None}, BAD_TOKEN),
        ({"exp": "soon"}, BAD_TOKEN),
        ({"exp": math.inf}, BAD_TOKEN),
        ({"exp": 10**400}, BAD_TOKEN),
        ({"iat": time.time() + 30}, None),  # The provider's clock may be ahead a little.
        ({"iat": time.time() + 300}, BAD_TOKEN),
        ({"nbf": time.time() + 30}, None),
        ({"nbf": time.time() + 300}, BAD_TOKEN),
        ({"tenant": None}, BAD_TOKEN),
        ({"tenant": ""}, BAD_TOKEN),
        ({"tenant": 7}, BAD_TOKEN),
        ({"tenant": "two\nlines"}, BAD_TOKEN),
    ]:
        with subtests.test(claims=claims):
            assert refused(tokens, ours.sign("b", **(good | claims))) == problem
    with subtests.test("who it names"):
        assert tokens.caller(ours.sign("a", **good)) == Caller("acme")
        named = Tokens(path, TokenRules(tenant_claim="org"), clock=lambda: NOW)
        assert named.caller(ours.sign("a", org="labs", aud="anybody")) == Caller("labs")
    with subtests.test("who signed it"):
        assert refused(tokens, stranger.sign("a", **good)) == BAD_TOKEN
        assert refused(tokens, ours.sign("a", **good)[:-4] + "AAAA") == BAD_TOKEN
        assert refused(tokens, jwt.encode({"tenant": "acme", "exp": NOW + 9}, None, "none")) == BAD_TOKEN
        assert refused(tokens, "no.token.here") == BAD_TOKEN
        critical = {"kid": "a", "crit": ["unknown"], "unknown": 1}
        claims = {"tenant": "acme", "exp": NOW + 9} | good
        assert refused(tokens, jwt.encode(claims, ours.keys["a"], "ES256", headers=critical)) == BAD_TOKEN
        listed = jwt.api_jws.encode(b"[1]", ours.keys["a"], "ES256", headers={"kid": "a"})
        assert refused(tokens, listed) == BAD_TOKEN
        unnamed = jwt.encode({"tenant": "acme", "exp": NOW + 9} | good, ours.keys["a"], "ES256")
        assert refused(tokens, unnamed) == BAD_TOKEN
    with subtests.test("a token that was accepted is accepted until it expires"):
        token = ours.sign("a", exp=NOW + 5, **good)
        assert refused(tokens, token) is None
        now[0] = NOW + 5
        assert refused(tokens, token) == EXPIRED_TOKEN


def test_the_file_of_keys_is_followed(tmp_path, subtests):
    provider = Provider("a")
    path = provider.publish(tmp_path / "jwks")
    tokens = Tokens(path, TokenRules(), clock=lambda: NOW)
    token = provider.sign("a")
    assert refused(tokens, token) is None
    with subtests.test("a key that is gone signs nothing any more"):
        Provider("b").publish(path)
        assert refused(tokens, token) == BAD_TOKEN
    with subtests.test("while it is spoilt no token is accepted"):
        path.write_text("{")
        assert refused(tokens, token) == BAD_TOKEN
        provider.publish(path)
        assert refused(tokens, token) is None
    with subtests.test("one key needs no name, and others than public ones sign nothing"):
        secret = {"kty": "oct", "k": "c2VjcmV0LXNlY3JldC1zZWNyZXQtc2VjcmV0", "kid": "s", "alg": "HS256"}
        provider.publish(path, secret)
        unnamed = jwt.encode({"tenant": "acme", "exp": NOW + 9}, provider.keys["a"], "ES256")
        assert refused(tokens, unnamed) is None
        forged = {"tenant": "acme", "exp": NOW + 9}
        by_secret = jwt.encode(forged, b"secret-secret-secret-secret-secret", "HS256", headers={"kid": "s"})
        assert refused(tokens, by_secret) == BAD_TOKEN
    private = [
        jwt.algorithms.ECAlgorithm.to_jwk(provider.keys["a"], as_dict=True) | {"kid": "p"},
        jwt.algorithms.RSAAlgorithm.to_jwk(rsa.generate_private_key(65537, 2048), as_dict=True),
        jwt.algorithms.OKPAlgorithm.to_jwk(ed25519.Ed25519PrivateKey.generate(), as_dict=True),
    ]
    for text, problem in [
        *((json.dumps({"keys": [provider.public("a"), key]}), "is private") for key in private),
        ("{", "Invalid|Expecting"),
        ("[]", ""),
        ('{"keys": []}', ""),
        (json.dumps({"keys": [secret]}), "no public"),
        (json.dumps({"keys": [provider.public("a") | {"use": "enc"}]}), "no public"),
        (json.dumps({"keys": [provider.public("a")] * 2}), "two keys of one id"),
        (json.dumps({"keys": [provider.public("a") | {"kid": ["l"]}]}), ""),
    ]:
        with subtests.test(text=text), pytest.raises(ConfigError, match=f"--jwks-file: .*{problem}"):
            (tmp_path / "bad").write_text(text)
            Tokens(tmp_path / "bad", TokenRules())
    with subtests.test("a curve of its own"):
        key = ed25519.Ed25519PrivateKey.generate()
        public = jwt.algorithms.OKPAlgorithm.to_jwk(key.public_key(), as_dict=True) | {"kid": "e"}
        Provider().publish(path, public)
        signed = jwt.encode({"tenant": "acme", "exp": NOW + 9}, key, "EdDSA", headers={"kid": "e"})
        assert refused(tokens, signed) is None


async def test_tokens_stand_beside_keys_or_alone(tmp_path, subtests):
    provider = Provider("a")
    tokens = Tokens(provider.publish(tmp_path / "jwks"), TokenRules(), clock=lambda: NOW)
    (tmp_path / "keys").write_text("a.dotted.key tenant=labs\n")
    both, alone = ApiKeys(tmp_path / "keys", tokens=tokens), ApiKeys(None, tokens=tokens)
    token = provider.sign("a")
    for keys, shown, wanted in [
        (both, token, Caller("acme")),
        (both, "a.dotted.key", Caller("labs")),
        (both, "another.dotted.key", BAD_TOKEN),
        (both, "plain", WRONG_KEY),
        (alone, token, Caller("acme")),
        (alone, "a.dotted.key", BAD_TOKEN),
        (alone, "", NO_KEY),
    ]:
        with subtests.test(shown=shown, alone=keys is alone):
            try:
                got = keys.check(f"Bearer {shown}")
            except Unauthenticated as error:
                got = str(error)
            assert got == wanted
    with subtests.test("rules need keys"), pytest.raises(ConfigError, match="need --jwks-file"):
        RouterConfig(model="m", jwt_audience="us")
    with subtests.test("over HTTP its requests are its tenant's"):
        backend = FakeBackend()
        async with client(backend, keys=alone) as http:
            body = {"prompt": "a", "max_tokens": 1}
            for headers, status in [({"authorization": f"Bearer {token}"}, 200), ({}, 401)]:
                answer = await http.post("/v1/completions", json=body, headers=headers)
                assert answer.status_code == status
            assert backend.requests[-1].tenant == "acme"
