"""`python -m services.prefill`: a prefill worker, or with --rank-index one rank of it."""

from services.prefill.role import prefill_roles
from services.rank.main import main

if __name__ == "__main__":
    main("services.prefill", prefill_roles)
