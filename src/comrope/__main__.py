"""``python -m comrope`` runs the command ``comrope``, for torchrun and accelerate launch."""

from __future__ import annotations

from comrope.experiments.cli import main

if __name__ == "__main__":
    main()
