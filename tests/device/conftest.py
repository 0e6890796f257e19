"""These tests need torch; without it nothing is collected. Those marked ``gpu`` need a CUDA device too."""

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("torch") else ["test_*.py"]
