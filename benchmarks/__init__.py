"""Measurements anyone can rerun; each prints JSON lines on stdout, and progress on stderr.

python -m benchmarks.machine      limits of the machine: memory bandwidth, matrix products
python -m benchmarks.engine       the engine in this process
python -m benchmarks.http         the same load through Ray Serve, over sockets
python -m benchmarks.startup      from process start to a warm engine, with a cold and a warm compilation cache
python -m benchmarks.invariance   tokens that change with the batch
"""
