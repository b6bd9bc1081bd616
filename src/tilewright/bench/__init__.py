"""The benchmark engine: how long proven kernels take here, how near that is to the machine's limits, and to rivals.

It reads ops, kernels and workloads as data and knows none by name. `engine.bench` measures, `report` writes it down.
"""
