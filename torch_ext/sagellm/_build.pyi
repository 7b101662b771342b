"""What setup.py writes beside the extension."""

VERSION: str
TORCH_VERSION: str
SOURCE: str
