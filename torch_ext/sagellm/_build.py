"""Written by setup.py beside the extension it describes."""

VERSION = '0.1.0'
TORCH_VERSION = '2.15.0'
SOURCE = '/tmp/w/mail/sagellm'
