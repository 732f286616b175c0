"""Convert and compare checkpoints, like ``vapo-mcore convert``.

python tools/convert_checkpoint.py hf-to-megatron models/smollm2-135m /tmp/smollm2-megatron
"""

import sys

from vapo_mcore.weights.command import main

if __name__ == "__main__":
    sys.exit(main())
