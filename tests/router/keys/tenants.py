"""Keys of tenants, and whose requests they may make."""


def bearer(key):
    return {"authorization": f"Bearer {key}-key"}


TENANT_CALLS = [
    # Key, tenant that is named, and whose request it is; None: it is refused.
    ("bare", "", ""),
    ("bare", "b", "b"),
    ("ours", "b", "b"),
    ("acme", "", "acme"),
    ("acme", "acme", "acme"),
    ("acme", "b", None),
]
