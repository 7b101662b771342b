#!/usr/bin/env python3
"""The demo: trains a small GPT with DistributedDataParallel and measures its communication, beside gloo.

    torchrun --standalone --nproc-per-node=2 examples/train_gpt.py --backend sagellm

`make demo` starts it, and so does `torch-sagellm demo` without a checkout: the program is in the package
(torch_ext/torch_sagellm/demos/train_gpt.py).
"""

from __future__ import annotations

import sys

from torch_sagellm.demos.train_gpt import main

if __name__ == "__main__":
    sys.exit(main())
