"""The build record that setup.py writes next to the extensions."""

VERSION: str
#: Of the sources; empty where git did not know it.
COMMIT: str
#: The torch that each extension was built with, and the extension's file without its suffixes.
EXTENSIONS: dict[str, str]
#: The folder of the sources; empty in a wheel, which is for other machines.
SOURCE: str
