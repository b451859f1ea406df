"""`python -m services.decode` is a decode worker, or with --rank-index one rank of it."""

from services.process.signals import ending_at_once


def _main() -> None:
    # The imports take a second or two, which Ctrl-C may cut short.
    from services.decode.decode_service import decode_roles
    from services.prefill.prefill_service import prefill_roles
    from services.rank.main import main
    from services.values.rank import Role

    main("services.decode", {Role.DECODE: decode_roles, Role.PREFILL: prefill_roles})


if __name__ == "__main__":
    with ending_at_once():
        _main()
