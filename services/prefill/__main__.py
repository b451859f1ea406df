"""`python -m services.prefill` is a prefill worker, or with --rank-index one rank of it."""

from services.process.signals import ending_at_once


def _main() -> None:
    from services.prefill.prefill_service import (
        prefill_roles,  # The import takes a second or two, which Ctrl-C may cut short.
    )
    from services.rank.main import main

    main("services.prefill", prefill_roles)


if __name__ == "__main__":
    with ending_at_once():
        _main()
