"""Triton kernels, each with its launcher; imported only when one of them is asked for."""
