"""What re-makes the paper's claim and this project's numbers: `python -m reproduction --help`."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
HERE = Path(__file__).parent
