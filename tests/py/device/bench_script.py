"""`torch-sagellm bench` for torchrun on a simulated device. Installs the device first, as the import of a vendor's
package does."""

from __future__ import annotations

import os
import sys

import simdevice

from torch_sagellm.cli.main import main

if __name__ == "__main__":
    name, flavour, *words = sys.argv[1:]
    device = simdevice.install(name)
    if flavour != "host":
        device.use_library(os.environ["SAGELLM_TEST_RUNTIME"], flavour)
    sys.exit(main(["bench", "--device", name, *words]))
