"""The build record that setup.py writes next to the extension."""

VERSION: str
TORCH_VERSION: str
SOURCE: str
