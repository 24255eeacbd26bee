"""The versions of the package and of the program that it fits."""

__version__ = "0.1.0.dev0"

# What the program says in its hello. A link between other versions is refused.
PROGRAM_VERSION = "0.1.0-dev"
