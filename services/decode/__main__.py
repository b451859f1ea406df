"""`python -m services.decode` is a decode worker, or with --rank-index one rank of it."""

from services.process.signals import ending_at_once


def _main() -> None:
    from services.decode.decode_service import (
        decode_roles,  # The import takes a second or two, which Ctrl-C may cut short.
    )
    from services.rank.main import main

    main("services.decode", decode_roles)


if __name__ == "__main__":
    with ending_at_once():
        _main()
