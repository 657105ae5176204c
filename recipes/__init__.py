"""What one runs: pretraining, fine-tuning, alignment, evaluation. Each file is a command."""

import tinyforge  # noqa: F401  before NumPy: stops with one line where a package is missing
