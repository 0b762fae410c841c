"""``python -m ftckpt``, and ``torchrun -m ftckpt``: the command line."""

from ftckpt.cli.main import main

if __name__ == "__main__":
    raise SystemExit(main())
