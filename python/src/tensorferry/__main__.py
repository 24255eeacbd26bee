"""The tensorferry command, for who has it not on PATH: python -m tensorferry."""

from ._program import main

main()
