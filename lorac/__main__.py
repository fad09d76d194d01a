"""`python -m lorac` is `lorac`."""

import sys

from lorac.cli import main

if __name__ == "__main__":
    sys.exit(main())
