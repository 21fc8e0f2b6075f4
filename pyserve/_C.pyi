"""Types of the compiled extension; the docstrings live in ``csrc/bindings.cpp``."""
