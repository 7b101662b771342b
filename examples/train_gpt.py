#!/usr/bin/env python3
"""The demo: trains a small GPT with DistributedDataParallel and measures its communication, compared with gloo.

    torchrun --standalone --nproc-per-node=2 examples/train_gpt.py --backend sagellm

`make demo` starts it. `torch-sagellm demo` starts it without a checkout, because the program is in the package
(torch_ext/torch_sagellm/demos/train_gpt.py).
"""

from __future__ import annotations

import sys

from torch_sagellm.demos.train_gpt import main

if __name__ == "__main__":
    sys.exit(main())
