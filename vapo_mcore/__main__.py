"""Run ``python -m vapo_mcore COMMAND`` like ``vapo-mcore COMMAND``."""

import sys

from vapo_mcore.cli import main

if __name__ == "__main__":
    sys.exit(main())
