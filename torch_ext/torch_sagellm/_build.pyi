"""The build record that setup.py writes next to the extensions."""

VERSION: str
#: Commit of the sources; empty if git did not know it.
COMMIT: str
#: For each torch version that an extension was built with, the name of the extension's file without its suffixes.
EXTENSIONS: dict[str, str]
#: The source folder; empty in a wheel, which is used on other machines.
SOURCE: str
