"""Launch a module as two ranks on this machine, as ``vapo-mcore train`` does: ``launcher.py MODULE ARGUMENT...``."""

import sys

from vapo_mcore.launch.local import launch

if __name__ == "__main__":
    sys.exit(launch(sys.argv[1], sys.argv[2:], 2))
