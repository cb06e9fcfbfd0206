"""``python -m rollwright``: the command line."""

from rollwright.cli import main

if __name__ == "__main__":
    raise SystemExit(main())
