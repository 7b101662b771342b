#!/usr/bin/env python3
"""A hang: one of three ranks does not call a collective. Shows the errors of gloo and of this package.

    torchrun --standalone --nproc-per-node=3 examples/09_hang.py
    torchrun --standalone --nproc-per-node=3 examples/09_hang.py --kind stop
    torchrun --standalone --nproc-per-node=3 examples/09_hang.py --kind skip

`torch-sagellm demo hang` starts the program without a checkout, because it is in the package
(torch_ext/torch_sagellm/demos/hang.py).
"""

from __future__ import annotations

from torch_sagellm.demos.hang import main

if __name__ == "__main__":
    main()
