"""`python -m services.decode`: a decode worker, or with --rank-index one rank of it."""

from services.decode.role import decode_roles
from services.rank.main import main

if __name__ == "__main__":
    main("services.decode", decode_roles)
