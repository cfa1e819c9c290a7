"""Small models to learn from; compile one with `mkc compile models/examples/dense.py:decoder`."""
